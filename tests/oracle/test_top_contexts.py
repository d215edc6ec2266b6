"""The inputs that activate an atom most are those that a loop over all finds."""

from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from families import tiny_ids
from text_models import CLOSE, FAMILIES, atoms_by_hand, experts_calls, model_of
from tiny_folder import D_VOCAB

from heapr_lab.inspection.activations import (
    atoms_at_tokens,
    top_contexts,
)
from heapr_lab.inspection.passages import Passage
from heapr_lab.inspection.routing import routing
from heapr_lab.models.experts import find_experts
from heapr_lab.text.calibration import CalibrationSet

pytestmark = pytest.mark.oracle


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
    own = every[every["layer"].eq(layer) & every["expert"].eq(expert)]
    own = own[own["atom"].eq(atom)].assign(size=lambda frame: frame["h"].abs())
    own = own.nlargest(6, "size")
    steps: list[tuple[int, int]] = []

    found = top_contexts(
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

    assert (found["window"] * 11 + found["position"]).tolist() == own["place"].tolist()
    np.testing.assert_allclose(found["h"], own["h"], **CLOSE)
    np.testing.assert_allclose(found["p"], own["p"], **CLOSE)
    assert steps == [(2, 5), (4, 5), (5, 5)]
    for row in found.itertuples():
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
    own = every[every["place"].isin(11 * places["window"] + places["position"])]
    atoms = own.groupby(["expert", "atom"])["share"]
    wanted = pd.DataFrame({"n_tokens": atoms.count(), "share": atoms.sum() / 4})
    windows = CalibrationSet.from_ids(ids)

    found = atoms_at_tokens(model, windows, places, layer=layer, n=10**6)

    assert found["share"].is_monotonic_decreasing
    assert found["share"].sum() == pytest.approx(1)
    found = found.set_index(["expert", "atom"]).sort_index()
    pd.testing.assert_frame_equal(found, wanted, check_dtype=False, rtol=1e-6)
    some = atoms_at_tokens(model, windows, places, layer=layer, n=3)
    assert some["share"].tolist() == found["share"].nlargest(3).tolist()
    assert atoms_at_tokens(model, windows, places[:0], layer=layer).empty


@pytest.mark.parametrize("family", FAMILIES)
def test_top_contexts_of_an_expert(
    tokenizer: Any, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The largest routing weights of one expert among all, whatever its atoms do."""
    monkeypatch.setattr("heapr_lab.inspection.activations.TOKENS_AT_ONCE", 2 * 11)
    model = model_of(family)
    ids = torch.from_numpy(np.random.default_rng(0).integers(1, D_VOCAB, (5, 11)))
    every, layer = atoms_by_hand(model, ids), find_experts(model)[0].layer
    own = every[every["layer"].eq(layer) & every["expert"].eq(2) & every["atom"].eq(0)]
    own = own.sort_values(["p", "place"], ascending=[False, True]).head(6)
    windows = CalibrationSet.from_ids(ids)
    asked: dict[str, Any] = {"layer": layer, "expert": 2, "atom": None, "n": 6}
    found = top_contexts(model, windows, tokenizer=tokenizer, **asked)
    assert (found["window"] * 11 + found["position"]).tolist() == own["place"].tolist()
    np.testing.assert_allclose(found["p"], own["p"], **CLOSE)
    assert "h" not in found


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
    asked: dict[str, Any] = {"layer": layer.layer, "expert": 2, "atom": 3, "n": 12}
    windows = CalibrationSet.from_ids(ids)
    found = top_contexts(model, windows, tokenizer=tokenizer, **asked)
    _, index, _ = experts_calls(model, ids)[layer.layer]
    first = [place for place in range(55) if 2 in index[place].tolist()][:12]
    assert (found["window"] * 11 + found["position"]).tolist() == first
    assert found["h"].eq(0).all()


def test_contexts_of_an_expert_without_tokens(tokenizer: Any) -> None:
    """Fewer tokens than asked for, or none: as many rows as there are."""
    model = model_of("qwen2_moe")
    ids = tiny_ids(n_sequences=1, seq_len=2)
    counts = routing(model, Passage(ids, ("a", "b")))
    counts = counts[counts["layer"].eq(0)]["expert"].value_counts()
    for expert in range(4):
        windows = CalibrationSet.from_ids(ids)
        asked: dict[str, Any] = {"layer": 0, "expert": expert, "atom": 0, "n": 9}
        found = top_contexts(model, windows, tokenizer=tokenizer, **asked)
        assert len(found) == counts.get(expert, 0)
    assert counts.sum() == 4  # two tokens in two experts each
