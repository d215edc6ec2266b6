"""What is copied as Python prunes what the panel shows: it is run on a tiny model."""

from dataclasses import fields
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from heapr_lab.importance.table import ImportanceTable
from heapr_lab.pruning.masks import KeepMask
from heapr_lab.pruning.options import Selection
from heapr_lab.pruning.selection import select
from heapr_lab.recipes.describing import python_of_model, python_of_table
from heapr_lab.recipes.export import write_checkpoint
from heapr_lab.recipes.making import make
from heapr_lab.recipes.weights import MASKED, WeightRecipe
from heapr_lab.text.calibration_spec import Calibration
from heapr_lab.workbench.settings import Opening, Setting
from heapr_lab.workbench.workbench import open_workbench

OTHER: dict[str, dict[str, Any]] = {
    "ratio": {"ratio": 0.29},
    "estimator": {"estimator": "fisher"},
    "scope": {"scope": "layer"},
    "granularity": {"granularity": "expert"},
    "structure": {"structure": "per_layer"},
    "multiple": {"structure": "aligned", "multiple": 4},
    "of": {"of": "model", "ratio": 0.1},
    "exclude_layers": {"exclude_layers": (0,)},
    "min_atoms": {"min_atoms": 3},
    "protect_unrouted": {"protect_unrouted": True},
    "estimator_options": {
        "estimator": "camera", "scope": "layer", "estimator_options": {"alpha": 0.5}
    },
}  # fmt: skip
"""Settings by field of a selection, in which that field is not the default."""
CALIBRATION: dict[str, Any] = {
    "n_sequences": 3, "seq_len": 16, "seed": -5, "own_text": 0.5
}  # fmt: skip
OPENING: dict[str, Any] = {
    "profile": "small", "seq_len": 32, "device": "cpu", "dtype": "bfloat16",
    "stream": True, "host_memory": "1GB",
}  # fmt: skip
"""What each field is given that has a default."""


@pytest.fixture
def inside(root, tmp_path, monkeypatch) -> Path:
    """An empty folder to run code in, with names that Python must quote."""
    (tmp_path / "a 'moe'").symlink_to(root / "moe")
    (tmp_path / "it's $text.txt").symlink_to(root / "text.txt")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def opened(**options: Any) -> Opening:
    """The tiny model, opened with little text."""
    return Opening.of("a 'moe'", **{"profile": "small"} | options)


def texts(**fields_: Any) -> Calibration:
    """The tiny text."""
    return Calibration("it's $text.txt", **fields_)


def mask_of(code: str) -> KeepMask:
    """The mask that the code makes, which is run."""
    names: dict[str, Any] = {}
    exec(code, names)
    keep = names["keep"]
    assert isinstance(keep, KeepMask)
    return keep


def same_mask(opening: Opening, calibration: Calibration, selection: Selection) -> str:
    """The code, after it has pruned as the objects do."""
    bench = open_workbench(opening.model, **opening.given())
    expected = bench.keep(Setting(selection, calibration))
    assert 0 < expected.n_removed < expected.n_atoms
    code = python_of_model(opening, calibration, selection, MASKED, folder="smaller")
    before_files = code.partition("smaller =")[0]
    assert mask_of(before_files).fingerprint == expected.fingerprint
    return code


def test_the_tables_here_have_every_field():
    """A field added to a selection, a calibration or an opening is tried here."""
    assert list(OTHER) == [field.name for field in fields(Selection)]
    for kind, given in ((Calibration, CALIBRATION), (Opening, OPENING)):
        assert list(given) == [field.name for field in fields(kind)][1:]


@pytest.mark.parametrize("name", OTHER)
def test_each_field_of_a_selection(name, inside):
    """The code selects as it says."""
    selection = Selection(**{"ratio": 0.3} | OTHER[name])
    assert getattr(selection, name) != getattr(Selection(0.3), name)
    assert f"{name}=" in same_mask(opened(), texts(), selection)


def test_every_field_of_a_calibration(inside):
    """The same windows are drawn, and of as many tokens."""
    code = same_mask(opened(), texts(**CALIBRATION), Selection(0.5))
    assert all(f"{key}={value!r}" in code for key, value in CALIBRATION.items())
    assert "corpus=" in code


def test_every_option_of_a_workbench(inside):
    """The model is opened again as it was."""
    code = same_mask(opened(**OPENING), texts(), Selection(0.5))
    assert all(f"{key}={value!r}" in code for key, value in OPENING.items())


def test_a_table_alone(folder):
    """Its file is named; fractions and long decimals are exact."""
    file = folder / "table.parquet"
    table = ImportanceTable.read(file)
    for selection in (
        Selection(0.3),
        Selection(0.3, "camera", "layer"),
        Selection(Fraction(1, 3)),  # type: ignore[arg-type]
        Selection(Decimal("0.12345678901234567890123")),  # type: ignore[arg-type]
    ):
        keep = mask_of(python_of_table(file, selection))
        assert keep.fingerprint == select(table, selection).fingerprint
        assert keep.settings["ratio"] == select(table, selection).settings["ratio"]


@pytest.mark.parametrize(
    ("weights", "after"),
    [("compress", False), ("compensated", True), ("unchanged", False)],
)
def test_checkpoints_have_the_same_weights(weights, after, inside, bench):
    """The code writes the atoms and the numbers that Export writes."""
    own_text = 0.5 if weights == "compress" else 0.0
    calibration = texts(own_text=own_text)
    recipe = WeightRecipe(weights, own_text, heal=4 * after)
    selection = Selection(0.4, "camera", "layer")
    code = python_of_model(opened(), calibration, selection, recipe, folder="a folder")
    keep = mask_of(code)
    assert keep == KeepMask.read("a folder/heapr_keep.parquet")
    setting = Setting(selection, calibration)
    table = bench.table_of(setting)
    made = make(bench, table, setting, recipe)
    assert made.keep.fingerprint == keep.fingerprint
    write_checkpoint(inside / "exported", made, bench, corpora=())
    saved, exported = (
        load_file(inside / name / "model.safetensors")
        for name in ("a folder", "exported")
    )
    assert saved.keys() == exported.keys()
    for name, tensor in saved.items():
        assert (tensor == exported[name]).all(), name
