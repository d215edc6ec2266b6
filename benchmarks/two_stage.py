"""The paper's Algorithm 1: two forward passes, one backward pass, full covariances.

Stage 1 accumulates the covariance G of the output gradient of each expert over its
routed tokens; stage 2 runs the tokens once more and gives each atomic expert the mean
of 1/2 e_k^T G e_k. It is the reference for `heapr_lab.importance.collect`, which
computes the same scores with one forward and one backward pass.

It leaves out what the algorithm does not need. With `as_published` it does the work of
the authors' code instead (https://github.com/LLIKKE/HEAPr, commit 9c101aa,
`pruning/pruning_global.py`, read for what it computes), which

- computes the gradients of all weights in stage 1, and throws them away,
- copies the matrix g g^T of each batch to the CPU and adds it there to G, and divides
  all of G by the number of tokens each time,
- runs the head and the loss in stage 2 as well,
- takes the quadratic form of every column of W_down in G for each batch again.

What still differs: there each expert is three modules of an earlier transformers, the
loss is a mean over tokens and has no factor of 1/2, which scales all scores alike, the
model is in training mode in stage 1, and an expert without tokens scores -1, not 0.

Shapes: E n_experts, I d_inter, D d_expert; n routed (token, slot) rows sorted by
expert. Letters: h atom activation; g = dl/dE_i(x), (n, D), the gradient at an
expert's output before its routing weight; G (E, D, D); W_down (E, D, I).
Source: HEAPr, section 3.4 and Algorithm 1.
"""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch
from torch import nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from heapr_lab.models.experts import ExpertsLayer, find_experts
from heapr_lab.models.grouped_linear import routed_linear, rows_of_experts
from heapr_lab.models.likelihood import final_states, token_nll
from heapr_lab.models.ragged_experts import activate, normalises
from heapr_lab.text.calibration import CalibrationSet

IMPLEMENTATION = "two_stage"


@dataclass(frozen=True, eq=False)
class TwoStage:
    """Scores of Algorithm 1, and the size of its state."""

    scores: pd.DataFrame
    """Columns layer, expert, atom, heapr: one row per atomic expert, sorted."""
    state_bytes: int
    """Bytes of everything that is kept between batches."""


class _Covariances:
    """What Algorithm 1 accumulates for one layer."""

    def __init__(self, layer: ExpertsLayer) -> None:
        down = layer.down
        wide = torch.float64 if down.dtype == torch.float64 else torch.float32
        sizes = {
            "G": (layer.n_experts, layer.d_expert, layer.d_expert),
            "h2": (layer.n_experts, layer.d_inter),
            "tokens": (layer.n_experts,),
        }
        self.state = {
            name: torch.zeros(size, dtype=wide, device=down.device)
            for name, size in sizes.items()
        }
        self.wide = wide
        self.down = down.detach()

    @property
    def state_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.state.values())

    def add_gradients(self, g: torch.Tensor, tokens: list[int]) -> None:
        """Stage 1: G_i += sum of g g^T over the rows of each expert."""
        for expert, rows in enumerate(g.to(self.wide).split(tokens)):
            if len(rows):
                self.state["G"][expert].addmm_(rows.T, rows)
                self.state["tokens"][expert] += len(rows)

    def add_activations(self, h: torch.Tensor, tokens: list[int]) -> None:
        """Stage 2: sum of h_k^2 over the rows of each expert."""
        for expert, rows in enumerate(h.split(tokens)):
            if len(rows):
                self.state["h2"][expert] += rows.to(self.wide).square().sum(0)

    def scores(self, layer: ExpertsLayer) -> torch.Tensor:
        """Mean of 1/2 e_k^T G e_k with e_k = w_down,k h_k, (E, I).

        The quadratic form of a column of W_down is the same for all tokens, so it is
        taken once; experts without tokens score 0.
        """
        tokens = self.state["tokens"].clamp(min=1)
        curvature = torch.stack(
            [
                ((G @ down) * down).sum(0)
                for G, down in zip(
                    self.state["G"], layer.down.to(self.wide), strict=True
                )
            ]
        )
        means = curvature / tokens[:, None], self.state["h2"] / tokens[:, None]
        return 0.5 * means[0] * means[1]


class _Published(_Covariances):
    """What the authors' code accumulates for one layer."""

    def __init__(self, layer: ExpertsLayer) -> None:
        super().__init__(layer)
        self.state |= {
            "G": self.state["G"].cpu(),
            "mean": torch.zeros_like(self.state["G"], device="cpu"),
        }

    def add_gradients(self, g: torch.Tensor, tokens: list[int]) -> None:
        """Stage 1: G_i += g^T g on the CPU, and its mean over the tokens so far."""
        for expert, rows in enumerate(g.to(self.wide).split(tokens)):
            if len(rows):
                self.state["G"][expert].add_((rows.T @ rows).cpu())
                self.state["tokens"][expert] += len(rows)
                seen = self.state["tokens"][expert].cpu()
                self.state["mean"][expert] = self.state["G"][expert] / seen

    def add_activations(self, h: torch.Tensor, tokens: list[int]) -> None:
        """Stage 2: sum of e_k^T G e_k over the rows of each expert."""
        for expert, rows in enumerate(h.split(tokens)):
            if len(rows):
                columns = self.down[expert].to(self.wide)
                mean = self.state["mean"][expert].to(columns.device)
                curvature = ((mean @ columns) * columns).sum(0)
                self.state["h2"][expert] += curvature * rows.to(self.wide).square().sum(
                    0
                )

    def scores(self, _layer: ExpertsLayer) -> torch.Tensor:
        """Half the mean of the quadratic forms, (E, I)."""
        return 0.5 * self.state["h2"] / self.state["tokens"].clamp(min=1)[:, None]


_covariances: ContextVar[dict[int, _Covariances] | None] = ContextVar(
    "covariances", default=None
)
"""The sums of each experts module, by its id, while a pass runs."""


class _Covariance(torch.autograd.Function):
    """The identity on an expert's output, whose backward accumulates g g^T."""

    @staticmethod
    def forward(
        ctx: Any, out: torch.Tensor, covariances: _Covariances, tokens: list[int]
    ) -> torch.Tensor:
        ctx.covariances, ctx.tokens = covariances, tokens
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        ctx.covariances.add_gradients(g, ctx.tokens)
        return g, None, None


def two_stage_scores(
    model: nn.Module,
    calibration: CalibrationSet,
    *,
    batch_size: int,
    as_published: bool = False,
) -> TwoStage:
    """Score every atomic expert of `model` by Algorithm 1.

    The loss is the sum over predicted tokens, the model is in eval mode, every batch
    counts, and no weight gradients are computed. Stage 2 needs no logits and omits the
    head, which is in favour of the algorithm.

    Args:
        model: a transformers causal language model with fused experts.
        calibration: the windows to score on.
        batch_size: windows per pass.
        as_published: whether to do all the work of the authors' code.
    """
    layers = find_experts(model)
    kind = _Published if as_published else _Covariances
    covariances = {id(layer.module): kind(layer) for layer in layers}
    batches = calibration.ids.to(layers[0].down.device).split(batch_size)
    token = _covariances.set(covariances)
    try:
        with running(model, IMPLEMENTATION, weights=as_published):
            for ids in batches:
                token_nll(model, ids).sum().backward()
                model.zero_grad()
            second = token_nll if as_published else final_states
            with torch.no_grad():
                for ids in batches:
                    second(model, ids)
    finally:
        _covariances.reset(token)
    frames = [_frame(layer, covariances[id(layer.module)]) for layer in layers]
    state_bytes = sum(each.state_bytes for each in covariances.values())
    return TwoStage(pd.concat(frames, ignore_index=True), state_bytes)


@contextlib.contextmanager
def running(
    model: Any, implementation: str, *, weights: bool = False
) -> Iterator[None]:
    """Eval mode with an experts implementation and gradients to the inputs only.

    Or to all weights, too.
    """
    previous = model.config._experts_implementation
    training = model.training
    required = {p: p.requires_grad for p in model.parameters()}
    model.eval()
    model.requires_grad_(weights)
    hook = model.get_input_embeddings().register_forward_hook(_require_grad)
    model.set_experts_implementation(implementation)
    try:
        yield
    finally:
        model.set_experts_implementation(previous)
        hook.remove()
        for parameter, requires_grad in required.items():
            parameter.requires_grad_(requires_grad)
        model.train(training)


def _require_grad(_module: Any, _args: Any, output: torch.Tensor) -> torch.Tensor:
    # Stage 2 differentiates nothing; the flag on a leaf has no effect there.
    return output if output.requires_grad else output.requires_grad_(True)


def _experts_forward(
    module: Any,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    everywhere = _covariances.get()
    assert everywhere is not None, "two_stage runs inside two_stage_scores only"
    covariances = everywhere[id(module)]
    layer = ExpertsLayer(-1, "", module)
    n_slots = top_k_index.shape[-1]
    experts, order = torch.sort(top_k_index.reshape(-1), stable=True)  # (n,)
    tokens = rows_of_experts(experts, layer.n_experts)
    x = hidden_states[order // n_slots]  # (n, D)
    h = activate(
        module, routed_linear(x, layer.up_rows, layer.up_bias, experts, tokens)
    )
    if not torch.is_grad_enabled():
        covariances.add_activations(h, tokens.tolist())
    out = routed_linear(h, layer.down, layer.down_bias, experts, tokens)  # (n, D)
    if torch.is_grad_enabled():
        out = _Covariance.apply(out, covariances, tokens.tolist())
    if normalises(module):
        out = module.post_expert_norm(out)
    weighted = out * top_k_weights.reshape(-1, 1)[order]
    unsorted = torch.empty_like(weighted).index_copy(0, order, weighted)
    total: torch.Tensor = unsorted.unflatten(0, (-1, n_slots)).sum(1)
    return total.to(hidden_states.dtype)


ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, _experts_forward)


def _frame(layer: ExpertsLayer, covariances: _Covariances) -> pd.DataFrame:
    with torch.no_grad():
        scores = covariances.scores(layer).cpu()
    shape = [range(size) for size in scores.shape]
    frame = pd.MultiIndex.from_product(shape, names=["expert", "atom"]).to_frame(False)
    frame.insert(0, "layer", layer.layer)
    return frame.assign(heapr=scores.flatten().numpy())
