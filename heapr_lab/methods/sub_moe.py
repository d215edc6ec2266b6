"""Sub-MoE, a plain reading: k-means by the cosine of experts' outputs, then a mean.

Sub-MoE factors the matrices of a group side by side, [W₁ … Wₙ] = U Σ [V₁ … Vₙ], and
takes W = U Σ · Σᵢ fᵢ Vᵢ with the experts' frequencies fᵢ. With all singular values that
is Σᵢ fᵢ · U Σ Vᵢ = Σᵢ fᵢ Wᵢ, the weighted mean, which is what is computed here.
"""

import numpy as np
import torch
from scipy.cluster.vq import ClusterError, kmeans2
from torch.nn.functional import normalize

from heapr_lab.methods.collectors import EXPERT_SUMS
from heapr_lab.methods.compression import ExpertComposition
from heapr_lab.methods.hc_smoe import merged_by_frequency
from heapr_lab.methods.merging import (
    MEAN_OUTPUTS,
    NOT_TRAINED,
    Groups,
    groups_of,
    n_groups,
    ranked,
    refuse_streamed_merge,
)
from heapr_lab.methods.method import Method, Request

_MOST_ROUNDS = 100


def _sub_moe(request: Request) -> ExpertComposition:
    """Each layer's experts are grouped by the directions of their mean outputs."""
    refuse_streamed_merge(request)
    layers = request.measured.architecture.layers
    outputs = request.measured.collected(MEAN_OUTPUTS, request.progress)
    first = ranked(request).drop_duplicates("layer").set_index("layer")["expert"]
    groups = {
        layer: directions(
            outputs[layer].plain, n_groups(shape, request.ratio), first=first[layer]
        )
        for layer, shape in layers.items()
    }
    return merged_by_frequency(request, groups)


def directions(features: torch.Tensor, number: int, *, first: int) -> Groups:
    """`number` groups of the rows of `features`, by k-means of their directions.

    The first centres are row `first` and then, one after the other, the row whose
    largest cosine to the centres so far is least. If a group would become empty, each
    row stays with the nearest of these.

    Shapes: features (E, F).

    Example:
        >>> rows = torch.tensor([[1.0, 0.0], [0.0, 3.0], [0.1, 1.0], [9.0, 1.0]])
        >>> directions(rows, 2, first=0)
        [[0, 3], [1, 2]]
    """
    units = normalize(features.double(), dim=1).numpy()
    cosines = units @ units.T
    centres = _spread(cosines, number, first=first)
    try:
        labels = kmeans2(
            units, units[centres], iter=_MOST_ROUNDS, minit="matrix", missing="raise"
        )[1]
    except ClusterError:
        labels = cosines[:, centres].argmax(1)
        labels[centres] = np.arange(number)
    return groups_of(labels.tolist())


def _spread(cosines: np.ndarray, number: int, *, first: int) -> list[int]:
    """`number` rows far from each other, by their cosines (E, E)."""
    centres = [int(first)]
    while len(centres) < number:
        nearest = cosines[:, centres].max(1)
        nearest[centres] = np.inf
        centres.append(int(nearest.argmin()))
    return centres


SUB_MOE = Method(
    "sub-moe-like",
    "Sub-MoE: experts of similar mean outputs become one, by k-means of cosines",
    "Li et al. 2025, Sub-MoE, arXiv:2506.23266",
    "merging",
    _sub_moe,
    deviations=(
        NOT_TRAINED,
        "Built from descriptions: no code of the authors' is public.",
        "Experts are compared by their mean outputs on all tokens of the layer.",
        "The first centres of k-means are spread, beginning with the most used expert, "
        "not drawn.",
        "The joint decomposition keeps all singular values, and then is the weighted "
        "mean Σ f W: that is computed, without a decomposition.",
        "A group of experts that no calibration token reaches becomes their mean.",
    ),
    collectors=(MEAN_OUTPUTS, EXPERT_SUMS),
)
