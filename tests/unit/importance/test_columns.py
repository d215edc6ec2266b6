"""Tables that cannot have been measured, or would count a token twice, are refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from families import tiny_ids, tiny_model
from torch import nn

from heapr_lab.errors import CacheError, SpecError
from heapr_lab.importance.collect import collect_statistics
from heapr_lab.importance.columns import MAXIMA, NORMS, SUMS
from heapr_lab.importance.table import ImportanceTable
from heapr_lab.refinement.elimination import eliminate
from heapr_lab.storage import files
from heapr_lab.text.calibration import CalibrationSet

WINDOWS = CalibrationSet.from_ids(tiny_ids(n_sequences=6))


def measured(model: nn.Module, ids: torch.Tensor, **options: Any) -> ImportanceTable:
    """The statistics of `model` on token ids."""
    return collect_statistics(model, CalibrationSet.from_ids(ids), **options)


@pytest.fixture(scope="module")
def model() -> nn.Module:
    """A tiny qwen2_moe in float64, which has every column."""
    return tiny_model("qwen2_moe")


@pytest.fixture(scope="module")
def table(model: nn.Module) -> ImportanceTable:
    """Its table on six windows."""
    return collect_statistics(model, WINDOWS)


# --- values -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("column", "bad"),
    [(name, -1.0) for name in (*SUMS, *MAXIMA, *NORMS) if name != "sum_hg"]
    + [
        (name, bad)
        for name in (*SUMS, *MAXIMA, *NORMS)
        for bad in (np.nan, np.inf, -np.inf)
        if name != "tokens"  # whole numbers, which test_table has
    ],
)
def test_impossible_values_are_refused(
    table: ImportanceTable, column: str, bad: float, tmp_path: Path
) -> None:
    """When a table is made and when it is read: column, atom and value are named."""
    frame = table.frame
    frame[column] = np.where(frame.index == 13, bad, frame[column])
    said = rf"column {column} has {bad:g}.* at \(layer, expert, atom\) \(0, 1, 5\)"
    with pytest.raises(SpecError, match=said):
        ImportanceTable.from_frame(frame, **table.metadata)
    files.write_frame(
        tmp_path / "t", frame, {**table.metadata, "kind": "ImportanceTable"}
    )
    with pytest.raises(CacheError, match=f"t is damaged: {said}"):
        ImportanceTable.read(tmp_path / "t")


def test_a_cancelled_sum_may_be_negative(table: ImportanceTable) -> None:
    """Σ h·g has both signs in what is really measured."""
    assert (table.column("sum_hg") < 0).any()
    assert (table.column("sum_hg") > 0).any()


# --- metadata ---------------------------------------------------------------------


def test_an_edited_specification_is_seen(
    table: ImportanceTable, tmp_path: Path
) -> None:
    """Its hash is compared, when a table is made and when it is read."""
    metadata = table.metadata
    metadata["spec"]["calibration"] = "0" * 64
    with pytest.raises(SpecError, match=r"spec_hash is .*: one of them was edited"):
        ImportanceTable.from_frame(table.frame, **metadata)
    path = tmp_path / "t.parquet"
    files.write_frame(path, table.frame, {**metadata, "kind": "ImportanceTable"})
    with pytest.raises(CacheError, match="one of them was edited"):
        ImportanceTable.read(path)
    del metadata["spec_hash"]
    ImportanceTable.from_frame(table.frame, **metadata)


# --- merging ----------------------------------------------------------------------


def test_no_calibration_counts_twice(
    model: nn.Module, table: ImportanceTable, tmp_path: Path
) -> None:
    """The same set, also inside a merged table and after a file."""
    other = measured(model, tiny_ids(n_sequences=2, seed=7))
    with pytest.raises(SpecError, match=r"the calibration set .* would count twice"):
        table.merge(collect_statistics(model, WINDOWS, batch_size=1))
    both = table.merge(other)
    both.write(tmp_path / "both.parquet")
    for merged in (both, ImportanceTable.read(tmp_path / "both.parquet")):
        with pytest.raises(SpecError, match="would count twice"):
            merged.merge(other)


def test_no_window_counts_twice(model: nn.Module, table: ImportanceTable) -> None:
    """Sets that share windows, in whatever order, alone or merged."""
    some = measured(model, WINDOWS.ids[[5, 1]])
    with pytest.raises(SpecError, match="2 of 2 windows would count twice"):
        table.merge(some)
    with pytest.raises(SpecError, match="2 of 6 windows would count twice"):
        some.merge(table)
    apart = measured(model, tiny_ids(n_sequences=3, seed=7))
    with pytest.raises(SpecError, match="2 of 5 windows"):
        table.merge(apart.merge(some))


def test_tables_of_before_merge_with_what_they_tell(
    model: nn.Module, table: ImportanceTable
) -> None:
    """Without a list of windows only equal sets are seen, or nothing."""
    metadata = table.metadata
    del metadata["windows"]
    old = ImportanceTable.from_frame(table.frame, **metadata)
    with pytest.raises(SpecError, match="the calibration set"):
        old.merge(table)
    some = measured(model, WINDOWS.ids[:2])
    merged = old.merge(some)
    assert merged.metadata["windows"] == some.metadata["windows"]
    with pytest.raises(SpecError, match="2 of 6 windows"):
        merged.merge(
            ImportanceTable.from_frame(
                table.frame,
                N=48,
                windows=table.metadata["windows"],
                architecture=metadata["architecture"],
            )
        )


def test_what_was_measured_otherwise_does_not_merge(
    model: nn.Module, table: ImportanceTable
) -> None:
    """Labels of the text and of the model are two losses."""
    own = measured(model, tiny_ids(n_sequences=2, seed=7), labels="model")
    for pair in ((table, own), (own, table)):
        with pytest.raises(SpecError, match=r"differ in labels: (data|model) and"):
            pair[0].merge(pair[1])
    more = measured(model, tiny_ids(n_sequences=2, seed=8), labels="model")
    assert own.merge(more).metadata["spec"]["labels"] == "model"


def test_the_order_of_merging_does_not_matter(
    model: nn.Module, table: ImportanceTable
) -> None:
    """Three tables in two orders: the same sums, and none may come again."""
    a, b = (measured(model, tiny_ids(n_sequences=2, seed=seed)) for seed in (7, 8))
    one, other = table.merge(a).merge(b), b.merge(table.merge(a))
    pd.testing.assert_frame_equal(one.frame, other.frame, rtol=1e-12)
    assert one.metadata["N"] == other.metadata["N"] == 8 * (6 + 2 + 2)
    for again in (table, a, b):
        with pytest.raises(SpecError, match="would count twice"):
            other.merge(again)


# --- another model ----------------------------------------------------------------


def test_a_table_of_another_model_of_the_same_shapes(
    model: nn.Module, table: ImportanceTable
) -> None:
    """Elimination compares identities, not only shapes."""
    twin = tiny_model("qwen2_moe", seed=1)
    with pytest.raises(SpecError, match="another model: it differs in weights"):
        eliminate(twin, table, WINDOWS)
    assert eliminate(model, table, WINDOWS).n_atoms == table.n_atoms
    bare = ImportanceTable.from_frame(table.frame, N=table.metadata["N"])
    assert eliminate(model, bare, WINDOWS).n_atoms == table.n_atoms


# --- windows ----------------------------------------------------------------------


def test_windows_that_are_written_to_are_other_windows(model: nn.Module) -> None:
    """The fingerprint is that of the ids as they are when it is asked for."""
    windows = CalibrationSet.from_ids(tiny_ids())
    before = windows.fingerprint
    first = collect_statistics(model, windows)
    windows.ids[1, 2] = (windows.ids[1, 2] + 1) % 48
    after = collect_statistics(model, windows)
    assert windows.fingerprint != before
    assert after.metadata["spec_hash"] != first.metadata["spec_hash"]


def test_windows_that_are_there_twice_are_told(
    model: nn.Module, caplog: pytest.LogCaptureFixture
) -> None:
    """They count twice, as asked; it is said."""
    measured(model, WINDOWS.ids)
    assert not caplog.text
    measured(model, WINDOWS.ids[[0, 1, 0, 0, 2]])
    assert "2 of 5 calibration windows repeat another" in caplog.text
