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
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import nn

from heapr_lab.errors import SpecError
from heapr_lab.inspection.passages import as_float64, check_position
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
Take = Callable[[Routed, torch.Tensor], None]
"""Takes a call of a layer and its products, −h · ∂ℓ/∂h̃ in nats, 0 for kept atoms, as
(n, I) float64."""


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
        run = _Run(model, keep, ids)
        sums = {k: _Sums(keep.by_layer(k).shape, run.n_tokens) for k in keep.layers}
        run.backward({k: total.take for k, total in sums.items()})
    atoms = {k: total.atoms.numpy() / run.n_predicted for k, total in sums.items()}
    tokens = np.stack([total.tokens.numpy() for total in sums.values()], axis=1)
    return Attribution(keep, atoms, tokens / run.n_predicted)


def attribute_token(
    model: nn.Module, keep: KeepMask, ids: Any, *, layer: int, position: int
) -> pd.DataFrame:
    """The removed atoms that one token is routed to in a layer, with their attribution.

    One forward and one backward pass at s = ½. The rows add up to what
    `attribute_loss` has for the token in the layer.

    Args:
        model: the dense model, which must be in memory.
        keep: the kept atoms of the pruned model.
        ids: token ids of one text, (1, L).
        layer: number of a MoE layer.
        position: index of the token, from 0.

    Returns:
        Columns expert, atom, p, h (in the half-pruned model), first_order; largest
        absolute value first.

    Raises:
        SpecError: there is no such layer or position, or as `attribute_loss`.
        CoverageError: the layer did not take part in the pass once.
        HeaprLabError: a gradient is not finite.
    """
    with differentiating(model):
        run = _Run(model, keep, ids)
        removed, calls = ~keep.by_layer(layer), list[tuple[Routed, torch.Tensor]]()
        check_position(position, run.n_tokens)
        run.backward({layer: lambda *seen: calls.append(seen)})
    frames = (_of_token(*seen, removed, position) for seen in calls)
    frame = pd.concat(itertools.chain(*frames), ignore_index=True)
    frame["first_order"] /= run.n_predicted
    order = frame.assign(size=frame["first_order"].abs()).sort_values(
        ["size", "expert", "atom"], ascending=[False, True, True], ignore_index=True
    )
    return order.drop(columns="size")


# --- one pass -----------------------------------------------------------------------


class _Run:
    """A pass of a model, whose removed atoms are halved, over one text."""

    def __init__(self, model: nn.Module, keep: KeepMask, ids: Any) -> None:
        backend_of(model).require_loaded(
            remedy="gradients of a text need all layers, so load it with stream=False",
        )
        self._model, self._ids = model, token_windows(ids)
        if len(self._ids) != 1:
            raise SpecError(f"the ids are {len(self._ids)} windows, expected one text")
        check_fits(model, self._ids)
        self._layers = find_experts(model)
        self._kept = keeps_of(self._layers, keep)
        self.n_tokens = self._ids.shape[1]
        self.n_predicted = self.n_tokens - 1

    def backward(self, takes: Mapping[int, Take]) -> None:
        """Give the products of each of these layers, by number, to its function."""
        observers = [
            _Observer(layer, ~kept, takes[layer.layer])
            for layer, kept in zip(self._layers, self._kept, strict=True)
            if layer.layer in takes
        ]
        seen = [observer.layer for observer in observers]
        factors = [kept + _HALF * ~kept for kept in self._kept]
        ids = self._ids.clone().to(input_device(self._model))
        # Observers come first: they end the masks of contexts around them.
        with observed(seen, observers), masked(self._layers, factors):
            token_nll(self._model, ids).sum().backward()
        for observer in observers:
            observer.check()


class _Observer:
    """Hands the products of one layer to `take` in the backward pass."""

    def __init__(self, layer: ExpertsLayer, removed: torch.Tensor, take: Take) -> None:
        self.layer, self._removed, self._take = layer, removed, take
        self._backwards, self._finite = 0, True

    def check(self) -> None:
        """Check that the layer took part in the pass.

        Raises:
            CoverageError: it did not, or more than once.
            HeaprLabError: its gradients are not finite.
        """
        check_gradients(
            self.layer.layer, self._backwards, finite=self._finite, where="the text"
        )

    def __call__(self, call: Routed) -> None:
        """Wait for the gradient of one call; nothing before the first layer has one."""
        if not call.h.requires_grad:
            call.h.requires_grad_(True)
        seen = replace(call, h=call.h.detach(), p=call.p.detach())
        call.h.register_hook(functools.partial(self._products, seen))

    def _products(self, call: Routed, gradient: torch.Tensor) -> None:
        """Take the products of one call.

        `gradient` is ∂ℓ/∂h, which for removed atoms is half of ∂ℓ/∂h̃.
        """
        wide = accumulating_dtype(call.h)
        products = -(call.h.to(wide) * gradient.to(wide)).cpu().double() / _HALF
        self._backwards += 1
        self._finite = self._finite and bool(torch.isfinite(products).all())
        products.masked_fill_(~self._removed[call.experts], 0.0)
        self._take(call, products)


class _Sums:
    """The products summed for each atom (E, I), and for each token (L,)."""

    def __init__(self, shape: tuple[int, ...], n_tokens: int) -> None:
        self.atoms = torch.zeros(shape, dtype=torch.float64)
        self.tokens = torch.zeros(n_tokens, dtype=torch.float64)

    def take(self, call: Routed, products: torch.Tensor) -> None:
        """Add the products of one call."""
        self.atoms.index_add_(0, call.experts, products)
        self.tokens.index_add_(0, call.rows.cpu(), products.sum(1))


def _of_token(
    call: Routed, products: torch.Tensor, removed: np.ndarray, position: int
) -> Iterator[pd.DataFrame]:
    """The products of one token's removed atoms, for each expert that it is routed to.

    Shapes: removed (E, I) bool.
    """
    for row in (call.rows == position).nonzero()[:, 0].tolist():
        expert = int(call.experts[row])
        atoms = removed[expert].nonzero()[0]
        columns = {
            "expert": expert,
            "atom": atoms,
            "p": float(call.p[row]),
            "h": as_float64(call.h[row])[atoms],
            "first_order": products[row].numpy()[atoms],
        }
        yield pd.DataFrame(columns)
