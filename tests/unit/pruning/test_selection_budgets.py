"""Ratios of the parameters of the whole model."""

from fractions import Fraction

import pytest
from score_tables import TWO_LAYERS, kept, make_table

from heapr_lab.errors import SpecError
from heapr_lab.models.architecture import Architecture, LayerShape
from heapr_lab.pruning.selection import select

# Atoms of layer 0 have 3 · 4 = 12 parameters, those of layer 1 have 2 · 4 = 8:
# 8 · 12 + 8 · 8 = 160 of 200 are in routed atoms.
MODEL = Architecture(
    n_parameters=200,
    bytes_per_parameter=4,
    d_model=4,
    layers={
        0: LayerShape(n_experts=2, d_inter=4, d_expert=4),
        1: LayerShape(n_experts=2, d_inter=4, d_expert=4, n_matrices=2),
    },
    other_weights_per_token=40,
    attention_width=0,
)


@pytest.mark.parametrize(
    ("ratio", "removed"),
    # 0.06 · 200 is one atom of layer 0, anything more is two; at 0.52 layer 0 is gone
    # (96) and one atom of layer 1 (8) makes 104.
    [(0, 0), (0.06, 1), (0.061, 2), (0.48, 8), (0.52, 9), (0.8, 16)],
)
def test_ratio_of_the_model(ratio: float, removed: int) -> None:
    """The lowest atoms go until at least the ratio of all parameters is gone."""
    table = make_table(TWO_LAYERS, architecture=MODEL.to_dict())
    keep = select(table, ratio=ratio, of="model")
    assert keep.n_removed == removed
    assert 200 - MODEL.parameters(keep) >= Fraction(str(ratio)) * 200


def test_parameters_beyond_32_bits_are_counted() -> None:
    """Amounts of parameters larger than 2³¹ do not wrap around."""
    shape = LayerShape(n_experts=1, d_inter=4, d_expert=2**31)
    model = Architecture(12 * 2**31, 2, 2**31, {0: shape}, 0, 0)
    table = make_table({0: [[1, 2, 3, 4]]}, architecture=model.to_dict())
    assert kept(table, ratio=0.75, of="model") == {0: [[0, 0, 0, 1]]}


def test_ratio_of_the_model_by_layer() -> None:
    """With scope layer each layer gives the same share of its atoms."""
    table = make_table(TWO_LAYERS, architecture=MODEL.to_dict())
    keep = select(table, ratio=0.4, of="model", scope="layer")
    assert keep.layer_ratios().tolist() == [0.5, 0.5]  # 0.4 · 200 / 160


def test_more_than_the_routed_share_is_refused() -> None:
    """Beyond the routed share the largest possible ratio is stated."""
    table = make_table(TWO_LAYERS, architecture=MODEL.to_dict())
    for scope in ("global", "layer"):
        with pytest.raises(SpecError, match=r"of the model 0\.81 .* possible is 0\.8$"):
            select(table, ratio=0.81, of="model", scope=scope)
    with pytest.raises(SpecError, match="no architecture"):
        select(make_table(TWO_LAYERS), ratio=0.1, of="model")
    partly = make_table({0: TWO_LAYERS[0]}, architecture=MODEL.to_dict())
    with pytest.raises(SpecError, match="a row for each atom of the model"):
        select(partly, ratio=0.1, of="model")
