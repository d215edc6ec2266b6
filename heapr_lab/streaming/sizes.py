"""The sizes of a model, from the names and shapes of its tensors; and what fits.

Without torch: shapes stand in the headers of files, and no weight is read.
"""

import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from heapr_lab.errors import SpecError
from heapr_lab.models.dtypes import DEQUANTISED
from heapr_lab.models.safetensors_headers import Stored, StoredTensor

ATOM_BYTES = 56
"""The size of the running sums of one atom: seven columns in float64."""
EXTRA_STATES = 3
"""States besides the outputs of all layers: the first inputs, and two gradients."""
_INDEX_BYTES = 4
_SHARE_OF_MEMORY = 0.75
"""The share of free memory for scores; the rest is for what exists for a moment."""

Shapes = Mapping[str, tuple[int, ...]]
"""The shape of each tensor, by its name in files or in the model."""

_SIZE = re.compile(r"(\d+(?:\.\d+)?) *([kmgt])(i?)b")
_LAYER = re.compile(r"(.*?\blayers\.)(\d+)\.")
PREDICTING = re.compile(r"(^|\.)mtp[._]")
"""A part of the path of a module that predicts further tokens (MTP)."""
_ENDS = re.compile(r"\b(embed_tokens|embeddings|word_embeddings|lm_head|head)\.weight$")
_EXPERTS = re.compile(
    r"(\.experts\..*(down_proj|w2|fc2)|moe\.output_linear)(\.weight|_blocks)?$"
)
"""Names of W_down of routed experts."""
_D_EXPERT = ("moe_latent_size", "moe_hidden_size")
_TOP_K = (
    "num_experts_per_tok", "moe_topk", "num_experts_per_token", "moe_k",
    "top_k_experts",
)  # fmt: skip


@dataclass(frozen=True)
class Sizes:
    """Numbers of parameters, and of what a pass keeps.

    Example:
        Two layers, each with 2 experts of 8 atoms, between embeddings and head:

        >>> sizes = Sizes((200, 200), (100, 100), 2, {0: 16, 1: 16}, 4, 2, 1, (2, 0))
        >>> sizes.n_parameters, sizes.n_atoms, sizes.states(2, n_tokens=10)
        (602, 32, 200)
    """

    layers: tuple[int, ...]
    """Parameters of each decoder layer."""
    ends: tuple[int, ...]
    """Parameters of the embeddings, and of a head that has weights of its own."""
    outside: int
    """All other parameters: the last norm, and other towers of a multimodal wrapper."""
    atoms: Mapping[int, int]
    """Routed atoms of each MoE layer."""
    n_experts: int
    """Routed experts of all layers."""
    d_model: int
    top_k: int
    state: tuple[int, int]
    """The numbers that `state_of` gives."""

    @property
    def n_parameters(self) -> int:
        """All parameters."""
        return sum(self.layers) + sum(self.ends) + self.outside

    @property
    def n_atoms(self) -> int:
        """Routed atoms of all layers."""
        return sum(self.atoms.values())

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
        widest = max(self.atoms.values(), default=0) * len(self.atoms)
        d_inter = widest // max(1, self.n_experts)
        return 16 * self.d_model + 4 * self.top_k * d_inter

    def states(self, itemsize: int, *, n_tokens: int) -> int:
        """Bytes of the states between the layers of a streamed pass."""
        n_states = len(self.layers) + EXTRA_STATES
        return n_states * n_tokens * state_bytes(self.state, itemsize)


def state_of(text: Mapping[str, Any], d_model: int) -> tuple[int, int]:
    """Numbers of a token that are kept between two layers, and how many in int32.

    The first are in the type of the weights: the state, of which models with
    hyper-connections have several. The others are of indexed attention, at most: the
    tokens that a layer attends to, which it chooses and may hand on.

    Args:
        text: the settings of the language model.
        d_model: the width of one state.
    """
    return d_model * (text.get("hc_mult") or 1), 2 * (text.get("index_topk") or 0)


def state_bytes(state: tuple[int, int], itemsize: int) -> int:
    """Bytes of what `state_of` counts."""
    return state[0] * itemsize + state[1] * _INDEX_BYTES


def sizes_of(shapes: Shapes, config: Mapping[str, Any]) -> Sizes:
    """The sizes of a model.

    Args:
        shapes: of its tensors; tied weights have one name.
        config: the content of its config.json.

    Raises:
        SpecError: embeddings or decoder layers have names that are not known.
    """
    text = text_settings(config)
    blocks = text.get("block_configs") or []
    depth = text.get("num_hidden_layers") or len(blocks) or math.inf
    numbers = _layer_numbers(shapes)
    inside = {name: number for name, number in numbers.items() if number < depth}
    around = [n for n in shapes if n not in numbers and not PREDICTING.search(n)]
    ends = [name for name in around if _ENDS.search(name)]
    if not ends or not inside:
        raise SpecError("the weights have no embeddings, or no layers, of known names")
    d_model = max((shapes[name] for name in ends), key=math.prod)[-1]
    layers, atoms, n_experts = Counter[int](), Counter[int](), 0
    for name, number in inside.items():
        layers[number] += math.prod(shapes[name])
        if _EXPERTS.search(name):
            atoms[number] += math.prod(shapes[name])
            n_experts += shapes[name][0] if len(shapes[name]) > 2 else 1
    counts = [block[_TOP_K[0]] for block in blocks if block.get(_TOP_K[0])]
    widths = (part.get(name) for part in (text, *blocks) for name in _D_EXPERT)
    d_expert = next(filter(None, widths), d_model)
    return Sizes(
        layers=tuple(layers[number] for number in sorted(layers)),
        ends=tuple(math.prod(shapes[name]) for name in ends),
        outside=sum(math.prod(shapes[n]) for n in around if n not in ends),
        atoms={number: n // d_expert for number, n in sorted(atoms.items())},
        n_experts=n_experts,
        d_model=d_model,
        top_k=max(counts, default=next((text[k] for k in _TOP_K if text.get(k)), 1)),
        state=state_of(text, d_model),
    )


def _layer_numbers(shapes: Shapes) -> dict[str, int]:
    """The number of the decoder layer that each tensor is in, by its name."""
    places = {name: _LAYER.match(name) for name in shapes}
    stacks = Counter[str]()
    for name, place in places.items():
        if place:
            stacks[place[1]] += math.prod(shapes[name])
    largest = max(stacks, key=lambda stack: stacks[stack], default="")
    matches = {name: place for name, place in places.items() if place}
    return {name: int(p[2]) for name, p in matches.items() if p[1] == largest}


def text_settings(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a config.json that is of the language model."""
    waiting = [config]
    for section in waiting:
        if any(name in section for name in _TOP_K):
            return section
        waiting += [inner for inner in section.values() if isinstance(inner, dict)]
    return config


def shapes_in(stored: Stored) -> dict[str, tuple[int, ...]]:
    """Shapes of weights in files, without scales; a byte of 4-bit numbers has two."""
    return {
        name.replace(".weight_packed", ".weight"): unpacked_shape(t)
        if name.endswith(_PACKED)
        else t.shape
        for tensors in stored.values()
        for name, t in tensors.items()
        if not name.endswith(NO_WEIGHTS) and t.dtype != "F8_E8M0"  # exponents
    }


def unpacked_shape(tensor: StoredTensor) -> tuple[int, ...]:
    """The shape of a weight, of which a byte may have two numbers in four bits."""
    *rows, columns = tensor.shape
    return (*rows, columns * (2 if tensor.dtype in ("U8", "I8") else 1))


_PACKED = ("_blocks", ".weight", ".weight_packed")
"""Ends of the names of weights that may be in four bits."""
NO_WEIGHTS = (
    "_scale_inv",
    "_scales",
    "activation_scale",
    *(f"weight_{name}" for name in ("scale", "scale_2", "global_scale")),
    *(f"input_{name}" for name in ("scale", "global_scale")),
    *(".k_scale", ".v_scale"),
)
"""Ends of the names of what comes with quantised weights."""


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
    return (
        f"{gigabytes(free)} are free, of which scores may take {_SHARE_OF_MEMORY:.0%}: "
        f"those of a window of {n_tokens:,} tokens need {gigabytes(needed)}, "
        f"{gigabytes(itemsize * sizes.n_parameters)} of it for weights, so decoder "
        "layers are read from disk, one at a time (stream=False loads them all)"
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
