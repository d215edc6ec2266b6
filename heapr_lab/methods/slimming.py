"""MoE-Slimming: budgets of layers, and then of experts, by the coverage of saliency.

The saliency of an atom is the size of its activations. The *coverage* of an expert, or
layer, is the share of its saliency that its kept atoms have, the most salient first.
Coverages of all layers are made proportional to smoothed losses of the layers, then
those of the experts of a layer to the roots of their attributions. Both come from one
experiment for each layer: the routed experts' output is multiplied by α.

Shapes: E n_experts, I d_inter, D d_expert; n tokens of a window that are routed to an
expert; T tokens of a window.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from heapr_lab.methods.atoms import compression_of
from heapr_lab.methods.compression import AtomCompression
from heapr_lab.methods.method import Method, Request
from heapr_lab.methods.single_experts import projected_down, projected_up
from heapr_lab.models.experts import ExpertsLayer, find_experts
from heapr_lab.models.modes import differentiating
from heapr_lab.models.ragged_experts import activate
from heapr_lab.progress import no_report
from heapr_lab.pruning.masks import KeepMask
from heapr_lab.refinement.expert_calls import ExpertCalls, recorded
from heapr_lab.streaming.layerwise import LayerByLayer

_ALPHA = 0.9
_EPS = 1e-6
"""Added to the squared norm of a layer's output."""
_CLIPPED = 0.01
"""Share of the largest terms of an attribution that are clipped."""
_SMOOTHINGS = 4
_LEAST_WEIGHT = 1e-6
_WIDTH = 1408
"""Atoms of an expert of Qwen1.5-MoE, for which `min_per_expert` was published."""


@dataclass(frozen=True, eq=False)
class LayerFound:
    """What is measured of one layer, in float64."""

    saliency: np.ndarray
    """The saliency of each atom, (E, I)."""
    attribution: np.ndarray
    """By how much the layer's loss falls with each expert's output, (E,)."""
    loss: float
    """Mean relative squared change of the decoder layer's output with α."""


class _Sums:
    """Means over the windows in which an expert has tokens."""

    def __init__(self, layer: ExpertsLayer) -> None:
        self._layer = layer
        self._saliency = np.zeros((layer.n_experts, layer.d_inter))
        self._attribution = np.zeros(layer.n_experts)
        self._windows = np.zeros(layer.n_experts)
        self._loss, self._n_tokens = 0.0, 0

    def add(self, calls: ExpertCalls, gradient: torch.Tensor, loss: float) -> None:
        """Add one window; gradient (T, D) is by the experts' weighted sum."""
        n_tokens = len(calls.output)
        self._loss, self._n_tokens = self._loss + loss, self._n_tokens + n_tokens
        for expert in calls.top_k_index.unique().tolist():
            tokens, slots = (calls.top_k_index == expert).nonzero(as_tuple=True)
            saliency, f = _run(self._layer, expert, calls.hidden_states[tokens])
            p = calls.top_k_weights[tokens, slots, None]
            terms = _ALPHA * p.double() * gradient[tokens].double() * f.double()
            share = len(tokens) / n_tokens
            self._attribution[expert] -= float(clipped_mean(terms).sum()) * share
            self._saliency[expert] += saliency.cpu().numpy()
            self._windows[expert] += 1

    def found(self) -> LayerFound:
        """The means."""
        windows = np.maximum(self._windows, 1)
        return LayerFound(
            self._saliency / windows[:, None],
            self._attribution / windows,
            self._loss / self._n_tokens,
        )


def _run(
    layer: ExpertsLayer, expert: int, x: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The saliency (I,) and the outputs (n, D) of an expert on the tokens x (n, D).

    The saliency of an atom is the mean of the norms, over tokens, of its outputs of
    W_gate and W_up and of h.
    """
    rows = projected_up(layer, expert, x)
    h = activate(layer.module, rows)
    norms = layer.by_atom(rows.double().norm(dim=0))  # (I, 2 or 1)
    every = torch.cat([norms, h.double().norm(dim=0)[:, None]], dim=1)
    return every.mean(1), projected_down(layer, expert, h)


def clipped_mean(terms: torch.Tensor) -> torch.Tensor:
    """The mean over tokens (n, D), without extremes in each of the D entries, (D,).

    With more than two tokens, terms are clipped at the 99 % quantile of their sizes.

    Example:
        >>> clipped_mean(torch.tensor([[1.0], [3.0]])).item()
        2.0
    """
    if len(terms) > 2:
        largest = terms.abs().quantile(1 - _CLIPPED, dim=0)
        terms = terms.clamp(-largest, largest)
    return terms.mean(0)


def measured(request: Request) -> dict[int, LayerFound]:
    """What is measured of each layer, with inputs from the dense model.

    Raises:
        LayoutError: the model's decoder layers cannot be run one by one.
    """
    report, stats = request.progress or no_report, {}
    layers = {layer.layer: layer for layer in find_experts(request.model)}
    windows = list(request.calibration.ids.split(1))
    with differentiating(request.model):
        walk = LayerByLayer(request.model, windows, list(layers.values()))
        for number, run in walk.layers():
            inputs = list(walk.states)
            sums = _Sums(layers[number]) if number in layers else None
            for index in run:
                if sums is not None:
                    sums.add(*_scaled(walk, layers[number], index, inputs[index]))
            if sums is not None:
                stats[number] = sums.found()
            report(number + 1, walk.n_layers)
    return stats


def _scaled(
    walk: LayerByLayer, layer: ExpertsLayer, index: int, states: torch.Tensor
) -> tuple[ExpertCalls, torch.Tensor, float]:
    """The calls of a window, and the loss and its gradient with α times their output.

    The loss is the sum over tokens of the relative squared change of what the decoder
    layer gives; the gradient (T, D) is by the routed experts' weighted sum.
    """
    scaled: list[torch.Tensor] = []

    def scale(_module: object, _args: object, output: torch.Tensor) -> torch.Tensor:
        scaled.append((_ALPHA * output).requires_grad_())
        return scaled[0]

    with recorded(layer, states.shape[0] * states.shape[1]) as calls:
        hook = layer.module.register_forward_hook(scale)
        try:
            changed = walk.output(layer.layer, index, states)
        finally:
            hook.remove()
    dense = walk.states[index]
    squares = (changed - dense).square().sum(-1) / (dense.square().sum(-1) + _EPS)
    loss = squares.sum()
    (gradient,) = torch.autograd.grad(loss, scaled)
    return calls(), gradient.flatten(0, -2).detach(), float(loss.detach())


# --- budgets ----------------------------------------------------------------------


def smoothed(losses: Sequence[float]) -> np.ndarray:
    """Weights of layers from their losses, with mean 1, (layers,).

    Four times the root, then clipped to one standard deviation around the mean.
    """
    weights = np.array(losses, dtype=np.float64)
    for _ in range(_SMOOTHINGS if len(weights) > 1 else 0):
        weights = np.sqrt(weights)
        mean, spread = weights.mean(), weights.std(ddof=1)
        weights = weights.clip(mean - spread, mean + spread)
    mean = weights.mean()
    return weights / mean if mean > 0 else np.ones(len(weights))


def thresholds(saliency: np.ndarray, weight: float) -> np.ndarray:
    """The number s at which each atom is kept, if the coverage is to be s · weight.

    That is the coverage by the atoms before it, divided by the weight. Without any
    saliency, every atom covers as much.

    Shapes: saliency (n,), from the largest to the smallest; result (n,), ascending.
    """
    sizes = saliency if saliency.sum() > 0 else np.ones(len(saliency))
    sums = sizes.cumsum()
    before: np.ndarray = np.concatenate([[0.0], sums[:-1]]) / sums[-1]
    before /= max(weight, _LEAST_WEIGHT)
    return before


def covering(
    groups: Sequence[np.ndarray], weights: Sequence[float] | np.ndarray, n_kept: int
) -> list[int]:
    """How many atoms each group keeps, `n_kept` in all.

    Coverages are proportional to `weights`, as far as whole atoms and full groups
    allow. Of equal thresholds, the more salient atom is kept.

    Shapes: each of `groups` (n,), saliencies from the largest to the smallest.
    """
    pairs = zip(groups, weights, strict=True)
    limits = np.concatenate([thresholds(group, weight) for group, weight in pairs])
    order = np.lexsort((-np.concatenate(list(groups)), limits))
    numbers = np.repeat(np.arange(len(groups)), [len(group) for group in groups])
    kept = np.bincount(numbers[order[:n_kept]], minlength=len(groups))
    return [int(count) for count in kept]


def of_experts(layer: LayerFound, n_kept: int, *, least: int) -> np.ndarray:
    """The atoms that a layer keeps, bool (E, I), `n_kept` in all.

    Experts that would keep fewer than `least` lose all, the smallest first, as long as
    the others have room.
    """
    n_experts, d_inter = layer.saliency.shape
    order = np.argsort(-layer.saliency, axis=1, kind="stable")
    ranked = np.take_along_axis(layer.saliency, order, axis=1)
    weights = np.sqrt(layer.attribution.clip(0))
    if weights.sum() > 0:
        weights = weights / weights.sum()
    # An expert without a positive attribution has no saliency to cover.
    covered = ranked * (layer.attribution > 0)[:, None]
    counts = np.array(covering(list(covered), weights, n_kept))
    room = n_experts - math.ceil(n_kept / d_inter)  # experts that may lose all
    small = np.flatnonzero(counts < least)
    gone = small[np.argsort(counts[small], kind="stable")][:room]
    left = np.setdiff1d(np.arange(n_experts), gone)
    counts[:] = 0
    counts[left] = covering([covered[e] for e in left], weights[left], n_kept)
    ranks = np.argsort(order, axis=1)
    kept: np.ndarray = ranks < counts[:, None]
    return kept


def _slimming(request: Request) -> AtomCompression:
    """The atoms that cover the saliency of each expert up to its budget."""
    stats = request.measured.once("moe-slimming", lambda: measured(request))
    flat = [np.sort(layer.saliency.ravel())[::-1] for layer in stats.values()]
    n_atoms = sum(row.size for row in flat)
    n_kept = n_atoms - int(request.ratio * n_atoms)
    budgets = covering(flat, smoothed([layer.loss for layer in stats.values()]), n_kept)
    keep = {}
    for (k, layer), budget in zip(stats.items(), budgets, strict=True):
        share = min(1.0, layer.saliency.shape[1] / _WIDTH)
        least = round(request.options["min_per_expert"] * share)
        keep[k] = of_experts(layer, budget, least=least)
    return compression_of(request, KeepMask(keep, request.made.to_dict()))


SLIMMING = Method(
    "moe-slimming",
    "MoE-Slimming: budgets of layers and experts by coverage of saliency",
    "Ding et al. 2026, Attribution-Guided and Coverage-Maximized Pruning, ICML",
    "atoms",
    _slimming,
    deviations=(
        "Saliency is the size of activations, as in the authors' configurations.",
        "A batch is one window, and windows are averaged; the authors' code has a "
        "moving average over batches, which depends on their order.",
        "Budgets are exact: the atoms with the lowest thresholds are kept, where the "
        "authors' code searches for a threshold by bisection and adjusts the counts.",
        "Where coverages of layers at most 1 on average cannot reach the budget, they "
        "are larger; the authors' search ends there.",
        "Experts whose attribution is not positive keep their most salient atoms; in "
        "the authors' code the order of these is reversed.",
        "min_per_expert is for experts of 1408 atoms and scaled down for smaller ones; "
        "freed budget stays in the layer. The authors' code discards this adjustment.",
        "Nothing is trained afterwards, and widths are not aligned.",
    ),
    options={"min_per_expert": 16},
)
