"""Exactly so many atoms are pruned as the ratio says, and the right ones."""

import inspect
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
from score_tables import TWO_LAYERS, kept, make_table

from heapr_lab import Selection, select
from heapr_lab.errors import SpecError
from heapr_lab.models.architecture import Architecture, LayerShape
from heapr_lab.storage.hashing import digest

# --- ragged atoms ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("ratio", "removed"),
    [
        (0, 0),
        (0.9, 90),  # 0.9 in binary is below 9/10
        (0.29, 29),  # and 0.29 · 100 is below 29
        (np.float32(0.7), 70),
        (np.float64(0.57), 57),
        (Decimal("0.58"), 58),
        (Fraction(1, 3), 33),
        (0.999, 99),
        (1e-3, 0),
    ],
)
def test_ratio_is_the_decimal_it_was_written_as(ratio, removed):
    """Exactly ⌊r · 100⌋ of 100 atoms go, also where all scores are equal."""
    table = make_table({0: np.ones((4, 25))})
    keep = select(table, ratio=ratio)
    assert (keep.n_removed, keep.n_atoms) == (removed, 100)


@pytest.mark.parametrize("ratio", [25, 1, 1.0, -0.1])
def test_ratio_outside_is_refused(ratio):
    """A ratio outside [0, 1) is an error that says how to write it."""
    message = (
        rf"^pruning ratio must be in \[0, 1\), got {ratio}; give a fraction \(0.25\), "
        "not per cent"
    )
    with pytest.raises(SpecError, match=message):
        select(make_table(TWO_LAYERS), ratio=ratio)


@pytest.mark.parametrize("ratio", [float("nan"), "0.2", True, None])
def test_ratio_must_be_a_number(ratio):
    """What is no number is an error."""
    with pytest.raises(SpecError, match="must be a number in"):
        select(make_table(TWO_LAYERS), ratio=ratio)


def test_unrouted_atoms_go_first():
    """An expert without tokens scores 0 and goes."""
    table = make_table({0: [[3, 4], [9, 9]]}, extra={"tokens": [1, 1, 0, 0]})
    assert kept(table, ratio=0.5) == {0: [[1, 1], [0, 0]]}


# --- widths ---------------------------------------------------------------------


def test_steps_of_different_sizes_may_remove_more_than_was_asked():
    """The cheapest step per atom goes, although a smaller one would have done."""
    # Layer 0 goes in a step of three atoms of 1 each, layer 1 in one of 2.
    table = make_table({0: [[1], [1], [1]], 1: [[2]]})
    keep = select(table, ratio=0.25, structure="per_layer")
    assert keep.layer_ratios().tolist() == [1, 0]


def test_one_width_for_the_model():
    """It is at least 1, and that of layers that had one before."""
    table = make_table(TWO_LAYERS)
    with pytest.raises(SpecError, match=r"0\.8 is infeasible.* possible is 0\.75"):
        select(table, ratio=0.8, structure="uniform")
    with pytest.raises(SpecError, match="layers of one width, got 2, 3"):
        select(make_table({0: [[1, 2]], 1: [[1, 2, 3]]}), ratio=0, structure="uniform")


# --- what stays -----------------------------------------------------------------


def test_excluded_layers_are_left_whole():
    """Scope global takes the whole amount from the others, scope layer does not."""
    table = make_table(TWO_LAYERS)
    keep = select(table, ratio=0.25, exclude_layers=[0])
    assert keep.layer_ratios().tolist() == [0.0, 0.5]
    keep = select(table, ratio=0.25, exclude_layers=[0], scope="layer")
    assert keep.layer_ratios().tolist() == [0.0, 0.25]
    with pytest.raises(SpecError, match=r"0\.6 is infeasible.* possible is 0\.5$"):
        select(table, ratio=0.6, exclude_layers=[0])
    # ⌊0.55 · 16⌋ is the 8 atoms that may go, so it can be had.
    assert select(table, ratio=0.55, exclude_layers=[0]).n_removed == 8


def test_the_largest_possible_ratio_can_be_had():
    """Two thirds are rounded down, so that what an error names is not refused."""
    table = make_table({0: [[1, 2, 3]]})
    message = r"^pruning ratio 0\.7 is infeasible.* possible is 0\.666666$"
    settings = {"structure": "aligned", "multiple": 1, "min_atoms": 1}
    with pytest.raises(SpecError, match=message):
        select(table, ratio=0.7, **settings)
    assert select(table, ratio=0.666666, **settings).n_removed == 2


def test_every_expert_keeps_its_least():
    """A floor keeps an expert's best atoms, and limits the ratio."""
    table = make_table(TWO_LAYERS)
    keep = select(table, ratio=0.5, min_atoms=2)
    assert keep.widths().to_numpy().tolist() == [[2, 2], [2, 2]]
    assert keep.by_layer(0).astype(int).tolist() == [[0, 1, 0, 1], [0, 1, 1, 0]]
    with pytest.raises(SpecError, match=r"0\.6 is infeasible.* possible is 0\.5$"):
        select(table, ratio=0.6, min_atoms=2)
    wide = select(table, ratio=0.2, min_atoms=3, structure="aligned", multiple=1)
    assert wide.widths().to_numpy().min() == 3


# --- settings -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"scope": "expert"}, "scope must be one of 'global', 'layer', got 'expert'"),
        ({"estimator": ["heapr"]}, r"estimator must be one of .*, got \['heapr'\]"),
        ({"estimator_options": "abc"}, "estimator_options must be values by name"),
        ({"estimator_options": 1}, "estimator_options must be values by name"),
        ({"structure": "square"}, "structure must be one of"),
        ({"of": "flops"}, "of must be one of 'atoms', 'model'"),
        ({"estimator": "camera"}, "'camera' ranks atoms within a layer"),
        ({"structure": "aligned"}, "'aligned' needs `multiple`"),
        ({"multiple": 4}, "'ragged' does not round widths"),
        ({"structure": "aligned", "multiple": 0}, "multiple must be a whole number"),
        ({"min_atoms": 1.5}, "min_atoms must be a whole number from 0 .*got 1.5"),
        ({"granularity": "expert", "structure": "uniform"}, "requires structure"),
        ({"exclude_layers": [7]}, "no routed experts in layers 7; layers .* 0, 1"),
        ({"exclude_layers": [0, 1]}, "names every layer"),
        ({"exclude_layers": [0], "structure": "uniform"}, "one width for all layers"),
        ({"estimator_options": {"seed": 1}}, "'heapr' has no option seed"),
    ],
)
def test_settings_that_cannot_be_used(settings, message):
    """A setting that cannot be used is an error that says what can."""
    with pytest.raises(SpecError, match=message):
        select(make_table(TWO_LAYERS), ratio=0.25, **settings)


def test_options_reach_the_estimator():
    """Another seed selects other atoms, the same seed the same."""
    table = make_table({0: np.ones((8, 32))})
    a, b, c = (
        select(table, ratio=0.5, estimator="random", estimator_options=options)
        for options in ({"seed": np.int64(seed)} for seed in (0, 0, 1))
    )
    assert a == b
    assert a != c
    assert a.settings["estimator_options"] == {"seed": 0}


def test_a_mask_names_its_table():
    """The name is the hash of what the table was measured with, if that is known."""
    spec = {"n_sequences": 8}
    known = make_table(TWO_LAYERS, spec=spec, spec_hash=digest(spec))
    assert select(known, ratio=0.5).settings["table"] == digest(spec)
    assert select(make_table(TWO_LAYERS), ratio=0.5).settings["table"] is None


def test_help_names_what_can_be_given():
    """Fields of a selection, which tab completes, too; that there is no ratio."""
    fields = [*inspect.signature(Selection).parameters]
    assert [*inspect.signature(select).parameters] == ["table", "selection", *fields]
    assert {"ratio", "scope", "estimator"} <= {*fields}
    with pytest.raises(SpecError, match=r"no ratio is given: select\(table, ratio="):
        select(make_table(TWO_LAYERS), scope="layer")


# --- ratios of the parameters -----------------------------------------------------


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
def test_ratio_of_the_model(ratio, removed):
    """The lowest atoms go until at least the ratio of all parameters is gone."""
    table = make_table(TWO_LAYERS, architecture=MODEL.to_dict())
    keep = select(table, ratio=ratio, of="model")
    assert keep.n_removed == removed
    assert 200 - MODEL.parameters(keep) >= Fraction(str(ratio)) * 200


def test_parameters_beyond_32_bits_are_counted():
    """Amounts of parameters larger than 2³¹ do not wrap around."""
    shape = LayerShape(n_experts=1, d_inter=4, d_expert=2**31)
    model = Architecture(12 * 2**31, 2, 2**31, {0: shape}, 0, 0)
    table = make_table({0: [[1, 2, 3, 4]]}, architecture=model.to_dict())
    assert kept(table, ratio=0.75, of="model") == {0: [[0, 0, 0, 1]]}


def test_ratio_of_the_model_by_layer():
    """With scope layer each layer gives the same share of its atoms."""
    table = make_table(TWO_LAYERS, architecture=MODEL.to_dict())
    keep = select(table, ratio=0.4, of="model", scope="layer")
    assert keep.layer_ratios().tolist() == [0.5, 0.5]  # 0.4 · 200 / 160


def test_more_than_the_routed_share_is_refused():
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
