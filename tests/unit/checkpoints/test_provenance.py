"""Provenance: what is written into a file is what is read from it."""

import json
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from commands import run
from figure_rows import keep_of
from PIL import Image, PngImagePlugin

from heapr_lab import ImportanceTable, KeepMask, figures, read_provenance
from heapr_lab.checkpoints.model_card import loading_code
from heapr_lab.checkpoints.provenance import MANIFEST_FILE
from heapr_lab.errors import CacheError, SpecError
from heapr_lab.storage import files

HASH = "ab" * 32
SAID = {"model": {"weights": HASH}, "importance": HASH, "odd": r"--> (a) \) \\ Δ } {"}


def picture(path: Path, description: str | None) -> Path:
    """A PNG file with that Description."""
    info = PngImagePlugin.PngInfo()
    if description is not None:
        info.add_text("Description", description)
    Image.new("L", (1, 1)).save(path, "PNG", pnginfo=info)
    return path


def test_a_figure_says_where_it_came_from(tmp_path):
    """What it was saved with, whatever the signs; PDF has the same for its readers."""
    data = figures.layer_ratios_data({0.25: keep_of(4, 1)})
    figure = figures.figure_layer_ratios(data)
    png, pdf = figures.save_figure(figure, tmp_path / "figure", provenance=SAID)
    assert read_provenance(str(png)) == SAID
    assert HASH.encode() in pdf.read_bytes()


def test_figures_of_earlier_versions_are_read(tmp_path):
    """Their record is behind a hash, and a name's ending may be of any case."""
    before = f"heapr-lab provenance sha256:{HASH} {json.dumps(SAID)}"
    assert read_provenance(picture(tmp_path / "a.PNG", before)) == SAID


def test_parquet_files_say_where_they_came_from(tmp_path):
    """A table its measurement, a mask its choice."""
    rows = {"layer": [0, 0], "expert": [0, 0], "atom": [0, 1], "sum_hg2": [2.0, 6]}
    facts = {"spec": {"schema": 1}, "provenance": {"device": "cpu"}}
    table = ImportanceTable.from_frame(pd.DataFrame(rows), N=2, **facts)
    table.write(tmp_path / "t.parquet")
    provenance = read_provenance(tmp_path / "t.parquet")
    assert provenance.items() >= (facts | {"N": 2}).items()
    assert "architecture" not in provenance
    choice = {"ratio": 0.5, "estimator": "fisher", "table": HASH}
    KeepMask.from_arrays({0: [[True, False]]}, **choice).write(tmp_path / "m.parquet")
    assert read_provenance(tmp_path / "m.parquet")["settings"].items() >= choice.items()


def test_a_checkpoint_says_where_it_came_from(tmp_path):
    """What is read is its manifest."""
    manifest = {"base_model": "lab", "selection": {}, "importance": HASH}
    files.write_json(tmp_path / "pruned" / MANIFEST_FILE, manifest)
    assert read_provenance(tmp_path / "pruned") == manifest


def test_foreign_files_are_refused(tmp_path):
    """Each message says what was expected instead."""
    (tmp_path / "a.md").write_text("# text")
    (tmp_path / "a.png").write_bytes(b"no picture")
    picture(tmp_path / "b.png", None)
    picture(tmp_path / "c.png", f"heapr-lab provenance sha256:{HASH}")
    picture(tmp_path / "d.png", '{"a": ' + "[" * 100_000)
    pq.write_table(pa.table({"x": [1]}), tmp_path / "a.parquet")
    (tmp_path / "list").mkdir()
    (tmp_path / "list" / MANIFEST_FILE).write_text("[]")
    expected = {
        "absent.png": "there is no file",
        "absent.parquet": "there is no file",
        "a.md": "expected png, parquet, or the folder of a checkpoint",
        **dict.fromkeys([f"{n}.png" for n in "abcd"], "says nothing of its origin"),
        "a.parquet": "was not written by heapr_lab",
        "": "is not a checkpoint of heapr_lab: it has no heapr_manifest.json",
        "list": "is damaged: expected a JSON object",
    }
    for name, message in expected.items():
        with pytest.raises((SpecError, CacheError), match=message):
            read_provenance(tmp_path / name)


def test_the_command_prints_text_or_json(tmp_path):
    """Names with dots for people, the same facts nested for programs."""
    path = str(picture(tmp_path / "a.png", json.dumps(SAID)))
    text = run("provenance", path)
    lines = dict(line.split(maxsplit=1) for line in text.splitlines())
    assert (lines["file"], lines["model.weights"]) == (path, HASH)
    assert json.loads(run("provenance", path, "--json")) == {"file": path, **SAID}


@pytest.mark.parametrize("manifest", [{}, {"structure": 3}])
def test_code_to_load_a_checkpoint_needs_its_structure(manifest, tmp_path):
    """A manifest without one is damaged."""
    files.write_json(tmp_path / MANIFEST_FILE, manifest)
    with pytest.raises(CacheError, match="names no structure"):
        loading_code(tmp_path)
