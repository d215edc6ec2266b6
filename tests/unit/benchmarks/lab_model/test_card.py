"""The bundled model is what the repository says of it."""

import re

import pytest
import torch
from torch.nn.functional import normalize

from heapr_lab.models.experts import find_experts
from heapr_lab.models.loading import load_model
from heapr_lab.storage import files, paths

FOLDER = paths.lab_model_dir()
MEGABYTE = 1_000_000


@pytest.mark.parametrize(
    ("recipe", "megabytes"),
    [("bundled", 16), ("unbalanced", 10), ("fine", 10), ("upcycled", 10)],
)
def test_the_weights_are_small(recipe: str, megabytes: int) -> None:
    """One safetensors file in bfloat16, so that it can be in the repository."""
    folder = paths.lab_model_dir(recipe)
    (file,) = folder.glob("*.safetensors")
    assert file.stat().st_size <= megabytes * MEGABYTE
    assert files.read_json(folder / "config.json")["dtype"] == "bfloat16"


@pytest.mark.parametrize(
    ("recipe", "share"), [("bundled", 0.25), ("fine", 0.05), ("upcycled", 0.25)]
)
def test_no_expert_is_idle(recipe: str, share: float) -> None:
    """On held-out text every routed expert has this part of its fair share."""
    assert pooled_load(recipe)["smallest"] >= share


def test_the_card_says_what_was_measured() -> None:
    """Every loss of training.json stands in the card."""
    training = files.read_json(FOLDER / "training.json")
    card = (FOLDER / "README.md").read_text()
    losses = training["evaluation"]["losses"]
    assert {row["corpus"] for row in losses} == set(training["mixture"])
    for row in losses:
        line = rf"\| {re.escape(row['corpus'])} \| {row['split']} \|.*"
        match = re.search(line, card)
        assert match is not None
        assert float(match[0].split("|")[-2]) == pytest.approx(row["perplexity"])


# --- the models to judge on -------------------------------------------------------


def pooled_load(recipe: str) -> dict[str, float]:
    """Smallest, median and largest load over all corpora, on held-out text."""
    training = files.read_json(paths.lab_model_dir(recipe) / "training.json")
    loads = training["evaluation"]["expert_load"]
    return {row["corpus"]: row for row in loads}["all of them"]


def test_the_unbalanced_model_is_unbalanced() -> None:
    """A few experts get most tokens, some less than a twentieth of their share."""
    load = pooled_load("unbalanced")
    assert load["largest"] >= 4 * load["median"]
    assert load["smallest"] < 0.05


def test_upcycled_experts_still_point_the_same_way() -> None:
    """Far more than experts of a model from scratch, whose cosine is near 0."""
    upcycled, scratch = (_mean_cosine(name) for name in ("upcycled", "bundled"))
    assert upcycled >= 0.5
    assert scratch <= 0.1


def _mean_cosine(recipe: str) -> float:
    """The mean cosine between the weights of two experts of the same layer."""
    model, _ = load_model(str(paths.lab_model_dir(recipe)), device="cpu")
    means = []
    for layer in find_experts(model):
        weights = normalize(layer.down.detach().float().flatten(1), dim=1)
        pairs = weights @ weights.T
        means.append(pairs[~torch.eye(len(pairs), dtype=torch.bool)].mean())
    return float(torch.stack(means).mean())
