"""REAM, a plain reading: each layer keeps salient experts, into which others merge."""

from collections.abc import Sequence

import numpy as np
import torch
from torch.nn.functional import normalize

from heapr_lab.errors import SpecError
from heapr_lab.methods.collectors import EXPERT_SUMS
from heapr_lab.methods.composing import dense_composition
from heapr_lab.methods.compression import ExpertComposition
from heapr_lab.methods.expert_axes import find_expert_axes
from heapr_lab.methods.experts import n_dropped, reap_scores
from heapr_lab.methods.merging import (
    LOGIT_COSINES,
    MEAN_OUTPUTS,
    NOT_TRAINED,
    Groups,
    Matrices,
    Merge,
    aligned,
    averaged,
    logit_cosines,
    merge_group,
    ranked,
)
from heapr_lab.methods.method import Method, Request
from heapr_lab.models.architecture import LayerShape
from heapr_lab.models.experts import ExpertsLayer, find_experts


def _ream(request: Request) -> ExpertComposition:
    """The salient experts of each layer stay, and are merged with those near them."""
    find_expert_axes(request.model)  # refused before any text is read
    shapes = request.measured.architecture.layers
    numbers = {k: _n_kept(request, layer=k, shape=own) for k, own in shapes.items()}
    near = _similarities(request)
    frame = ranked(request)
    frame = frame.assign(score=reap_scores(frame)).sort_values(
        ["score", "norm"], ascending=False, kind="stable"
    )
    kept, compositions = {}, {}
    for layer in find_experts(request.model):
        own = frame[frame["layer"] == layer.layer].set_index("expert")["score"]
        order, number = own.index.tolist(), numbers[layer.layer]
        size = request.options["group_size"]
        groups = gathered(near[layer.layer], order, number, size=size)
        kept[layer.layer] = tuple(group[0] for group in groups)
        if number < layer.n_experts:
            merge = _by_saliency(_raised(own.sort_index().to_numpy()))
            matrices = [merge_group(layer, group, merge) for group in groups]
            compositions[layer.layer] = dense_composition(matrices)
    return ExpertComposition(request.made, compositions, shapes, kept)


def _n_kept(request: Request, *, layer: int, shape: LayerShape) -> int:
    """The number of experts that a layer keeps.

    Raises:
        SpecError: fewer than a token is routed to, or too few for groups of their size.
    """
    kept = shape.n_experts - n_dropped(shape, request.ratio, layer=layer)
    size = request.options["group_size"]
    if kept * size < shape.n_experts:
        raise SpecError(
            f"group_size is {size}, so the {kept} experts that layer {layer} would "
            f"keep take in at most {max(kept * size, 0)} of {shape.n_experts}: give "
            f"at least {-(-shape.n_experts // kept)}"
        )
    return kept


def _similarities(request: Request) -> dict[int, np.ndarray]:
    """How similar the experts of each layer are, (E, E), by layer.

    Raises:
        LayoutError: a router cannot be run on the inputs of the experts.
    """
    logits = logit_cosines(request)
    outputs = request.measured.collected(MEAN_OUTPUTS, request.progress)
    return {k: similarity(outputs[k].gated, logits[k]) for k in logits}


def similarity(outputs: torch.Tensor, cosines: np.ndarray) -> np.ndarray:
    """The mean of the similarities of outputs and of router logits, (E, E), in [0, 1].

    That of outputs is (1 + cosine) / 2, that of logits 1 − d / max d, where d is the
    distance of their columns of length 1.

    Args:
        outputs: the mean of each expert's output times its routing probability, (E, D).
        cosines: of the logits' columns, (E, E).
    """
    units = normalize(outputs, dim=1).numpy()
    distances = np.sqrt(np.maximum(2 - 2 * cosines, 0))
    np.fill_diagonal(distances, 0)
    most = distances.max() or 1.0
    found: np.ndarray = ((1 + units @ units.T) / 2 + 1 - distances / most) / 2
    return found


def gathered(
    near: np.ndarray, order: Sequence[int], number: int, *, size: int
) -> Groups:
    """The first `number` of `order`, ascending, each with the experts that it takes in.

    In their order, each takes the nearest of those that none has taken, until its group
    has `size`. The expert that is kept is the first of its group.

    Example:
        >>> near = np.array([[1, 0.9, 0.1], [0.9, 1, 0.8], [0.1, 0.8, 1]])
        >>> gathered(near, [2, 0, 1], 2, size=16)
        [[0], [2, 1]]
    """
    groups, left = {}, list(order[number:])
    for expert in order[:number]:
        nearest = sorted(left, key=lambda other: -near[expert, other])[: size - 1]
        groups[expert] = [expert, *nearest]
        left = [other for other in left if other not in nearest]
    return [groups[expert] for expert in sorted(groups)]


def _raised(scores: np.ndarray) -> np.ndarray:
    """The scores, the smallest positive one in place of 0."""
    positive = scores[scores > 0]
    return np.where(scores > 0, scores, positive.min()) if len(positive) else scores


def _by_saliency(scores: np.ndarray) -> Merge:
    """Merges a group, aligned to its first expert, weighted by the scores (E,)."""

    def merge(layer: ExpertsLayer, group: Sequence[int]) -> Matrices:
        like = layer.expert(group[0])
        experts = [aligned(layer.expert(e), like, distance) for e in group]
        return averaged(experts, scores[list(group)].tolist())

    return merge


def distance(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Euclidean distances of the atoms (I, F) of two experts, each of length 1."""
    return torch.cdist(normalize(one, dim=1), normalize(other, dim=1))


REAM = Method(
    "ream-like",
    "REAM: experts merge into those that REAP keeps, with their router rows removed",
    "Jha et al. 2026, REAM, arXiv:2604.04356",
    "merging",
    _ream,
    deviations=(
        NOT_TRAINED,
        "Each layer is measured on the dense model; the authors' code runs the text "
        "again through merged layers, unless told not to.",
        "Atoms are aligned by all their weights alone; the authors' code adds the "
        "distances of their activations, and reduces weights to 64 dimensions.",
        "p in the saliency is the weight with which the family's own router multiplies "
        "an output, renormalised or not.",
        "Experts of saliency 0 weigh as much as the least positive one, as in the "
        "authors' code, but not at most 0.5.",
    ),
    options={"group_size": 16},
    collectors=(MEAN_OUTPUTS, LOGIT_COSINES, EXPERT_SUMS),
)
