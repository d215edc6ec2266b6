"""The control of merging: groups drawn at random, each of which becomes its average."""

import numpy as np

from heapr_lab.methods.compression import ExpertComposition
from heapr_lab.methods.hc_smoe import merged_by_frequency
from heapr_lab.methods.merging import (
    NOT_TRAINED,
    Groups,
    groups_of,
    n_groups,
    refuse_streamed_merge,
)
from heapr_lab.methods.method import Method, Request


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
    refuse_streamed_merge(request)
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
