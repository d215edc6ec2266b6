"""Where a file came from: the marks in figures and tables, and how they are read.

A mark is the SHA-256 of the provenance, followed by the provenance as canonical JSON.
It is in the Description of a PNG file, the Keywords of a PDF file, and a comment in
Markdown and LaTeX. CSV has no comments, so a CSV file is identified through the files
beside it that were made from it. Parquet files and checkpoints of this package contain
their provenance themselves.
"""

import contextlib
import functools
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from heapr_lab.errors import CacheError, SpecError
from heapr_lab.repr_html import card_html
from heapr_lab.storage import cache, files
from heapr_lab.storage.hashing import canonical_json, digest

MANIFEST_FILE = "heapr_manifest.json"
"""File in the folder of a checkpoint that says how it was made."""

_TABLE = "importance table"
_MARK = re.compile(r"heapr-lab provenance sha256:([0-9a-f]{64})(?: (\{.*\}))?")
_HASH = re.compile("[0-9a-f]{64}")
_PDF_KEYWORDS = re.compile(rb"/Keywords\s*\(((?:[^\\()]|\\.)*)\)", re.DOTALL)


@dataclass(frozen=True, repr=False)
class Origin:
    """Where a file came from, as `read_provenance` found it."""

    file: Path
    kind: str
    """figure, table, rows, importance table, keep mask, comparison or checkpoint."""
    provenance: dict[str, Any]
    """What the file says of its origin, as plain data."""
    spec_hash: str | None = None
    """Hash of the specification of the importance table behind it."""
    rows: Path | None = None
    """The CSV file it was made from, if that is beside it, unchanged."""

    @property
    def importance(self) -> Path | None:
        """Path of the importance table in the cache; None if it is not there."""
        if self.spec_hash is None:
            return None
        path = cache.hashed_path("importance", self.spec_hash, extension="parquet")
        return path if path.is_file() else None

    def facts(self) -> dict[str, Any]:
        """Everything that is known, as plain data."""
        facts: dict[str, Any] = {"file": str(self.file), "kind": self.kind}
        facts["provenance"] = self.provenance
        if self.rows is not None:
            facts["rows"] = str(self.rows)
        if self.spec_hash is not None:
            facts["importance"] = self._measured()
        return facts

    def _measured(self) -> dict[str, Any]:
        """The table behind the file, and how it was measured if it is in the cache."""
        found: dict[str, Any] = {"spec_hash": self.spec_hash}
        path = self.importance
        if path is None:
            return found | {"file": None}
        found["file"] = str(path)
        if self.kind == _TABLE:  # its provenance says how it was measured
            return found
        return found | _measurement(files.read_metadata(path))

    def lines(self) -> dict[str, str]:
        """`facts` for display: the text of each known fact, by its dotted name."""
        facts = self.facts()
        flat = _flat(facts.pop("provenance") | facts)
        first = {name: flat.pop(name) for name in ("file", "kind")}
        shown = {name: value for name, value in flat.items() if value is not None}
        return {name: _text(value) for name, value in (first | shown).items()}

    def __repr__(self) -> str:
        behind = "none" if self.spec_hash is None else self.spec_hash[:16]
        return f"Origin({self.kind} {str(self.file)!r}, importance table {behind})"

    def _repr_html_(self) -> str:
        return card_html("Provenance", self.lines())


def _flat(facts: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in facts.items():
        whole = f"{before}{name}"
        flat |= _flat(value, f"{whole}.") if isinstance(value, dict) else {whole: value}
    return flat


def _text(value: Any) -> str:
    return value if isinstance(value, str) else canonical_json(value)


# --- marks ------------------------------------------------------------------------


def mark(provenance: Mapping[str, Any]) -> str:
    """The line that a file contains: hash and JSON of `provenance`, in ASCII.

    Example:
        >>> mark({"ratio": 0.25})[-14:]
        '{"ratio":0.25}'
    """
    plain = dict(provenance)
    # A comment of Markdown ends with the first `-->`.
    text = canonical_json(plain).replace(">", r"\u003e")
    return f"heapr-lab provenance sha256:{digest(plain)} {text}"


def _read_mark(text: str, path: Path) -> dict[str, Any]:
    """The provenance in the mark in `text`.

    Raises:
        CacheError: there is no mark, it consists of the hash alone, or it was changed.
    """
    found = _MARK.search(text)
    if found is None:
        raise CacheError(
            f"{path} has no mark of heapr_lab: give a file that heapr_lab wrote and "
            "that was not converted since"
        )
    sha256, said = found.groups()
    if said is None:
        raise CacheError(
            f"{path} has only the hash of its provenance, sha256:{sha256}: it was "
            "written by an older heapr_lab; make it again with `heapr-lab figures`"
        )
    try:
        provenance: dict[str, Any] = json.loads(said)
    except (ValueError, RecursionError):
        provenance = {}
    if digest(provenance) != sha256:
        raise CacheError(
            f"the mark of {path} was changed after it was written: expected a "
            f"provenance with sha256:{sha256}; make the file again"
        )
    return provenance


# --- reading ----------------------------------------------------------------------


def read_provenance(path: Path | str) -> Origin:
    """Where a file of heapr_lab came from.

    Args:
        path: a figure (png, pdf), a table (md, tex, csv), an importance table or a keep
            mask (parquet), or the folder of a checkpoint.

    Raises:
        SpecError: there is no such file, or heapr_lab writes no files of its kind.
        CacheError: the file is damaged, or heapr_lab did not write it.
    """
    path = Path(path)
    if path.is_dir() or path.suffix.lower() == ".parquet":
        with _whole(path):
            return _of_checkpoint(path) if path.is_dir() else _of_parquet(path)
    if not path.is_file():
        raise SpecError(f"there is no file {path}; give the path of one")
    suffix = path.suffix.lower()
    if suffix == ".csv":
        return _of_rows(path)
    if suffix not in _TEXTS:
        raise SpecError(
            f"{path} is of a kind that heapr_lab does not write: expected png, pdf, "
            "md, tex, csv, parquet, or the folder of a checkpoint"
        )
    kind = "figure" if suffix in {".png", ".pdf"} else "table"
    provenance = _read_mark(_TEXTS[suffix](path), path)
    rows = _rows_of(path, provenance)
    return Origin(path, kind, provenance, _hash(provenance, "importance"), rows)


def _hash(said: Mapping[str, Any], name: str) -> str | None:
    """The SHA-256 that `said` has under `name`, if it is one."""
    found = said.get(name)
    return found if isinstance(found, str) and _HASH.fullmatch(found) else None


def _png_text(path: Path) -> str:
    """The Description of a PNG file.

    Raises:
        CacheError: it is damaged, or not a PNG file.
    """
    from PIL import PngImagePlugin

    try:
        with PngImagePlugin.PngImageFile(path) as image:
            return str(image.text.get("Description", ""))
    except (OSError, SyntaxError, ValueError) as error:
        raise CacheError(
            f"{path} cannot be read as PNG ({error}); make it again"
        ) from error


def _pdf_text(path: Path) -> str:
    """The Keywords of a PDF file as matplotlib writes it, uncompressed."""
    found = _PDF_KEYWORDS.findall(path.read_bytes())
    return re.sub(rb"\\(.)", rb"\1", found[-1]).decode("latin-1") if found else ""


_plain_text = functools.partial(Path.read_text, encoding="utf-8", errors="replace")
_TEXTS: dict[str, Callable[[Path], str]] = {
    ".png": _png_text,
    ".pdf": _pdf_text,
    ".md": _plain_text,
    ".tex": _plain_text,
}


@contextlib.contextmanager
def _whole(path: Path) -> Iterator[None]:
    """Reads the origin that a file or a manifest states.

    Raises:
        CacheError: a part of it is missing, or has another type.
    """
    try:
        yield
    except (AttributeError, KeyError, TypeError) as error:
        raise CacheError(
            f"{path} is damaged: a part of its provenance is missing, or has another "
            f"type ({error}); {files.remedy(path)}"
        ) from error


def _of_parquet(path: Path) -> Origin:
    """The origin of an importance table, a keep mask or a comparison of the panel.

    Raises:
        SpecError: there is no such file.
        CacheError: the file is none of these.
    """
    if not path.is_file():
        raise SpecError(f"there is no file {path}; give the path of one")
    metadata = files.read_metadata(path)
    match metadata.get("kind"):
        case "ImportanceTable":
            said = _measurement(metadata)
            return Origin(path, _TABLE, said, _hash(said, "spec_hash"))
        case "KeepMask":
            said = {**metadata["settings"], "fingerprint": metadata["fingerprint"]}
            return Origin(path, "keep mask", said, _hash(said, "table"))
        case "comparison":
            said = {name: metadata[name] for name in ("model", "pins", "importance")}
            return Origin(path, "comparison", said, _hash(said, "importance"))
        case other:
            raise CacheError(
                f"{path} holds {other or 'another kind of table'}, expected an "
                "importance table, a keep mask or a comparison"
            )


def _measurement(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """How an importance table was measured, as its metadata says."""
    found = {name: metadata.get(name) for name in ("N", "spec", "spec_hash")}
    return {**found, **(metadata.get("provenance") or {})}


def _of_checkpoint(folder: Path) -> Origin:
    """The origin of a checkpoint, from its manifest.

    Raises:
        CacheError: there is no manifest.
    """
    path = folder / MANIFEST_FILE
    if not path.is_file():
        raise CacheError(
            f"{folder} is not a checkpoint of heapr_lab: it has no {MANIFEST_FILE}; "
            "give a folder that save_pruned or `heapr-lab prune` wrote"
        )
    said: dict[str, Any] = files.read_json(path)
    made = said["selection" if "selection" in said else "compression"]
    behind = _hash(said, "importance") or _hash(made, "table")
    return Origin(folder, "checkpoint", said, behind)


# --- the rows a file was made from ------------------------------------------------


def rows_digest(text: str) -> str:
    """The hash by which a provenance identifies the text of a CSV file."""
    return digest(text)


def _holds(path: Path, rows: Any) -> bool:
    return path.is_file() and rows_digest(path.read_bytes().decode()) == rows


def _rows_of(path: Path, provenance: Mapping[str, Any]) -> Path | None:
    """The CSV file that `path` was made from, if it is beside it, unchanged."""
    beside = path.with_suffix(".csv"), path.parent / "data" / f"{path.stem}.csv"
    rows = provenance.get("data")
    return next((found for found in beside if _holds(found, rows)), None)


def _of_rows(path: Path) -> Origin:
    """The origin of a CSV file, from the marked file that was made from it.

    Raises:
        CacheError: no such file is beside it, or that was made from other rows.
    """
    above = path.parent.parent if path.parent.name == "data" else path.parent
    beside = [path.with_suffix(".md"), above / f"{path.stem}.png"]
    marked = list(filter(Path.is_file, beside))
    for found in marked:
        provenance = _read_mark(_TEXTS[found.suffix](found), found)
        if _holds(path, provenance.get("data")):
            return Origin(path, "rows", provenance, _hash(provenance, "importance"))
    if marked:
        raise CacheError(
            f"{path} has other rows than {marked[0]} was made from: one of them was "
            "changed; make both again"
        )
    raise CacheError(
        f"{path} has no provenance of its own, as CSV has no comments: expected beside "
        f"it {' or '.join(map(str, beside))}, which says where its rows came from"
    )
