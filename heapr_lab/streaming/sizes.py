"""The sizes of a model, as it is built without weights; and what fits.

Without torch and pandas until a model is counted.
"""

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from heapr_lab.errors import LayoutError, SpecError
from heapr_lab.models.formats import DEQUANTISED

if TYPE_CHECKING:
    from heapr_lab.models.architecture import Architecture, LayerShape

ATOM_BYTES = 56
"""The size of the running sums of one atom: seven columns in float64."""
EXTRA_STATES = 3
"""States other than the outputs of all layers: the first inputs, and two gradients."""
_INDEX_BYTES = 4
_SHARE_OF_MEMORY = 0.75
"""The share of free memory for scores; the rest is for what exists for a moment."""

_SIZE = re.compile(r"(\d+(?:\.\d+)?) *([kmgt])(i?)b")


@dataclass(frozen=True)
class Sizes:
    """Numbers of parameters, and of what a pass keeps.

    Example:
        Two layers, each with 2 experts of 8 atoms, between embeddings and head:

        >>> from heapr_lab.models.architecture import Architecture, LayerShape
        >>> shape = LayerShape(n_experts=2, d_inter=8, d_expert=4)
        >>> model = Architecture(602, 2, 4, {0: shape, 1: shape}, 0, 0)
        >>> sizes = Sizes(model, (200, 200), (100, 100), (4, 0))
        >>> sizes.n_atoms, sizes.outside, sizes.states(2, n_tokens=10)
        (32, 2, 400)
    """

    model: "Architecture"
    """The whole model, and its layers with routed experts."""
    layers: tuple[int, ...]
    """Parameters of each decoder layer."""
    ends: tuple[int, ...]
    """Parameters of the embeddings, and of a head that has weights of its own."""
    state: tuple[int, int]
    """The numbers that `state_of` gives."""

    @property
    def outside(self) -> int:
        """All other parameters: the last norm, and other towers of a wrapper."""
        return self.model.n_parameters - sum(self.layers) - sum(self.ends)

    @property
    def moe(self) -> "tuple[LayerShape, ...]":
        """The routed experts of each MoE layer."""
        return tuple(self.model.layers.values())

    @property
    def n_atoms(self) -> int:
        """Routed atoms of all layers."""
        return sum(shape.n_atoms for shape in self.moe)

    def needed(self, itemsize: int, n_tokens: int, *, streamed: bool = False) -> int:
        """Bytes of weights, of sums, and of what a batch keeps for its backward pass.

        Args:
            itemsize: bytes of a weight in memory.
            n_tokens: of a batch.
            streamed: whether one layer at a time is in memory.
        """
        n_at_once = 1 if streamed else len(self.layers)
        combine = max if streamed else sum
        weights = self.outside + combine((*self.layers, *self.ends))
        kept = n_tokens * n_at_once * self._kept_by_a_layer
        return (weights + kept) * itemsize + ATOM_BYTES * self.n_atoms

    @property
    def _kept_by_a_layer(self) -> int:
        """Numbers that autograd keeps of a token in a layer, at most.

        For each atom that it is routed to, the two projections, their activation and h;
        around the experts sixteen times the width of the model.
        """
        widest = max(shape.top_k * shape.d_inter for shape in self.moe)
        return 16 * self.model.d_model + 4 * widest

    def states(self, itemsize: int, *, n_tokens: int) -> int:
        """Bytes of the states between the layers of a streamed pass."""
        n_states = len(self.layers) + EXTRA_STATES
        return n_states * n_tokens * state_bytes(self.state, itemsize)


def sizes_of(model: Any) -> Sizes:
    """The sizes of a model, which may be on the meta device.

    Raises:
        LayoutError: its experts cannot be measured, are fewer than a token is routed
            to, or its decoder layers are not in one list.
    """
    from heapr_lab.models.experts import describe
    from heapr_lab.streaming.stream import decoder_layers

    ends = [model.get_input_embeddings(), model.get_output_embeddings()]
    weights = {end.weight for end in ends if end is not None}  # tied ones once
    blocks = decoder_layers(model)
    whole = describe(model)
    for number, shape in whole.layers.items():
        if shape.top_k > shape.n_experts:
            raise LayoutError(
                f"layer {number} routes a token to {shape.top_k} experts and has "
                f"{shape.n_experts}: correct num_experts_per_tok in config.json"
            )
    return Sizes(
        model=whole,
        layers=tuple(sum(p.numel() for p in block.parameters()) for block in blocks),
        ends=tuple(weight.numel() for weight in weights),
        state=state_of(model.config),
    )


def state_of(config: Any) -> tuple[int, int]:
    """Numbers of a token that are kept between two layers, and how many in int32.

    The first are in the type of the weights: the state, of which models with
    hyper-connections have several. The others are of indexed attention, at most: the
    tokens that a layer attends to, which it chooses and may hand on.

    Args:
        config: of the model, or of a wrapper around it.
    """
    text = config.get_text_config()
    n_states = getattr(text, "hc_mult", None) or 1
    return text.hidden_size * n_states, 2 * (getattr(text, "index_topk", None) or 0)


def state_bytes(state: tuple[int, int], itemsize: int) -> int:
    """Bytes of what `state_of` counts."""
    return state[0] * itemsize + state[1] * _INDEX_BYTES


# --- memory -----------------------------------------------------------------------


def why_streamed(
    sizes: Sizes, itemsize: int, n_tokens: int, free: float, *, method: str | None
) -> str | None:
    """Why a model is streamed if the caller does not say; None if it is loaded whole.

    Args:
        sizes: of the model.
        itemsize: bytes of a weight in memory.
        n_tokens: of a calibration window.
        free: bytes of the device.
        method: the format of quantised weights, if they are.

    Returns:
        What is wrong with its numbers, and what is done in place of it.
    """
    if method in DEQUANTISED:
        return (
            f"the weights are in {method}: they are dequantised when they are read "
            "from disk, one decoder layer at a time"
        )
    needed = sizes.needed(itemsize, n_tokens)
    if needed <= _SHARE_OF_MEMORY * free:
        return None
    weights = itemsize * sizes.model.n_parameters
    return (
        f"{gigabytes(free)} are free, of which scores may take {_SHARE_OF_MEMORY:.0%}: "
        f"those of a window of {n_tokens:,} tokens need {gigabytes(needed)}, "
        f"{gigabytes(weights)} of it for weights, so decoder layers are "
        "read from disk, one at a time (stream=False loads them all)"
    )


def gigabytes(n_bytes: float) -> str:
    """A size as text.

    Example:
        >>> gigabytes(1.25e10), gigabytes(2e6)
        ('12.5 GB', '0.002 GB')
    """
    large = n_bytes / 1e9
    return f"{large:,.0f} GB" if large >= 100 else f"{large:.3g} GB"


def size_of(size: int | str, *, least: int = 1) -> int:
    """Bytes, from a number or a text with a unit.

    Raises:
        SpecError: it is neither, or less than `least`.

    Example:
        >>> size_of("24GB"), size_of("1 GiB")
        (24000000000, 1073741824)
    """
    text = str(size).strip().lower()
    match = _SIZE.fullmatch(text)
    n_bytes = int(text) if text.isdecimal() else -1
    if match:
        base = 1024 if match[3] else 1000
        n_bytes = int(float(match[1]) * base ** " kmgt".index(match[2]))
    if n_bytes < least:
        raise SpecError(
            f"a size is {size!r}, expected bytes, or a number with a unit: 16GB, 512MiB"
        )
    return n_bytes
