import math
import shutil
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from commands import TINY, manifest_of, refused, run, said, text_of
from tiny_folder import write_model, write_text

from heapr_lab import ImportanceTable, KeepMask, Workbench
from heapr_lab.cli.prune import _held_out
from heapr_lab.importance.estimators import ESTIMATORS
from heapr_lab.refinement import compensation
from heapr_lab.storage import paths
from heapr_lab.storage.hashing import without_nan
from heapr_lab.workbench.settings import PROFILES

N_ATOMS = 2 * 4 * 8
"""Layers, experts, atoms of the tiny model."""


def prune(root: Path, *arguments: object) -> dict[str, Any]:
    """What `prune` says of the tiny model with its table."""
    table = ("--importance", root / "table.parquet", *TINY)
    return said("prune", root / "moe", *table, *arguments)


def losses(root: Path, *model: object) -> dict[str, float]:
    """What `evaluate` says of a model on the text, by metric."""
    rows = said("evaluate", *model, "--corpora", root / "text.txt", *TINY)["results"]
    assert all(row["stderr"] is None for row in rows)
    return {row["metric"]: row["value"] for row in rows}


def test_help_names_every_estimator_and_profile():
    """The help of `prune` names those that rank the whole model, as the command does.

    They are in the order of the registry; and the profiles with their sizes in theirs.
    """
    ranking = [name for name, score in ESTIMATORS.items() if not score.within_layer]
    *others, last = ranking
    text = " ".join(run("prune", "--help").split())
    assert f"{', '.join(others)} or {last} [default: the method's]" in text
    sizes = [f"{p.name} ({p.n_sequences} of {p.seq_len})" for p in PROFILES.values()]
    words = text.replace("windows of", "of").replace(" tokens)", ")")
    assert f"{', '.join(sizes)} [default: the model's]" in words


def test_score_writes_the_table(folder):
    """`score --out` writes all atoms; a batch size changes nothing but the speed."""
    table = ImportanceTable.read(folder / "table.parquet")
    assert table.n_atoms == N_ATOMS
    assert table.metadata["N"] == 8 * 31  # windows, predicted tokens of each

    out = folder / "batches.parquet"
    options = ("--batch-size", 3, "--out", out, *text_of(folder))
    for seed in (0, 5):
        facts = said("score", folder / "moe", "--seed", seed, *options)
        same = facts["spec_hash"] == table.metadata["spec_hash"]
        assert (same, facts["atoms"]) == (seed == 0, N_ATOMS)
    assert ImportanceTable.read(out).metadata["provenance"]["batch_size"] == 3


def test_prune_counts_and_writes_the_mask(folder):
    """`prune` removes ⌊r · n⌋ atoms, says what that saves, and writes that mask.

    Without `--json` there is a line for each fact.
    """
    out = folder / "mask.parquet"
    facts = prune(folder, "--ratio", 0.3, "--out", out)
    table = ("--importance", folder / "table.parquet")
    lines = run("prune", folder / "moe", "--ratio", "30%", *table).splitlines()
    assert ["atoms", "kept", "45"] in [line.split() for line in lines]
    assert facts["atoms_kept"] == N_ATOMS - 19  # 0.3 · 64 = 19.2
    removed = facts["parameters_before"] - facts["parameters_after"]
    assert removed == 19 * 3 * 16  # atoms, matrices, d_model
    assert KeepMask.read(out).n_removed == 19


@pytest.mark.parametrize("options", [(), ("--structure", "uniform", "--multiple", 4)])
def test_prune_writes_a_checkpoint_that_evaluate_reads(folder, tmp_path, options):
    """The table alone is enough; perplexity is that of the mask on the dense model.

    A mask has a divergence, too.
    """
    out, mask = tmp_path / "pruned", tmp_path / "mask.parquet"
    for path in (mask, out):
        prune(folder, "--ratio", 0.5, *options, "--out", path)
    assert KeepMask.read(out / "heapr_keep.parquet") == KeepMask.read(mask)
    masked = losses(folder, folder / "moe", "--mask", mask, "--kl")
    assert masked.pop("kl") > 1e-3
    assert 0 < masked.pop("top1_agreement") < 1
    assert losses(folder, out) == pytest.approx(masked, rel=1e-5)
    card = (out / "README.md").read_text()
    assert "8 windows of 32 tokens" in card
    assert "| perplexity | not measured |" in card
    assert "| reloaded | not checked |" in card


def test_weights_that_the_loss_refused_are_not_called_compensated(
    folder, tmp_path, monkeypatch
):
    """Whatever the held-out windows say, they are against it here."""
    monkeypatch.setattr(compensation, "_FEWEST_TO_JUDGE", 2)
    monkeypatch.setattr(compensation, "STANDARD_ERRORS", -math.inf)
    base = ("prune", folder / "moe", "--ratio", 0.4, "--estimator", "fisher")
    facts = said(*base, "--out", tmp_path / "out", *text_of(folder))
    assert not facts["compensated"]
    weights = manifest_of(tmp_path / "out")["weights"]
    assert weights.startswith("sliced, otherwise unchanged")


def test_the_method_is_the_best_that_the_inputs_allow(folder, tmp_path):
    """With text it is compensated, or HEAPr's; `paper` is HEAPr, sliced; all say so."""
    base = ("prune", folder / "moe", "--ratio", 0.4, *text_of(folder))
    best = said(*base, "--out", tmp_path / "best")
    (chosen,) = [row for row in best["held_out"] if row["chosen"]]
    assert chosen["made"] == best["chosen"]
    assert best["chosen"].split(" + ")[0] == best["estimator"]
    options = ("--estimator", "elimination", "--out", tmp_path / "asked")
    facts = said(*base, *options)
    assert (facts["estimator"], facts["compensated"]) == ("elimination", True)
    assert "held_out" not in facts
    paper = said(*base, "--out", tmp_path / "p", "--method", "paper")
    assert (paper["estimator"], paper["compensated"]) == ("heapr", False)
    table = prune(folder, "--ratio", 0.4, "--out", tmp_path / "table")
    assert (table["estimator"], table["compensated"]) == ("fisher", False)
    made = [manifest_of(tmp_path / name) for name in ("asked", "p", "table")]
    weights = [manifest["weights"] for manifest in made]
    assert weights[0].startswith("W_down compensated by least squares")
    assert weights[1:] == ["sliced, otherwise unchanged"] * 2
    manifest = manifest_of(tmp_path / "best")
    assert manifest["held_out"] == without_nan(best["held_out"])
    card = (tmp_path / "best" / "README.md").read_text()
    decided = f"| {chosen['deciding']:+.4f} | {chosen['deciding_stderr']:.4f} |"
    assert f"| {best['chosen']} {decided}" in card
    (change,) = manifest["perplexity"].values()
    measured = losses(folder, tmp_path / "best")["perplexity"]
    assert measured == pytest.approx(change[1], rel=1e-4)


def test_a_mask_keeps_what_the_checkpoint_keeps(folder, tmp_path):
    """The same command with either `--out` says the same choice; a mask has no fit."""
    base = ("prune", folder / "moe", "--ratio", 0.5, *text_of(folder))
    out, mask = tmp_path / "out", tmp_path / "mask.parquet"
    written, masked = (said(*base, "--out", path) for path in (out, mask))
    assert KeepMask.read(mask) == KeepMask.read(out / "heapr_keep.parquet")
    for name in ("method", "estimator", "chosen", "held_out", "atoms_kept"):
        assert masked[name] == written[name]
    assert not masked["compensated"]


@pytest.mark.parametrize("method", ["best", "paper"])
def test_prune_and_heal(folder, tmp_path, method):
    """What is kept is trained before it is written; manifest and output say so."""
    base = ("prune", folder / "moe", "--ratio", 0.6, "--method", method)
    out = tmp_path / "d"
    facts = said(*base, "--heal", 16, "--out", out, *text_of(folder))
    assert facts["healed_on"] == 16
    manifest = manifest_of(out)
    assert "then healed on 384 tokens of" in manifest["weights"]  # 4 are held out
    first, *later = (row["held_out"] for row in manifest["healing"])
    assert min(later) < first
    (change,) = manifest["perplexity"].values()
    assert losses(folder, out)["perplexity"] == pytest.approx(change[1], rel=1e-4)


def test_too_little_text_to_heal_on_is_said_before_anything_is_measured(
    folder, tmp_path, monkeypatch
):
    """On a large model the scores take hours."""
    monkeypatch.setattr(Workbench, "fitted", lambda *_: pytest.fail("measured"))
    base = ("prune", folder / "moe", "--ratio", 0.6, "--out", tmp_path / "d")
    assert "5000 were requested" in refused(*base, "--heal", 5000, *text_of(folder))


def test_prune_with_few_windows_of_two_corpora(folder, tmp_path, monkeypatch):
    """One window that is reported has no standard error: null in the manifest.

    Perplexity is measured corpus by corpus.
    """
    monkeypatch.setattr(compensation, "STANDARD_ERRORS", -math.inf)
    out, more = tmp_path / "pruned", write_text(tmp_path / "more.txt", n_texts=16)
    mixture = f"0.5*{folder / 'text.txt'} + 0.5*{more}"
    args = ("prune", folder / "moe", "--ratio", 0.4, "--own-text", 0, "--out", out)
    run(*args, "--n-sequences", 9, "--corpus", mixture, *TINY)
    manifest = manifest_of(out)
    assert manifest["perplexity"].keys() == {str(folder / "text.txt"), str(more)}
    rows = manifest["held_out"]
    assert [row["stderr"] for row in rows] == [None] * 3
    paper, others, chosen = rows
    assert others["nll"] is None
    assert all(isinstance(row["nll"], float) for row in (paper, chosen))
    reported = f"| {chosen['delta_nll']:+.4f} | {chosen['against_paper']:+.4f} | — |"
    assert reported in (out / "README.md").read_text("utf-8")


@pytest.mark.parametrize(
    ("error", "by"), [(0.003, ", by -0.0200 ± 0.0030"), (math.nan, "")]
)
def test_a_difference_is_printed_with_its_error(error, by):
    """One window has none."""
    rows = {"made": ["heapr", "ours"], "chosen": [False, True]}
    rows |= {"delta_nll": [0.12, 0.1], "against_paper": [0, -0.02], "stderr": error}
    words = _held_out(pd.DataFrame(rows), in_words=True)
    assert words["held-out loss, HEAPr"] == f"0.1200 -> 0.1000 nats per token{by}"


def test_score_with_elimination(folder):
    """Its table has the estimator and a hash, which a mask of it names."""
    out, mask = folder / "eliminated.parquet", folder / "eliminated_mask.parquet"
    facts = said("score", folder / "moe", "--eliminate", "--out", out, *text_of(folder))
    assert "elimination" in ImportanceTable.read(out).estimators
    how = ("--estimator", "elimination", "--ratio", 0.4, "--out", mask)
    run("prune", folder / "moe", *how, *text_of(folder))
    assert said("provenance", mask)["settings"]["table"] == facts["spec_hash"]


def test_evaluate_a_task(folder):
    """The continuation task of a text gives an accuracy with its standard error."""
    task = f"continuation:{folder / 'text.txt'}"
    arguments = ("--corpora", "", "--tasks", task, "--limit", 8, *TINY)
    rows = said("evaluate", folder / "moe", *arguments)["results"]
    assert [row["metric"] for row in rows] == ["acc", "acc_norm"]
    for row in rows:
        assert row["value"] * 8 == pytest.approx(round(row["value"] * 8))
        assert row["stderr"] >= 0


def test_what_was_made_for_another_model_is_refused(folder, tmp_path):
    """A table, and a mask that fits in shape: before anything is written."""
    mask, other, out = (tmp_path / name for name in ("mask.parquet", "other", "never"))
    write_model(other, seed=1)
    prune(folder, "--ratio", 0.3, "--out", mask)
    table = ("--importance", folder / "table.parquet", "--ratio", 0.3, "--out", out)
    for args in (("prune", other, *table), ("evaluate", other, "--mask", mask, *TINY)):
        assert "was made for another model" in refused(*args)
    assert not out.exists()


# --- plan -------------------------------------------------------------------------


SHAPES = paths.project_dir() / "tests" / "data" / "shapes"


def test_a_plan_is_printed(tmp_path):
    """Only config.json is there: as lines, and as one JSON object."""
    config = Path(shutil.copy(SHAPES / "DeepSeek-V3" / "config.json", tmp_path))
    options = ("plan", config, "--memory", "141GB", "--dtype", "bfloat16")
    lines = run(*options)
    assert "671 B parameters" in lines
    assert "in memory or in files" in lines
    plan = said(*options)
    assert (plan["engine"], plan["free_bytes"]) == ("streamed", 141 * 10**9)
