"""Parameters, bytes and floating-point operations, before and after pruning.

Plain arithmetic, without torch. One multiplication with one addition counts as two
operations, as in torch's counter; norms, activations, softmax and additions of biases
are not counted. An atom is a row of W_gate and W_up and a column of W_down, with the
biases of its two rows; the bias of W_down's output belongs to the expert and is kept.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import pandas as pd

from heapr_lab.errors import SpecError


class Keep(Protocol):
    """The part of a `KeepMask` that is read here."""

    @property
    def arrays(self) -> Mapping[int, np.ndarray]:
        """True for the kept atoms, bool (n_experts, d_inter), by layer."""


@dataclass(frozen=True)
class LayerShape:
    """The routed experts of one layer."""

    n_experts: int
    d_inter: int
    d_expert: int
    """Width of the experts' input and output, mostly d_model."""
    n_matrices: int = 3
    """3 with W_gate, 2 without."""
    atom_biases: int = 0
    """Bias entries of one atom: 2 if W_gate and W_up have biases."""
    top_k: int = 1

    @property
    def atom_parameters(self) -> int:
        """Parameters of one atom."""
        return self.n_matrices * self.d_expert + self.atom_biases

    @property
    def n_atoms(self) -> int:
        """Routed atoms of the layer."""
        return self.n_experts * self.d_inter

    @property
    def atom_flops(self) -> int:
        """Operations of one atom for one routed token."""
        return 2 * self.n_matrices * self.d_expert


@dataclass(frozen=True)
class Architecture:
    """The sizes of a model that pruning its routed experts changes, and the rest.

    Example:
        One layer, 2 experts of 3 atoms, gated, d_model 4: an atom has 12 parameters.

        >>> shape = LayerShape(n_experts=2, d_inter=3, d_expert=4)
        >>> Architecture(100, 2, 4, {0: shape}, 10, 8).layers[0].atom_parameters
        12
    """

    n_parameters: int
    """Parameters of the whole model, tied weights counted once."""
    bytes_per_parameter: float
    d_model: int
    layers: Mapping[int, LayerShape]
    other_weights_per_token: int
    """Entries of all matrices outside the routed experts that multiply every token."""
    attention_width: int
    """Σ over softmax-attention layers of n_heads · (qk_head_dim + v_head_dim)."""

    # --- parameters -------------------------------------------------------------

    def parameters(self, keep: Keep | None = None) -> int:
        """Parameters of the whole model after pruning (before, without `keep`)."""
        widths = self._widths(keep)
        return self.n_parameters - sum(
            (shape.n_atoms - int(widths[layer].sum())) * shape.atom_parameters
            for layer, shape in self.layers.items()
        )

    # --- operations -------------------------------------------------------------

    def routed_flops_per_token(
        self, keep: Keep | None = None, tokens: pd.DataFrame | None = None
    ) -> float:
        """Operations of the routed experts for a mean token.

        In a layer every token goes to `top_k` experts, to expert i with the measured
        share of `tokens`: Σ_i top_k · tokens_i / Σ tokens · kept_i · atom_flops.

        Args:
            keep: the kept atoms; by default all.
            tokens: columns layer, expert, tokens, one row per expert; by default, and
                in a layer without routed tokens, every expert has the same share.
        """
        widths, shares = self._widths(keep), expert_shares(tokens, self.layers)
        total = 0.0
        for layer, shape in self.layers.items():
            width = float(np.sum(shares[layer] * widths[layer]))
            total += shape.top_k * shape.atom_flops * width
        return total

    def routed_flops_saved(
        self, keep: Keep, tokens: pd.DataFrame | None = None
    ) -> float:
        """Share of the routed experts' operations that pruning saves."""
        return 1 - self.routed_flops_per_token(keep, tokens) / (
            self.routed_flops_per_token(None, tokens)
        )

    def flops_per_token(
        self,
        keep: Keep | None = None,
        tokens: pd.DataFrame | None = None,
        *,
        seq_len: int,
    ) -> float:
        """Operations of the whole model for a mean token of a `seq_len` sequence.

        Attention is counted without the causal mask, as torch's counter does: every
        token attends to all `seq_len` keys.
        """
        other = 2 * self.other_weights_per_token
        attention = 2 * seq_len * self.attention_width
        return other + attention + self.routed_flops_per_token(keep, tokens)

    # --- plain data -------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data, which `from_dict` reads."""
        plain = dataclasses.asdict(self)
        plain["layers"] = {str(k): shape for k, shape in plain["layers"].items()}
        return plain

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> "Architecture":
        """The architecture that `to_dict` described.

        Raises:
            SpecError: an entry is missing or unknown.
        """
        try:
            layers = {int(k): LayerShape(**v) for k, v in plain["layers"].items()}
            return cls(**{**plain, "layers": layers})
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise SpecError(
                f"not an architecture: {error}; give what Architecture.to_dict "
                f"returned, with the entries "
                f"{', '.join(f.name for f in dataclasses.fields(cls))}"
            ) from error

    # --- widths -----------------------------------------------------------------

    def _widths(self, keep: Keep | None) -> dict[int, np.ndarray]:
        """The kept atoms of each expert, (n_experts,), by layer.

        Raises:
            SpecError: the layers or shapes are those of another model.
        """
        expected = {k: (s.n_experts, s.d_inter) for k, s in self.layers.items()}
        if keep is None:
            return {layer: np.full(*shape) for layer, shape in expected.items()}
        shapes = {layer: rows.shape for layer, rows in keep.arrays.items()}
        for layer in sorted(shapes.keys() | expected.keys()):
            if shapes.get(layer) != expected.get(layer):
                raise SpecError(
                    f"the mask is for another model: in layer {layer} it has (experts, "
                    f"atoms) {shapes.get(layer)}, the model {expected.get(layer)}"
                )
        return {k: np.count_nonzero(rows, axis=1) for k, rows in keep.arrays.items()}


def expert_shares(
    tokens: pd.DataFrame | None, layers: Mapping[int, LayerShape]
) -> dict[int, np.ndarray]:
    """Each expert's share of its layer's routed tokens, float64 (n_experts,), by layer.

    Raises:
        SpecError: `tokens` does not have one row for each expert.
    """
    equal = {k: np.full(s.n_experts, 1 / s.n_experts) for k, s in layers.items()}
    if tokens is None:
        return equal
    rows = tokens.sort_values(["layer", "expert"], kind="stable")
    numbers, experts = rows["layer"].to_numpy(), rows["expert"].to_numpy()
    counts = rows["tokens"].to_numpy(dtype=np.float64)
    shares = {}
    for layer, shape in layers.items():
        span = slice(*np.searchsorted(numbers, [layer, layer + 1]))
        if not np.array_equal(experts[span], np.arange(shape.n_experts)):
            raise SpecError(
                f"tokens has {len(experts[span])} rows for layer {layer}, expected one "
                f"for each of its {shape.n_experts} experts; give "
                "ImportanceTable.expert_tokens()"
            )
        total = counts[span].sum()
        shares[layer] = counts[span] / total if total > 0 else equal[layer]
    return shares
