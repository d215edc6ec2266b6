"""Each trace of a text is what plain loops over the model's own weights give.

Also who serves a token: what the router handed over, and the longest atoms.
"""

from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from families import tiny_ids, tiny_windows
from heard import Heard
from keeps import full_keep, logits_of, random_keep, zeroed_twin
from text_models import (
    CLOSE,
    FAMILIES,
    TEXT,
    atoms_by_hand,
    experts_calls,
    model_of,
    tolerance,
)

from heapr_lab.errors import SpecError
from heapr_lab.inspection.activations import atoms_of_token, routing, top_contexts
from heapr_lab.inspection.passages import (
    Passage,
    continue_text,
    read_passage,
    token_losses,
    token_texts,
)
from heapr_lab.models.experts import find_experts
from heapr_lab.models.hooks import IMPLEMENTATION
from heapr_lab.text.calibration import CalibrationSet

CONTEXT = 64
WINDOWS = tiny_windows(n_sequences=5, seq_len=11)
IDS = WINDOWS.ids


# --- the text ---------------------------------------------------------------------


def test_tokens_join_to_the_text(tokenizer):
    """Every character stands with the token that completes it, and none is lost.

    Nor are bytes that never become a character.
    """
    passage = read_passage(model_of("qwen2_moe"), tokenizer, text=TEXT)
    assert passage.text == TEXT
    assert passage.ids.shape == (1, len(passage.tokens))
    place = passage.tokens.index("漢")
    assert passage.tokens[place - 2 : place] == ("", "")  # two of its three bytes
    assert passage.tokens[:3] == ("th", "e", " ")
    ids = tokenizer("a漢b")["input_ids"]
    broken = [ids[0], ids[1], ids[4], ids[1]]
    texts = token_texts(tokenizer, broken)
    assert len(texts) == 4
    assert "".join(texts) == tokenizer.decode(broken)
    assert texts[-1] == "\ufffd"


@pytest.mark.parametrize(
    ("room", "expected"), [(0, "a" * 64), (4, "a" * 20 + "b" * 40)]
)
def test_a_long_text_is_clipped(tokenizer, room, expected):
    """The beginning is kept, or the end where it is to be continued; and it is told."""
    model = model_of("qwen2_moe", max_position_embeddings=CONTEXT)
    passage = read_passage(model, tokenizer, text="a" * 70 + "b" * 40, room=room)
    assert passage.text == expected
    assert passage.n_left_out == 110 - len(expected)
    shorter = read_passage(model, tokenizer, text="ab" * 9, most=7)
    assert (shorter.text, shorter.n_left_out) == ("abababa", 11)
    unlimited = read_passage(model, tokenizer, text="ab" * 9, most=99, room=9)
    assert unlimited.n_left_out == 0


def test_texts_that_cannot_be_read(tokenizer):
    """No text, no room, and one token where two are needed: errors that say so."""
    model = model_of("qwen2_moe", max_position_embeddings=CONTEXT)
    with pytest.raises(SpecError, match="no tokens"):
        read_passage(model, tokenizer, text="")
    with pytest.raises(SpecError, match="the context has 64 in all"):
        read_passage(model, tokenizer, text="ab", room=64)
    short = read_passage(model, tokenizer, text="a")
    with pytest.raises(SpecError, match="has 1 token, expected at least 2"):
        token_losses(model, short, keep=full_keep(model))
    with pytest.raises(SpecError, match="has 1 token, expected at least 2"):
        routing(model, short)


# --- losses -----------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_token_losses(tokenizer, family):
    """Cross entropies of the dense logits, and of a model with the columns zeroed."""
    model = model_of(family)
    keep = random_keep(model)
    passage = read_passage(model, tokenizer, text=TEXT)
    steps = Heard()

    losses = token_losses(model, passage, keep=keep, progress=steps)

    for column, twin in (
        ("dense_nll", model),
        ("pruned_nll", zeroed_twin(model, keep)),
    ):
        log_probs = logits_of(twin, passage.ids)[0, :-1].log_softmax(-1)
        expected = -log_probs.gather(1, passage.ids[0, 1:, None])[:, 0]
        assert np.isnan(losses[column].iloc[0])
        np.testing.assert_allclose(
            losses[column].iloc[1:], expected, **tolerance(family)
        )
    assert (losses["delta_nll"].abs().iloc[1:] > 1e-6).all()
    assert losses["delta_nll"].equals(losses["pruned_nll"] - losses["dense_nll"])
    assert losses["token"].tolist() == list(passage.tokens)
    assert steps == [(1, 2), (2, 2)]
    # Columns that stand for W_down are the pruned model's, not the dense one's.
    layer = find_experts(model)[0]
    down_projs = {layer.layer: 2 * layer.down.detach()}
    others = token_losses(model, passage, keep=keep, down_projs=down_projs)
    pd.testing.assert_series_equal(others["dense_nll"], losses["dense_nll"])
    assert (others["pruned_nll"] != losses["pruned_nll"]).iloc[1:].all()


# --- continuations ----------------------------------------------------------------


@pytest.mark.parametrize("family", ["qwen2_moe", "gpt_oss"])
def test_continuations(tokenizer, family):
    """One token after the other, each the most probable of a forward without cache."""
    model = model_of(family, eos_token_id=None)
    model.generation_config.repetition_penalty = 3.0  # of the checkpoint: not wanted
    keep = random_keep(model)
    prompt = read_passage(model, tokenizer, text="the north", room=9)
    steps = Heard()
    texts = []
    for mask, twin in ((None, model), (keep, zeroed_twin(model, keep))):
        ids = prompt.ids
        for _ in range(9):
            ids = torch.cat([ids, logits_of(twin, ids)[:, -1:].argmax(-1)], dim=1)
        options = {"n_tokens": 9, "keep": mask, "progress": steps}
        tokens = continue_text(model, tokenizer, prompt=prompt, **options)
        expected = ids[0, prompt.ids.shape[1] :].tolist()
        assert tokens["token_id"].tolist() == expected
        assert tokens["step"].tolist() == list(range(9))
        assert "".join(tokens["token"]) == tokenizer.decode(ids[0])[len("the north") :]
        texts.append(expected)
    assert texts[0] != texts[1]
    assert steps == 2 * [(done, 9) for done in range(1, 10)]


def test_the_end_of_a_continuation(tokenizer):
    """The model's end of text is the last token; the progress callback can end it, too.

    What that raises leaves the model as it was.
    """
    model = model_of("qwen2_moe")
    before = model.config._experts_implementation
    prompt = read_passage(model, tokenizer, text="the north", room=9)

    def stop(done: int, total: int) -> None:
        # switched on for the dense model too, so that nothing else can be set meanwhile
        assert model.config._experts_implementation == IMPLEMENTATION != before
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        continue_text(model, tokenizer, prompt=prompt, n_tokens=9, progress=stop)
    assert model.config._experts_implementation == before
    with pytest.raises(SpecError, match=r"n_tokens must be .* from 1, got 0"):
        continue_text(model, tokenizer, prompt=prompt, n_tokens=0)
    first = continue_text(model, tokenizer, prompt=prompt, n_tokens=1)["token_id"][0]
    model.generation_config.eos_token_id = int(first)
    tokens = continue_text(model, tokenizer, prompt=prompt, n_tokens=9)
    assert tokens["token_id"].tolist() == [first]


# --- who serves a token -----------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_routing(tokenizer, family):
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
def test_atoms_of_token(tokenizer, family):
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


def test_what_is_not_there(tokenizer):
    """Layers, positions, experts and atoms that do not exist are named."""
    model = model_of("deepseek_v3")  # layer 0 has no routed experts
    passage = read_passage(model, tokenizer, text=TEXT)
    windows = tiny_windows()
    with pytest.raises(SpecError, match="layer must be one of 1, 2, got 0"):
        atoms_of_token(model, passage, layer=0, position=0)
    with pytest.raises(SpecError, match=r"position in .* from 0 to .*, got 99"):
        atoms_of_token(model, passage, layer=1, position=99)
    query: dict[str, Any] = {"layer": 1, "expert": 0, "atom": 0, "n": 1}
    for name, value, message in (
        ("layer", 7, "layer must be one of 1, 2, got 7"),
        ("expert", 4, "expert in layer 1 must be .* from 0 to 3, got 4"),
        ("atom", 8, "atom in layer 1 must be .* from 0 to 7, got 8"),
        ("n", 0, "n must be .* from 1, got 0"),
    ):
        with pytest.raises(SpecError, match=message):
            top_contexts(model, windows, tokenizer=tokenizer, **query | {name: value})


# --- contexts ---------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_top_contexts(tokenizer, family, monkeypatch):
    """The largest |h| of all, found batch by batch, with the text around each."""
    monkeypatch.setattr("heapr_lab.inspection.activations.TOKENS_AT_ONCE", 2 * 11)
    model = model_of(family)
    query: dict[str, Any] = {"layer": find_experts(model)[0].layer}
    query |= {"expert": 2, "atom": 3}
    every = atoms_by_hand(model, IDS)
    top = every[every[[*query]].eq(query).all(axis=1)]
    top = top.assign(size=top["h"].abs()).nlargest(6, "size")
    steps = Heard()
    options: dict[str, Any] = {"n": 6, "width": 3, "progress": steps}

    rows = top_contexts(model, WINDOWS, tokenizer=tokenizer, **query, **options)

    assert (rows["window"] * 11 + rows["position"]).tolist() == top["place"].tolist()
    np.testing.assert_allclose(rows["h"], top["h"], **CLOSE)
    np.testing.assert_allclose(rows["p"], top["p"], **CLOSE)
    assert steps == [(2, 5), (4, 5), (5, 5)]
    for row in rows.itertuples():
        around = IDS[row.window, max(0, row.position - 3) : row.position + 4]
        assert row.before + row.token + row.after == tokenizer.decode(around)


def test_of_equal_activations_the_first(tokenizer, monkeypatch):
    """An atom that is never active shows the first tokens of its expert."""
    monkeypatch.setattr("heapr_lab.inspection.activations.TOKENS_AT_ONCE", 2 * 11)
    model = model_of("qwen2_moe")
    layer = find_experts(model)[0]
    with torch.no_grad():
        layer.up_rows[2, layer.atom_rows(torch.tensor([3]))] = 0
    query: dict[str, Any] = {"layer": layer.layer, "expert": 2, "atom": 3, "n": 12}
    rows = top_contexts(model, WINDOWS, tokenizer=tokenizer, **query)
    _, index, _ = experts_calls(model, IDS)[layer.layer]
    first = [place for place in range(55) if 2 in index[place].tolist()][:12]
    assert (rows["window"] * 11 + rows["position"]).tolist() == first
    assert rows["h"].eq(0).all()


def test_contexts_of_an_expert_without_tokens(tokenizer):
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
