"""First-order attribution: which removed atoms, at which tokens, change the loss.

Let ℓ(s) be the loss while h of every removed atom is multiplied by 1 − s: of the dense
model at s = 0, of the pruned one at s = 1. Then Δℓ = ∫ ℓ'(s) ds from 0 to 1, where

    ℓ'(s) = −Σ h · ∂ℓ/∂h̃ = −Σ ⟨∂ℓ/∂y, w_down · h⟩,     h̃ = (1 − s) · h,

over the removed atoms and the tokens routed to them; y is the output of the expert.
The terms of the integral are integrated gradients (Sundararajan et al. 2017), which add
up to Δℓ; with one value of s they are attribution patching. By the midpoint rule one
forward and one backward pass, at s = ½, are wrong by ℓ'''/24 in all. The gradient of
the dense model is wrong by ℓ''/2, and a trained model has ℓ' ≈ 0, so that this is most
of Δℓ; the gradient of the pruned model is as wrong in the other direction. So s = ½ it
is. Where ℓ is quadratic, the attribution of a layer is the mean of what its removal
alone costs and of what restoring it in the pruned model gains: its Shapley value.

A token's attribution is that of what is removed *at* it. The loss that rises may be
that of any later token.

Shapes: L tokens of the text; E n_experts, I d_inter; n routed rows of a call, sorted by
expert. Units: nats per predicted token, of which there are L − 1.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import nn

from heapr_lab.errors import SpecError
from heapr_lab.models.backend import backend_of
from heapr_lab.models.experts import ExpertsLayer, find_experts
from heapr_lab.models.grouped_linear import accumulating_dtype
from heapr_lab.models.hooks import Routed, check_gradients, masked, observed
from heapr_lab.models.likelihood import check_fits, input_device, token_nll
from heapr_lab.models.modes import differentiating
from heapr_lab.pruning.masks import KeepMask
from heapr_lab.pruning.surgery import keeps_of
from heapr_lab.text.calibration import token_windows

_HALF = 0.5
"""What removed atoms are multiplied by."""


@dataclass(frozen=True, eq=False)
class Attribution:
    """First-order attribution of Δloss to what a mask removes, in nats per token."""

    keep: KeepMask
    """The mask of the pruned model."""
    atoms: Mapping[int, np.ndarray]
    """Attribution of each atom (E, I), by layer; 0 for kept atoms."""
    tokens: np.ndarray
    """Attribution of what is removed at each token in each layer, (L, n_layers)."""

    @property
    def total(self) -> float:
        """The sum over everything that is removed: the estimate of Δloss."""
        return float(sum(atoms.sum() for atoms in self.atoms.values()))

    def layers(self) -> pd.DataFrame:
        """Columns layer, n_removed (atoms), first_order."""
        rows = [(k, atoms.sum()) for k, atoms in self.atoms.items()]
        frame = pd.DataFrame(rows, columns=["layer", "first_order"])
        frame.insert(1, "n_removed", [(~self.keep.by_layer(k)).sum() for k, _ in rows])
        return frame


def attribute_loss(model: nn.Module, keep: KeepMask, ids: Any) -> Attribution:
    """What each removed atom, and what is removed at each token, adds to the loss.

    Args:
        model: the dense model, which must be in memory; it is not changed.
        keep: the kept atoms of the pruned model.
        ids: token ids of one text, (1, L).

    Raises:
        SpecError: `keep` is of another model, the ids are not one window of the model's
            tokens, or the model is streamed.
        CoverageError: a layer did not take part in the backward pass once.
        HeaprLabError: a gradient is not finite.
    """
    with differentiating(model):  # also within inference mode, whose tensors are frozen
        windows = _one_text(model, ids)
        layers = find_experts(model)
        kept = keeps_of(layers, keep)
        sums = [
            _Sums(layer, ~mask, windows.shape[1])
            for layer, mask in zip(layers, kept, strict=True)
        ]
        factors = [mask + _HALF * ~mask for mask in kept]
        # Observers come first: they end the masks of contexts around them.
        with observed(layers, sums), masked(layers, factors):
            token_nll(model, windows.to(input_device(model))).sum().backward()
        for total in sums:
            total.check()
    n_predicted = windows.shape[1] - 1
    atoms = {total.layer: total.atoms.numpy() / n_predicted for total in sums}
    tokens = np.stack([total.tokens.numpy() for total in sums], axis=1)
    return Attribution(keep, atoms, tokens / n_predicted)


def _one_text(model: nn.Module, ids: Any) -> torch.Tensor:
    """The token ids of a text that the model, in memory, can read, (1, L).

    Raises:
        SpecError: they are not one window of its tokens, or the model is streamed.
    """
    backend_of(model).require_loaded(
        remedy="gradients of a text need all layers, so load it with stream=False",
    )
    windows = token_windows(ids)
    if len(windows) != 1:
        raise SpecError(f"the ids are {len(windows)} windows, expected one text")
    check_fits(model, windows)
    return windows.clone()


class _Sums:
    """Sums the products of one layer, −h · ∂ℓ/∂h̃ in nats, of what it removes.

    Shapes: atoms (E, I), tokens (L,).
    """

    def __init__(
        self, layer: ExpertsLayer, removed: torch.Tensor, n_tokens: int
    ) -> None:
        """Nothing is summed yet; `removed` are the removed atoms, (E, I)."""
        self.layer = layer.layer
        self.atoms = torch.zeros(removed.shape, dtype=torch.float64)
        self.tokens = torch.zeros(n_tokens, dtype=torch.float64)
        self._removed = removed
        self._backwards, self._finite = 0, True

    def check(self) -> None:
        """Check that the layer took part in the pass.

        Raises:
            CoverageError: it did not, or more than once.
            HeaprLabError: its gradients are not finite.
        """
        check_gradients(
            self.layer, self._backwards, finite=self._finite, where="the text"
        )

    def __call__(self, call: Routed) -> None:
        """Wait for the gradient of one call; nothing before the first layer has one."""
        if not call.h.requires_grad:
            call.h.requires_grad_(True)
        seen = replace(call, h=call.h.detach(), p=call.p.detach())
        call.h.register_hook(functools.partial(self._add, seen))

    def _add(self, call: Routed, gradient: torch.Tensor) -> None:
        """Add the products of one call.

        `gradient` is ∂ℓ/∂h, which for removed atoms is half of ∂ℓ/∂h̃.
        """
        wide = accumulating_dtype(call.h)
        products = -(call.h.to(wide) * gradient.to(wide)).cpu().double() / _HALF
        self._backwards += 1
        self._finite = self._finite and bool(torch.isfinite(products).all())
        products.masked_fill_(~self._removed[call.experts], 0.0)
        self.atoms.index_add_(0, call.experts, products)
        self.tokens.index_add_(0, call.rows.cpu(), products.sum(1))
