"""Who serves a token: what the router handed over, and the longest atoms."""

from typing import Any

import pandas as pd
import pytest
from families import tiny_ids
from keeps import random_keep
from text_models import (
    FAMILIES,
    TEXT,
    atoms_by_hand,
    experts_calls,
    model_of,
    tolerance,
)

from heapr_lab.errors import SpecError
from heapr_lab.inspection.activations import atoms_of_token, top_contexts
from heapr_lab.inspection.passages import read_passage
from heapr_lab.inspection.routing import routing
from heapr_lab.models.experts import find_experts
from heapr_lab.pruning.surgery import masking
from heapr_lab.text.calibration import CalibrationSet

pytestmark = pytest.mark.oracle


@pytest.mark.parametrize("family", FAMILIES)
def test_routing(tokenizer: Any, family: str) -> None:
    """The weights and experts that the router handed over, for every token."""
    model = model_of(family)
    passage = read_passage(model, tokenizer, text=TEXT)
    rows = []
    for number, (_, index, weights) in experts_calls(model, passage.ids).items():
        for place, text in enumerate(passage.tokens):
            pairs = zip(weights[place].tolist(), index[place].tolist(), strict=True)
            for p, expert in sorted(pairs, key=lambda pair: -pair[0]):
                rows.append((number, place, text, expert, p))
    names = ["layer", "position", "token", "expert", "p"]
    expected = pd.DataFrame(sorted(rows, key=lambda row: row[:2]), columns=names)
    found = routing(model, passage)
    pd.testing.assert_frame_equal(
        found, expected, check_dtype=False, **tolerance(family)
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_atoms_of_token(tokenizer: Any, family: str) -> None:
    """The longest of all p · h_k · w_down_k of one token, and their shares."""
    model = model_of(family)
    passage = read_passage(model, tokenizer, text=TEXT)
    layer, position = find_experts(model)[-1].layer, 5
    expected = atoms_by_hand(model, passage.ids)
    expected = expected[expected["layer"].eq(layer) & expected["place"].eq(position)]
    length = (expected["p"] * expected["h"] * expected["w_down_norm"]).abs()
    expected = expected.assign(contribution=length, share=length / length.sum())
    expected = expected.nlargest(7, "contribution").reset_index(drop=True)

    found = atoms_of_token(model, passage, layer=layer, position=position, n=7)

    pd.testing.assert_frame_equal(
        found, expected[list(found)], check_dtype=False, rtol=1e-9
    )


def test_traces_are_of_the_dense_model(tokenizer: Any) -> None:
    """Asked while a mask is on, they say what they say without it."""
    model = model_of("qwen2_moe")
    passage = read_passage(model, tokenizer, text=TEXT)
    expected = routing(model, passage)
    with masking(model, random_keep(model)):
        pd.testing.assert_frame_equal(routing(model, passage), expected)


def test_what_is_not_there(tokenizer: Any) -> None:
    """Layers, positions, experts and atoms that do not exist are named."""
    model = model_of("deepseek_v3")  # layer 0 has no routed experts
    passage = read_passage(model, tokenizer, text=TEXT)
    windows = CalibrationSet.from_ids(tiny_ids())
    with pytest.raises(SpecError, match=r"layer is 0, expected one of .*: 1, 2"):
        atoms_of_token(model, passage, layer=0, position=0)
    with pytest.raises(SpecError, match="position is 99, expected 0 to"):
        atoms_of_token(model, passage, layer=1, position=99)
    asked: dict[str, Any] = {"layer": 1, "expert": 0, "atom": 0, "n": 1}
    for name, value, message in (
        ("layer", 7, "layer is 7"),
        ("expert", 4, "expert is 4, expected 0 to 3 in layer 1"),
        ("atom", 8, "atom is 8, expected 0 to 7 in layer 1"),
        ("n", 0, "n is 0"),
    ):
        with pytest.raises(SpecError, match=message):
            top_contexts(model, windows, tokenizer=tokenizer, **asked | {name: value})
