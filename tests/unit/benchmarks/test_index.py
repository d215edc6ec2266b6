"""Every benchmark has one row, and is shown from its committed results."""

import io
from pathlib import Path

import pandas as pd
import pytest

from benchmarks.index import BENCHMARKS, results_of
from benchmarks.publish import draw
from heapr_lab import figures
from heapr_lab.storage import paths

FOLDER = paths.project_dir() / "benchmarks"


def test_every_table_of_results_has_a_row():
    """What was measured is shown, and what is shown was measured somewhere."""
    measured = {path.stem for path in (FOLDER / "results").glob("*.csv")}
    assert measured == set(BENCHMARKS)
    for benchmark in BENCHMARKS.values():
        assert {"date", "device", "n_cpus", "versions"} <= set(benchmark.machine())


def test_every_script_has_a_row():
    """Each file of benchmarks/ that writes results is named, and no other."""
    scripts = {
        path.name
        for path in FOLDER.glob("*.py")
        if "from benchmarks.machine import" in path.read_text("utf-8")
    }
    shown = {benchmark.script for benchmark in BENCHMARKS.values()}
    assert scripts == shown


@pytest.mark.parametrize("name", BENCHMARKS)
def test_a_benchmark_is_shown(name):
    """Its table has rows; the committed figure was drawn from the committed results."""
    row = BENCHMARKS[name]
    data = row.data(results_of(name))
    assert len(row.table(data)) >= 2
    assert (row.figure is None) == (row.stem == "")
    if row.stem:
        folder = paths.figures_dir()
        assert_written(folder / "data" / f"{row.stem}.csv", data)
        assert_written(folder / f"{row.stem}_table.csv", row.table(data))


def assert_written(path: Path, frame: pd.DataFrame) -> None:
    """The file has these rows; last digits of a mean depend on the processor."""
    expected = pd.read_csv(io.StringIO(figures.rows_text(frame)))
    pd.testing.assert_frame_equal(pd.read_csv(path), expected, rtol=1e-12, atol=0.0)


def test_a_figure_is_written_with_its_rows_and_table(tmp_path):
    """Files of the names and kinds that are committed."""
    row = BENCHMARKS["structures"]
    data = row.data(row.rows())
    written = {path.relative_to(tmp_path) for path in draw(row, data, tmp_path)}
    assert all((paths.figures_dir() / name).is_file() for name in written)
    assert {path.suffix for path in written} == {".png", ".pdf", ".csv", ".md"}
