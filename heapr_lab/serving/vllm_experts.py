"""Experts of vLLM with the widths of a pruned checkpoint: allocated, loaded and run.

vLLM does not check that all tensors of a "quantized" checkpoint were loaded, and fills
a narrower tensor into a wider parameter: both are checked here.

Shapes: E n_experts, D d_model, T tokens, K experts of each token, w_e atoms of expert e
on this rank, with those of zeros that a kernel wants, W = sum of w_e.
"""

import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from vllm._custom_ops import cpu_fused_moe, cpu_prepack_moe_weight
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import (
    FUSED_MOE_UNQUANTIZED_CONFIG,
    FusedMoEConfig,
)
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import (
    FusedMoEMethodBase,
)
from vllm.model_executor.layers.fused_moe.oracle.unquantized import (
    select_unquantized_moe_backend,
)
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)
from vllm.model_executor.utils import set_weight_attrs
from vllm.platforms import current_platform
from vllm.utils.math_utils import round_up

from heapr_lab.errors import LayoutError
from heapr_lab.models.ragged_experts import (
    Packed,
    kernel_runs,
    routed_sum,
    sum_at_once,
)
from heapr_lab.serving.widths import shard

GATE, DOWN, UP = "w1", "w2", "w3"
"""vLLM's names of the projections of an expert."""
SWIGLU_LIMIT, SWIGLU_ALPHA = 7.0, 1.702
"""Constants of gpt-oss, as they are fixed in vLLM."""


def clamped_swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Atom activations of gpt-oss."""
    gate, up = gate.clamp(max=SWIGLU_LIMIT), up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT)
    return gate * torch.sigmoid(SWIGLU_ALPHA * gate) * (up + 1)


ACTIVATIONS: dict[Any, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    MoEActivation.SILU: lambda gate, up: F.silu(gate) * up,
    MoEActivation.GELU: lambda gate, up: F.gelu(gate) * up,
    MoEActivation.GELU_TANH: lambda gate, up: F.gelu(gate, approximate="tanh") * up,
    MoEActivation.SWIGLUOAI: clamped_swiglu,
}
"""Atom activations from gate and up projection, by vLLM's name."""


class Arrived:
    """Which tensors of the experts of a layer were loaded."""

    def __init__(
        self, widths: list[int], prefix: str, *, has_bias: bool = False
    ) -> None:
        """Expect experts of `widths` (E,) atoms in the module at the path `prefix`."""
        self.widths, self.prefix = widths, prefix
        weights = (GATE, DOWN, UP)
        biases = tuple(map(bias_of, weights)) if has_bias else ()
        self.parts = weights + biases
        self.seen: set[tuple[int, str]] = set()

    def see(self, expert: int, part: str, tensor: torch.Tensor) -> None:
        """Note a tensor as it is in the file.

        Shapes: `DOWN` (D, w_e), its bias (D,), the others (w_e, D) and (w_e,).

        Raises:
            LayoutError: it has another width than config.json says.
        """
        width = tensor.shape[1 if part == DOWN else 0]
        if part != bias_of(DOWN) and width != self.widths[expert]:
            raise LayoutError(
                f"{part} of expert {expert} of {self.prefix} has the width {width}, "
                f"config.json says {self.widths[expert]}: a file belongs to another "
                "checkpoint"
            )
        self.seen.add((expert, part))

    def check(self) -> None:
        """Check that all were loaded; all have to be, if they are again.

        Raises:
            LayoutError: some were not.
        """
        every = itertools.product(range(len(self.widths)), self.parts)
        lost = [pair for pair in every if pair not in self.seen]
        if lost:
            raise LayoutError(
                f"{len(lost)} tensors of {self.prefix} are in no file, the first is "
                f"{lost[0][1]} of expert {lost[0][0]}: a file of the checkpoint is "
                "missing; download it again"
            )
        self.seen.clear()


def bias_of(part: str) -> str:
    """The name of the bias of a projection."""
    return f"{part}_bias"


class NarrowMethod(UnquantizedFusedMoEMethod):
    """vLLM's own experts, of another width than the configuration's."""

    def __init__(self, moe: FusedMoEConfig, width: int, prefix: str) -> None:
        """Experts of `width` in the module at the path `prefix`.

        The `moe` of this layer alone is changed, before anything is allocated.
        """
        moe.intermediate_size = width
        moe.intermediate_size_per_partition = width // moe.tp_size
        moe.intermediate_size_per_partition_unpadded = width // moe.tp_size
        super().__init__(moe)
        self.arrived = Arrived([width] * moe.num_logical_experts, prefix)

    def create_weights(
        self, layer: Any, *args: Any, weight_loader: Any, **kwargs: Any
    ) -> None:
        """Allocate weights as vLLM does, with a loader that checks widths."""

        def load(
            param: Any, loaded_weight: torch.Tensor, *more: Any, **facts: Any
        ) -> Any:
            self.arrived.see(facts["expert_id"], facts["shard_id"], loaded_weight)
            return weight_loader(param, loaded_weight, *more, **facts)

        super().create_weights(layer, *args, weight_loader=load, **kwargs)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Process weights as vLLM does, if all tensors were loaded.

        Raises:
            LayoutError: some were not.
        """
        self.arrived.check()
        super().process_weights_after_loading(layer)


class RaggedMethod(FusedMoEMethodBase):
    """Experts of different widths, packed one after the other.

    With tensor parallelism each rank has a part of the atoms of every expert; vLLM
    adds the ranks' sums.
    """

    def __init__(self, moe: FusedMoEConfig, widths: list[int], prefix: str) -> None:
        """Experts of `widths` (E,) in the module at the path `prefix`."""
        super().__init__(moe)
        self.arrived = Arrived(widths, prefix, has_bias=moe.has_bias)
        self.own = [shard(width, moe.tp_rank, moe.tp_size) for width in widths]
        """The atoms of each expert that are on this rank."""
        kernel = kernel_of(moe)
        self.isa = "" if kernel is None else kernel.isa
        """The instructions of vLLM's kernel, or "" where torch computes."""
        block = 1 if kernel is None else _block(kernel)
        self.widths = [round_up(atoms.stop - atoms.start, block) for atoms in self.own]
        self.starts = [0, *itertools.accumulate(self.widths)]

    def create_weights(
        self,
        layer: nn.Module,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,  # noqa: ARG002 (the interface of vLLM)
        params_dtype: torch.dtype,
        **_attributes: Any,
    ) -> None:
        """Allocate w13 (2W, D), the gate's rows of each expert first, and w2 (W, D).

        With biases w13_bias (2W,) and w2_bias (E, D), too.
        """
        n_atoms = self.starts[-1]
        shapes: dict[str, tuple[int, ...]] = {
            "w13_weight": (2 * n_atoms, hidden_size),
            "w2_weight": (n_atoms, hidden_size),
        }
        if self.moe.has_bias:
            shapes["w13_bias"] = (2 * n_atoms,)
            shapes["w2_bias"] = (num_experts, hidden_size)
        for name, shape in shapes.items():
            weight = nn.Parameter(torch.empty(shape, dtype=params_dtype), False)
            layer.register_parameter(name, weight)
            set_weight_attrs(weight, {"weight_loader": self.load})

    def load(
        self,
        param: nn.Parameter,
        loaded_weight: torch.Tensor,
        weight_name: str,  # noqa: ARG002 (the interface of vLLM)
        shard_id: str,
        expert_id: int,
        return_success: bool = False,
    ) -> bool | None:
        """Copy this rank's part of a tensor of one expert to its place.

        Output biases are on the first rank; others have zeros.

        Raises:
            LayoutError: it has another width than config.json says.
        """
        part = shard_id if loaded_weight.ndim == 2 else bias_of(shard_id)
        self.arrived.see(expert_id, part, loaded_weight)
        if part == bias_of(DOWN):
            rows = loaded_weight if self.moe.tp_rank == 0 else loaded_weight[:0]
            place = param.data[expert_id]
        else:
            whole = loaded_weight.T if part == DOWN else loaded_weight
            rows = whole[self.own[expert_id]]
            place = self._place(param, part, expert_id)
        place[: len(rows)].copy_(rows)
        place[len(rows) :].zero_()
        return True if return_success else None

    def _place(self, param: nn.Parameter, part: str, expert: int) -> torch.Tensor:
        """The rows of a parameter that a tensor of an expert takes."""
        start, width = self.starts[expert], self.widths[expert]
        if part != DOWN:
            start = 2 * start + width * (part in {UP, bias_of(UP)})
        return param.data[start : start + width]

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Check that all tensors were loaded, and arrange them for the kernel.

        Raises:
            LayoutError: some were not.
        """
        self.arrived.check()
        if self.isa:
            by_turns = self.moe.activation == MoEActivation.SWIGLUOAI
            numbers, tensors = range(len(self.widths)), tensors_of(layer)
            experts = [expert_of(tensors, self.starts, number) for number in numbers]
            pack(experts, self.isa, by_turns=by_turns)

    def get_fused_moe_quant_config(self, layer: nn.Module) -> Any:  # noqa: ARG002
        """A configuration in which nothing is quantised."""
        return FUSED_MOE_UNQUANTIZED_CONFIG

    def apply(
        self,
        layer: Any,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared_experts: Any,  # noqa: ARG002 (run by vLLM, as there is no kernel)
        shared_experts_input: Any,  # noqa: ARG002
    ) -> torch.Tensor:
        """The routed experts' weighted sum on this rank.

        Shapes: x (T, D); topk_weights, topk_ids (T, K); result (T, D).
        """
        out: torch.Tensor = ragged_sum(
            x,
            *tensors_of(layer),
            self.starts,
            topk_ids,
            topk_weights,
            layer.activation.value,
            self.isa,
        )
        return out


def tensors_of(layer: Any) -> tuple[torch.Tensor, torch.Tensor, Any, Any]:
    """The tensors w13, w2 and their biases, which may be None."""
    biases = (getattr(layer, name, None) for name in ("w13_bias", "w2_bias"))
    first, second = (None if bias is None else bias.data for bias in biases)
    return layer.w13_weight.data, layer.w2_weight.data, first, second


def kernel_of(moe: FusedMoEConfig) -> type[CPUUnquantizedExperts] | None:
    """VLLM's kernel for the experts of a layer on this processor.

    It runs one expert at a time here, as any other width is one of its own. None where
    it does not take the model's shape, and on a GPU.
    """
    if not current_platform.is_cpu():
        return None
    try:
        kernel = select_unquantized_moe_backend(moe)[1]
    except NotImplementedError:
        return None
    if not (isinstance(kernel, type) and issubclass(kernel, CPUUnquantizedExperts)):
        return None
    return None if moe.hidden_dim % _block(kernel) else kernel


def _block(kernel: type[CPUUnquantizedExperts]) -> int:
    """The number that widths have to be multiples of."""
    return math.lcm(kernel.output_alignment, kernel.reduction_alignment)


class Expert(NamedTuple):
    """The tensors of one expert: (2w, D), (w, D), (2w,) and (D,)."""

    rows: torch.Tensor
    columns: torch.Tensor
    bias: torch.Tensor | None = None
    output_bias: torch.Tensor | None = None


def expert_of(
    tensors: tuple[torch.Tensor, torch.Tensor, Any, Any], starts: list[int], number: int
) -> Expert:
    """Views of the tensors of one expert, whose atoms are from `starts[number]` on.

    Shapes: w13 (2W, D); w2 (W, D); w13_bias (2W,) or None; w2_bias (E, D) or None;
    starts (E + 1,).
    """
    w13, w2, w13_bias, w2_bias = tensors
    start, end = starts[number : number + 2]
    return Expert(
        w13[2 * start : 2 * end],
        w2[start:end],
        None if w13_bias is None else w13_bias[2 * start : 2 * end],
        None if w2_bias is None else w2_bias[number],
    )


def pack(experts: list[Expert], isa: str, *, by_turns: bool) -> None:
    """Arrange the weights as vLLM's kernel reads them, each in its place.

    Args:
        experts: their widths are multiples of the kernel's block.
        isa: instructions of the kernel.
        by_turns: each atom's gate and then its up projection, as the kernel wants
            them for the activation of gpt-oss.
    """
    for rows, columns, bias, _ in experts:
        if not len(columns):
            continue
        for tensor in (rows, bias) if by_turns else ():
            if tensor is not None:
                tensor.copy_(torch.stack(tensor.chunk(2), 1).view_as(tensor))
        for weight, place in ((rows, rows), (columns.T.contiguous(), columns)):
            packed = cpu_prepack_moe_weight(weight[None], isa)
            place.view(-1).copy_(packed.view(-1))


@torch.library.custom_op("heapr_lab::ragged_sum", mutates_args=())
def ragged_sum(
    x: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    w13_bias: torch.Tensor | None,
    w2_bias: torch.Tensor | None,
    starts: list[int],
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    activation: str,
    isa: str,
) -> torch.Tensor:
    """The weighted sum of experts of any widths, one operation to a compiler.

    With `isa` vLLM's kernel computes it, from weights that `pack` has arranged.

    Shapes: x (T, D); w13 (2W, D); w2 (W, D); w13_bias (2W,); w2_bias (E, D);
    starts (E + 1,), the first atom of each and W; topk_ids, topk_weights (T, K);
    result (T, D).
    """
    tensors = w13, w2, w13_bias, w2_bias
    act = ACTIVATIONS[MoEActivation(activation)]

    def by_torch(number: int, x: torch.Tensor) -> torch.Tensor:
        rows, columns, bias, output_bias = expert_of(tensors, starts, number)
        gate, up = F.linear(x, rows, bias).chunk(2, -1)
        out = act(gate, up) @ columns
        return out if output_bias is None else out + output_bias

    def by_kernel(number: int, x: torch.Tensor) -> torch.Tensor:
        rows, columns, bias, output_bias = expert_of(tensors, starts, number)
        if not len(columns):
            return by_torch(number, x)
        weights = rows[None], columns.view(1, x.shape[1], -1)
        biases = [None if b is None else b[None] for b in (bias, output_bias)]
        only, whole = torch.zeros(len(x), 1, dtype=torch.int32), torch.ones(len(x), 1)
        out = torch.empty_like(x)
        cpu_fused_moe(out, x, *weights, *biases, whole, only, activation, isa)
        return out

    if kernel_runs(x, tensors, starts[-1]):
        widest = max(b - a for a, b in itertools.pairwise(starts))
        ends = torch.tensor(starts, device=x.device)
        packed = Packed(*tensors, ends, widest, (2, 2), lambda h: act(*h.chunk(2, -1)))
        return sum_at_once(packed, x, topk_ids.long(), topk_weights)
    run = by_kernel if isa else by_torch
    return routed_sum(run, len(starts) - 1, x, topk_ids.long(), topk_weights)


@ragged_sum.register_fake
def _shape(x: torch.Tensor, *_others: Any) -> torch.Tensor:
    return torch.empty_like(x)
