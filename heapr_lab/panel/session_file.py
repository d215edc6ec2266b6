"""The state of a panel in one JSON file: checked whole when read, never evaluated."""

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final, Literal

import msgspec
import numpy as np
import pandas as pd

from heapr_lab.errors import CacheError, SpecError
from heapr_lab.importance.estimators import find_estimator
from heapr_lab.importance.table import ImportanceTable
from heapr_lab.panel.session import POINT_COLUMNS, Pin, Point
from heapr_lab.pruning.options import Selection
from heapr_lab.recipes.weights import WeightRecipe
from heapr_lab.storage.cache import cache_path
from heapr_lab.storage.files import replacing
from heapr_lab.text.calibration_spec import Calibration

KIND: Final = "heapr-lab panel session"
VERSION: Final = 4
"""Increased whenever files of an older version can no longer be read."""


class Inspected(msgspec.Struct, frozen=True):
    """What is kept of the Inspect tab; earlier files have numbers, too."""

    text: str


class Tests(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Size of the test data of points, as in `Profile`."""

    seq_len: int
    n_test: int | None
    n_items: int


class MethodRow(msgspec.Struct, frozen=True):
    """What the row of a method must have; all else that it has is numbers."""

    label: str
    method: str
    achieved_ratio: float | None


class SavedSession(msgspec.Struct, frozen=True):
    """What a session file has."""

    kind: Literal["heapr-lab panel session"]
    version: Literal[4]
    table: str
    """The `fingerprint_of` the table that selections and points are of; in earlier
    files, its `spec_hash`."""
    measured_for: str
    """An estimator; where it needs an extra pass, the table has its scores."""
    tests: Tests | None
    """None without a model."""
    texts: dict[str, str]
    """Hash of the test data of each corpus and task of the points, and of the corpora
    of methods, where known."""
    calibration: Calibration
    selection: Selection
    recipe: WeightRecipe = msgspec.field(name="way")
    """How weights are made."""
    pins: tuple[Pin, ...]
    points: tuple[Point, ...]
    inspected: Inspected | None
    """None without a model."""
    methods: tuple[dict[str, str | float | None], ...] = ()
    """Rows of the methods that were run, each a `MethodRow` with savings and losses."""

    def __post_init__(self) -> None:
        find_estimator(self.measured_for)
        for recipe in (self.recipe, *(pin.recipe for pin in self.pins)):
            if recipe.own_text > 1:
                raise SpecError(
                    f"own_text is {recipe.own_text}, expected a share from 0 to 1"
                )

    def frame(self) -> pd.DataFrame:
        """The points as `PruningSession` has them: NaN where nothing was measured."""
        rows = [
            {k: v for k, v in msgspec.structs.asdict(point).items() if v is not None}
            for point in self.points
        ]
        frame = pd.DataFrame(rows, columns=list(POINT_COLUMNS))
        return frame.assign(selection=[point.selection for point in self.points])


def points_of(frame: pd.DataFrame) -> tuple[Point, ...]:
    """The rows of points as Python's own numbers; None for those that are not finite.

    Args:
        frame: as `PruningSession.points`.
    """
    return tuple(
        Point(**{name: _plain(value) for name, value in row.items()})
        for row in frame.to_dict("records")
    )


def rows_of(rows: Iterable[Mapping[str, Any]]) -> tuple[dict[str, Any], ...]:
    """The rows of methods as Python's own values; None for what is not finite."""
    return tuple({name: _plain(value) for name, value in row.items()} for row in rows)


def _plain(value: Any) -> Any:
    value = value.item() if isinstance(value, np.generic) else value
    return None if isinstance(value, float) and not np.isfinite(value) else value


# --- files ----------------------------------------------------------------------------


def path_of(name: Path | str) -> Path:
    """The path that somebody typed, with `~` as a folder.

    Raises:
        SpecError: it begins with the home of a user who is not known here.
    """
    try:
        return Path(name).expanduser()
    except RuntimeError as error:
        raise SpecError(
            f"{name} is in the home of an unknown user: write ~/ for your own"
        ) from error


def write_session(path: Path | str, saved: SavedSession) -> None:
    """Write `saved` to a file, which is replaced only if it is a session, too.

    Raises:
        SpecError: there is another file or a folder of this name, or a value is not
            plain data.
    """
    path = Path(path)
    if path.is_dir():
        raise SpecError(f"{path} is a folder, expected the name of a file")
    if path.exists():
        read_session(path)
    try:
        data = msgspec.json.encode(saved)
        same = msgspec.json.decode(data, type=SavedSession) == saved
    except (TypeError, msgspec.ValidationError):
        same = False
    if not same:
        raise SpecError(
            f"{saved.selection!r}, or the selection of a pin, has a value that a file "
            "would change: give decimals"
        )
    with replacing(path) as temporary:
        temporary.write_bytes(msgspec.json.format(data) + b"\n")


def read_session(path: Path | str) -> SavedSession:
    """The state in a file of `write_session`.

    Raises:
        SpecError: there is no such file, it is another one, of another version, or a
            part of it is missing or wrong, or unknown where that matters.
    """
    path = path_of(path)
    if not path.is_file():
        raise SpecError(f"there is no session {path}; save one in the panel")
    data = path.read_bytes()
    try:
        saved = msgspec.json.decode(data, type=SavedSession)
        _check_known(msgspec.json.decode(data))
    except (ValueError, TypeError, RecursionError) as error:
        raise SpecError(
            f"{path} is no session of the panel, or one of another heapr_lab: {error}"
        ) from error
    return saved


def _check_known(plain: Mapping[str, Any]) -> None:
    """Check that nothing is unknown in what determines masks, weights and losses.

    Raises:
        SpecError, TypeError, msgspec.ValidationError: something is, or wrong.
    """
    Calibration.from_dict(plain["calibration"])
    for part in (plain, *plain["pins"], *plain["points"]):
        if part["selection"] is not None:
            Selection.from_dict(part["selection"])
        if "way" in part:
            WeightRecipe(**part["way"])
    for row in plain.get("methods", ()):
        msgspec.convert(row, MethodRow)
        numbers = {name: row[name] for name in row.keys() - {"label", "method"}}
        msgspec.convert(numbers, dict[str, float | None])


# --- tables ---------------------------------------------------------------------------


def fingerprint_of(table: ImportanceTable) -> str:
    """What tells tables apart: the hash of what was measured, and of all numbers."""
    return table.memo("fingerprint", lambda: _hash_of(table))


def is_as_measured(table: ImportanceTable) -> bool:
    """Whether the cache has the same numbers for what the table says was measured."""
    return table.memo("is as measured", lambda: _is_cached(table))


def _is_cached(table: ImportanceTable) -> bool:
    spec = table.metadata.get("spec", {})
    path = cache_path("importance", spec, extension="parquet")
    try:
        return fingerprint_of(ImportanceTable.read(path)) == fingerprint_of(table)
    except (CacheError, OSError):
        return False


def _hash_of(table: ImportanceTable) -> str:
    sha = hashlib.sha256(str(table.metadata.get("spec_hash", "")).encode())
    frame = table.frame
    for name in sorted(frame.columns):
        sha.update(f"{name} {frame[name].dtype} ".encode())
        sha.update(np.ascontiguousarray(frame[name]).tobytes())
    return sha.hexdigest()
