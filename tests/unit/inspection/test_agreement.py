"""Agreement of what two models write, against loops that write token by token."""

from typing import Any

import pytest
import torch
from families import tiny_ids, tiny_model
from keeps import logits_of, random_keep
from sacrebleu.metrics import CHRF
from tiny_folder import D_VOCAB
from torch import nn
from transformers import GenerationConfig

from heapr_lab.errors import SpecError
from heapr_lab.inspection.agreement import evaluate_agreement
from heapr_lab.pruning.surgery import prune
from heapr_lab.refinement.generation import continuations

PROMPTS = tiny_ids(n_sequences=5)[:, :6]
N_NEW = 7


def model_of(family: str = "qwen2_moe", *, end: int | None = None) -> Any:
    """A tiny model whose texts end with token `end`, if any."""
    model: Any = tiny_model(family, vocab_size=D_VOCAB)
    model.generation_config.eos_token_id = end
    return model


def by_loop(model: nn.Module, prompt: torch.Tensor, end: int | None) -> list[int]:
    """The most probable tokens, one forward pass for each."""
    ids = prompt[None]
    for _ in range(N_NEW):
        new = logits_of(model, ids)[:, -1].argmax(-1, keepdim=True)
        ids = torch.cat([ids, new], dim=1)
        if new.item() == end:
            break
    return [int(token) for token in ids[0, len(prompt) :]]


def written(model: nn.Module) -> list[list[int]]:
    """What `continuations` continues each prompt with."""
    return [
        row.tolist() for row in continuations(model, PROMPTS, n_new=N_NEW, batch_size=2)
    ]


@pytest.mark.parametrize("family", ["qwen2_moe", "deepseek_v2", "gpt_oss"])
def test_continuations_are_those_of_a_loop(family: str) -> None:
    """Also of a pruned model, in batches, and where texts end."""
    model = model_of(family)
    for one in (model, prune(model, random_keep(model))):
        found = written(one)
        assert found == [by_loop(one, prompt, None) for prompt in PROMPTS]
        end = found[0][2]
        one.generation_config.eos_token_id = end
        found = written(one)
        assert found == [by_loop(one, prompt, end) for prompt in PROMPTS]
        assert min(map(len, found)) < N_NEW
        one.generation_config.eos_token_id = None


def test_agreement_by_hand(tokenizer: Any) -> None:
    """Every number from continuations and predictions of loops."""
    dense = model_of()
    pruned = prune(dense, random_keep(dense))
    found = evaluate_agreement(dense, pruned, PROMPTS, tokenizer, n_new=N_NEW)
    same, shares, texts = [], [], ([], [])
    for prompt in PROMPTS:
        wanted, own = (by_loop(m, prompt, None) for m in (dense, pruned))
        ids = torch.cat([prompt, torch.tensor(wanted)])
        predicted = logits_of(pruned, ids[None])[0].argmax(-1).tolist()
        same += [a == b for a, b in zip(predicted[5:], wanted, strict=False)]
        until = [a == b for a, b in zip(wanted, own, strict=True)] + [False]
        shares.append(until.index(False) / N_NEW)
        for text, ids in zip(texts, (wanted, own), strict=True):
            text.append(tokenizer.decode(ids, skip_special_tokens=True))
    assert len(same) == 5 * N_NEW
    assert found.teacher_forced == pytest.approx(sum(same) / len(same))
    spread = torch.tensor(shares)
    assert found.until_difference == pytest.approx(float(spread.mean()))
    assert found.stderr == pytest.approx(float(spread.std() / 5**0.5))
    assert found.chrf == CHRF().corpus_score(texts[1], [texts[0]]).score
    assert 0 < found.until_difference < 1


def test_a_model_agrees_with_itself(tokenizer: Any) -> None:
    """Wholly, also where texts end at once."""
    model = model_of(end=3)
    found = evaluate_agreement(model, model, PROMPTS, tokenizer, n_new=N_NEW)
    assert (found.teacher_forced, found.until_difference) == (1.0, 1.0)
    assert "100.00%" in found._repr_html_()


def test_progress_counts_tokens_of_both_models(tokenizer: Any) -> None:
    """Step by step and batch by batch, of the dense model, then of the pruned one."""
    seen: list[tuple[int, int]] = []
    model = model_of()
    evaluate_agreement(
        model, model, PROMPTS, tokenizer, n_new=2, batch_size=3,
        progress=lambda *done: seen.append(done),
    )  # fmt: skip
    steps = [3, 6, 6, 8, 10, 10, 13, 16, 16, 18, 20, 20]
    assert seen == [(done, 20) for done in steps]


def test_settings_of_a_checkpoint_change_nothing() -> None:
    """Cut-offs, penalties and limits in its `generation_config`, which stays."""
    model = model_of()
    model.generation_config = GenerationConfig()

    def drawn() -> list[list[int]]:
        return [
            row.tolist()
            for t in (0.0, 1.0)
            for row in continuations(model, PROMPTS, n_new=N_NEW, temperature=t)
        ]

    plain = drawn()
    for changed in (
        {"min_p": 0.9}, {"no_repeat_ngram_size": 1}, {"typical_p": 0.1}, {"top_k": 1},
        {"repetition_penalty": 3.0}, {"num_beams": 3}, {"max_length": 7},
        {"suppress_tokens": plain[0]}, {"bad_words_ids": [plain[0][:1]]},
        {"guidance_scale": 2.0}, {"max_time": 1e-9}, {"return_dict_in_generate": True},
    ):  # fmt: skip
        settings = GenerationConfig(**changed)
        model.generation_config = settings
        assert drawn() == plain, changed
        assert model.generation_config is settings


def test_samples_are_those_of_a_seed() -> None:
    """And leave the random numbers of the process as they were."""
    model = model_of()
    torch.manual_seed(7)
    before = torch.random.get_rng_state()
    draws = [
        continuations(model, PROMPTS, n_new=9, temperature=1.0, seed=seed)
        for seed in (1, 1, 2)
    ]
    assert torch.equal(torch.random.get_rng_state(), before)
    one, two, other = (torch.stack(rows).tolist() for rows in draws)
    assert one == two != other


def test_samples_follow_the_models_distribution() -> None:
    """First tokens of many draws, at two temperatures, against the probabilities."""
    model = model_of()
    prompts = PROMPTS[:1].expand(4000, -1)
    logits = logits_of(model, PROMPTS[:1])[0, -1].double()
    for temperature in (1.0, 0.5):
        rows = continuations(
            model, prompts, n_new=1, temperature=temperature, batch_size=4000
        )
        share = torch.bincount(torch.cat(rows), minlength=D_VOCAB) / 4000
        expected = (logits / temperature).softmax(-1)
        error = (share - expected).abs()
        assert bool((error <= 5 * (expected / 4000).sqrt() + 1e-3).all())


def test_what_cannot_be_continued_is_refused(tokenizer: Any) -> None:
    """No tokens, unknown tokens, and numbers that mean nothing."""
    model = model_of()
    with pytest.raises(SpecError, match="n_new"):
        continuations(model, PROMPTS, n_new=0)
    with pytest.raises(SpecError, match="batch_size"):
        continuations(model, PROMPTS, n_new=1, batch_size=0)
    with pytest.raises(SpecError, match="not in the model's vocab"):
        continuations(model, PROMPTS + D_VOCAB, n_new=1)
