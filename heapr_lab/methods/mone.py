"""MoNE: experts that are rarely used, or nearly constant, become their mean output.

Shapes: E n_experts, D d_expert, f (n, D) an expert's outputs for the n tokens routed to
it, before their routing weights.
"""

from dataclasses import dataclass

import numpy as np
import torch

from heapr_lab.errors import LayoutError, one_of
from heapr_lab.methods.collectors import routed_outputs, stacked
from heapr_lab.methods.composing import Composition, dense_experts
from heapr_lab.methods.compression import ExpertComposition
from heapr_lab.methods.experts import lowest_of
from heapr_lab.methods.method import Request, ours
from heapr_lab.models.experts import ExpertsLayer, find_experts
from heapr_lab.models.ragged_experts import normalises
from heapr_lab.refinement.expert_calls import ExpertCalls

SCORES = ("product", "variance", "routing")
"""What an expert's score is: the routing weight of a mean token times the deviation of
its output, or the norm of the output's variance, or the routing weight."""
SCOPES = ("layer", "global")
"""Where experts are ranked: within each layer, or all of the model."""


@dataclass(frozen=True, eq=False)
class OutputMoments:
    """Means and variances of the outputs of one layer's experts, in float64."""

    routing: torch.Tensor
    """Σ p of the tokens routed to each expert over all tokens, (E,)."""
    variance: torch.Tensor
    """Σ (f − mean)² / (n − 1) of each entry, (E, D); 0 with fewer than two tokens."""
    mean: torch.Tensor
    """The mean output, (E, D); 0 without tokens."""

    def scores(self, kind: str) -> np.ndarray:
        """The score of each expert, (E,), one of `SCORES`."""
        routing, variance = self.routing.numpy(), self.variance.numpy()
        scores: dict[str, np.ndarray] = {
            "product": routing * np.sqrt(variance.sum(1)),
            "variance": np.linalg.norm(variance, axis=1),
            "routing": routing,
        }
        return scores[kind]


def _moments(calls: ExpertCalls, expert: int) -> tuple[torch.Tensor, ...]:
    """The fields of `OutputMoments` for one expert, which is run twice."""
    routing, count = 0.0, 0
    total = torch.zeros(calls.layer.d_expert, dtype=torch.float64)
    for f, p in routed_outputs(calls, expert):
        routing, count = routing + float(p.double().sum()), count + len(f)
        total += f.double().sum(0).cpu()
    mean = total / max(count, 1)
    squares = torch.zeros_like(mean)
    for f, _ in routed_outputs(calls, expert):
        squares += (f.double().cpu() - mean).square().sum(0)
    share = torch.tensor(routing / len(calls.output), dtype=torch.float64)
    return share, squares / max(count - 1, 1), mean


OUTPUT_MOMENTS = stacked(_moments, OutputMoments)
"""The `OutputMoments` of each layer."""


def with_constants(
    layer: ExpertsLayer, gone: np.ndarray, values: torch.Tensor
) -> Composition:
    """The layer's experts, those of `gone` replaced by constant vectors.

    Shapes: gone bool (E,); values (E, D).
    """
    return [
        {"down_bias": value.to(layer.down)} if constant else expert
        for expert, constant, value in zip(
            dense_experts(layer), gone, values, strict=True
        )
    ]


def _mone(request: Request) -> ExpertComposition:
    """The experts with the lowest scores become constants.

    Raises:
        SpecError: an option is invalid.
        LayoutError: an expert's output is normalised, which a constant is not.
    """
    score = one_of(request.options["score"], SCORES, name="score")
    scope = one_of(request.options["scope"], SCOPES, name="scope")
    layers = find_experts(request.model)
    for layer in layers:
        if normalises(layer.module):
            raise LayoutError(
                f"{layer.name} normalises the output of each expert, so that none can "
                "be replaced by its mean: use reap, which drops experts"
            )
    moments = request.measured.collected(OUTPUT_MOMENTS, request.progress)
    scores = {k: stats.scores(score) for k, stats in moments.items()}
    gone = lowest_of(scores, request.ratio, scope)
    made = {
        layer.layer: with_constants(layer, gone[layer.layer], moments[layer.layer].mean)
        for layer in layers
        if gone[layer.layer].any()
    }
    return request.composed(made)


ours("mone", _mone, OUTPUT_MOMENTS)
