"""The bundled model is what the repository says of it."""

import re

import pytest

from heapr_lab.storage import files, paths

FOLDER = paths.lab_model_dir()


@pytest.mark.parametrize(
    ("recipe", "megabytes"),
    [("bundled", 16), ("unbalanced", 10), ("fine", 10), ("upcycled", 10)],
)
def test_the_weights_are_small(recipe, megabytes):
    """One safetensors file in bfloat16, so that it can be in the repository."""
    folder = paths.lab_model_dir(recipe)
    (file,) = folder.glob("*.safetensors")
    assert file.stat().st_size <= megabytes * 1_000_000
    assert files.read_json(folder / "config.json")["dtype"] == "bfloat16"


@pytest.mark.parametrize(
    ("recipe", "share"), [("bundled", 0.25), ("fine", 0.05), ("upcycled", 0.25)]
)
def test_no_expert_is_idle(recipe, share):
    """On held-out text every routed expert has this part of its fair share."""
    assert pooled_load(recipe)["smallest"] >= share


def test_the_card_says_what_was_measured():
    """Every loss of training.json stands in the card."""
    training = files.read_json(FOLDER / "training.json")
    card = (FOLDER / "README.md").read_text()
    losses = training["evaluation"]["losses"]
    assert {row["corpus"] for row in losses} == set(training["mixture"])
    for row in losses:
        line = rf"\| {re.escape(row['corpus'])} \| {row['split']} \|.*"
        match = re.search(line, card)
        assert float(match[0].split("|")[-2]) == pytest.approx(row["perplexity"])


# --- the models to judge on -------------------------------------------------------


def pooled_load(recipe: str) -> dict[str, float]:
    """Smallest, median and largest load over all corpora, on held-out text."""
    training = files.read_json(paths.lab_model_dir(recipe) / "training.json")
    loads = training["evaluation"]["expert_load"]
    return {row["corpus"]: row for row in loads}["all of them"]


def test_the_unbalanced_model_is_unbalanced():
    """A few experts get most tokens, some less than a twentieth of their share."""
    load = pooled_load("unbalanced")
    assert load["largest"] >= 4 * load["median"]
    assert load["smallest"] < 0.05
