"""The bundled model is what the repository says of it."""

import re

import pytest

from heapr_lab.storage import files, paths

FOLDER = paths.lab_model_dir()
MEGABYTE = 1_000_000


def test_the_weights_are_small() -> None:
    """One safetensors file in bfloat16, at most 16 MB."""
    found = list(FOLDER.glob("*.safetensors"))
    assert len(found) == 1
    assert found[0].stat().st_size <= 16 * MEGABYTE
    assert files.read_json(FOLDER / "config.json")["dtype"] == "bfloat16"


def test_no_expert_is_idle() -> None:
    """On held-out text every routed expert has at least a quarter of its fair share."""
    loads = files.read_json(FOLDER / "training.json")["evaluation"]["expert_load"]
    pooled = {row["corpus"]: row for row in loads}["all of them"]
    assert pooled["smallest"] >= 0.25


def test_the_card_says_what_was_measured() -> None:
    """Every loss of training.json stands in the card."""
    training = files.read_json(FOLDER / "training.json")
    card = (FOLDER / "README.md").read_text()
    losses = training["evaluation"]["losses"]
    assert {row["corpus"] for row in losses} == set(training["mixture"])
    for row in losses:
        line = rf"\| {re.escape(row['corpus'])} \| {row['split']} \|.*"
        found = re.search(line, card)
        assert found is not None
        assert float(found[0].split("|")[-2]) == pytest.approx(row["perplexity"])
