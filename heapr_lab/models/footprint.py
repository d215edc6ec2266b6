"""The memory that the scores of a model need, from the sizes of its weights alone.

Each term is one function. What autograd keeps is counted by a rule: in an expert the
input projection, its activation and h, and on a GPU the output and the weighted output
of each routed token; outside the experts the output of every matrix, and its input
unless that is the layer's own; two residual states, in float32 or wider. The few
families whose experts have biases or a norm after them keep outputs on a CPU as well,
which is not counted.

Shapes: E n_experts, I d_inter, D d_expert, K top_k.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from heapr_lab.models.architecture import Architecture, LayerShape
from heapr_lab.models.experts import describe, find_experts
from heapr_lab.models.moments import MAXIMA, SUMS
from heapr_lab.models.wrapped import decoder_layers

IN_MEMORY, STREAMED = "in memory", "streamed"

PROCESS = {"cpu": 0.51e9, "cuda": 0.5e9}
"""Python with torch and transformers after a pass over a tiny model, measured; a CUDA
context, stated."""
_ALLOCATOR = {"cpu": 1.3, "cuda": 1.1}
"""What the process holds, over what tensors hold.

The C library keeps freed blocks below 32 MB: 1.24 to 1.36 were measured. Weights that
are streamed are larger, and are given back. The factor of CUDA is an assumption.
"""
_READING = 0.3
"""Of a layer, what reading it takes for a moment: measured with bfloat16 files."""
_SUM_BYTES, _STATE_BYTES = 8, 4


@dataclass(frozen=True)
class Sizes:
    """The sizes of a model's parts, read from its skeleton."""

    architecture: Architecture
    layers: tuple[int, ...]
    """Parameters of each decoder layer."""
    outside: tuple[int, ...]
    """Numbers that each layer keeps for its backward pass and a token, outside the
    experts."""
    head_weights: int
    """Entries of the output embedding."""

    @property
    def rest(self) -> int:
        """Parameters outside the decoder layers: embeddings, last norm, head."""
        return self.architecture.n_parameters - sum(self.layers)

    @property
    def n_atoms(self) -> int:
        """Routed atoms of all layers."""
        return sum(shape.n_atoms for shape in self.architecture.layers.values())

    def kept(self, layer: int, kind: str) -> int:
        """Numbers that autograd keeps of a layer for one token, without residuals."""
        return self.outside[layer] + _kept_by_experts(self._shape(layer), kind)

    def passing(self, layer: int, kind: str) -> int:
        """Numbers that exist for a moment in a layer's backward pass, for one token.

        On a CPU this fits what benchmarks/growth.py measured; on a GPU it is assumed.
        """
        shape = self._shape(layer)
        if kind == "cuda":
            return 0 if shape is None else 3 * shape.top_k * shape.d_expert
        routed = 0 if shape is None else 2 * shape.top_k * shape.d_inter
        return 12 * self.architecture.d_model + routed

    def _shape(self, layer: int) -> LayerShape | None:
        return self.architecture.layers.get(layer)


def _kept_by_experts(shape: LayerShape | None, kind: str) -> int:
    """Numbers that autograd keeps of the routed experts for one token.

    On a CPU one expert's rows are gathered at a time, and no output is kept.
    """
    if shape is None:
        return 0
    of_an_atom = 4 if shape.n_matrices == 3 else 2
    outputs = 2 * shape.d_expert if kind == "cuda" else 0
    return shape.top_k * (of_an_atom * shape.d_inter + outputs)


def sizes_of(skeleton: Any) -> Sizes:
    """The sizes of a model, which may be on the meta device.

    Raises:
        LayoutError: it has no routed experts that can be measured, or no list of
            decoder layers.
    """
    routed = {id(p) for k in find_experts(skeleton) for p in k.module.parameters()}
    architecture, blocks = describe(skeleton), decoder_layers(skeleton)
    return Sizes(
        architecture=architecture,
        layers=tuple(sum(p.numel() for p in block.parameters()) for block in blocks),
        outside=tuple(
            _outside(block, routed, architecture.d_model) for block in blocks
        ),
        head_weights=skeleton.get_output_embeddings().weight.numel(),
    )


def _outside(block: nn.Module, routed: set[int], d_model: int) -> int:
    matrices = (p for p in block.parameters() if p.dim() == 2 and id(p) not in routed)
    shapes = [tuple(p.shape) for p in matrices]
    return sum(out + (inner if inner != d_model else 0) for out, inner in shapes)


@dataclass(frozen=True)
class Work:
    """What is run, and on what kind of device."""

    n_windows: int
    seq_len: int
    batch_tokens: int
    itemsize: int
    """Bytes of a weight in memory."""
    kind: str
    """cpu or cuda."""

    @property
    def n_tokens(self) -> int:
        """Tokens of all windows."""
        return self.n_windows * self.seq_len


def device_parts(sizes: Sizes, work: Work, engine: str) -> Mapping[str, float]:
    """Bytes on the device by what they are for; their sum is the peak."""
    streamed, factor = engine == STREAMED, _ALLOCATOR[work.kind]
    parts = {
        "process": PROCESS[work.kind],
        "weights": weight_bytes(sizes, work, streamed=streamed),
        "activations": activation_bytes(sizes, work, streamed=streamed),
        "sums": sums_bytes(sizes),
    }
    taken = parts["activations"] + parts["sums"]
    if not streamed:
        return parts | {"allocator": (factor - 1) * (taken + parts["weights"])}
    parts["allocator"] = (factor - 1) * taken
    # Before the layer runs, in large blocks, which are given back.
    reading = _READING * max(sizes.layers) * work.itemsize
    return parts | {"reading": max(0.0, reading - factor * parts["activations"])}


def weight_bytes(sizes: Sizes, work: Work, *, streamed: bool) -> float:
    """Weights that are in memory together: all, or those of the largest part."""
    ends = max(sizes.head_weights, sizes.rest - sizes.head_weights)
    part = max(*sizes.layers, ends)
    n_weights = part if streamed else sum(sizes.layers) + sizes.rest
    return n_weights * work.itemsize


def activation_bytes(sizes: Sizes, work: Work, *, streamed: bool) -> float:
    """What a batch's backward pass keeps, of all layers or of one, and its buffers."""
    numbers = range(len(sizes.layers))
    residual = 2 * sizes.architecture.d_model * max(work.itemsize, _STATE_BYTES)
    kept = [sizes.kept(n, work.kind) * work.itemsize + residual for n in numbers]
    passing = max(sizes.passing(n, work.kind) for n in numbers) * work.itemsize
    return work.batch_tokens * ((max if streamed else sum)(kept) + passing)


def sums_bytes(sizes: Sizes) -> float:
    """The running sums of every atom."""
    return float(sizes.n_atoms * len(SUMS + MAXIMA) * _SUM_BYTES)
