"""REAM: each layer keeps its salient experts, into which the others merge.

The saliency of an expert is the mean of p² · ‖f‖ over the tokens for which it is one of
the K most probable, where p is the softmax of the router's logits: the authors' code
multiplies an output by p and then takes REAP's mean of p · ‖p · f‖. That mean is taken
in batches of windows, and then of these; where none of its tokens are in a batch, 0.

Shapes: T tokens, K experts of each, E n_experts, I d_inter.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import nn
from torch.nn.functional import normalize

from heapr_lab.errors import SpecError
from heapr_lab.methods.collectors import routed_outputs
from heapr_lab.methods.composing import Matrices
from heapr_lab.methods.compression import ExpertComposition
from heapr_lab.methods.expert_axes import find_expert_axes
from heapr_lab.methods.experts import n_dropped
from heapr_lab.methods.merging import (
    Groups,
    Merge,
    aligned,
    atoms_of,
    averaged,
    cosines_of_logits,
    logit_cosines,
    mean_outputs,
    merge_group,
    router_logits,
)
from heapr_lab.methods.method import Request, ours
from heapr_lab.models.architecture import LayerShape
from heapr_lab.models.experts import ExpertsLayer, find_experts
from heapr_lab.refinement.expert_calls import ExpertCalls

_N_COMPONENTS = 64
"""The number of components of an atom's weights by which it is aligned."""
_LARGEST_RAISED = 0.5
"""The most that the saliency 0 of an expert is raised to."""

# --- saliency ---------------------------------------------------------------------

GatedNorms = tuple[torch.Tensor, torch.Tensor]
"""The most probable experts of each token (T, K), and p² · ‖f‖ of each."""


def gated_norms(model: nn.Module, calls: ExpertCalls) -> GatedNorms | None:
    """`GatedNorms`; None if the experts' inputs do not give the router's logits."""
    logits = router_logits(model, calls)
    if logits is None:
        return None
    p, index = logits.softmax(1).topk(calls.top_k_index.shape[1])
    probable = replace(calls, top_k_index=index, top_k_weights=p)
    wide = torch.promote_types(calls.layer.dtype, torch.float32)
    norms = p.square().to(wide)
    for expert in range(calls.layer.n_experts):
        outputs = [f for f, _ in routed_outputs(probable, expert)]
        norms[index == expert] *= torch.cat(outputs).to(wide).norm(dim=1)
    return index.short().cpu(), norms.cpu()


def saliency(norms: GatedNorms, batch: torch.Tensor, n_experts: int) -> np.ndarray:
    """The saliency of each expert, (E,).

    Args:
        norms: the norms of each token and its most probable experts.
        batch: the number of the batch that each token is in, (T,).
        n_experts: E.
    """
    index, values = norms
    places = (batch[:, None] * n_experts + index).flatten().numpy()
    size = (int(batch.max()) + 1) * n_experts
    counts = np.bincount(places, minlength=size)
    sums = np.bincount(places, values.flatten().numpy(), minlength=size)
    means = (sums / np.maximum(counts, 1)).reshape(-1, n_experts)
    scores: np.ndarray = means.mean(0)
    return scores


def _batches(request: Request) -> torch.Tensor:
    """The batch of each token, (T,): windows in the order of their contents."""
    windows, (n, length) = request.calibration, request.calibration.ids.shape
    size = request.options["batch_size"]
    prints = windows.window_fingerprints()
    place = np.argsort(sorted(range(n), key=prints.__getitem__))
    return torch.from_numpy(place // size).repeat_interleave(length)


def raised(scores: np.ndarray) -> np.ndarray:
    """The scores, with the smallest positive one in place of 0, at most 0.5."""
    positive = scores[scores > 0]
    least = min(_LARGEST_RAISED, positive.min(initial=np.inf))
    return np.where(scores > 0, scores, least)


# --- the method -------------------------------------------------------------------


def _atoms(layer: ExpertsLayer) -> list[torch.Tensor]:
    """The weights of each expert's atoms, (I, F)."""
    return [atoms_of(layer.expert(expert)) for expert in range(layer.n_experts)]


def _ream(request: Request) -> ExpertComposition:
    """The salient experts of each layer stay, and are merged with those near them."""
    find_expert_axes(request.model)  # refused before any text is read
    numbers = {k: _n_kept(request, layer=k, shape=s) for k, s in request.shapes.items()}
    batches, near = _batches(request), _similarities(request)
    norms = request.measured.collected(gated_norms, request.progress)
    kept, compositions = {}, {}
    for layer in find_experts(request.model):
        k, number, size = layer.layer, numbers[layer.layer], layer.n_experts
        scores = raised(saliency(norms[k], batches, size))
        order = np.argsort(-scores, kind="stable").tolist()
        most = request.options["group_size"]
        groups = gathered(near[k], order, number, size=most)
        kept[k] = tuple(group[0] for group in groups)
        if number < size:
            merge = _by_saliency(scores, components(_atoms(layer)))
            compositions[k] = [merge_group(layer, group, merge) for group in groups]
    return request.composed(compositions, kept)


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
    outputs = request.measured.collected(mean_outputs, request.progress)
    return {k: similarity(outputs[k].gated, logits[k]) for k in logits}


def similarity(outputs: torch.Tensor, cosines: np.ndarray) -> np.ndarray:
    """The mean of the similarities of outputs and of router logits, (E, E), in [0, 1].

    That of outputs is (1 + cosine) / 2, that of logits 1 − d / max d, where d is the
    distance of their columns of length 1.

    Args:
        outputs: the mean of each expert's output times its routing probability, (E, D).
        cosines: the cosines of the logits' columns, (E, E).
    """
    units = normalize(outputs, dim=1).numpy()
    distances = np.sqrt(np.maximum(2 - 2 * cosines, 0))
    np.fill_diagonal(distances, 0)
    most = distances.max() or 1.0
    mean: np.ndarray = ((1 + units @ units.T) / 2 + 1 - distances / most) / 2
    return mean


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


def components(atoms: Sequence[torch.Tensor]) -> torch.Tensor:
    """What atoms are aligned by, rows of length 1, (E, I, at most 64).

    The largest principal components of the atoms' weights, each of length 1, times
    their singular values: the authors' randomised decomposition, with their seed.

    Args:
        atoms: the atoms of each expert, (I, F).
    """
    rows = normalize(torch.cat([weights.float().cpu() for weights in atoms]), dim=1)
    rows = rows - rows.mean(0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        _, s, v = torch.pca_lowrank(rows, q=min(_N_COMPONENTS, *rows.shape))
    placed = normalize(rows @ (v * s), dim=1)
    places: torch.Tensor = placed.unflatten(0, (len(atoms), -1))
    return places


def _by_saliency(scores: np.ndarray, places: torch.Tensor) -> Merge:
    """Merges a group, aligned to its first expert, weighted by the scores (E,).

    Args:
        scores: the scores of the experts.
        places: the rows of their atoms, from `components`.
    """

    def merge(layer: ExpertsLayer, group: Sequence[int]) -> Matrices:
        first = places[group[0]]
        experts = [
            aligned(layer.expert(e), torch.cdist(first, places[e])) for e in group
        ]
        return averaged(experts, scores[list(group)].tolist())

    return merge


ours("ream", _ream, mean_outputs, cosines_of_logits, gated_norms)
