"""Experts of vLLM with the widths of a pruned checkpoint: allocated, loaded and run.

vLLM does not check that all tensors of a "quantized" checkpoint were loaded, and fills
a narrower tensor into a wider parameter: both are checked here.

Shapes: E n_experts, D d_model, T tokens, K experts of each token, w_e atoms of expert e
on this rank, W = sum of w_e.
"""

import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import (
    FUSED_MOE_UNQUANTIZED_CONFIG,
    FusedMoEConfig,
)
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import (
    FusedMoEMethodBase,
)
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)
from vllm.model_executor.utils import set_weight_attrs

from heapr_lab.errors import LayoutError
from heapr_lab.models.ragged_experts import linear, routed_sum, times
from heapr_lab.models.widths import shard

GATE, DOWN, UP = "w1", "w2", "w3"
"""vLLM's names of the projections of an expert."""

ACTIVATIONS: dict[Any, Callable[[torch.Tensor], torch.Tensor]] = {
    MoEActivation.SILU: F.silu,
    MoEActivation.GELU: F.gelu,
    MoEActivation.GELU_TANH: lambda gate: F.gelu(gate, approximate="tanh"),
}
"""What the gate goes through, by vLLM's name."""


class Arrived:
    """Which tensors of the experts of a layer were loaded."""

    def __init__(self, widths: list[int], prefix: str) -> None:
        """Of experts with `widths` (E,) atoms, in the module at the path `prefix`."""
        self.widths, self.prefix = widths, prefix
        self.seen: set[tuple[int, str]] = set()

    def see(self, expert: int, part: str, tensor: torch.Tensor) -> None:
        """Note a tensor as it is in the file: `DOWN` (D, w_e), the others (w_e, D).

        Raises:
            LayoutError: it has another width than config.json says.
        """
        found = tensor.shape[1 if part == DOWN else 0]
        if found != self.widths[expert]:
            raise LayoutError(
                f"{part} of expert {expert} of {self.prefix} has the width {found}, "
                f"config.json says {self.widths[expert]}: a file belongs to another "
                "checkpoint"
            )
        self.seen.add((expert, part))

    def check(self) -> None:
        """Check that all were loaded.

        Raises:
            LayoutError: some were not.
        """
        every = itertools.product(range(len(self.widths)), (GATE, DOWN, UP))
        lost = [pair for pair in every if pair not in self.seen]
        if lost:
            raise LayoutError(
                f"{len(lost)} tensors of {self.prefix} are in no file, the first is "
                f"{lost[0][1]} of expert {lost[0][0]}: a file of the checkpoint is "
                "missing; download it again"
            )


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
        """As vLLM's, with a loader that checks widths."""

        def load(
            param: Any, loaded_weight: torch.Tensor, *more: Any, **facts: Any
        ) -> Any:
            self.arrived.see(facts["expert_id"], facts["shard_id"], loaded_weight)
            return weight_loader(param, loaded_weight, *more, **facts)

        super().create_weights(layer, *args, weight_loader=load, **kwargs)

    def process_weights_after_loading(self, layer: Any) -> None:
        """As vLLM's, if all tensors were loaded.

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
        self.arrived = Arrived(widths, prefix)
        self.own = [shard(width, moe.tp_rank, moe.tp_size) for width in widths]
        """The atoms of each expert that are on this rank."""
        self.widths = [atoms.stop - atoms.start for atoms in self.own]
        self.starts = [0, *itertools.accumulate(self.widths)]

    def create_weights(
        self,
        layer: nn.Module,
        num_experts: int,  # noqa: ARG002 (the interface of vLLM)
        hidden_size: int,
        intermediate_size_per_partition: int,  # noqa: ARG002
        params_dtype: torch.dtype,
        **_attributes: Any,
    ) -> None:
        """Allocate w13 (2W, D), of each expert the gate's rows first, and w2 (W, D)."""
        for name, n_rows in {"w13": 2 * self.starts[-1], "w2": self.starts[-1]}.items():
            empty = torch.empty(n_rows, hidden_size, dtype=params_dtype)
            weight = nn.Parameter(empty, requires_grad=False)
            layer.register_parameter(f"{name}_weight", weight)
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

        Raises:
            LayoutError: it has another width than config.json says.
        """
        self.arrived.see(expert_id, shard_id, loaded_weight)
        rows = loaded_weight.T if shard_id == DOWN else loaded_weight
        start, width = self.starts[expert_id], self.widths[expert_id]
        if shard_id != DOWN:
            start = 2 * start + (width if shard_id == UP else 0)
        param.data[start : start + width].copy_(rows[self.own[expert_id]])
        return True if return_success else None

    def process_weights_after_loading(self, layer: nn.Module) -> None:  # noqa: ARG002
        """Check that all tensors were loaded.

        Raises:
            LayoutError: some were not.
        """
        self.arrived.check()

    def get_fused_moe_quant_config(self, layer: nn.Module) -> Any:  # noqa: ARG002
        """That nothing is quantised."""
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
        w13, w2, name = layer.w13_weight, layer.w2_weight, layer.activation.value
        out: torch.Tensor = ragged_sum(
            x, w13, w2, self.widths, topk_ids, topk_weights, name
        )
        return out


@torch.library.custom_op("heapr_lab::ragged_sum", mutates_args=())
def ragged_sum(
    x: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    widths: list[int],
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    activation: str,
) -> torch.Tensor:
    """The weighted sum of experts of `widths`, one operation to a compiler.

    Shapes: x (T, D); w13 (2W, D); w2 (W, D); topk_ids, topk_weights (T, K); result
    (T, D).
    """
    act = ACTIVATIONS[MoEActivation(activation)]
    starts = [0, *itertools.accumulate(widths)]

    def expert(number: int, rows: torch.Tensor) -> torch.Tensor:
        atoms = slice(starts[number], starts[number + 1])
        both = linear(rows, w13[2 * atoms.start : 2 * atoms.stop], None)
        gate, up = both.chunk(2, -1)
        return times(act(gate) * up, w2[atoms])

    return routed_sum(expert, len(widths), x, topk_ids.long(), topk_weights)


@ragged_sum.register_fake
def _shape(x: torch.Tensor, *_others: Any) -> torch.Tensor:
    return torch.empty_like(x)
