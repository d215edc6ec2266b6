"""Provenance: what is written into a file is what is read from it."""

import json
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from heapr_lab import figures
from heapr_lab.cli.app import app
from heapr_lab.errors import CacheError, SpecError
from heapr_lab.importance.table import ImportanceTable
from heapr_lab.pruning.masks import KeepMask
from heapr_lab.storage import cache as store
from heapr_lab.storage import files
from heapr_lab.storage.hashing import digest
from heapr_lab.storage.provenance import (
    MANIFEST_FILE,
    mark,
    read_provenance,
    rows_digest,
)

SPEC = {"schema": 1, "calibration": "c" * 64}
HASH = digest(SPEC)
CALIBRATION = {"corpus": "pydocs", "n_sequences": 8, "seed": 3}
SOURCE = {
    "model": {"weights": "w" * 64},
    "importance": HASH,
    # what PDF strings, comments of Markdown and ASCII could each stumble over
    "odd": r"--> (a) \) \\ Δ } {",
}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache with the one importance table of SPEC."""
    monkeypatch.setenv("HEAPR_CACHE_DIR", str(tmp_path / "cache"))
    path = store.cache_path("importance", SPEC, extension="parquet")
    table().write(path)
    return path


def table() -> ImportanceTable:
    """Two atoms, measured for SPEC."""
    rows = {"layer": [0, 0], "expert": [0, 0], "atom": [0, 1], "sum_hg2": [2.0, 6]}
    provenance = {"calibration": CALIBRATION, "versions": {"torch": "2.0"}}
    return ImportanceTable.from_frame(
        pd.DataFrame(rows), N=2, spec=SPEC, spec_hash=HASH, provenance=provenance
    )


def written(folder: Path) -> dict[str, Path]:
    """A figure and a table, with rows beside them, by suffix."""
    data = figures.atomic_expert_data(d_model=2, d_inter=2, atom=1)
    files = figures.Display("atomic_expert", data).save(
        folder / "figure", provenance=SOURCE
    )
    files += figures.write_table(data, folder / "table", provenance=SOURCE)
    return {path.suffix: path for path in files}


@pytest.mark.parametrize("suffix", [".png", ".pdf", ".md", ".tex", ".csv"])
def test_what_is_written_is_read(suffix: str, tmp_path: Path, cache: Path) -> None:
    """Every field comes back, with the rows and the importance table behind it."""
    path = written(tmp_path)[suffix]
    found = read_provenance(path)
    said = {name: found.provenance[name] for name in SOURCE}
    assert said == SOURCE
    assert found.importance == cache
    measured = found.facts()["importance"]
    assert (measured["spec_hash"], measured["file"]) == (HASH, str(cache))
    assert (measured["calibration"], measured["N"]) == (CALIBRATION, 2)
    rows = path.with_suffix(".csv")
    assert found.provenance["data"] == rows_digest(rows.read_text(encoding="utf-8"))
    assert found.rows == (None if suffix == ".csv" else rows)


def test_rows_in_the_data_folder_are_those_of_the_figure(tmp_path: Path) -> None:
    """As `make reproduce` lays them out: figures above, rows in data/."""
    files = written(tmp_path)
    files[".md"].unlink()
    (tmp_path / "data").mkdir()
    rows = (tmp_path / "table.csv").rename(tmp_path / "data" / "figure.csv")
    (tmp_path / "figure.csv").unlink()
    assert read_provenance(files[".pdf"]).rows == rows
    assert read_provenance(rows).provenance["odd"] == SOURCE["odd"]


def test_changed_rows_are_not_those_of_the_figure(tmp_path: Path) -> None:
    """Rows that were edited are no longer offered, and are refused themselves."""
    files = written(tmp_path)
    rows = tmp_path / "figure.csv"
    rows.write_text(rows.read_text().replace("1", "2"))
    assert read_provenance(files[".png"]).rows is None
    with pytest.raises(CacheError, match=r"other rows than .*\.png was made from"):
        read_provenance(rows)
    (tmp_path / "figure.png").unlink()
    with pytest.raises(CacheError, match=r"CSV has no comments: expected beside it"):
        read_provenance(rows)


def test_a_table_that_is_not_in_the_cache_is_named(tmp_path: Path, cache: Path) -> None:
    """The hash is known without the file."""
    cache.unlink()
    found = read_provenance(written(tmp_path)[".png"])
    assert found.spec_hash == HASH
    assert found.importance is None
    assert found.facts()["importance"] == {"spec_hash": HASH, "file": None}


def test_parquet_files_say_where_they_came_from(tmp_path: Path, cache: Path) -> None:
    """An importance table its measurement, a mask its choice and its table."""
    measured = read_provenance(cache)
    assert (measured.kind, measured.importance) == ("importance table", cache)
    assert measured.provenance["calibration"] == CALIBRATION
    choice = {"ratio": 0.5, "estimator": "fisher", "table": HASH}
    KeepMask.from_arrays({0: [[True, False]]}, **choice).write(tmp_path / "m.parquet")
    mask = read_provenance(tmp_path / "m.parquet")
    assert (mask.kind, mask.importance) == ("keep mask", cache)
    assert choice.items() <= mask.provenance.items()


@pytest.mark.parametrize("named", ["importance", "selection"])
def test_a_checkpoint_says_where_it_came_from(
    named: str, tmp_path: Path, cache: Path
) -> None:
    """Its manifest, and the table that it or its selection names."""
    manifest = {"base_model": "lab", "selection": {}, "importance": None}
    manifest |= {named: HASH if named == "importance" else {"table": HASH}}
    files.write_json(tmp_path / "pruned" / MANIFEST_FILE, manifest)
    found = read_provenance(tmp_path / "pruned")
    assert (found.kind, found.importance) == ("checkpoint", cache)
    assert found.provenance == manifest


def test_foreign_files_are_refused(tmp_path: Path) -> None:
    """Each with what was expected instead."""
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "a.md").write_text("# text")
    (tmp_path / "a.png").write_bytes(b"no picture")
    (tmp_path / "a.pdf").write_bytes(b"%PDF-1.4")
    pq.write_table(pa.table({"x": [1]}), tmp_path / "a.parquet")
    expected = {
        "absent.png": "there is no file",
        "a.txt": "expected png, pdf, md, tex, csv, parquet",
        "a.md": "no mark of heapr_lab: give a file that heapr_lab wrote",
        "a.png": "cannot be read as PNG",
        "a.pdf": "no mark of heapr_lab",
        "a.parquet": "was not written by heapr_lab",
        "": "is not a checkpoint of heapr_lab: it has no heapr_manifest.json",
    }
    for name, message in expected.items():
        with pytest.raises((SpecError, CacheError), match=message):
            read_provenance(tmp_path / name)


def test_other_tables_are_refused(tmp_path: Path) -> None:
    """A parquet file of another kind is named as what it is."""
    files.write_frame(tmp_path / "x.parquet", pd.DataFrame({"a": [1]}), {"kind": "X"})
    with pytest.raises(CacheError, match="holds X, expected an importance table"):
        read_provenance(tmp_path / "x.parquet")


def test_a_mark_is_checked(tmp_path: Path) -> None:
    """An edited provenance is refused, and one of which only the hash was written."""
    path = tmp_path / "t.md"
    path.write_text(f"<!-- {mark({'ratio': 0.25}).replace('0.25', '0.5')} -->")
    with pytest.raises(CacheError, match="was changed after it was written"):
        read_provenance(path)
    path.write_text(f"<!-- heapr-lab provenance sha256:{HASH} -->")
    with pytest.raises(CacheError, match=f"only the hash .*sha256:{HASH}.*make it"):
        read_provenance(path)


def test_the_command_prints_text_or_json(tmp_path: Path, cache: Path) -> None:
    """Names with dots for people, the same facts nested for programs."""
    path = str(written(tmp_path)[".pdf"])
    text = CliRunner().invoke(app, ["provenance", path]).stdout
    lines = dict(line.split(maxsplit=1) for line in text.splitlines())
    assert lines["importance.file"] == str(cache)
    assert lines["model.weights"] == "w" * 64
    printed = CliRunner().invoke(app, ["provenance", path, "--json"]).stdout
    assert json.loads(printed) == read_provenance(path).facts()
