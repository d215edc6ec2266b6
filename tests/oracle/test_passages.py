"""Each trace of a text is what plain loops over the model's own weights give."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from families import tiny_ids, tiny_model
from keeps import full_keep, logits_of, random_keep, zeroed_twin
from oracles.token_by_token import atom_activations, matrices
from tiny_folder import D_VOCAB, write_tokenizer
from torch import nn
from transformers import AutoTokenizer

from heapr_lab.errors import SpecError
from heapr_lab.evaluation.activations import atoms_of_token, top_contexts
from heapr_lab.evaluation.passages import (
    Passage,
    continue_text,
    read_passage,
    token_losses,
    token_texts,
)
from heapr_lab.evaluation.routing import routing
from heapr_lab.models.experts import find_experts
from heapr_lab.models.hooks import IMPLEMENTATION
from heapr_lab.pruning.surgery import masking
from heapr_lab.text.calibration import CalibrationSet

pytestmark = pytest.mark.oracle

FAMILIES = ["qwen2_moe", "deepseek_v3", "gpt_oss", "nemotron_h"]
"""With and without gates, biases, shared experts, scaled routing, dense layers."""
CLOSE: dict[str, Any] = {"rtol": 1e-9, "atol": 1e-12}
SINGLE: dict[str, Any] = {"rtol": 1e-6, "atol": 1e-7}
"""Where a family computes a part in float32, whatever its type."""
TEXT = "the weather, then naïve Ω€ 漢字 🙂 paths"
CONTEXT = 64
Call = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A tokenizer of bytes."""
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return AutoTokenizer.from_pretrained(folder)


def tolerance(family: str) -> dict[str, Any]:
    """How close numbers of a family have to be."""
    return SINGLE if family == "nemotron_h" else CLOSE


def model_of(family: str, **changes: Any) -> Any:
    """A tiny float64 model that knows the tokenizer's ids."""
    return tiny_model(family, vocab_size=D_VOCAB, **changes)


def experts_calls(model: nn.Module, ids: torch.Tensor) -> dict[int, Call]:
    """What each experts module was handed: x (T, D), experts (T, K), p (T, K)."""
    calls, hooks = {}, []
    for layer in find_experts(model):

        def keep(
            _module: Any, args: Any, kwargs: Any, number: int = layer.layer
        ) -> Any:
            names = ("hidden_states", "top_k_index", "top_k_weights")
            given = dict(zip(names, args, strict=False)) | kwargs
            calls[number] = tuple(given[name] for name in names)

        hooks.append(layer.module.register_forward_pre_hook(keep, with_kwargs=True))
    logits_of(model, ids)
    for hook in hooks:
        hook.remove()
    return calls


def atoms_by_hand(model: nn.Module, ids: torch.Tensor) -> pd.DataFrame:
    """Every atom's h for every token, one token and slot after the other."""
    modules = {layer.layer: layer.module for layer in find_experts(model)}
    rows = []
    for number, (x, index, weights) in experts_calls(model, ids).items():
        for token in range(len(x)):
            for slot in range(index.shape[1]):
                expert, p = int(index[token, slot]), float(weights[token, slot])
                w = matrices(modules[number], expert)
                with torch.no_grad():
                    h = atom_activations(modules[number], x[token], w)
                    norms = [float(column.norm()) for column in w["W_down"].T]
                for atom, (value, norm) in enumerate(
                    zip(h.tolist(), norms, strict=True)
                ):
                    rows.append((number, token, expert, p, atom, value, norm))
    names = ["layer", "place", "expert", "p", "atom", "h", "w_down_norm"]
    return pd.DataFrame(rows, columns=names)


# --- the text ---------------------------------------------------------------------


def test_tokens_join_to_the_text(tokenizer: Any) -> None:
    """Every character stands with the token that completes it, and none is lost."""
    passage = read_passage(model_of("qwen2_moe"), tokenizer, text=TEXT)
    assert passage.text == TEXT
    assert passage.ids.shape == (1, len(passage.tokens))
    place = passage.tokens.index("漢")
    assert passage.tokens[place - 2 : place] == ("", "")  # two of its three bytes
    assert passage.tokens[:3] == ("th", "e", " ")


def test_tokens_that_are_no_text_are_shown(tokenizer: Any) -> None:
    """Bytes that never become a character are not swallowed."""
    ids = tokenizer("a漢b")["input_ids"]
    texts = token_texts(tokenizer, [ids[0], ids[1], ids[4], ids[1]])
    assert len(texts) == 4
    assert "".join(texts) == tokenizer.decode([ids[0], ids[1], ids[4], ids[1]])
    assert texts[-1] == "\ufffd"


@pytest.mark.parametrize(
    ("room", "expected"), [(0, "a" * 64), (4, "a" * 20 + "b" * 40)]
)
def test_a_long_text_is_clipped(tokenizer: Any, room: int, expected: str) -> None:
    """The beginning is kept, or the end where it is to be continued; and it is told."""
    model = model_of("qwen2_moe", max_position_embeddings=CONTEXT)
    passage = read_passage(model, tokenizer, text="a" * 70 + "b" * 40, room=room)
    assert passage.text == expected
    assert passage.n_left_out == 110 - len(expected)
    shorter = read_passage(model, tokenizer, text="ab" * 9, most=7)
    assert (shorter.text, shorter.n_left_out) == ("abababa", 11)
    unlimited = read_passage(model, tokenizer, text="ab" * 9, most=99, room=9)
    assert unlimited.n_left_out == 0


def test_texts_that_cannot_be_read(tokenizer: Any) -> None:
    """No text, no room, and one token where two are needed: errors that say so."""
    model = model_of("qwen2_moe", max_position_embeddings=CONTEXT)
    with pytest.raises(SpecError, match="no tokens"):
        read_passage(model, tokenizer, text="")
    with pytest.raises(SpecError, match="64 is what can be read"):
        read_passage(model, tokenizer, text="ab", room=64)
    one = read_passage(model, tokenizer, text="a")
    with pytest.raises(SpecError, match="has 1 token, expected at least 2"):
        token_losses(model, one, keep=full_keep(model))
    with pytest.raises(SpecError, match="has 1 token, expected at least 2"):
        routing(model, one)


# --- losses -----------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_token_losses(tokenizer: Any, family: str) -> None:
    """Cross entropies of the dense logits, and of a model with the columns zeroed."""
    model = model_of(family)
    keep = random_keep(model)
    passage = read_passage(model, tokenizer, text=TEXT)
    steps: list[tuple[int, int]] = []

    found = token_losses(
        model, passage, keep=keep, progress=lambda *step: steps.append(step)
    )

    for column, twin in (
        ("dense_nll", model),
        ("pruned_nll", zeroed_twin(model, keep)),
    ):
        log_probs = logits_of(twin, passage.ids)[0].log_softmax(-1)
        expected = [
            -float(log_probs[place - 1, passage.ids[0, place]])
            for place in range(1, len(passage.tokens))
        ]
        assert np.isnan(found[column].iloc[0])
        np.testing.assert_allclose(
            found[column].iloc[1:], expected, **tolerance(family)
        )
    assert (found["delta_nll"].abs().iloc[1:] > 1e-6).all()
    assert found["delta_nll"].equals(found["pruned_nll"] - found["dense_nll"])
    assert found["token"].tolist() == list(passage.tokens)
    assert steps == [(1, 2), (2, 2)]


def test_token_losses_with_other_columns(tokenizer: Any) -> None:
    """Columns that stand for W_down are the pruned model's, not the dense one's."""
    model = model_of("qwen2_moe")
    keep = random_keep(model)
    passage = read_passage(model, tokenizer, text=TEXT)
    plain = token_losses(model, passage, keep=keep)
    layer = find_experts(model)[0]
    downs = {layer.layer: 2 * layer.down.detach()}
    found = token_losses(model, passage, keep=keep, downs=downs)
    pd.testing.assert_series_equal(found["dense_nll"], plain["dense_nll"])
    assert (found["pruned_nll"] != plain["pruned_nll"]).iloc[1:].all()


# --- continuations ----------------------------------------------------------------


@pytest.mark.parametrize("family", ["qwen2_moe", "gpt_oss"])
def test_continuations(tokenizer: Any, family: str) -> None:
    """One token after the other, each the most probable of a forward without cache."""
    model = model_of(family, eos_token_id=None)
    model.generation_config.repetition_penalty = 3.0  # of the checkpoint: not wanted
    keep = random_keep(model)
    prompt = read_passage(model, tokenizer, text="the north", room=9)
    steps: list[tuple[int, int]] = []
    texts = []
    for mask, twin in ((None, model), (keep, zeroed_twin(model, keep))):
        ids = prompt.ids
        for _ in range(9):
            ids = torch.cat([ids, logits_of(twin, ids)[:, -1:].argmax(-1)], dim=1)
        found = continue_text(
            model,
            tokenizer,
            prompt=prompt,
            n_tokens=9,
            keep=mask,
            progress=lambda *step: steps.append(step),
        )
        wanted = ids[0, prompt.ids.shape[1] :].tolist()
        assert found["token_id"].tolist() == wanted
        assert found["step"].tolist() == list(range(9))
        assert "".join(found["token"]) == tokenizer.decode(ids[0])[len("the north") :]
        texts.append(wanted)
    assert texts[0] != texts[1]
    assert steps == 2 * [(done, 9) for done in range(1, 10)]


def test_a_continuation_ends_with_the_text(tokenizer: Any) -> None:
    """The model's end of text is the last token that is written."""
    model = model_of("qwen2_moe")
    prompt = read_passage(model, tokenizer, text="the north", room=9)
    first = continue_text(model, tokenizer, prompt=prompt, n_tokens=1)["token_id"][0]
    model.generation_config.eos_token_id = int(first)
    found = continue_text(model, tokenizer, prompt=prompt, n_tokens=9)
    assert found["token_id"].tolist() == [first]


def test_a_continuation_can_be_ended(tokenizer: Any) -> None:
    """What the progress callback raises ends it, and the model is as it was."""
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
    with pytest.raises(SpecError, match="n_tokens is 0"):
        continue_text(model, tokenizer, prompt=prompt, n_tokens=0)


# --- who serves a token -----------------------------------------------------------


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


def test_routing_is_the_routers_own(tokenizer: Any) -> None:
    """Of qwen2_moe: the largest two of the softmax of x · W_routerᵀ, in every layer."""
    model = model_of("qwen2_moe", norm_topk_prob=False)
    passage = read_passage(model, tokenizer, text=TEXT)
    calls = experts_calls(model, passage.ids)
    found = routing(model, passage).set_index(["layer", "position"])
    for number, (x, _, _) in calls.items():
        weight = model.model.layers[number].mlp.gate.weight.detach()
        for place in range(len(passage.tokens)):
            shares = (x[place] @ weight.T).softmax(-1)
            p, experts = shares.topk(2)
            own = found.loc[(number, place)]
            assert own["expert"].tolist() == experts.tolist()
            # the family's router takes its softmax in float32
            np.testing.assert_allclose(own["p"], p, **SINGLE)


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


def test_a_token_is_served_by_all_its_atoms(tokenizer: Any) -> None:
    """Asked for more atoms than there are, the shares of all add up to one."""
    model = model_of("qwen2_moe")
    passage = read_passage(model, tokenizer, text=TEXT)
    found = atoms_of_token(model, passage, layer=0, position=0, n=1000)
    assert len(found) == 2 * find_experts(model)[0].d_inter
    assert found["share"].sum() == pytest.approx(1)


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


# --- what an atom answers to ------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_top_contexts(
    tokenizer: Any, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The largest |h| of all, found batch by batch, with the text around each."""
    monkeypatch.setattr("heapr_lab.evaluation.activations.TOKENS_AT_ONCE", 2 * 11)
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


def test_of_equal_activations_the_first(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An atom that is never active shows the first tokens of its expert."""
    monkeypatch.setattr("heapr_lab.evaluation.activations.TOKENS_AT_ONCE", 2 * 11)
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


def test_the_end_of_the_path_is_a_frame(tokenizer: Any, tmp_path: Path) -> None:
    """Every trace can be written to a table as it is."""
    model = model_of("qwen2_moe")
    passage = read_passage(model, tokenizer, text=TEXT)
    windows = CalibrationSet.from_ids(tiny_ids())
    asked: dict[str, Any] = {"layer": 0, "expert": 0, "atom": 0}
    for frame in (
        token_losses(model, passage, keep=full_keep(model)),
        routing(model, passage),
        atoms_of_token(model, passage, layer=0, position=1),
        top_contexts(model, windows, tokenizer=tokenizer, **asked),
    ):
        frame.to_parquet(tmp_path / "trace.parquet")
        assert frame.index.equals(pd.RangeIndex(len(frame)))
