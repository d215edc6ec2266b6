"""The widths of a checkpoint by layer, and what engines cannot carry."""

import pytest

from heapr_lab.errors import HeaprLabError
from heapr_lab.serving.widths import shard, widths_by_layer

WIDTHS = {"model.layers.1.mlp.experts": [3, 0], "model.layers.10.mlp.experts": [2, 2]}
TWICE = WIDTHS | {"vision.layers.1.experts": [1]}


def test_by_layer():
    """The layers are numbers, as an engine has other names for modules."""
    widths = widths_by_layer({"format_version": 1, "widths": WIDTHS})
    assert widths == {1: [3, 0], 10: [2, 2]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format_version": 99}, "format version 99.*upgrade"),
        ({"format_version": "x"}, "format version 'x', .* up to 1: upgrade"),
        ({"output_bias": True}, "output biases, which heapr-lab 0"),
        ({"quantised": "int8", "format_version": 3}, "integers, which heapr-lab 0"),
        ({"widths": {"model.experts": [1]}}, "no numbered layer"),
        ({"widths": {"mtp.layers.0.mlp.experts": [1]}}, "without speculative"),
        ({"widths": TWICE}, "layer 1 has two experts modules"),
    ],
)
def test_refused(change, message):
    """The error comes before anything is allocated."""
    with pytest.raises(HeaprLabError, match=message):
        widths_by_layer({"format_version": 1, "widths": WIDTHS} | change)


@pytest.mark.parametrize("n_ranks", [1, 2, 3])
@pytest.mark.parametrize("width", [0, 1, 2, 7, 32])
def test_each_atom_is_on_one_rank(width, n_ranks):
    """Atoms are in order, and shared as evenly as can be."""
    parts = [range(width)[shard(width, rank, n_ranks)] for rank in range(n_ranks)]
    assert [atom for part in parts for atom in part] == list(range(width))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
