"""What a mark says, read from each kind of file, without drawing any."""

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from PIL import Image, PngImagePlugin

from heapr_lab.errors import CacheError, SpecError
from heapr_lab.storage import cache, files
from heapr_lab.storage.hashing import digest
from heapr_lab.storage.provenance import (
    MANIFEST_FILE,
    Origin,
    mark,
    read_provenance,
    rows_digest,
)

HASH = "ab" * 32
ROWS = "x,y\n1,2\n"
SAID = {"importance": HASH, "odd": "--> (a) \\) é", "data": rows_digest(ROWS)}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for files, and a cache elsewhere."""
    monkeypatch.setenv("HEAPR_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "files").mkdir()
    return tmp_path / "files"


def marked(path: Path, said: dict[str, Any]) -> Path:
    """A file that carries the mark of `said`, of the kind that its name says."""
    text = mark(said)
    if path.suffix.lower() == ".png":
        info = PngImagePlugin.PngInfo()
        info.add_text("Description", text)
        Image.new("L", (1, 1)).save(path, "PNG", pnginfo=info)
    elif path.suffix.lower() == ".pdf":
        escaped = text.translate({ord(c): f"\\{c}" for c in "\\()"})
        path.write_bytes(
            b"%PDF-1.4\n"
            + 2 * b"<< /Keywords (an earlier one) >>\n"
            + f"<< /Keywords\n({escaped}) /Title (x) >>".encode("latin-1")
        )
    else:
        path.write_text(f"% ℓ\n<!-- {text} -->\n", encoding="utf-8")
    return path


KINDS = {".png": "figure", ".pdf": "figure", ".md": "table", ".tex": "table"}


@pytest.mark.parametrize("suffix", [*KINDS, *map(str.upper, KINDS)])
def test_the_mark_of_each_kind_of_file(folder: Path, suffix: str) -> None:
    """It is read whole, whatever the case of the extension, from a text as a path."""
    path = marked(folder / f"a{suffix}", SAID)
    assert read_provenance(str(path)) == Origin(
        path, KINDS[suffix.lower()], SAID, HASH, None
    )


def test_a_mark_cannot_end_a_comment() -> None:
    """It is ASCII, without the sign that ends a comment of Markdown."""
    text = mark(SAID)
    assert text.isascii()
    assert ">" not in text
    assert text.startswith(f"heapr-lab provenance sha256:{digest(SAID)} {{")


@pytest.mark.parametrize("beside", ["a.csv", "data/a.csv"])
def test_rows_beside_a_figure(folder: Path, beside: str) -> None:
    """Those of its name, in its folder or in data/, if they are its own."""
    figure = marked(folder / "a.png", SAID)
    rows = folder / beside
    rows.parent.mkdir(exist_ok=True)
    rows.write_text(ROWS)
    assert read_provenance(figure).rows == rows
    assert read_provenance(rows) == Origin(rows, "rows", SAID, HASH)
    rows.write_text("x,y\n1,3\n")
    assert read_provenance(figure).rows is None
    with pytest.raises(CacheError, match=r"has other rows than .*a\.png was made from"):
        read_provenance(rows)


def test_the_first_file_that_was_made_of_the_rows(folder: Path) -> None:
    """A table beside them that was made from others does not hide the figure."""
    marked(folder / "a.md", {"data": "others"})
    marked(folder / "a.png", SAID)
    rows = folder / "a.csv"
    rows.write_text(ROWS)
    assert read_provenance(rows).provenance == SAID


def test_rows_that_nothing_was_made_of(folder: Path) -> None:
    """It is said where the files were expected."""
    (folder / "data").mkdir()
    rows = folder / "data" / "a.csv"
    rows.write_text(ROWS)
    expected = rf"beside it {folder}/data/a\.md or {folder}/a\.png, which"
    with pytest.raises(CacheError, match=expected):
        read_provenance(rows)


@pytest.mark.parametrize("importance", [None, 3, "ab", HASH + "0", HASH.upper()])
def test_what_is_no_hash_names_no_table(folder: Path, importance: object) -> None:
    """Nothing is looked for under it."""
    found = read_provenance(marked(folder / "a.md", {"importance": importance}))
    assert found.spec_hash is None
    assert found.importance is None
    assert "importance" not in found.facts()


# --- what is said of it -------------------------------------------------------------


def test_facts_and_lines(folder: Path) -> None:
    """Nested for programs, and by names with dots, file and kind first, for people."""
    path = folder / "a.md"
    said = {"model": {"name": "m", "sizes": [1, 2]}, "seed": 3, "none": None}
    origin = Origin(path, "table", said)
    assert origin.facts() == {"file": str(path), "kind": "table", "provenance": said}
    assert list(origin.lines().items()) == [
        ("file", str(path)),
        ("kind", "table"),
        ("model.name", "m"),
        ("model.sizes", "[1,2]"),
        ("seed", "3"),
    ]


def test_the_table_behind_a_file(folder: Path) -> None:
    """Its measurement is told where the cache has it."""
    origin = Origin(folder / "a.md", "table", {}, HASH, folder / "a.csv")
    unknown = {"spec_hash": HASH, "file": None}
    assert origin.facts()["importance"] == unknown
    assert origin.facts()["rows"] == str(folder / "a.csv")
    path = cache.hashed_path("importance", HASH, extension="parquet")
    path.mkdir(parents=True)
    assert origin.importance is None
    path.rmdir()
    metadata = {"kind": "ImportanceTable", "N": 2, "spec": {}, "spec_hash": HASH}
    frame = pd.DataFrame({"x": [1]})
    files.write_frame(path, frame, metadata | {"provenance": {"device": "cpu"}})
    assert origin.importance == path
    assert origin.facts()["importance"] == {
        "spec_hash": HASH,
        "file": str(path),
        "N": 2,
        "spec": {},
        "device": "cpu",
    }
    table = read_provenance(path)
    measured = {"N": 2, "spec": {}, "spec_hash": HASH, "device": "cpu"}
    assert table == Origin(path, "importance table", measured, HASH)
    assert table.facts()["importance"] == {"spec_hash": HASH, "file": str(path)}
    files.write_frame(path, frame, metadata)
    del measured["device"]
    assert read_provenance(path).provenance == measured


def test_an_origin_shows_itself(folder: Path) -> None:
    """Short in a console, as a card in a notebook."""
    path = folder / "a.md"
    assert repr(Origin(path, "table", {})) == (
        f"Origin(table {str(path)!r}, importance table none)"
    )
    assert repr(Origin(path, "table", {}, HASH)).endswith(
        f"importance table {HASH[:16]})"
    )
    html = Origin(path, "table", {"seed": 3})._repr_html_()
    assert ">Provenance<" in html
    assert str(path) in html


# --- parquet files and checkpoints ----------------------------------------------------


def test_a_comparison_of_the_panel(folder: Path) -> None:
    """Model, pinned selections and the table they are of."""
    said = {"model": "m", "pins": [1], "importance": HASH}
    path = folder / "a.PARQUET"
    files.write_frame(
        path, pd.DataFrame({"x": [1]}), said | {"kind": "comparison", "more": 1}
    )
    assert read_provenance(path) == Origin(path, "comparison", said, HASH)


def test_a_mask_that_says_what_it_was_chosen_from(folder: Path) -> None:
    """Its settings and fingerprint."""
    path = folder / "m.parquet"
    metadata = {"kind": "KeepMask", "settings": {"table": HASH}, "fingerprint": "f"}
    files.write_frame(path, pd.DataFrame({"x": [1]}), metadata)
    said = {"table": HASH, "fingerprint": "f"}
    assert read_provenance(path) == Origin(path, "keep mask", said, HASH)


def test_parquet_files_of_no_kind(folder: Path) -> None:
    """One that is absent is not a damaged one."""
    with pytest.raises(SpecError, match="there is no file"):
        read_provenance(folder / "a.parquet")
    files.write_frame(folder / "a.parquet", pd.DataFrame({"x": [1]}), {})
    with pytest.raises(CacheError, match="holds another kind of table, expected an"):
        read_provenance(folder / "a.parquet")


def test_the_table_of_a_checkpoint(folder: Path) -> None:
    """That which it names itself comes before that of its selection."""
    manifest = {"importance": HASH, "selection": {"table": "cd" * 32}}
    (folder / MANIFEST_FILE).write_text(json.dumps(manifest))
    assert read_provenance(folder) == Origin(folder, "checkpoint", manifest, HASH)
    del manifest["importance"]
    (folder / MANIFEST_FILE).write_text(json.dumps(manifest))
    assert read_provenance(folder).spec_hash == "cd" * 32


def test_a_text_that_is_no_utf8(folder: Path) -> None:
    """Is searched for a mark all the same."""
    path = folder / "a.tex"
    path.write_bytes(b"\xff% " + mark({"seed": 1}).encode())
    assert read_provenance(path).provenance == {"seed": 1}
    path.write_bytes(b"\xff")
    with pytest.raises(CacheError, match="has no mark of heapr_lab"):
        read_provenance(path)


def test_a_picture_without_a_description(folder: Path) -> None:
    """Has no mark, as a PDF file without keywords; no picture at all is damaged."""
    Image.new("L", (1, 1)).save(folder / "a.png")
    (folder / "a.pdf").write_bytes(b"%PDF-1.4")
    for name in ("a.png", "a.pdf"):
        with pytest.raises(CacheError, match="has no mark of heapr_lab"):
            read_provenance(folder / name)
    (folder / "a.png").write_bytes(b"no picture")
    with pytest.raises(CacheError, match="cannot be read as PNG"):
        read_provenance(folder / "a.png")
