"""Who serves a token: what the router handed over, and the longest atoms."""

from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from families import tiny_ids
from keeps import random_keep
from text_models import (
    CLOSE,
    FAMILIES,
    TEXT,
    atoms_by_hand,
    experts_calls,
    model_of,
    tolerance,
)
from tiny_folder import D_VOCAB

from heapr_lab.errors import SpecError
from heapr_lab.inspection.activations import (
    atoms_at_tokens,
    atoms_of_token,
    top_contexts,
)
from heapr_lab.inspection.passages import Passage, read_passage
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
    table = routing(model, passage)
    pd.testing.assert_frame_equal(
        table, expected, check_dtype=False, **tolerance(family)
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

    atoms = atoms_of_token(model, passage, layer=layer, position=position, n=7)

    pd.testing.assert_frame_equal(
        atoms, expected[list(atoms)], check_dtype=False, rtol=1e-9
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
    query: dict[str, Any] = {"layer": 1, "expert": 0, "atom": 0, "n": 1}
    for name, value, message in (
        ("layer", 7, "layer is 7"),
        ("expert", 4, "expert is 4, expected 0 to 3 in layer 1"),
        ("atom", 8, "atom is 8, expected 0 to 7 in layer 1"),
        ("n", 0, "n is 0"),
    ):
        with pytest.raises(SpecError, match=message):
            top_contexts(model, windows, tokenizer=tokenizer, **query | {name: value})


# --- contexts ---------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_top_contexts(
    tokenizer: Any, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The largest |h| of all, found batch by batch, with the text around each."""
    monkeypatch.setattr("heapr_lab.inspection.activations.TOKENS_AT_ONCE", 2 * 11)
    model = model_of(family)
    ids = torch.from_numpy(np.random.default_rng(0).integers(1, D_VOCAB, (5, 11)))
    layer, expert, atom = find_experts(model)[0].layer, 2, 3
    every = atoms_by_hand(model, ids)
    top = every[every["layer"].eq(layer) & every["expert"].eq(expert)]
    top = top[top["atom"].eq(atom)].assign(size=lambda frame: frame["h"].abs())
    top = top.nlargest(6, "size")
    steps: list[tuple[int, int]] = []

    rows = top_contexts(
        model,
        CalibrationSet.from_ids(ids),
        tokenizer=tokenizer,
        layer=layer,
        expert=expert,
        atom=atom,
        n=6,
        width=3,
        progress=lambda *step: steps.append(step),
    )

    assert (rows["window"] * 11 + rows["position"]).tolist() == top["place"].tolist()
    np.testing.assert_allclose(rows["h"], top["h"], **CLOSE)
    np.testing.assert_allclose(rows["p"], top["p"], **CLOSE)
    assert steps == [(2, 5), (4, 5), (5, 5)]
    for row in rows.itertuples():
        around = ids[row.window, max(0, row.position - 3) : row.position + 4]
        assert row.before + row.token + row.after == tokenizer.decode(around)


@pytest.mark.parametrize("family", FAMILIES)
def test_atoms_at_tokens(family: str) -> None:
    """The mean over the tokens of what a loop over all atoms finds, largest first."""
    model = model_of(family)
    ids = torch.from_numpy(np.random.default_rng(0).integers(1, D_VOCAB, (5, 11)))
    layer = find_experts(model)[0].layer
    places = pd.DataFrame({"window": [3, 0, 3, 4], "position": [10, 2, 4, 0]})
    every = atoms_by_hand(model, ids).query("layer == @layer")
    size = (every["p"] * every["h"]).abs() * every["w_down_norm"]
    every["share"] = size / size.groupby(every["place"]).transform("sum")
    rows = every[every["place"].isin(11 * places["window"] + places["position"])]
    atoms = rows.groupby(["expert", "atom"])["share"]
    expected = pd.DataFrame({"n_tokens": atoms.count(), "share": atoms.sum() / 4})
    windows = CalibrationSet.from_ids(ids)

    table = atoms_at_tokens(model, windows, places, layer=layer, n=10**6)

    assert table["share"].is_monotonic_decreasing
    assert table["share"].sum() == pytest.approx(1)
    table = table.set_index(["expert", "atom"]).sort_index()
    pd.testing.assert_frame_equal(table, expected, check_dtype=False, rtol=1e-6)
    some = atoms_at_tokens(model, windows, places, layer=layer, n=3)
    assert some["share"].tolist() == table["share"].nlargest(3).tolist()
    assert atoms_at_tokens(model, windows, places[:0], layer=layer).empty


def test_of_equal_activations_the_first(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An atom that is never active shows the first tokens of its expert."""
    monkeypatch.setattr("heapr_lab.inspection.activations.TOKENS_AT_ONCE", 2 * 11)
    model = model_of("qwen2_moe")
    layer = find_experts(model)[0]
    with torch.no_grad():
        layer.up_rows[2, layer.atom_rows(torch.tensor([3]))] = 0
    ids = torch.from_numpy(np.random.default_rng(0).integers(1, D_VOCAB, (5, 11)))
    query: dict[str, Any] = {"layer": layer.layer, "expert": 2, "atom": 3, "n": 12}
    windows = CalibrationSet.from_ids(ids)
    rows = top_contexts(model, windows, tokenizer=tokenizer, **query)
    _, index, _ = experts_calls(model, ids)[layer.layer]
    first = [place for place in range(55) if 2 in index[place].tolist()][:12]
    assert (rows["window"] * 11 + rows["position"]).tolist() == first
    assert rows["h"].eq(0).all()


def test_contexts_of_an_expert_without_tokens(tokenizer: Any) -> None:
    """Fewer tokens than asked for, or none: as many rows as there are."""
    model = model_of("qwen2_moe")
    ids = tiny_ids(n_sequences=1, seq_len=2)
    counts = routing(model, Passage(ids, ("a", "b")))
    counts = counts[counts["layer"].eq(0)]["expert"].value_counts()
    for expert in range(4):
        windows = CalibrationSet.from_ids(ids)
        query: dict[str, Any] = {"layer": 0, "expert": expert, "atom": 0, "n": 9}
        rows = top_contexts(model, windows, tokenizer=tokenizer, **query)
        assert len(rows) == counts.get(expert, 0)
    assert counts.sum() == 4  # two tokens in two experts each
