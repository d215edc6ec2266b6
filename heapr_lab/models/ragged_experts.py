"""Experts of different widths: how they run, and how transformers loads and saves them.

This file is self-contained: every pruned checkpoint includes a copy of it, so that it
can be loaded without heapr_lab, with `trust_remote_code=True`. Importing it registers
the checkpoint format with transformers, as a "quantization" named heapr, because that
is the only hook that may change modules before weights are loaded into them.

Shapes: E n_experts, D d_expert, w_e atoms kept of expert e, W = sum of w_e, n routed
rows, T tokens, K experts of each.
"""

import copy
import dataclasses
import functools
import inspect
import itertools
import logging
import re
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import nn
from transformers.core_model_loading import ConversionOps, WeightConverter
from transformers.quantizers.auto import (
    AUTO_QUANTIZER_MAPPING,
    register_quantization_config,
    register_quantizer,
)
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

try:
    import triton
    import triton.language as tl
except ImportError:  # it comes with torch for CUDA
    triton = None

logger = logging.getLogger(__name__)

METHOD = "heapr"
FORMAT_VERSION = 1
"""The version that is written; 2 and 3 were those of what is in `_GONE`."""
_COMPOSED = "heapr_composed"
"""What earlier versions wrote in place of `METHOD` for other papers' methods."""
EARLIER = "heapr-lab 0.1 (`git checkout ad73bb64` in a clone of the repository)"
"""What reads every earlier format: the last commit before the first of them went."""
_GONE = {
    "output_bias": "experts with output biases",
    "quantised": "experts whose weights are integers",
    "experts": "experts that share matrices, or are factors",
    "n_kept": "layers that keep different numbers of experts",
    "skipping": "experts with thresholds of dynamic skipping",
}
"""What earlier checkpoints had, by the field that says so."""
CODE_NAME = "modeling_heapr"
"""Name of the copy of this file in a checkpoint."""

# --- experts ----------------------------------------------------------------------


class RaggedExperts(nn.Module):
    """The kept atoms of one layer's experts, packed one expert after the other.

    Replaces the family's own experts module, with the same arguments. An expert without
    atoms gives the output bias of its family, or 0 if that has none.
    """

    family: Any
    """The family's own module without weights: activation, gating and norm."""

    def __init__(self, module: Any, widths: list[int]) -> None:
        """Allocate `widths` (E,) atoms for the experts in `module`, without values."""
        super().__init__()
        weight = module.down_proj
        d_expert = weight.shape[2 if module.is_transposed else 1]
        n_kept, factor = sum(widths), 2 if module.has_gate else 1
        self.heapr_widths = list(widths)
        """Atoms of each expert, (E,)."""
        self.starts = [0, *itertools.accumulate(widths)]
        """Index of the first atom of each expert, and W."""
        self.factor = factor
        """Rows of the input projection for each atom: 2 with a gate, else 1."""
        self.d_expert = d_expert
        # Not a submodule, so that its own submodules keep their names.
        self.__dict__["family"] = without_weights(module)
        for name, child in self.family.named_children():
            self.add_module(name, child)

        def empty(*shape: int) -> nn.Parameter:
            return nn.Parameter(weight.new_empty(shape))

        self.up_rows = empty(factor * n_kept, d_expert)
        """Rows of the input projection, in the family's own order for each expert."""
        self.down_columns = empty(n_kept, d_expert)
        """Columns of W_down as rows."""
        self.up_bias = empty(factor * n_kept) if module.has_bias else None
        self.down_bias = empty(len(widths), d_expert) if module.has_bias else None

    def forward(
        self,
        hidden_states: torch.Tensor,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor,
    ) -> torch.Tensor:
        """The routed experts' weighted sum.

        Shapes: hidden_states (T, D); top_k_index, top_k_weights (T, K); result (T, D).
        """
        routing = top_k_index, top_k_weights
        if kernel_runs(hidden_states, self._tensors(), self.starts[-1]):
            return self.at_once(hidden_states, *routing)
        n_experts = len(self.heapr_widths)
        return routed_sum(self._expert, n_experts, hidden_states, *routing)

    def _tensors(self) -> Iterator[torch.Tensor | None]:
        """All that computes: adapters may take the place of a parameter."""
        yield from (self.up_rows, self.down_columns, self.up_bias, self.down_bias)
        yield from self.parameters()

    def at_once(
        self, hidden_states: torch.Tensor, *routing: torch.Tensor
    ) -> torch.Tensor:
        """`forward` by `sum_at_once`; arguments and result as there."""
        norm = self.family.post_expert_norm if normalises(self.family) else None
        packed = Packed(
            self.up_rows,
            self.down_columns,
            self.up_bias,
            self.down_bias,
            self._starts_on(hidden_states.device),
            max(self.heapr_widths),
            (self.factor, self.factor if self.family.is_concatenated else 1),
            functools.partial(activate, self.family),
            norm,
        )
        return sum_at_once(packed, hidden_states, *routing)

    def _starts_on(self, device: torch.device) -> torch.Tensor:
        """The `starts` as a tensor, copied to a device once."""
        there: torch.Tensor | None = self.__dict__.get("_starts")
        if there is None or there.device != device:
            there = self.__dict__["_starts"] = torch.tensor(self.starts, device=device)
        return there

    def _expert(self, expert: int, x: torch.Tensor) -> torch.Tensor:
        rows = self._rows_of(expert)
        up_bias = None if self.up_bias is None else self.up_bias[rows]
        h = activate(self.family, F.linear(x, self.up_rows[rows], up_bias))
        out = h @ self.down_columns[self._atoms_of(expert)]
        if self.down_bias is not None:
            out = out + self.down_bias[expert]
        if normalises(self.family):
            out = self.family.post_expert_norm(out)
        return out

    def _atoms_of(self, expert: int) -> slice:
        return slice(self.starts[expert], self.starts[expert + 1])

    def _rows_of(self, expert: int) -> slice:
        atoms = self._atoms_of(expert)
        return slice(self.factor * atoms.start, self.factor * atoms.stop)


def routed_sum(
    run: Callable[[int, torch.Tensor], torch.Tensor],
    n_experts: int,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    """The weighted sum of what `run(expert, x)` returns for the tokens routed to each.

    A slot whose index is `n_experts` is not run.

    Shapes: hidden_states (T, D); top_k_index, top_k_weights (T, K); result (T, D).
    """
    order, counts = by_expert(top_k_index, n_experts)
    routed = (order // top_k_index.shape[-1]).split(counts)  # tokens of each expert
    p = top_k_weights.reshape(-1)[order][:, None].split(counts)
    # Each expert's output is added to the total while it is still in the cache:
    # nothing as large as all routed rows is ever allocated.
    wide = torch.promote_types(hidden_states.dtype, torch.float32)
    total = torch.zeros_like(hidden_states, dtype=wide)
    for expert, tokens in enumerate(routed):
        if len(tokens):
            out = run(expert, hidden_states[tokens]) * p[expert]
            total.index_add_(0, tokens, out.to(wide))
    return total.to(hidden_states.dtype)


def by_expert(
    top_k_index: torch.Tensor, n_experts: int
) -> tuple[torch.Tensor, list[int]]:
    """Slots sorted by their expert, and how many each expert has.

    Slots whose index is `n_experts` are left out.

    Shapes: top_k_index (T, K); slots (at most T · K,); counts (E,).
    """
    experts, order = torch.sort(top_k_index.reshape(-1), stable=True)
    counts = torch.bincount(experts, minlength=n_experts)[:n_experts].tolist()
    return order[: sum(counts)], counts


def activate(module: Any, rows: torch.Tensor) -> torch.Tensor:
    """Atom activations h from the input projection's output, (n, I).

    Shapes: rows (n, 2I) in the family's own order, or (n, I) without a gate.
    """
    h: torch.Tensor
    h = module._apply_gate(rows) if module.has_gate else module.act_fn(rows)
    return h


def normalises(module: Any) -> bool:
    """Whether an expert's output is normalised before its routing weight.

    Versions of transformers that know no such family do not say so.
    """
    return getattr(module, "has_post_expert_norm", False)


def fused_experts(modules: Iterable[tuple[str, nn.Module]]) -> dict[str, Any]:
    """Those of named modules that have transformers' experts interface, by name."""
    return {
        name: module
        for name, module in modules
        if hasattr(module, "is_concatenated") and hasattr(module, "has_gate")
    }


def without_weights(module: nn.Module) -> Any:
    """A copy that keeps activation, gating and norm, but no expert weights."""
    shell = copy.copy(module)
    shell._parameters = dict.fromkeys(module._parameters)
    shell._modules = copy.deepcopy(module._modules)  # a norm keeps its weights
    return shell


# --- all experts at once, on a GPU ------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Packed:
    """The experts of one layer, packed one after the other, and what they compute."""

    up_rows: torch.Tensor
    """Rows of the input projection, (layout[0] · W, D)."""
    down_columns: torch.Tensor
    """Columns of W_down as rows, (W, D)."""
    up_bias: torch.Tensor | None
    """(layout[0] · W,)."""
    down_bias: torch.Tensor | None
    """(E, D)."""
    starts: torch.Tensor
    """The first atom of each expert, and W: (E + 1,), on the device."""
    widest: int
    """Atoms of the widest expert."""
    layout: tuple[int, int]
    """Rows of the input projection for each atom, and the parts that they are in: two
    if the gate is a part of its own."""
    activate: Callable[[torch.Tensor], torch.Tensor]
    """Atom activations (n, w) from the input projection's output (n, layout[0] · w)."""
    norm: Callable[[torch.Tensor], torch.Tensor] | None = None
    """That of each expert's output, before its routing weight."""


def kernel_runs(
    x: torch.Tensor, tensors: Iterable[torch.Tensor | None], n_atoms: int
) -> bool:
    """Whether `sum_at_once` takes `x`: half precision on CUDA, and no gradients.

    Args:
        x: the tokens.
        tensors: all weights.
        n_atoms: atoms of all experts.
    """
    if triton is None or not x.is_cuda or not len(x) or not n_atoms:
        return False
    return infers_in_half(x, *tensors) and _compiles(x.device)


def infers_in_half(*tensors: torch.Tensor | None) -> bool:
    """Whether all are of one half-precision type, and no gradient is wanted."""
    there = [t for t in tensors if t is not None]
    trained = torch.is_grad_enabled() and any(t.requires_grad for t in there)
    half = {t.dtype for t in there} in ({torch.bfloat16}, {torch.float16})
    return half and not trained


def sum_at_once(
    experts: Packed,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    """As `routed_sum`, by one kernel for each of the two products, whatever the widths.

    The host waits for nothing. Activations are padded to the widest expert.

    Shapes: hidden_states (T, D); top_k_index, top_k_weights (T, K); result (T, D).
    """
    n_experts, n_slots = len(experts.starts) - 1, top_k_index.shape[-1]
    of_rows, order = torch.sort(top_k_index.reshape(-1), stable=True)  # (n,)
    rows = _Rows.of(of_rows, experts.starts)
    shape = -(-experts.widest // 16) * 16, hidden_states.shape[1]
    up = hidden_states, experts.up_rows, experts.up_bias, order // n_slots
    h = experts.activate(rows.times(*up, shape, experts.layout))
    out = rows.times(h, experts.down_columns, None, order, shape)
    del h  # there are as many rows as routed tokens
    if experts.down_bias is not None:
        out = out + experts.down_bias[of_rows.clamp_max(n_experts - 1)]
    if experts.norm is not None:
        out = experts.norm(out)
    p = top_k_weights.reshape(-1)[order].masked_fill(of_rows >= n_experts, 0.0)
    out = out * p[:, None]
    slots = torch.empty_like(out).index_copy_(0, order, out)
    del out
    total: torch.Tensor
    total = slots.unflatten(0, (-1, n_slots)).sum(1, dtype=torch.float32)
    return total.to(hidden_states.dtype)


@dataclasses.dataclass(frozen=True)
class _Rows:
    """Rows sorted by expert, cut into pieces that a program multiplies."""

    cuts: torch.Tensor
    """The first row of each piece, and n."""
    experts: torch.Tensor
    """The expert of each piece, or E: then nothing is computed."""
    starts: torch.Tensor
    """The first atom of each expert, and W: (E + 1,)."""
    size: int
    """Most rows of a piece."""
    n: int

    @classmethod
    def of(cls, experts: torch.Tensor, starts: torch.Tensor) -> "_Rows":
        """Cut where an expert ends, and after so many rows as an expert has on average.

        Shapes: experts (n,) in ascending order.
        """
        n, n_experts = len(experts), len(starts) - 1
        size = min(128, max(16, triton.next_power_of_2(n // n_experts)))
        numbers = torch.arange(n_experts, device=experts.device)
        ends = torch.searchsorted(experts, numbers, right=True)
        regular = torch.arange(0, n + size, size, device=experts.device).clamp_max(n)
        cuts, _ = torch.cat([regular, ends]).sort()
        owners = torch.searchsorted(ends, cuts, right=True)
        return cls(cuts, owners, starts, size, n)

    def times(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        of_rows: torch.Tensor,
        shape: tuple[int, int],
        layout: tuple[int, int] | None = None,
    ) -> torch.Tensor:
        """The products of all rows and the matrix of their expert.

        Args:
            x: with a layout the tokens (T, D), else the activations (n, w).
            weight: the rows of the input projection, or the columns of W_down.
            bias: of these rows, if the family has one.
            of_rows: the token of each row, (n,).
            shape: w, the padded width, and D.
            layout: that of `Packed`, of the input projection.

        Returns:
            The input projection's output, padded, (n, rows of an atom · w), or (n, D).
        """
        (width, d_expert), (factor, parts) = shape, layout or (1, 1)
        out = x.new_zeros(self.n, factor * width if layout else d_expert)
        tile = _tile(self.size)
        grid = len(self.cuts) - 1, triton.cdiv(out.shape[1], tile["N"])
        inputs = x, of_rows, weight, weight if bias is None else bias
        tensors = *(tensor.contiguous() for tensor in inputs), out
        of_pieces = self.cuts, self.experts, self.starts
        sizes = len(self.starts) - 1, width, d_expert
        kind = layout is not None, factor, parts, bias is not None
        with torch.cuda.device_of(out):
            _multiply[grid](*tensors, *of_pieces, *sizes, *kind, M=self.size, **tile)
        return out


@functools.cache
def _compiles(device: torch.device) -> bool:
    """Whether Triton compiles here, for which it needs a C compiler.

    Raises:
        OutOfMemoryError: there is no memory to try it.
    """
    x = torch.ones(1, 16, dtype=torch.float16, device=device)
    one, starts = torch.zeros(1, dtype=torch.long, device=device), [0, 16]
    rows = _Rows.of(one, torch.tensor(starts, device=device))
    try:
        rows.times(x, x.expand(16, 16).contiguous(), None, one, (16, 16))
    except torch.OutOfMemoryError:  # it will be asked again
        raise
    except Exception:  # of whatever is missing
        logger.warning(
            "one expert is run after the other, which is slow", exc_info=True
        )
        return False
    return True


def _tile(size: int) -> dict[str, int]:
    """How a program multiplies `size` rows: its columns, depths, warps and stages."""
    columns = 64 if size <= 32 else 128
    return {"N": columns, "K": 64, "num_warps": 4, "num_stages": 3}


if triton is not None:

    @triton.jit
    def _multiply(  # type: ignore[no-untyped-def]
        x,
        of_rows,
        weight,
        bias,
        out,
        cuts,
        experts,
        starts,
        n_experts,
        most,
        d_expert,
        UP: tl.constexpr,
        FACTOR: tl.constexpr,
        PARTS: tl.constexpr,
        BIAS: tl.constexpr,
        M: tl.constexpr,
        N: tl.constexpr,
        K: tl.constexpr,
    ):
        """Multiply the rows of one piece by N columns of their expert's matrix.

        Of each of the PARTS of the padded columns the first ones are the expert's.
        """
        piece = tl.program_id(0)
        first, end = tl.load(cuts + piece), tl.load(cuts + piece + 1)
        expert = tl.load(experts + piece)
        if (first < end) & (expert < n_experts):
            start = tl.load(starts + expert)
            width = tl.load(starts + expert + 1) - start
            rows = first + tl.arange(0, M)
            here = rows < end
            columns = tl.program_id(1) * N + tl.arange(0, N)
            if UP:
                each = FACTOR // PARTS
                part, place = columns // (each * most), columns % (each * most)
                inside = (part < PARTS) & (place < each * width)
                source = FACTOR * start + part * each * width + place
                left = x + tl.load(of_rows + rows, mask=here, other=0) * d_expert
                right = weight + source * d_expert
                stride, depth, n_columns = 1, d_expert, FACTOR * most
            else:
                inside = columns < d_expert
                left = x + rows * most
                right = weight + start * d_expert + columns
                stride, depth, n_columns = d_expert, width, d_expert
            if tl.sum(inside.to(tl.int32)) > 0:
                total = tl.zeros((M, N), tl.float32)
                for k in range(0, depth, K):
                    deep = k + tl.arange(0, K)
                    within = deep < depth
                    a = tl.load(
                        left[:, None] + deep, mask=here[:, None] & within, other=0
                    )
                    b = tl.load(
                        right + deep[:, None] * stride,
                        mask=within[:, None] & inside,
                        other=0,
                    )
                    total = tl.dot(a, b, total)
                if BIAS:
                    total += tl.load(bias + source, mask=inside, other=0).to(tl.float32)
                at = out + rows[:, None] * n_columns + columns
                value = total.to(out.dtype.element_ty)
                tl.store(at, value, mask=here[:, None] & inside)


# --- files: one tensor for each expert, packed when it is loaded ------------------

ROWS, COLUMNS, BIAS = "rows", "columns", "bias"
"""Input projection and its bias; W_down; output bias, which has no atom axis."""


class Pack(ConversionOps):
    """Packs the tensors of all experts into one; `Unpack` is the inverse.

    The input projection of an expert is one tensor, or two with a gate, whose rows are
    concatenated, or interleaved if the family has them so.
    """

    def __init__(self, widths: list[int], kind: str, *, interleaved: bool) -> None:
        self.widths, self.kind, self.interleaved = widths, kind, interleaved

    def __deepcopy__(self, memo: dict[int, Any]) -> "Pack":
        return self  # transformers copies it for each tensor; it has no state

    @torch.no_grad()
    def convert(
        self,
        input_dict: dict[str, Any],
        source_patterns: list[str],
        target_patterns: list[str],
        **_kwargs: Any,
    ) -> dict[str, Any]:
        """Join the tensors that transformers collected for one target.

        Raises:
            ValueError: a tensor is missing or has another width than config.json says.
        """
        sources = [input_dict.pop(name, []) for name in source_patterns]
        for name, tensors in zip(source_patterns, sources, strict=True):
            self._check(name, tensors)
        parts = [self._joined(pieces) for pieces in zip(*sources, strict=True)]
        return {target_patterns[0]: torch.cat(parts)}

    def _check(self, name: str, tensors: list[torch.Tensor]) -> None:
        if self.kind == BIAS:
            widths = self.widths[: len(tensors)]
        else:
            axis = 1 if self.kind == COLUMNS else 0
            widths = [tensor.shape[axis] for tensor in tensors]
        if widths != self.widths:
            raise ValueError(
                f"{name}: found the widths {widths}, config.json says {self.widths}; a "
                "file of the checkpoint is missing, or belongs to another checkpoint"
            )

    def _joined(self, pieces: tuple[torch.Tensor, ...]) -> torch.Tensor:
        if self.kind == BIAS:
            return pieces[0][None]
        if self.kind == COLUMNS:
            return pieces[0].T
        if self.interleaved:
            return torch.stack(pieces, dim=1).flatten(0, 1)
        return torch.cat(pieces)

    @property
    def reverse_op(self) -> "Pack":
        """The inverse: loading packs, saving unpacks."""
        other = Pack if isinstance(self, Unpack) else Unpack
        return other(self.widths, self.kind, interleaved=self.interleaved)


class Unpack(Pack):
    """Splits a packed tensor into the tensors of each expert."""

    @torch.no_grad()
    def convert(
        self,
        input_dict: dict[str, Any],
        source_patterns: list[str],
        target_patterns: list[str],
        full_layer_name: str = "",
        **_kwargs: Any,
    ) -> dict[str, Any]:
        """Split a packed tensor into named tensors."""
        target_patterns = _as_renamed(target_patterns, full_layer_name)
        packed = input_dict.pop(source_patterns[0])
        packed = packed[0] if isinstance(packed, list) else packed
        n_parts = len(target_patterns)
        sizes = [1 if self.kind == BIAS else n_parts * w for w in self.widths]
        tensors = {}
        for expert, rows in enumerate(packed.split(sizes)):
            for name, tensor in zip(
                target_patterns, self._parts(rows, n_parts), strict=True
            ):
                tensors[name.replace("*", str(expert))] = tensor.contiguous()
        return tensors

    def _parts(self, rows: torch.Tensor, n_parts: int) -> tuple[torch.Tensor, ...]:
        if self.kind == BIAS:
            return (rows[0],)
        if self.kind == COLUMNS:
            return (rows.T,)
        if self.interleaved:
            return tuple(rows[part::n_parts] for part in range(n_parts))
        return rows.chunk(n_parts)


def _as_renamed(patterns: list[str], name: str) -> list[str]:
    """The `patterns`, with the path of the module from the first one's full `name`.

    Older versions of transformers rename only the first pattern of a conversion, and
    lose its prefix, where a family has another name for a module (Mixtral's experts).
    """
    path, star, _ = name.partition(".*.")
    return [path + star + p.partition(".*.")[2] for p in patterns] if star else patterns


def expert_conversions(
    path: str, module: RaggedExperts, family: list[Any]
) -> list[WeightConverter]:
    """How the tensors of each expert become those of `module`, which is at `path`.

    Args:
        path: path of the experts module in its model.
        module: the module.
        family: the conversions of the model's family, whose names for the tensors of
            an expert are kept; without them, the names are `gate_proj`, `up_proj` and
            `down_proj`.
    """
    shell = module.family
    here = path[path.find("layers.") :]
    ups = ["gate_proj", "up_proj"] if shell.has_gate else ["up_proj"]
    up_target = "gate_up_proj" if shell.has_gate else "up_proj"
    rows = _own_names(family, here, up_target)
    rows = rows or [f"{here}.*.{name}.weight" for name in ups]
    columns = _own_names(family, here, "down_proj") or [f"{here}.*.down_proj.weight"]
    interleaved = not shell.is_concatenated

    def packed(sources: list[str], target: str, kind: str) -> WeightConverter:
        op = Pack(module.heapr_widths, kind, interleaved=interleaved)
        return WeightConverter(sources, f"{here}.{target}", [op])

    rules = [packed(rows, "up_rows", ROWS), packed(columns, "down_columns", COLUMNS)]
    if module.up_bias is not None:
        biases = [name.replace(".weight", ".bias") for name in rows]
        rules.append(packed(biases, "up_bias", ROWS))
    if module.down_bias is not None:
        bias = columns[0].replace(".weight", ".bias")
        rules.append(packed([bias], "down_bias", BIAS))
    return rules


def _own_names(family: list[Any], here: str, target: str) -> list[str] | None:
    """Patterns of the tensors that the family merges into `target` of the module."""
    for conversion in family:
        if not isinstance(conversion, WeightConverter):
            continue
        goal, sources = conversion.target_patterns[0], conversion.source_patterns
        end = f"{here}.{target}"
        if end.endswith(goal) and all(".*." in source for source in sources):
            prefix = end[: len(end) - len(goal)]
            return [prefix + source for source in sources]
    return None


def _of_experts(conversion: Any) -> bool:
    """Whether a conversion of the family makes whole experts, unlike a pruned model."""
    return isinstance(conversion, WeightConverter) and any(
        target.endswith((".gate_up_proj", ".up_proj", ".down_proj"))
        and "experts" in target
        for target in conversion.target_patterns
    )


# --- registration -----------------------------------------------------------------


class HeaprConfig(QuantizationConfigMixin):
    """The entry `quantization_config` in config.json of a pruned model."""

    def __init__(
        self,
        widths: dict[str, list[int]] | None = None,
        format_version: int = FORMAT_VERSION,
        **facts: Any,
    ) -> None:
        """The `widths` of the experts in each experts module, by its path."""
        self.quant_method: Any = METHOD
        self.widths = widths or {}
        self.format_version = format_version
        self.facts = facts

    def to_dict(self) -> dict[str, Any]:
        """The entry as plain data."""
        version = {"quant_method": METHOD, "format_version": self.format_version}
        return {**version, **self.facts, "widths": self.widths}


_CONVERSIONS = inspect.signature(HfQuantizer.update_weight_conversions)
_OLDER = "model" not in _CONVERSIONS.parameters
"""Whether transformers is older than the version that tells quantizers the model."""


class HeaprQuantizer(HfQuantizer):
    """Replaces experts by ragged ones before weights are loaded."""

    requires_calibration = True
    quantization_config: HeaprConfig
    loading: Any = None
    """The model whose experts were replaced, until its weights are loaded."""

    def validate_environment(self, *_args: Any, **_kwargs: Any) -> None:
        """Refuse a checkpoint of a later version, or with what is no longer read.

        Raises:
            ValueError: it is one.
        """
        check_format(self.quantization_config.to_dict())

    def _process_model_before_weight_loading(self, model: Any, **_kwargs: Any) -> Any:
        """Replace the model's experts by ragged ones.

        Raises:
            ValueError: the widths do not match this model's experts.
        """
        every = self.quantization_config.widths
        modules = fused_experts(model.named_modules())
        check_widths(every, {n: len(m.down_proj) for n, m in modules.items()}, model)
        for path, widths in every.items():
            parent, _, name = path.rpartition(".")
            block: Any = model.get_submodule(parent)
            setattr(block, name, RaggedExperts(modules[path], widths))
            # Some families would initialise the parameters that were replaced.
            block._is_hf_initialized = True
        base: Any = type(model)
        model.__class__ = with_code(base)  # which refuses holes
        self.loading = model
        # Nothing is quantised; else older versions would not cast what is stored.
        self.pre_quantized = not _OLDER
        return model

    def _process_model_after_weight_loading(self, model: Any, **_kwargs: Any) -> Any:
        self.loading = None
        finish(model)
        return model

    def update_weight_conversions(
        self, weight_conversions: list[Any], model: Any = None
    ) -> list[Any]:
        """The family's conversions, with those of its experts replaced.

        Older versions of transformers do not say of which model.
        """
        model = self.loading if model is None else model
        kept = [c for c in weight_conversions if not _of_experts(c)]
        for path in self.quantization_config.widths:
            module = model.get_submodule(path)
            kept += expert_conversions(path, module, weight_conversions)
        return kept

    def is_serializable(self) -> bool:
        """Whether the model can be saved: yes."""
        return True

    @property
    def is_trainable(self) -> bool:
        """Whether the model can be trained: yes."""
        return True


def check_widths(widths: Any, n_experts: dict[str, int], model: Any) -> None:
    """Check that `widths` has one entry for every expert of `model`, and no others.

    Args:
        widths: the widths in config.json.
        n_experts: number of experts in each experts module, by its path.
        model: the model, for the message.

    Raises:
        ValueError: an entry is missing, superfluous or invalid.
    """
    entries = widths if isinstance(widths, dict) else {}
    differing = sorted(entries.keys() ^ n_experts.keys())
    if differing:
        path = differing[0]
        said, true = ("widths", "no") if path in entries else ("no widths", "such")
        raise ValueError(
            f"config.json has {said} of {path!r}, but {type(model).__name__} has "
            f"{true} experts there; it belongs to another model, or is damaged"
        )
    for path, kept in entries.items():
        counts = isinstance(kept, list) and all(type(w) is int and w >= 0 for w in kept)
        if not counts or len(kept) != n_experts[path]:
            raise ValueError(
                f"config.json has the widths {str(kept)[:60]} of {path!r}, expected "
                f"{n_experts[path]} counts of atoms: use the config.json that the "
                "checkpoint was written with"
            )


def check_format(settings: Mapping[str, Any]) -> None:
    """Check that this version reads what `quantization_config` describes.

    Raises:
        ValueError: it does not.
    """
    for name, what in _GONE.items():
        if settings.get(name):
            raise ValueError(
                f"the checkpoint has {what}, which {EARLIER} reads and this version "
                "does not: load it with that, or make it again from the base model"
            )
    version = settings.get("format_version", FORMAT_VERSION)
    if not isinstance(version, int) or version > FORMAT_VERSION:
        raise ValueError(
            f"the checkpoint has format version {version!r}, this version of heapr_lab "
            f"reads up to {FORMAT_VERSION}: upgrade heapr_lab, or get config.json again"
        )


if METHOD not in AUTO_QUANTIZER_MAPPING:
    for _name in (METHOD, _COMPOSED):
        register_quantization_config(_name)(HeaprConfig)
        register_quantizer(_name)(HeaprQuantizer)


def finish(model: Any) -> None:
    """Let `model` be trained, moved, cast and saved, with its code, as any other."""
    unmark(model)
    base: Any = type(model)
    model.__class__ = with_code(base)


def unmark(model: Any) -> None:
    """Tell transformers that the weights of `model` are not quantised."""
    for module in model.modules():
        if isinstance(module, transformers.PreTrainedModel):
            module.config._is_quantized = False
    model.is_quantized = False


# --- holes ------------------------------------------------------------------------

_LAYER = re.compile(r"(.*?)layers\.(\d+)\.")


def check_no_missing_weights(
    model: Any,
    *,
    missing: Collection[str],
    mismatched: Collection[str] = (),
    unexpected: Collection[str] = (),
) -> None:
    """Refuse weights that transformers, with a warning, would randomise or drop.

    Args:
        model: the loaded model.
        missing: its parameters and buffers that are in no file.
        mismatched: parameters and buffers that have another shape in the files.
        unexpected: tensors in the files that are not in the model; only those of its
            own decoder layers are refused.

    Raises:
        ValueError: there is such a weight.
    """
    stray = _of_own_layers(model, unexpected)
    holes = {
        "lacks": sorted(missing),
        "has in other shapes": sorted(mismatched),
        "has, but config.json does not,": stray,
    }
    texts = [
        f"{verb} {len(names)} of its weights ({', '.join(names[:3])}"
        f"{', ...' if len(names) > 3 else ''})"
        for verb, names in holes.items()
        if names
    ]
    if texts:
        raise ValueError(
            f"the checkpoint of this {type(model).__name__} {' and '.join(texts)}: its "
            "files are incomplete, or config.json belongs to another model; download "
            "it again, or create it again"
        )


def _of_own_layers(model: Any, names: Collection[str]) -> list[str]:
    """The `names` that belong to decoder layers of `model`, sorted.

    Layers after the last, which predict further tokens, are left out by design.
    """
    places = [_LAYER.match(name) for name in model.state_dict()]
    prefixes = {place[1] for place in places if place}
    config = model.config.get_text_config()
    n_layers = 1 + max((int(place[2]) for place in places if place), default=-1)
    n_predicting = getattr(config, "num_nextn_predict_layers", None) or 0
    further = range(n_layers, n_layers + n_predicting)
    return sorted(
        name
        for name in names
        if (place := _LAYER.match(name))
        and place[1] in prefixes
        and int(place[2]) not in further
    )


# --- code -------------------------------------------------------------------------

_AUTO_CLASSES = (
    "AutoModelForCausalLM",
    "AutoModelForImageTextToText",
    "AutoModelForMultimodalLM",
)


class CarriesCode:
    """Saves a copy of this file with a model of transformers, and refuses holes."""

    def _adjust_missing_and_unexpected_keys(self, loading_info: Any) -> None:
        """Adjust the keys, then refuse missing, mismatched and unexpected weights."""
        super()._adjust_missing_and_unexpected_keys(loading_info)  # type: ignore[misc]
        model: Any = self
        missing = loading_info.missing_keys
        if type(self).__name__ not in (model.config.architectures or ()):
            # A new head, such as a classifier's, is to be trained.
            prefix = f"{model.base_model_prefix}."
            missing = {name for name in missing if name.startswith(prefix)}
        mismatched = {name for name, *_ in loading_info.mismatched_keys}
        loading_info.mismatched_keys.clear()  # else an error without names is raised
        check_no_missing_weights(
            self,
            missing=missing,
            mismatched=mismatched,
            unexpected=loading_info.unexpected_keys,
        )

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoModel") -> None:
        """Nothing to do: `save_pretrained` names the code itself."""

    def save_pretrained(self, save_directory: Any, **kwargs: Any) -> None:
        """Save as transformers does, with the code."""
        config: Any = self.config  # type: ignore[attr-defined]
        carry_code(Path(save_directory), config, type(self).__name__)
        super().save_pretrained(save_directory, **kwargs)  # type: ignore[misc]


def carry_code(folder: Path, config: Any, name: str) -> None:
    """Copy this file to `folder` and name it in `config`, for use without heapr_lab.

    Not if the model class `name` is not of transformers: nothing could load it there.
    """
    if not hasattr(transformers, name):
        return
    # A multimodal wrapper is not a causal language model to transformers.
    plain = config.get_text_config() is config
    auto = _AUTO_CLASSES[:1] if plain else _AUTO_CLASSES[1:]
    config.auto_map = dict.fromkeys(auto, f"{CODE_NAME}.{name}")
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"{CODE_NAME}.py"
    if target.resolve() != Path(__file__).resolve():
        shutil.copyfile(__file__, target)


@functools.cache
def with_code(base: Any) -> Any:
    """The model class `base` of transformers, which also saves its code."""
    if issubclass(base, CarriesCode):
        return base
    # With the same module and name, so that transformers treats it as its own.
    body = {"__module__": base.__module__, "__doc__": base.__doc__}
    return type(base.__name__, (CarriesCode, base), body)


def __getattr__(name: str) -> Any:
    """The class that `auto_map` in config.json asks for.

    Raises:
        AttributeError: transformers has no such class.
    """
    base = getattr(transformers, name, None)
    if not isinstance(base, type):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return with_code(base)
