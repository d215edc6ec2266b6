"""What is saved and written: one number for all who ask, and files as their source."""

from dataclasses import fields
from pathlib import Path

import pytest
import torch
from commands import manifest_of, one_line, run, said, text_of
from families import tiny_model
from pressing import cancel, export, failed, panel_on
from stored_tensors import tensors_in
from tiny_folder import write_folder, write_model, write_text
from transformers import AutoModelForCausalLM

from heapr_lab.checkpoints import model_card
from heapr_lab.evaluation.perplexity import evaluate_perplexity
from heapr_lab.importance.table import ImportanceTable
from heapr_lab.models.sources import read_source, weights_bytes
from heapr_lab.panel.panel import Explorer
from heapr_lab.panel.session import PruningSession
from heapr_lab.pruning.options import Selection
from heapr_lab.recipes.export import savings
from heapr_lab.text.calibration_spec import Calibration
from heapr_lab.workbench.settings import Setting
from heapr_lab.workbench.workbench import Workbench, open_workbench

SEQ_LEN = 32
"""Tokens in each window of the commands."""


@pytest.fixture(scope="session")
def root(tmp_path_factory) -> Path:
    """A tiny model in bfloat16 in `moe`, a text, a table of windows of 32 tokens."""
    folder = tmp_path_factory.mktemp("export")
    write_model(folder / "moe", dtype=torch.bfloat16)
    write_text(folder / "text.txt")
    out = ("--out", folder / "table.parquet")
    run("score", folder / "moe", *text_of(folder), *out)
    return folder


def bench_of(root: Path) -> Workbench:
    """The model, loaded in float32, whose profile has windows of 64 tokens."""
    return open_workbench(str(root / "moe"), profile="small")


def panel_of(root: Path, bench: Workbench) -> Explorer:
    """The panel of the table, calibrated and evaluated on the text."""
    text = str(root / "text.txt")
    table = ImportanceTable.read(root / "table.parquet")
    session = PruningSession(table, workbench=bench, calibration=Calibration(text))
    return panel_on(session, (text,))


def test_a_manifest_says_how_to_make_it_again(root, tmp_path):
    """Its selection and calibration, read back, select the same atoms."""
    chosen = ("--ratio", 0.3, "--estimator", "fisher", "--n-sequences", 4)
    out = ("--out", tmp_path / "pruned")
    run("prune", root / "moe", *chosen, *text_of(root), *out)
    manifest = manifest_of(tmp_path / "pruned")
    of_selection = {field.name for field in fields(Selection)}
    chosen = {k: v for k, v in manifest["selection"].items() if k in of_selection}
    calibration = Calibration.from_dict(manifest["calibrated_on"])
    setting = Setting(Selection.from_dict(chosen), calibration)
    keep = bench_of(root).keep(setting)
    assert keep.fingerprint == manifest["keep_fingerprint"]
    assert setting.selection == Selection(0.3, "fisher")
    assert setting.calibration.n_sequences == 4


# --- operations ------------------------------------------------------------------


def test_all_who_ask_count_operations_alike(root, tmp_path):
    """Panel, command line, manifest and workbench have the paper's context."""
    bench = bench_of(root)
    panel = panel_of(root, bench)
    panel.controls.ratio.value = "0.25"
    numbers = panel.session.savings()
    assert numbers is not None
    export(panel, tmp_path / "pruned", weights="unchanged")
    line = ("prune", root / "moe", "--importance", root / "table.parquet")
    line = (*line, "--estimator", "heapr", "--ratio", 0.25)
    # The workbench measures with its own profile, here of the table's windows.
    setting = Setting(0.25, calibration=str(root / "text.txt"))
    bench.profile = type(bench.profile)("small", 8, SEQ_LEN, 4, 8)
    rows = [
        numbers,
        said(*line),
        manifest_of(tmp_path / "pruned")["savings"],
        bench.savings(setting).iloc[0].to_dict(),
    ]
    names = ("flops_before", "flops_after", "flops_reduction", "seq_len")
    counts = [[row[name] for name in names] for row in rows]
    assert counts == [counts[0]] * 4
    assert counts[0][-1] == 2048
    told = "at 2,048 tokens of context"
    assert told in panel.numbers.value
    assert told in (tmp_path / "pruned" / "README.md").read_text()
    assert told in run(*line)


# --- files -----------------------------------------------------------------------


@pytest.mark.parametrize("weights", ["unchanged", "compress"])
def test_a_checkpoint_has_the_type_and_size_of_its_source(root, tmp_path, weights):
    """Loaded in float32, written in bfloat16 by both; sizes are those of the files."""
    bench = bench_of(root)
    assert next(bench.model.parameters()).dtype == torch.float32
    panel = panel_of(root, bench)
    panel.controls.ratio.value = "0.4"
    told = export(panel, tmp_path / "panel", weights=weights)
    method = "best" if weights == "compress" else "paper"
    chosen = (*text_of(root), "--method", method, "--ratio", 0.4)
    facts = said("prune", root / "moe", *chosen, "--out", tmp_path / "line")
    sizes = {name: weights_bytes(tmp_path / name) for name in ("panel", "line")}
    ours, theirs = (tensors_in(tmp_path / name).values() for name in sizes)
    assert {t.dtype for t in (*ours, *theirs)} == {torch.bfloat16}
    assert sum(t.nbytes for t in ours) == sum(t.nbytes for t in theirs)
    assert sizes["line"] == facts["bytes_after"]
    assert facts["bytes_after_is"] == "that of the files"
    dense = weights_bytes(root / "moe")
    assert facts["bytes_before"] == dense > facts["bytes_after"]
    assert f"{sizes['panel']:,} bytes, bfloat16 (dense: {dense:,})" in told
    card = (tmp_path / "panel" / "README.md").read_text()
    assert f"| {dense:,} → {sizes['panel']:,}" in card
    # The dense model, from which the weights were copied, is as it was.
    assert {p.dtype for p in bench.model.parameters()} == {torch.float32}


def test_sizes_that_are_no_files_are_called_estimates(root):
    """Without a checkpoint the dense bytes are of files, the pruned ones estimated."""
    table = ImportanceTable.read(root / "table.parquet")
    keep = PruningSession(table).keep_of(Selection(ratio=0.25))
    source = read_source(root / "moe")
    facts = savings(keep, table, source=source)
    assert facts["bytes_before"] == source.n_bytes
    ratio = facts["parameters_after"] / facts["parameters_before"]
    assert facts["bytes_after"] == pytest.approx(ratio * source.n_bytes, abs=1)
    assert facts["bytes_after_is"].startswith("an estimate")
    panel = panel_of(root, bench_of(root))
    assert "bytes (bfloat16 files, pruned: an estimate)" in panel.numbers.value
    alone = Explorer(PruningSession(table))
    assert "bytes (an estimate, 4 for each parameter)" in alone.numbers.value


def test_a_width_that_the_files_cannot_have_is_refused_first(
    root, tmp_path, monkeypatch
):
    """4 atoms would do in float32, as loaded; not in bfloat16, as written."""
    panel = panel_of(root, bench_of(root))
    panel.controls.ratio.value = "0.5"
    panel.controls.structure.value = "uniform"
    panel.controls.multiple.value = 4
    panel.export.folder.value = str(tmp_path / "pruned")
    monkeypatch.delattr(type(panel.session.workbench), "calibration_set")
    assert "a multiple of 8" in failed(panel.export.job)
    assert list(tmp_path.iterdir()) == []


def test_a_table_of_another_model_is_refused_first(root, tmp_path):
    """One of equal shapes: neither evaluated nor written."""
    write_model(tmp_path / "other", seed=3)
    panel = panel_of(root, open_workbench(str(tmp_path / "other"), profile="small"))
    panel.export.folder.value = str(tmp_path / "pruned")
    for job in (panel.evaluation.job, panel.export.job):
        assert "table was measured on another model" in failed(job)
    assert not (tmp_path / "pruned").exists()


def test_a_family_without_one_width_is_refused_first(tmp_path, monkeypatch):
    """A shared expert has a routed one's width: nothing is measured to find out."""
    monkeypatch.setattr("heapr_lab.models.loading.read_weights", None)
    write_folder(tmp_path / "moe", tiny_model("deepseek_v4"))
    chosen = ("--ratio", 0.5, "--structure", "uniform", "--corpus", "pydocs")
    message = one_line("prune", tmp_path / "moe", *chosen, "--out", tmp_path / "out")
    assert "no width fits. Choose the structure per_layer" in message


# --- cards -----------------------------------------------------------------------


def test_the_panels_card_is_full(root, tmp_path):
    """Calibration, and the perplexity of the weights in the files, not of the mask."""
    bench, text = bench_of(root), str(root / "text.txt")
    panel = panel_of(root, bench)
    panel.controls.ratio.value = "0.5"
    export(panel, tmp_path / "pruned", weights="compensated")
    manifest = manifest_of(tmp_path / "pruned")
    assert f"of {SEQ_LEN} tokens of {text}" in manifest["calibration"]
    assert manifest["importance"] == panel.session.table.metadata["spec_hash"]
    windows = bench.test_windows(text)
    loaded = AutoModelForCausalLM.from_pretrained(
        tmp_path / "pruned", dtype=torch.float32
    )
    dense, pruned = manifest["perplexity"][text]
    assert dense == bench.perplexity(None, windows).value
    assert pruned == pytest.approx(evaluate_perplexity(loaded, windows.ids).value)
    masked = bench.perplexity(panel.session.keep, windows).value
    assert abs(pruned / masked - 1) > 1e-4
    card = (tmp_path / "pruned" / "README.md").read_text()
    assert (
        f"| perplexity of these weights, {text} | {dense:.2f} → {pruned:.2f} |" in card
    )
    assert "not recorded" not in card.replace("| revision | not recorded |", "")
    assert "selected by HEAPr's\nsecond-order importance" in card
    for estimator, text in (("fisher", "score `fisher` of"), (None, "mask given by")):
        other = manifest | {"selection": {"estimator": estimator}}
        assert f"\n{text}" in model_card.card(other, source=tmp_path / "pruned")


def test_the_panel_writes_own_text_too(root, tmp_path):
    """As the command line by default; the card names all windows, and what wrote them.

    Progress is shown while the model writes; the control is for `compress` alone.
    """
    panel = panel_of(root, bench_of(root))
    panel.controls.ratio.value = "0.5"
    told: list[str] = []
    panel.export.job.text.observe(lambda change: told.append(change["new"]), "value")
    panel.weights.own.value = 50
    export(panel, tmp_path / "pruned", weights="compress")
    manifest = manifest_of(tmp_path / "pruned")
    assert manifest["calibrated_on"]["own_text"] == 0.5
    assert "and 4 that the model wrote itself" in manifest["calibration"]
    used = bench_of(root).fitted(Calibration.from_dict(manifest["calibrated_on"]))
    assert manifest["importance"] == used.table().metadata["spec_hash"]
    assert any("token" in text for text in told), told
    panel.weights.weights.value = "unchanged"
    assert panel.weights.own.disabled


def test_export_is_cancelled_while_it_measures(root, tmp_path):
    """Nothing is left behind, and nothing is said to be written."""
    panel = panel_of(root, bench_of(root))
    panel.controls.ratio.value = "0.45"
    panel.export.folder.value = str(tmp_path / "pruned")
    cancel(panel.export.job, "as written")
    assert panel.export.job.value == ""
    assert list(tmp_path.iterdir()) == []
