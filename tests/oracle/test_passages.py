"""Each trace of a text is what plain loops over the model's own weights give."""

import numpy as np
import pandas as pd
import pytest
import torch
from heard import Heard
from keeps import full_keep, logits_of, random_keep, zeroed_twin
from text_models import FAMILIES, TEXT, model_of, tolerance

from heapr_lab.errors import SpecError
from heapr_lab.inspection.passages import (
    continue_text,
    read_passage,
    token_losses,
    token_texts,
)
from heapr_lab.models.experts import find_experts
from heapr_lab.models.hooks import IMPLEMENTATION

CONTEXT = 64


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
