"""One `Selection`, one `Calibration`: checked, hashable, JSON both ways."""

import json
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_tables import random_table

from heapr_lab import Calibration, Selection, Setting, select
from heapr_lab.errors import SpecError
from heapr_lab.importance.estimators import ESTIMATORS
from heapr_lab.pruning.options import STRUCTURES, exact_ratio, parse_layers


@st.composite
def selections(draw: st.DrawFn) -> Selection:
    """Any selection that can be made."""
    estimator = draw(st.sampled_from(sorted(ESTIMATORS)))
    structure = draw(st.sampled_from(STRUCTURES))
    ragged, uniform = structure == "ragged", structure == "uniform"
    multiples = st.none() if ragged else st.integers(1, 64)
    excluded = st.just(()) if uniform else st.lists(st.integers(4, 9), max_size=3)
    return Selection(
        draw(st.floats(0, 1, exclude_max=True)),
        estimator=estimator,
        scope="layer" if ESTIMATORS[estimator].within_layer else "global",
        granularity=draw(st.sampled_from(("atom", "expert"))) if ragged else "atom",
        structure=structure,
        multiple=draw(multiples) or (8 if structure == "aligned" else None),
        of=draw(st.sampled_from(("atoms", "model"))),
        exclude_layers=draw(excluded),  # type: ignore[arg-type]
        min_atoms=draw(st.integers(0, 9)),
    )


@given(selections())
def test_a_selection_survives_json(selection):
    """Read back it is equal, with an equal hash, and its text is the same.

    A repr makes the selection again: it names what was set, and is Python.
    """
    again = Selection.from_dict(json.loads(json.dumps(selection.to_dict())))
    assert again == selection
    assert hash(again) == hash(selection)
    assert again.text == selection.text
    assert eval(repr(selection), {"Selection": Selection}) == selection


def test_one_form_of_what_is_equal():
    """However numbers and layers were given: numbers are Python's, layers in order."""
    assert Selection(np.float64(0.3)) == Selection(Decimal("0.3"))  # type: ignore[arg-type]
    for layers in (np.array([1, 0]), range(2), (layer for layer in (0, 1))):
        other = Selection(0.3, exclude_layers=layers)  # type: ignore[arg-type]
        assert other == Selection(0.3, exclude_layers=(0, 1))
    of_numpy = Selection(
        np.float64(0.3),
        structure="aligned",
        multiple=np.int64(8),  # type: ignore[arg-type]
        min_atoms=np.int64(2),  # type: ignore[arg-type]
        exclude_layers=[4, 3],  # type: ignore[arg-type]
    )
    assert repr(of_numpy) == (
        "Selection(0.3, structure='aligned', multiple=8, exclude_layers=(3, 4), "
        "min_atoms=2)"
    )


def test_plain_data_of_a_selection():
    """Whatever exact numbers it was made of, files hold floats, by name."""
    third: Any = Fraction(1, 3)
    selection = Selection(third, exclude_layers=(4, 2))
    plain = selection.to_dict()
    assert json.loads(json.dumps(plain)) == plain
    assert plain == Selection(0.5).to_dict() | {
        "ratio": 1 / 3,
        "exclude_layers": [2, 4],
    }


def test_files_of_earlier_versions_are_read():
    """They hold settings that are gone; one that was used is refused by name."""
    selection = Selection(0.5)
    gone = {"price": None, "protect_outliers": 0.0, "protect_unrouted": False}
    earlier = {**selection.to_dict(), "own_layers": [], "layer_ratios": {}, **gone}
    assert Selection.from_dict(earlier) == selection
    for used in (
        {"price": 0.5},
        {"protect_outliers": 0.1},
        {"protect_unrouted": True},
        {"layer_ratios": {"1": 0.5}},
        {"of": "bytes"},
        {"estimator": "shrunk"},
    ):
        with pytest.raises(SpecError, match="was a setting of an earlier heapr-lab"):
            Selection.from_dict(earlier | used)


@pytest.mark.parametrize(
    ("selection", "text", "rules"),
    [
        (
            Selection(0.25, granularity="expert", of="model", min_atoms=3),
            "heapr, 0.25 of the parameters (model), global scope, by expert, ragged, "
            "at least 3 atoms each",
            "heapr, global, by expert, ragged, of the parameters (model), "
            "at least 3 atoms each",
        ),
        (
            Selection(0.12345, scope="layer", structure="aligned", multiple=2),
            "heapr, 0.1235 of the atoms, layer scope, by atom, aligned, multiples of 2",
            "heapr, layer, by atom, aligned, multiples of 2",
        ),
        (
            Selection(0.5, structure="per_layer", of="model", exclude_layers=(7, 2)),
            "heapr, 0.5 of the parameters (model), global scope, by atom, per_layer, "
            "layers 2, 7 not pruned",
            "heapr, global, by atom, per_layer, of the parameters (model), "
            "layers 2, 7 not pruned",
        ),
    ],
)
def test_a_selection_as_text(selection, text, rules):
    """Titles and labels say what is pruned and how, and no more than was asked for."""
    assert selection.text == text
    assert selection.rules_text == rules


def test_ratios_do_not_change_the_ranking():
    """Selections that differ in ratios alone share a ranking; others do not."""
    selection = Selection(0.2)
    assert selection.ranking_key == Selection(0.7).ranking_key
    assert selection.ranking_key != Selection(0.2, min_atoms=1).ranking_key


@pytest.mark.parametrize(
    ("plain", "message"),
    [
        ({}, "ratio is required; got none"),
        ({"estimator": "heapr"}, "ratio is required; got estimator"),
        ({"ratio": 0.5, "ratoi": 0.6}, "no field ratoi; it has ratio, estimator"),
        (
            {"ratio": 0.5, "min_atoms": 2**31},
            "min_atoms must be a whole number from 0 to",
        ),
        ({"ratio": 0.5, "exclude_layers": "12"}, "a list of layer numbers, got '12'"),
        *(
            ({"ratio": 0.5, "exclude_layers": layers}, "exclude_layers must be .*got")
            for layers in ([-1], [1.7], ["1"], [True], [None], 1, b"\x01", [1.0])
        ),
    ],
)
def test_what_cannot_be_used_is_named(plain, message):
    """The error names it, also when it comes from a file."""
    with pytest.raises(SpecError, match=message):
        Selection.from_dict(plain)


def test_a_ratio_is_called_what_the_caller_calls_it():
    """By default it is the pruning ratio, as `select` has it."""
    with pytest.raises(SpecError, match=r"^--at must be in \[0, 1\), got 1;"):
        exact_ratio(1, name="--at")


@pytest.mark.parametrize("text", ["7-5", "5-", "-5", "1-2-3", "1.5", "²", "9" * 5000])
def test_lists_that_are_not_of_layers_are_refused(text):
    """A range has two ends, the lower first."""
    with pytest.raises(SpecError, match=r"excluded: .*; give"):
        parse_layers(text, name="excluded")


def test_lists_of_layers_are_read():
    """Numbers and ranges in any order, each layer once."""
    assert parse_layers(" 7, 0-2,1 ,", name="") == (0, 1, 2, 7)
    assert parse_layers("5 - 7,0", name="") == (0, 5, 6, 7)
    assert parse_layers("", name="") == ()


def test_select_takes_one_way_of_saying_it():
    """A selection, its ratio, or its fields."""
    table = random_table(1, 2, 4)
    assert select(table, 0.5) == select(table, ratio=0.5)
    selection = Selection(0.5, scope="layer")
    assert select(table, selection) == select(table, ratio=0.5, scope="layer")
    with pytest.raises(TypeError, match="not both"):
        select(table, selection, ratio=0.5)


@pytest.mark.parametrize(
    "fields",
    [
        {"corpus": 5},
        {"n_sequences": 0},
        {"n_sequences": True},
        {"seq_len": 1},
        {"seed": 2**63},
        {"seed": 0.5},
        {"sead": 1},
    ],
)
def test_a_calibration_that_cannot_be_used(fields):
    """Numbers and names are checked where it is made."""
    with pytest.raises(SpecError, match=next(iter(fields))):
        Calibration.from_dict(fields)


def test_a_setting_is_a_pair():
    """The short form gives the same; wholes and their parts are not mixed."""
    short = Setting(0.4, "ptb", scope="layer")
    pair = Setting(Selection(0.4, scope="layer"), Calibration("ptb"))
    assert short == pair
    assert hash(short) == hash(pair)
    assert pair.at(0.7) == Setting(Selection(0.7, scope="layer"), pair.calibration)
    with pytest.raises(TypeError, match="not both"):
        Setting(pair.selection, scope="layer")


def test_columns_tell_settings_apart():
    """Rows of results name whatever was set besides what they always name."""
    plain = Setting(0.4).columns()
    assert set(Setting(0.4, of="model", min_atoms=2).columns()) - set(plain) == {
        "of",
        "min_atoms",
    }
