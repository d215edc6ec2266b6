"""HC-SMoE: experts whose mean outputs are near each other become their average.

Its control draws the groups at random.
"""

import numpy as np
import torch
from scipy.cluster.hierarchy import cut_tree, linkage

from heapr_lab.methods.compression import ExpertComposition
from heapr_lab.methods.merging import (
    MEAN_OUTPUTS,
    NEVER_ROUTED,
    NOT_TRAINED,
    Groups,
    groups_of,
    merged_by_frequency,
    n_groups,
)
from heapr_lab.methods.method import Method, Request


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
    layers = request.measured.architecture.layers
    outputs = request.measured.collected(MEAN_OUTPUTS, request.progress)
    groups = {
        layer: average_linkage(outputs[layer].plain, n_groups(shape, request.ratio))
        for layer, shape in layers.items()
    }
    return merged_by_frequency(request, groups)


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


# --- the control ------------------------------------------------------------------


def drawn(n_experts: int, number: int, rng: np.random.Generator) -> Groups:
    """`number` groups of experts: so many begin one each, the others join any of them.

    Example:
        >>> sorted(map(len, drawn(4, 3, np.random.default_rng(0))))
        [1, 1, 2]
    """
    labels = rng.permutation(n_experts)
    joining = labels >= number
    labels[joining] = rng.integers(number, size=joining.sum())
    return groups_of(labels.tolist())


def _random_groups(request: Request) -> ExpertComposition:
    """Groups that `seed` draws, as many in each layer as other methods make."""
    rng, layers = np.random.default_rng(request.seed), request.measured.architecture
    groups = {
        layer: drawn(shape.n_experts, n_groups(shape, request.ratio), rng)
        for layer, shape in layers.layers.items()
    }
    return merged_by_frequency(request, groups)


RANDOM_GROUPS = Method(
    "random-groups",
    "control of merging: experts in groups drawn at random become one",
    "a control of this project",
    "merging",
    _random_groups,
    deviations=(
        NOT_TRAINED,
        "Groups are merged as those of hc-smoe are, so that the difference between the "
        "two is what its groups are worth.",
    ),
)
