import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
from commands import TINY, one_line, refused, run, text_of
from tiny_folder import write_model, write_text

from heapr_lab.importance.estimators import ESTIMATORS
from heapr_lab.importance.table import ImportanceTable
from heapr_lab.pruning.masks import KeepMask
from heapr_lab.refinement import compensation
from heapr_lab.storage import paths
from heapr_lab.storage.hashing import without_nan

N_ATOMS = 2 * 4 * 8
"""Layers, experts, atoms of the tiny model."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model `moe`, another one `other`, a text `text.txt`, and a table of `moe`."""
    root = tmp_path_factory.mktemp("cli")
    write_model(root / "moe")
    write_model(root / "other", seed=1)
    write_text(root / "text.txt")
    run("score", root / "moe", "--out", root / "table.parquet", *text_of(root))
    return root


def prune(root: Path, *arguments: object) -> dict[str, Any]:
    """What `prune --json` says of the tiny model with its table."""
    table = ("--importance", root / "table.parquet", *TINY)
    return dict(json.loads(run("prune", root / "moe", *table, "--json", *arguments)))


def test_help_names_every_estimator() -> None:
    """The help of `prune` names the estimators of the registry, in its order."""
    *others, last = ESTIMATORS
    text = " ".join(run("prune", "--help").split())
    assert f"{', '.join(others)} or {last} [default: the method's]" in text


def test_score_writes_the_table(folder: Path) -> None:
    """`score --out` writes all atoms; a batch size changes nothing but the speed."""
    table = ImportanceTable.read(folder / "table.parquet")
    assert table.n_atoms == N_ATOMS
    assert table.metadata["N"] == 8 * 31  # windows, predicted tokens of each

    output = run("score", folder / "moe", "--batch-size", 3, "--json", *text_of(folder))
    facts = json.loads(output)
    assert facts["spec_hash"] == table.metadata["spec_hash"]
    assert facts["atoms"] == N_ATOMS


def test_score_with_a_batch_size_measures_in_such_batches(folder: Path) -> None:
    """A given batch size is used, and recorded."""
    out = folder / "batches.parquet"
    run("score", folder / "moe", "--batch-size", 3, "--seed", 5, "--out", out,
        *text_of(folder))  # fmt: skip
    assert ImportanceTable.read(out).metadata["provenance"]["batch_size"] == 3


def test_prune_counts_and_writes_the_mask(folder: Path) -> None:
    """`prune` removes ⌊r · n⌋ atoms, says what that saves, and writes that mask."""
    out = folder / "mask.parquet"
    facts = prune(folder, "--ratio", 0.3, "--out", out)
    assert facts["atoms_kept"] == N_ATOMS - 19  # 0.3 · 64 = 19.2
    removed = facts["parameters_before"] - facts["parameters_after"]
    assert removed == 19 * 3 * 16  # atoms, matrices, d_model
    assert KeepMask.read(out).n_removed == 19


@pytest.mark.parametrize("structure", ["ragged", "uniform"])
def test_prune_writes_a_checkpoint_that_evaluate_reads(
    folder: Path, tmp_path: Path, structure: str
) -> None:
    """The table alone is enough; perplexity is that of the mask on the dense model."""
    out, mask = tmp_path / "pruned", tmp_path / "mask.parquet"
    chosen = ("--ratio", 0.5, "--structure", structure, "--multiple", 4)
    if structure == "ragged":
        chosen = chosen[:-2]
    prune(folder, *chosen, "--out", mask)
    prune(folder, *chosen, "--out", out)
    assert KeepMask.read(out / "heapr_keep.parquet") == KeepMask.read(mask)
    text = ("--corpora", folder / "text.txt", *TINY, "--json")
    sliced = json.loads(run("evaluate", out, *text))["results"]
    masked = json.loads(run("evaluate", folder / "moe", "--mask", mask, *text))
    for row, other in zip(sliced, masked["results"], strict=True):
        assert row["value"] == pytest.approx(other["value"], rel=1e-5)
    card = (out / "README.md").read_text()
    assert "8 windows of 32 tokens" in card
    assert "| perplexity | not measured |" in card
    assert "| reloaded | not checked |" in card


def test_weights_that_the_loss_refused_are_not_called_compensated(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the held-out windows say, they are against it here."""
    monkeypatch.setattr(compensation, "_FEWEST_TO_JUDGE", 2)
    monkeypatch.setattr(compensation, "STANDARD_ERRORS", -math.inf)
    base = ("prune", folder / "moe", "--ratio", 0.4, "--estimator", "fisher", "--json")
    facts = json.loads(run(*base, "--out", tmp_path / "out", *text_of(folder)))
    assert not facts["compensated"]
    manifest = json.loads((tmp_path / "out" / "heapr_manifest.json").read_text())
    assert manifest["weights"].startswith("sliced, otherwise unchanged")


def test_the_method_is_the_best_that_the_inputs_allow(
    folder: Path, tmp_path: Path
) -> None:
    """With text it is compensated, or HEAPr's; `paper` is HEAPr, sliced; all say so."""
    base = ("prune", folder / "moe", "--ratio", 0.4, "--json")
    best = json.loads(run(*base, "--out", tmp_path / "best", *text_of(folder)))
    (chosen,) = [row for row in best["held_out"] if row["chosen"]]
    assert chosen["made"] == best["chosen"]
    assert best["chosen"].split(" + ")[0] == best["estimator"]
    options = ("--estimator", "elimination", "--out", tmp_path / "asked")
    facts = json.loads(run(*base, *options, *text_of(folder)))
    assert (facts["estimator"], facts["compensated"]) == ("elimination", True)
    assert "held_out" not in facts
    paper = json.loads(
        run(*base, "--out", tmp_path / "p", "--method", "paper", *text_of(folder))
    )
    assert (paper["estimator"], paper["compensated"]) == ("heapr", False)
    table = prune(folder, "--ratio", 0.4, "--out", tmp_path / "table")
    assert (table["estimator"], table["compensated"]) == ("shrunk", False)
    weights = [
        json.loads((tmp_path / name / "heapr_manifest.json").read_text())["weights"]
        for name in ("asked", "p", "table")
    ]
    assert weights[0].startswith("W_down compensated by least squares")
    assert weights[1:] == ["sliced, otherwise unchanged"] * 2
    evaluated = ("--corpora", folder / "text.txt", *TINY, "--json")
    rows = json.loads(run("evaluate", tmp_path / "best", *evaluated))["results"]
    manifest = json.loads((tmp_path / "best" / "heapr_manifest.json").read_text())
    assert manifest["held_out"] == without_nan(best["held_out"])
    card = (tmp_path / "best" / "README.md").read_text()
    assert f"| {best['chosen']} | {chosen['delta_nll']:+.4f} |" in card
    (change,) = manifest["perplexity"].values()
    perplexity = next(row["value"] for row in rows if row["metric"] == "perplexity")
    assert perplexity == pytest.approx(change[1], rel=1e-4)


def test_a_mask_keeps_what_the_checkpoint_keeps(folder: Path, tmp_path: Path) -> None:
    """The same command with either `--out` says the same choice; a mask has no fit."""
    base = ("prune", folder / "moe", "--ratio", 0.5, "--json", *text_of(folder))
    out, mask = tmp_path / "out", tmp_path / "mask.parquet"
    written, masked = (json.loads(run(*base, "--out", path)) for path in (out, mask))
    assert KeepMask.read(mask) == KeepMask.read(out / "heapr_keep.parquet")
    for name in ("method", "estimator", "chosen", "held_out", "atoms_kept"):
        assert masked[name] == written[name]
    assert not masked["compensated"]


@pytest.mark.parametrize("method", ["best", "paper"])
def test_prune_and_heal(folder: Path, tmp_path: Path, method: str) -> None:
    """What is kept is trained before it is written; manifest and output say so."""
    base = ("prune", folder / "moe", "--ratio", 0.6, "--method", method, "--json")
    out = tmp_path / "d"
    facts = json.loads(run(*base, "--heal", 16, "--out", out, *text_of(folder)))
    assert facts["healed_on"] == 16
    manifest = json.loads((tmp_path / "d" / "heapr_manifest.json").read_text())
    assert "then healed on 384 tokens of" in manifest["weights"]  # 4 are held out
    first, *later = (row["held_out"] for row in manifest["healing"])
    assert min(later) < first
    (change,) = manifest["perplexity"].values()
    evaluated = ("--corpora", folder / "text.txt", *TINY, "--json")
    rows = json.loads(run("evaluate", tmp_path / "d", *evaluated))["results"]
    perplexity = next(row["value"] for row in rows if row["metric"] == "perplexity")
    assert perplexity == pytest.approx(change[1], rel=1e-4)


def test_healing_needs_weights_and_text(folder: Path, tmp_path: Path) -> None:
    """A table alone, and a mask alone, are refused before anything is loaded."""
    (tmp_path / "nothing").mkdir()
    base = ("prune", tmp_path / "nothing", "--ratio", 0.4, "--heal", 16)
    assert "--out" in one_line(*base, "--out", tmp_path / "mask.parquet")
    assert "--out" in one_line(*base)
    table = ("--importance", folder / "table.parquet", "--out", tmp_path / "x")
    assert "leave --importance out" in one_line(*base, *table)


def test_a_mixture_is_measured_corpus_by_corpus(folder: Path, tmp_path: Path) -> None:
    """The card of what was calibrated on a mixture has a perplexity of each part."""
    write_text(tmp_path / "more.txt", n_texts=16)
    parts = [str(folder / "text.txt"), str(tmp_path / "more.txt")]
    mixture = f"0.5*{parts[0]} + 0.5*{parts[1]}"
    run(
        "prune", folder / "moe", "--ratio", 0.4, "--out", tmp_path / "out",
        "--corpus", mixture, *TINY,
    )  # fmt: skip
    manifest = json.loads((tmp_path / "out" / "heapr_manifest.json").read_text())
    assert list(manifest["perplexity"]) == parts
    message = refused(
        "prune", folder / "moe", "--max-rise", 0.1, "--corpus", mixture, *TINY
    )
    assert "is a mixture" in message


def test_prune_with_few_windows(folder: Path, tmp_path: Path) -> None:
    """One window that is reported has no standard error: null in the manifest."""
    out = tmp_path / "pruned"
    args = ("prune", folder / "moe", "--ratio", 0.4, "--own-text", 0, "--out", out)
    few = ("--n-sequences", 7, *text_of(folder))
    assert "expected at least 8" in refused(*args, *few)
    run(*args, "--n-sequences", 8, *text_of(folder))
    rows = json.loads((out / "heapr_manifest.json").read_text())["held_out"]
    assert [row["stderr"] for row in rows] == [None] * 3
    assert all(isinstance(row["nll"], float) for row in rows)
    assert "| — |" in (out / "README.md").read_text("utf-8")


def test_prune_to_a_perplexity(folder: Path, tmp_path: Path) -> None:
    """The ratio found keeps the limit; it needs the model, and no ratio beside it."""
    mask = tmp_path / "mask.parquet"
    args = ("--max-rise", 0.001, "--out", mask, *text_of(folder), "--json")
    facts = json.loads(run("prune", folder / "moe", *args))
    assert 0 < facts["achieved_ratio"] < 1
    text = ("--corpora", folder / "text.txt", *TINY, "--json")
    dense, pruned = (
        json.loads(run("evaluate", folder / "moe", *text, *more))["results"][0]["value"]
        for more in ((), ("--mask", mask))
    )
    assert pruned <= 1.001 * dense
    message = refused("prune", folder / "moe", "--max-rise", 0.1, "--ratio", 0.1)
    assert "give --ratio or --max-rise" in message
    table = ("--importance", folder / "table.parquet")
    assert "runs the model" in refused("prune", folder / "moe", "--max-rise", 1, *table)
    counted = ("--max-rise", 0.1, "--of", "model")
    assert "leave --of out" in one_line("prune", folder / "moe", *counted)


def test_a_ratio_in_per_cent(folder: Path) -> None:
    """With the sign it is a share; without it, the message says what to write."""
    counts = [prune(folder, "--ratio", text)["atoms_kept"] for text in ("40%", 0.4)]
    assert counts[0] == counts[1]


def test_score_with_elimination(folder: Path) -> None:
    """Its table has the estimator and a hash, which a mask of it names."""
    out, mask = folder / "eliminated.parquet", folder / "eliminated_mask.parquet"
    args = ("--eliminate", "--out", out, "--json", *text_of(folder))
    facts = json.loads(run("score", folder / "moe", *args))
    assert "elimination" in ImportanceTable.read(out).estimators
    how = ("--estimator", "elimination", "--ratio", 0.4, "--out", mask)
    run("prune", folder / "moe", *how, *text_of(folder))
    origin = json.loads(run("provenance", mask, "--json"))
    assert origin["settings"]["table"] == facts["spec_hash"]


def test_prune_takes_the_importance_from_the_cache(folder: Path) -> None:
    """Without a file, `prune` selects what it selects with the file of `score`."""
    out, how = folder / "cached.parquet", ("--ratio", 0.4, "--estimator", "shrunk")
    run("prune", folder / "moe", *how, "--out", out, *text_of(folder))
    prune(folder, *how, "--out", folder / "given.parquet")
    assert KeepMask.read(out) == KeepMask.read(folder / "given.parquet")


def test_evaluate_dense_and_pruned(folder: Path) -> None:
    """A mask changes the loss and has a divergence; the numbers are valid JSON."""
    mask, text = folder / "half.parquet", folder / "text.txt"
    prune(folder, "--ratio", 0.5, "--out", mask)
    arguments = ("evaluate", folder / "moe", "--corpora", text, *TINY, "--json")
    dense = json.loads(run(*arguments))["results"]
    pruned = json.loads(run(*arguments, "--mask", mask, "--kl"))["results"]
    loss = [
        next(row["value"] for row in rows if row["metric"] == "nll")
        for rows in (dense, pruned)
    ]
    assert abs(loss[1] - loss[0]) > 1e-3  # half of a random model does matter
    assert next(row["value"] for row in pruned if row["metric"] == "kl") > 1e-3
    assert all(row["stderr"] is None for row in pruned)


def test_evaluate_a_task(folder: Path) -> None:
    """The continuation task of a text gives an accuracy with its standard error."""
    task = f"continuation:{folder / 'text.txt'}"
    arguments = ("--corpora", "", "--tasks", task, "--limit", 8, *TINY, "--json")
    rows = json.loads(run("evaluate", folder / "moe", *arguments))["results"]
    assert [row["metric"] for row in rows] == ["acc", "acc_norm"]
    for row in rows:
        assert row["value"] * 8 == pytest.approx(round(row["value"] * 8))
        assert row["stderr"] >= 0


def test_text_output(folder: Path) -> None:
    """Without `--json` there is a line for each fact."""
    table = ("--importance", folder / "table.parquet")
    lines = run("prune", folder / "moe", "--ratio", 0.3, *table).splitlines()
    assert ["atoms", "kept", "45"] in [line.split() for line in lines]


def test_foreign_table_is_refused(folder: Path) -> None:
    """A table of other weights is refused before a mask is written."""
    out = folder / "never.parquet"
    table = ("--importance", folder / "table.parquet")
    message = refused("prune", folder / "other", "--ratio", 0.3, *table, "--out", out)
    assert "was made for another model" in message
    assert "weights" in message
    assert not out.exists()


def test_foreign_mask_is_refused(folder: Path) -> None:
    """A mask that fits in shape, but was selected for other weights, is refused."""
    mask = folder / "own.parquet"
    prune(folder, "--ratio", 0.3, "--out", mask)
    message = refused("evaluate", folder / "other", "--mask", mask, *TINY)
    assert "was made for another model" in message


# --- plan -------------------------------------------------------------------------


SHAPES = paths.project_dir() / "tests" / "data" / "shapes"


def test_a_plan_is_printed(tmp_path: Path) -> None:
    """Only config.json is there: as lines, and as one JSON object."""
    config = Path(shutil.copy(SHAPES / "DeepSeek-V3" / "config.json", tmp_path))
    options = ("plan", config, "--memory", "141GB", "--dtype", "bfloat16")
    lines = run(*options)
    assert "671 B parameters" in lines
    assert "in memory or in files" in lines
    plan = json.loads(run(*options, "--json"))
    assert (plan["engine"], plan["free_bytes"]) == ("streamed", 141 * 10**9)
    message = one_line("plan", config, "--memory", "24 bananas")
    assert "'24 bananas', expected bytes, or a number with a unit" in message
