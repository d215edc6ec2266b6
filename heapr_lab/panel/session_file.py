"""The state of a panel in one JSON file: checked whole when read, never unpickled."""

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import pandas as pd

from heapr_lab.errors import CacheError, SpecError
from heapr_lab.importance.estimators import ESTIMATORS
from heapr_lab.importance.table import ImportanceTable
from heapr_lab.panel.session import POINT_COLUMNS, Way
from heapr_lab.pruning.options import Selection
from heapr_lab.storage.files import read_json, write_json
from heapr_lab.text.calibration_spec import Calibration
from heapr_lab.workbench.presets import WEIGHTS

KIND = "heapr-lab panel session"
VERSION = 3
"""Increased whenever files of an older version can no longer be read."""
INSPECTED = ("text", "n_tokens", "layer", "position", "atom_layer", "expert", "atom")
"""The controls of the Inspect tab whose values are saved."""
MAPPED: Mapping[str, type] = {
    "variable": str,
    "order": str,
    "pin": int,
    "layer": int,
    "expert": int,
}
"""The controls of the map of experts whose values are saved, and their types."""
_WORDS = ("estimator", "weights", "scope", "granularity", "structure", "dataset")
"""Columns of points that are text; others but `selection` are numbers."""
_NEEDED = {"selection", *_WORDS, "ratio", "achieved_ratio", "summed_score"}


@dataclass(frozen=True)
class SavedSession:
    """What a session file has."""

    table: str
    """Of `fingerprint_of`: selections and points are of this table."""
    measured_for: str
    """An estimator; where it needs an extra pass, the table has its scores."""
    tests: Mapping[str, int | None] | None
    """Size of the test data of the points; None without a model."""
    texts: Mapping[str, str]
    """Hash of the test data of each corpus and task of the points, where known."""
    calibration: Calibration
    selection: Selection
    way: Way
    """How weights are made."""
    pins: tuple[tuple[str, Selection, Way], ...]
    """(label, selection, way) of the Compare tab."""
    points: tuple[Mapping[str, Any], ...]
    """Rows of `PruningSession.points`, without what was not measured."""
    inspected: Mapping[str, Any]
    """Values of the controls in `INSPECTED`; empty without a model."""
    map: Mapping[str, Any]
    """Values of the controls in `MAPPED`."""

    def frame(self) -> pd.DataFrame:
        """The points as `PruningSession` has them."""
        return pd.DataFrame(list(self.points), columns=list(POINT_COLUMNS))

    def to_dict(self) -> dict[str, Any]:
        """Plain data, which `from_dict` reads.

        Raises:
            SpecError: a selection has a value that JSON has not, such as a fraction.
        """
        return {
            **{name: getattr(self, name) for name in ("table", "measured_for")},
            "tests": self.tests,
            "texts": dict(self.texts),
            "calibration": self.calibration.to_dict(),
            "selection": _plain(self.selection),
            "way": asdict(self.way),
            "pins": [
                {"label": label, "selection": _plain(chosen), "way": asdict(way)}
                for label, chosen, way in self.pins
            ],
            "points": [_plain_point(row) for row in self.points],
            "inspected": dict(self.inspected),
            "map": dict(self.map),
        }

    @classmethod
    def from_dict(cls, plain: Any) -> Self:
        """The state that `to_dict` described.

        Raises:
            SpecError: a field is missing, unknown or has a wrong value.
        """
        _check_fields(plain, set(cls.__dataclass_fields__), what="a session")
        table, known = _text(plain["table"]), _text(plain["measured_for"])
        if known not in ESTIMATORS:
            raise SpecError(f"measured_for is {known!r}, expected an estimator")
        return cls(
            table,
            known,
            _tests(plain["tests"]),
            _texts(plain["texts"]),
            _read(Calibration.from_dict, plain["calibration"], what="calibration"),
            _selection(plain["selection"]),
            _way(plain["way"]),
            tuple(_pin(part) for part in _list(plain["pins"], what="pins")),
            tuple(_point(part) for part in _list(plain["points"], what="points")),
            _inspected(plain["inspected"]),
            _map(plain["map"]),
        )


def write_session(path: Path | str, saved: SavedSession) -> None:
    """Write `saved` to a file, which is replaced only if it is a session, too.

    Raises:
        SpecError: there is another file of this name, or a value is not plain data.
    """
    path = Path(path)
    if path.exists():
        _check_kind(path)
    write_json(path, {"kind": KIND, "version": VERSION, **saved.to_dict()})


def read_session(path: Path | str) -> SavedSession:
    """The state in a file of `write_session`.

    Raises:
        SpecError: there is no such file, it is another one, of another version, or a
            part of it is missing or wrong.
    """
    path = Path(path)
    if not path.is_file():
        raise SpecError(f"there is no session {path}; save one in the panel")
    plain = _check_kind(path)
    found = plain.pop("version", None)
    if type(found) is not int or found != VERSION:
        raise SpecError(
            f"{path} has version {found!r}, expected {VERSION}: open it with the "
            "heapr_lab that saved it"
        )
    try:
        return SavedSession.from_dict(plain)
    except SpecError as error:
        raise SpecError(f"{path} cannot be opened: {error}") from error


def fingerprint_of(table: ImportanceTable) -> str:
    """What tells tables apart: the hash of what was measured, else of all numbers."""
    recorded = table.metadata.get("spec_hash")
    return str(recorded) if recorded else _hash_of(table.frame)


def _hash_of(frame: pd.DataFrame) -> str:
    sha = hashlib.sha256()
    for name in sorted(frame.columns):
        sha.update(f"{name} {frame[name].dtype} ".encode())
        sha.update(np.ascontiguousarray(frame[name]).tobytes())
    return sha.hexdigest()


# --- as plain data --------------------------------------------------------------------


def _plain(selection: Selection) -> dict[str, Any]:
    plain = selection.to_dict()
    if Selection.from_dict(plain) != selection:
        raise SpecError(
            f"{selection!r} has a value that a file would change: give decimals"
        )
    return plain


def _plain_point(row: Mapping[str, Any]) -> dict[str, Any]:
    selection = row["selection"]
    plain = None if selection is None else _plain(selection)
    return {**row, "selection": plain}


def rows_of(points: pd.DataFrame) -> tuple[dict[str, Any], ...]:
    """The rows of points without what was not measured, as Python's numbers."""
    return tuple(
        {
            name: value.item() if isinstance(value, np.generic) else value
            for name, value in row.items()
            if name == "selection" or pd.notna(value)
        }
        for row in points.to_dict("records")
    )


# --- reading --------------------------------------------------------------------------


def _check_kind(path: Path) -> dict[str, Any]:
    """The content of a session's file, but for its kind.

    Raises:
        SpecError: it is a file of another kind.
    """
    try:
        plain = read_json(path)
    except CacheError as error:
        raise SpecError(f"{path} is no session of the panel: {error}") from error
    if not isinstance(plain, dict) or plain.pop("kind", None) != KIND:
        raise SpecError(
            f"{path} is no session of the panel: expected a JSON object whose kind is "
            f"{KIND!r}; give another name"
        )
    return plain


def _check_fields(plain: Any, names: set[str], *, what: str) -> None:
    if not isinstance(plain, dict) or plain.keys() != names:
        found = ", ".join(sorted(plain)) if isinstance(plain, dict) else repr(plain)
        raise SpecError(f"{what} has {', '.join(sorted(names))}, found {found}")


def _read(read: Callable[[Any], Any], plain: Any, *, what: str) -> Any:
    """`read(plain)`.

    Raises:
        SpecError: it is not what `read` expects; `what` names it.
    """
    try:
        return read(plain)
    except (TypeError, ValueError, AttributeError, KeyError, OverflowError) as error:
        raise SpecError(f"{what} cannot be read from {plain!r}: {error}") from error


def _selection(plain: Any) -> Selection:
    found = _read(Selection.from_dict, plain, what="selection")
    assert isinstance(found, Selection)
    return found


def _way(plain: Any) -> Way:
    _check_fields(plain, {"weights", "own_text"}, what="a way of weights")
    if plain["weights"] not in WEIGHTS:
        raise SpecError(
            f"weights are {plain['weights']!r}, expected one of {', '.join(WEIGHTS)}"
        )
    own = _number(plain["own_text"], name="own_text")
    if not 0 <= own <= 1:
        raise SpecError(f"own_text is {own}, expected a share from 0 to 1")
    return Way(plain["weights"], own)


def _pin(plain: Any) -> tuple[str, Selection, Way]:
    _check_fields(plain, {"label", "selection", "way"}, what="a pin")
    label, chosen = _text(plain["label"]), _selection(plain["selection"])
    return label, chosen, _way(plain["way"])


def _point(plain: Any) -> dict[str, Any]:
    names = set(POINT_COLUMNS)
    if not isinstance(plain, dict) or not _NEEDED <= plain.keys() <= names:
        raise SpecError(f"a point has {', '.join(POINT_COLUMNS)}, found {plain!r}")
    chosen = plain["selection"]
    row: dict[str, Any] = {"selection": None if chosen is None else _selection(chosen)}
    for name, value in plain.items():
        if name != "selection":
            row[name] = _text(value) if name in _WORDS else _number(value, name=name)
    return row


def _tests(plain: Any) -> dict[str, int | None] | None:
    if plain is None:
        return None
    _check_fields(plain, {"seq_len", "n_test", "n_items"}, what="tests")
    return {
        name: None if value is None else int(_number(value, name=name))
        for name, value in plain.items()
    }


def _texts(plain: Any) -> dict[str, str]:
    if not isinstance(plain, dict):
        raise SpecError(f"texts are {plain!r}, expected a hash for each name")
    return {name: _text(value) for name, value in plain.items()}


def _inspected(plain: Any) -> dict[str, Any]:
    if plain == {}:
        return {}
    _check_fields(plain, set(INSPECTED), what="inspected")
    for name, value in plain.items():
        if name != "text" and type(value) is not int:
            raise SpecError(f"inspected {name} is {value!r}, expected a whole number")
    return {**plain, "text": _text(plain["text"])}


def _map(plain: Any) -> dict[str, Any]:
    _check_fields(plain, set(MAPPED), what="a map")
    for name, value in plain.items():
        if type(value) is not MAPPED[name]:
            kind = MAPPED[name].__name__
            raise SpecError(f"{name} of the map is {value!r}, expected {kind}")
    return dict(plain)


def _list(plain: Any, *, what: str) -> list[Any]:
    if not isinstance(plain, list):
        raise SpecError(f"{what} is {plain!r}, expected a list")
    return plain


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise SpecError(f"found {value!r}, expected a text")
    return value


def _number(value: Any, *, name: str) -> float:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not math.isfinite(value):
        raise SpecError(f"{name} is {value!r}, expected a number")
    return value  # type: ignore[no-any-return]
