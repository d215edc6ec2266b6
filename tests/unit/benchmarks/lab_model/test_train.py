"""Training the lab model: resumable to the bit, balanced, on schedule."""

import dataclasses
import json
import math
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from heard import Heard, stop_at
from safetensors.torch import load_file
from stored_tensors import same_tensors

from benchmarks.lab_model import train
from benchmarks.lab_model.recipes import TrainSpec
from benchmarks.lab_model.run_folder import begin_from
from benchmarks.lab_model.train import (
    balance_losses,
    build_lab_model,
    learning_rate_at,
    train_bundled,
    train_lab_model,
)
from heapr_lab.errors import CacheError, SpecError
from heapr_lab.models.experts import find_experts
from heapr_lab.models.loading import load_model
from heapr_lab.storage import cache

Mixture = dict[str, float]
SPEC = TrainSpec(
    d_vocab=300,
    d_model=16,
    d_inter=8,
    d_shared=8,
    n_layers=2,
    n_experts=4,
    top_k=2,
    n_heads=2,
    seq_len=16,
    batch_size=2,
    n_steps=8,
    warmup_steps=2,
    decay_fraction=0.25,
    n_threads=1,
)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory) -> Mixture:
    """Two small files of words and of numbers, three to one."""
    folder = tmp_path_factory.mktemp("corpora")
    words, numbers = folder / "words.txt", folder / "numbers.txt"
    words.write_text("\n\n".join(f"the {w} of the house" for w in dir(list)))
    numbers.write_text("\n\n".join(str(n * n) for n in range(300)))
    return {str(words): 0.75, str(numbers): 0.25}


def losses_of(
    folder: Path,
    mixture: Mixture,
    *,
    on_step: Callable[..., None] | None = None,
    decay_mixture: Mixture | None = None,
    **changes: Any,
) -> dict[int, float]:
    """The loss of each step of a run in `folder`, whose model is in `out` there."""
    heard = Heard()
    train_lab_model(
        folder / "out",
        spec=dataclasses.replace(SPEC, **changes),
        work=folder,
        mixture=mixture,
        decay_mixture=decay_mixture,
        on_step=on_step or heard,
    )
    return {step: loss for step, _n_steps, loss in heard}


# --- training ---------------------------------------------------------------------


@pytest.mark.parametrize("name", ["out", "work"])
def test_two_runs_do_not_share_a_folder(tmp_path, mixture, name):
    """Neither for model nor state: the second is refused."""
    folders = {"out": tmp_path / "out", "work": tmp_path / "work"}
    refused = pytest.raises(SpecError, match="is being written by another")
    with cache.writing(folders[name]), refused:
        train_lab_model(**folders, spec=SPEC, mixture=mixture)


def test_a_resumed_run_is_the_uninterrupted_run(tmp_path, mixture, monkeypatch):
    """Stopped twice and resumed, weights and optimizer state are equal to the bit."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    losses = losses_of(whole, mixture)
    monkeypatch.setattr(train, "_SAVE_SECONDS", -1.0)  # after every step
    for step in (3, 6):
        with pytest.raises(KeyboardInterrupt):
            losses_of(parts, mixture, on_step=stop_at(step))
    again = losses_of(parts, mixture)
    assert sorted(losses) == list(range(1, 9))
    # Step 6 was not saved when the run stopped in it, so it is done again.
    assert again == {step: losses[step] for step in (6, 7, 8)}
    for name in ("state.safetensors", "out/model.safetensors"):
        got, expected = load_file(parts / name), load_file(whole / name)
        torch.testing.assert_close(got, expected, rtol=0, atol=0)


def test_the_written_model_is_the_trained_one(tmp_path, mixture):
    """A stock checkpoint in bf16 with its tokenizer, and what it was trained on.

    Who may read one file of it may read all.
    """
    losses_of(tmp_path, mixture)
    out = tmp_path / "out"
    assert len({stat.S_IMODE(path.stat().st_mode) for path in out.iterdir()}) == 1
    model, tokenizer = load_model(out, device="cpu", dtype="bfloat16")
    assert type(model).__name__ == "Qwen2MoeForCausalLM"
    trained = load_file(tmp_path / "state.safetensors")
    W = model.model.layers[0].mlp.experts.down_proj
    master = trained["weight.model.layers.0.mlp.experts.down_proj"]
    assert torch.equal(W, master.to(torch.bfloat16))
    untrained = build_lab_model(SPEC).model.layers[0].mlp.experts.down_proj
    assert not torch.equal(master, untrained)
    text = "the append of the house"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    training = json.loads((out / "training.json").read_text())
    assert training["mixture"] == mixture
    assert training["n_tokens"] == 8 * 2 * 16
    n_texts = [corpus["n_texts"] for corpus in training["corpora"]]
    assert n_texts == [len(dir(list)), 300]


def test_a_run_goes_on_from_an_earlier_model(tmp_path, mixture):
    """It begins with that model's weights and tokenizer, and says so."""
    losses_of(tmp_path, mixture)
    first, work = tmp_path / "out", tmp_path / "w2"
    options = {"mixture": mixture, "start_from": first}
    spec = dataclasses.replace(SPEC, seed=1, learning_rate=0.0, precision="bfloat16")
    second = train_lab_model(tmp_path / "second", spec=spec, work=work, **options)
    same_tensors(first, second)  # nothing is learned at a rate of zero
    for name in (work, second):
        tokenizer = (name / "tokenizer.json").read_text()
        assert tokenizer == (first / "tokenizer.json").read_text()
    training = json.loads((second / "training.json").read_text())
    assert training["went_on_from"] == json.loads((first / "training.json").read_text())
    wider = dataclasses.replace(SPEC, d_inter=16)
    with pytest.raises(CacheError, match="other shapes"):
        train_lab_model(tmp_path / "no", spec=wider, work=tmp_path / "w3", **options)


def test_bundled_runs_follow_each_other(tmp_path, monkeypatch, mixture):
    """Two runs with a folder each; what stays is the second one's model."""
    monkeypatch.setattr(train, "MIXTURE", mixture)
    monkeypatch.setattr(train, "DECAY_MIXTURE", mixture)
    runs = [SPEC, dataclasses.replace(SPEC, seed=1, n_steps=4)]
    heard, work = Heard(), tmp_path / "work"
    train_bundled(tmp_path / "out", work=work, runs=runs, on_step=heard)
    assert [step for step, *_ in heard] == [*range(1, 9), *range(1, 5)]
    training = json.loads((tmp_path / "out" / "training.json").read_text())
    assert training["spec"]["n_steps"] == 4
    assert training["went_on_from"]["spec"]["n_steps"] == 8
    assert (work / "model-1" / "model.safetensors").exists()


def test_either_precision_learns_alike(tmp_path, mixture):
    """Parameters stay float32; bfloat16 arithmetic moves the loss by its rounding."""
    losses = [
        list(losses_of(tmp_path / name, mixture, precision=name).values())
        for name in ("float32", "bfloat16")
    ]
    np.testing.assert_allclose(*losses, rtol=5e-3)
    state = load_file(tmp_path / "bfloat16" / "state.safetensors")
    assert state.pop("other.step").item() == SPEC.n_steps
    assert {tensor.dtype for tensor in state.values()} == {torch.float32}


@pytest.mark.parametrize("family", ["deepseek_v2", "gpt_oss"])
def test_other_families_are_trained(tmp_path, mixture, family):
    """Their routers' logits are what is balanced."""
    losses_of(tmp_path, mixture, family=family, n_steps=1)


def test_learning_lowers_the_loss(tmp_path, mixture):
    """It falls from ln 300 = 5.7 nats."""
    losses = list(losses_of(tmp_path, mixture, n_steps=60).values())
    assert losses[0] == pytest.approx(math.log(300), abs=0.3)
    assert sum(losses[-5:]) / 5 < losses[0] - 1


def test_a_run_with_other_settings_is_refused(tmp_path, mixture):
    """Seed, mixture or corpora changed: not resumed; longer, or on 2 threads: is."""
    losses_of(tmp_path, mixture)
    state = (tmp_path / "state.safetensors").read_bytes()
    words, numbers = mixture
    for seed, shares in (
        (1, mixture),
        (0, {words: 0.5, numbers: 0.5}),
        (0, {words: 1.0}),
    ):
        with pytest.raises(CacheError, match="unfinished run with other settings"):
            losses_of(tmp_path, shares, seed=seed)
    assert (tmp_path / "state.safetensors").read_bytes() == state
    longer = losses_of(tmp_path, mixture, n_steps=10, n_threads=2)
    torch.set_num_threads(1)
    assert list(longer) == [9, 10]


def test_the_decay_has_a_mixture_of_its_own(tmp_path, mixture):
    """The last 2 of 8 steps decay: only their losses depend on the decay mixture.

    At a rate of zero, losses differ as the batches of the steps do.
    """
    words, numbers = mixture
    late = {"same": None, "numbers": {words: 0.0, numbers: 1.0}}
    runs = [
        losses_of(tmp_path / name, mixture, decay_mixture=shares, learning_rate=0.0)
        for name, shares in late.items()
    ]
    same, other = ([*losses.values()] for losses in runs)
    assert len(set(same)) == 8
    assert same[:6] == other[:6]
    assert same[6:] != other[6:]


# --- losses and schedule ----------------------------------------------------------


def test_the_balance_loss_by_hand():
    """Each of 4 experts chosen once with P = 1/4: 4 · 4 · (1/4 · 1/4) = 1.

    All to expert 0 with probability 1: E·(1·1) = 4; with top-2, f_0 = 1/2: 2. Layers
    that collapse on different experts do not make up for each other. Its gradient
    lowers the logits of an expert that gets too much.
    """
    even, one = torch.eye(4) * 3, torch.tensor([[100.0, 1.0, 0.0, -1.0]]).expand(6, 4)
    layers = [one.roll(expert, 1) for expert in range(4)]
    for given, top_k, wanted in (([even], 1, 1), ([one], 1, 4), ([one], 2, 2),
                                 (layers, 1, 4)):  # fmt: skip
        loss, _ = balance_losses(given, top_k=top_k)
        assert loss.item() == pytest.approx(wanted)
    logits = torch.tensor([[2.0, 0.0, 0.0, 0.0]], requires_grad=True)
    balance_losses([logits], top_k=1)[0].backward()
    assert logits.grad[0, 0] > 0 > logits.grad[0, 1]


def test_the_z_loss_by_hand():
    """Logits 0 for 4 experts: (ln 4)²; a layer with ln-partition 2 beside it: mean."""
    zero = torch.zeros(3, 4)
    two = torch.full((3, 4), 2 - math.log(4))
    z = balance_losses([zero, two], top_k=1)[1].item()
    assert z == pytest.approx((math.log(4) ** 2 + 4) / 2)


def test_the_learning_rate_warms_up_stays_and_decays():
    """Warmup 4 of 100 steps, decay over the last 20, by hand."""
    spec = TrainSpec(n_steps=100, warmup_steps=4, decay_fraction=0.2, learning_rate=1.0)
    rates = [learning_rate_at(step, spec) for step in range(100)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert set(rates[4:81]) == {1.0}
    assert rates[81:] == pytest.approx([step / 20 for step in range(19, 0, -1)])


def test_upcycled_experts_are_copies_with_noise(tmp_path, mixture):
    """All else is as it was, and the router is a new one."""
    losses_of(tmp_path, mixture, family="qwen3_moe", n_steps=2, n_experts=1, top_k=1)
    earlier = tmp_path / "out"
    dense = load_file(earlier / "model.safetensors")
    model = build_lab_model(dataclasses.replace(SPEC, family="qwen3_moe"))
    fresh = {name: weight.clone() for name, weight in model.state_dict().items()}
    begin_from(tmp_path, earlier, model)
    (layer, _) = find_experts(model)
    for expert in range(4):
        copied = dense["model.layers.0.mlp.experts.0.down_proj.weight"].float()
        noise = layer.down[expert] - copied
        expected = 0.02 * copied.std().item()
        assert noise.std().item() == pytest.approx(expected, rel=0.3)
    name = "model.layers.0.mlp.gate.weight"
    assert torch.equal(model.state_dict()[name], fresh[name])
    name = "model.embed_tokens.weight"
    assert torch.equal(model.state_dict()[name], dense[name].float())
