"""HC-SMoE: experts whose mean outputs are near each other become their average."""

from collections.abc import Sequence

import torch
from scipy.cluster.hierarchy import cut_tree, linkage

from heapr_lab.methods.compression import ExpertComposition
from heapr_lab.methods.merging import (
    MEAN_OUTPUTS,
    NEVER_ROUTED,
    NOT_TRAINED,
    Groups,
    Matrices,
    averaged,
    groups_of,
    merged,
    n_groups,
    refuse_streamed_merge,
)
from heapr_lab.methods.method import Method, Request
from heapr_lab.models.experts import ExpertsLayer


def average_linkage(features: torch.Tensor, number: int) -> Groups:
    """`number` groups of the rows of `features`, joined by their mean distance.

    Beginning with single rows, the two groups are joined between whose rows the mean
    Euclidean distance is least.

    Shapes: features (E, F).

    Example:
        >>> rows = torch.tensor([[0.0], [5.0], [1.0], [7.0]])
        >>> average_linkage(rows, 2)
        [[0, 2], [1, 3]]
    """
    if number == len(features):
        return [[expert] for expert in range(number)]
    tree = linkage(features.double().numpy(), method="average")
    return groups_of(cut_tree(tree, n_clusters=number)[:, 0].tolist())


def _hc_smoe(request: Request) -> ExpertComposition:
    """Each layer's experts are joined by their mean outputs on all of its tokens."""
    refuse_streamed_merge(request)
    layers = request.measured.architecture.layers
    outputs = request.measured.collected(MEAN_OUTPUTS, request.progress)
    groups = {
        layer: average_linkage(outputs[layer].plain, n_groups(shape, request.ratio))
        for layer, shape in layers.items()
    }
    return merged_by_frequency(request, groups)


def merged_by_frequency(
    request: Request, groups: dict[int, Groups]
) -> ExpertComposition:
    """Each group becomes the mean of its experts, weighted by their routed tokens."""
    tokens = request.measured.tokens(request.progress)

    def merge(layer: ExpertsLayer, group: Sequence[int]) -> Matrices:
        counts = [float(tokens[layer.layer][expert]) for expert in group]
        return averaged([layer.expert(expert) for expert in group], counts)

    return merged(request, groups, merge)


HC_SMOE = Method(
    "hc-smoe",
    "HC-SMoE: experts of near mean outputs become one, by average linkage",
    "Chen et al. 2024, HC-SMoE, arXiv:2410.08589",
    "merging",
    _hc_smoe,
    deviations=(
        NOT_TRAINED,
        "Average linkage, as in the paper; the authors' scripts misspell the option, "
        "and run k-means.",
        "Frequencies count the experts that a token is routed to, whatever their "
        "number; the authors' code counts the best two.",
        NEVER_ROUTED,
    ),
    collectors=(MEAN_OUTPUTS,),
)
