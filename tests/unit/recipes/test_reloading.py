"""What is written is loaded again before it gets its name."""

import contextlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from commands import manifest_of
from safetensors.torch import load_file
from stored_tensors import changed_tensors

from heapr_lab.checkpoints import save
from heapr_lab.errors import CacheError, SpecError
from heapr_lab.importance.table import ImportanceTable
from heapr_lab.models.backend import backend_of
from heapr_lab.models.loading import load_model
from heapr_lab.models.sources import read_source
from heapr_lab.progress import Progress, no_report
from heapr_lab.pruning.options import Selection
from heapr_lab.recipes import export
from heapr_lab.recipes.making import PruningResult, healing_of, make
from heapr_lab.recipes.weights import WeightRecipe
from heapr_lab.streaming import opening
from heapr_lab.streaming.opening import load_like
from heapr_lab.text.calibration_spec import Calibration
from heapr_lab.workbench.settings import Setting
from heapr_lab.workbench.workbench import Workbench, open_workbench

BOTH_LOSSES = r"is \d+\.\d{6} nats per token in place of"


def half(
    bench: Workbench, root: Path, *, structure: str = "ragged", **recipe: Any
) -> PruningResult:
    """Half of the model, and the weights of a recipe."""
    text = str(root / "text.txt")
    setting = Setting(Selection(0.5, structure=structure), Calibration(text))
    table = bench.importance(setting.calibration)
    return make(bench, table, setting, WeightRecipe(**recipe))


def write(
    root: Path, out: Path, *, weights: str = "unchanged", **options: Any
) -> dict[str, Any]:
    """Export half of the model; returns the manifest."""
    structure = options.pop("structure", "ragged")
    corpora = options.pop("corpora", [str(root / "text.txt")])
    bench: Workbench = open_workbench(str(root / "moe"), profile="small", **options)
    made = half(bench, root, structure=structure, weights=weights)
    export.write_checkpoint(out, made, bench, corpora=corpora)
    return manifest_of(out)


def test_a_training_is_kept_until_its_weights_are_written(bench, root):
    """By an error it is not forgotten; no other process has it meanwhile."""
    made = half(bench, root, heal=8)
    with contextlib.suppress(OSError), healing_of(bench, made) as healing:
        assert healing is not None
        healing[1].write_text("trained")
        second = healing_of(bench, made)
        with pytest.raises(SpecError, match="is being written by another process"):
            second.__enter__()
        raise OSError("the disk is full")
    with healing_of(bench, made) as again:
        assert again is not None
        assert again[1].read_text() == "trained"
    assert not again[1].exists()


def test_a_table_without_sizes_is_refused_before_a_training(bench, root, tmp_path):
    """The card needs them, and nothing slow is done for one that cannot be written."""
    made = half(bench, root, heal=8)
    made = replace(made, table=ImportanceTable.from_frame(made.table.frame))
    parts: list[str] = []

    def part(label: str, _unit: str) -> Progress:
        parts.append(label)
        return no_report

    with pytest.raises(SpecError, match="architecture"):
        export.write_checkpoint(tmp_path / "out", made, bench, corpora=(), part=part)
    assert parts == []


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"weights": "compensated"},
        {"structure": "uniform"},
        {"dtype": "float64"},
        {"dtype": "bfloat16"},
        {"stream": True},
    ],
    ids=str,
)
def test_the_card_says_what_was_compared(root, tmp_path, options):
    """Each structure, way of weights and dtype; ragged and float32 to every bit."""
    manifest = write(root, tmp_path / "out", **options)
    told = manifest["reloaded"]
    assert told.startswith("Δ nll = ")
    assert f"on 4 windows of {root / 'text.txt'}" in told
    if options.get("dtype") != "bfloat16":
        assert "Δ nll = 0.0000" in told
    assert f"| reloaded | {told} |" in (tmp_path / "out" / "README.md").read_text()


def damage(folder: Path) -> None:
    """Add a little to one matrix of one expert."""
    pairs = ((f, name) for f in folder.glob("*.safetensors") for name in load_file(f))
    path, name = next(pair for pair in pairs if "down_proj" in pair[1])
    with changed_tensors(path) as tensors:
        tensors[name] += 0.05


def cut(folder: Path) -> None:
    """Leave out the end of the file."""
    (path,) = folder.glob("*.safetensors")
    path.write_bytes(path.read_bytes()[:-64])


def change_written(monkeypatch: Any, change: Callable[[Path], None]) -> None:
    """Let something change the files once their weights are written."""
    save_tokenizer = save.save_tokenizer

    def changing(folder: Path, *args: Any, **options: Any) -> str:
        change(folder)
        return save_tokenizer(folder, *args, **options)

    monkeypatch.setattr(save, "save_tokenizer", changing)


@pytest.mark.parametrize(
    ("change", "message"), [(damage, BOTH_LOSSES), (cut, "cannot be loaded again")]
)
def test_files_that_are_wrong_leave_nothing(
    root, tmp_path, monkeypatch, change, message
):
    """The error has both losses, and there is neither folder nor partial folder."""
    change_written(monkeypatch, change)
    with pytest.raises(CacheError, match=message):
        write(root, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("structure", ["ragged", "uniform"])
def test_sliced_files_are_compared_with_the_mask(
    bench, root, tmp_path, monkeypatch, structure
):
    """A wrong tensor leaves nothing, not even a folder to resume from."""
    text, made = str(root / "text.txt"), half(bench, root, structure=structure)

    def write_slices(out: Path) -> dict[str, Any]:
        options: Any = {"base": "moe", "bench": bench, "corpora": [text]}
        export.slice_checkpoint(out, read_source(root / "moe"), made, **options)
        return manifest_of(out)

    told = write_slices(tmp_path / "out")
    assert told["reloaded"] == f"Δ nll = 0.0000 on 4 windows of {text}"
    assert set(told["perplexity"]) == {text}
    change_written(monkeypatch, damage)
    with pytest.raises(CacheError, match=BOTH_LOSSES):
        write_slices(tmp_path / "other")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_model_too_large_for_a_second_copy(root, tmp_path, monkeypatch):
    """It is written, and the card says that it was not checked, and why."""
    monkeypatch.setattr(opening, "free_memory", lambda _device: 1000)
    told = write(root, tmp_path / "out", stream=False)["reloaded"]
    assert told.startswith("not checked: a second copy of ")


def test_a_loss_that_is_no_number_is_another(root, tmp_path, monkeypatch):
    """NaN is not within any tolerance."""
    monkeypatch.setattr(export, "_loss_of", lambda *_args: float("nan"))
    with pytest.raises(CacheError, match="is nan nats"):
        write(root, tmp_path / "out")


def test_load_like(root):
    """The same dtype and place, in memory or streamed."""
    for options in ({"dtype": "float64"}, {"stream": True}, {}):
        model, _ = load_model(root / "moe", **options)
        again = load_like(root / "moe", model)
        assert again.dtype == model.dtype
        assert backend_of(again).runs_whole == ("stream" not in options)
        assert not again.training


def test_without_text_the_card_says_why_nothing_was_compared(root, tmp_path):
    """No corpus was asked for."""
    told = write(root, tmp_path / "out", corpora=[])["reloaded"]
    assert told == "not checked: no corpus to compare on"
