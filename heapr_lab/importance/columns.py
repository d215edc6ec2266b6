"""The rows of importance tables: their types, their order, and how tables add up.

Layer 1, without torch. Used through `ImportanceTable`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from heapr_lab.errors import SpecError, digest

KEYS = ("layer", "expert", "atom")
"""Columns that name a row."""
SUMS = (
    "tokens",
    "sum_p",
    "sum_p_out",
    "sum_h2",
    "sum_g2",
    "sum_hg",
    "sum_hg2",
    "sum_abs_h",
    "sum_ph2",
)
"""Columns that add up over samples."""
MAXIMA = ("max_abs_h", "max_abs_ph")
"""Columns of which the larger stays."""
_SIGNED = ("sum_hg",)
"""Sums of terms that may be negative."""
NORMS = ("w_down_sq", "w_up_sq", "w_gate_sq")
"""Columns of the weights alone, equal in every table of one model."""

_TYPES = {"layer": np.int16, "expert": np.int16, "atom": np.int32}

_DEFAULTS = {"labels": "data"}
"""Entries of a specification that are left out where they have this value."""

_PIECE = 2**16

# Two devices add a squared norm in another order; different weights differ by more.
_SAME_NORM = 1e-5


def typed_rows(frame: pd.DataFrame) -> pd.DataFrame:
    """A lazy copy of `frame` with the types of the table's columns.

    Raises:
        SpecError: a key column is missing, or a value does not fit its type.
    """
    missing = [name for name in KEYS if name not in frame]
    if missing or not len(frame):
        raise SpecError(
            f"the frame has {len(frame)} rows and lacks column "
            f"{', '.join(missing) or '(none)'}; expected rows with layer, expert, atom"
        )
    typed = frame.copy(deep=False)
    whole = {**_TYPES, "tokens": np.int64}
    for name, kind in whole.items():
        if name in frame and frame[name].dtype != kind:
            with np.errstate(invalid="ignore"):
                typed[name] = _as_type(frame[name], kind)
            if not np.array_equal(typed[name], frame[name]):
                raise SpecError(
                    f"column {name} must hold whole numbers that fit "
                    f"{np.dtype(kind).name}, got {frame[name].dtype} values up to "
                    f"{frame[name].max()}"
                )
    for name in (*SUMS, *MAXIMA, *NORMS):
        measured = name in typed and name not in whole
        if measured and typed[name].dtype not in (np.float32, np.float64):
            typed[name] = _as_type(typed[name], np.float64)
    return typed


def check_values(frame: pd.DataFrame) -> None:
    """Make sure that what was measured can have been measured.

    Raises:
        SpecError: a sum, a maximum or a norm is not finite, or is negative where its
            terms cannot be (column, row and value named).
    """
    for name in (*SUMS, *MAXIMA, *NORMS):
        if name not in frame:
            continue
        values = frame[name].to_numpy()
        least = -np.inf if name in _SIGNED else 0
        # Comparisons with NaN are false; the extremes of a column with NaN are NaN.
        if least <= values.min() and np.abs(values.max()) < np.inf > -values.min():
            continue
        row = int(np.argmin((values >= least) & np.isfinite(values)))
        atom = tuple(int(frame[key].iloc[row]) for key in KEYS)
        raise SpecError(
            f"column {name} has {values[row]} at (layer, expert, atom) {atom}, "
            f"expected a finite number{'' if name in _SIGNED else ' from 0'}; measure "
            "again, in float32 if the model overflows in a smaller type"
        )


def check_spec(metadata: Mapping[str, Any]) -> None:
    """Make sure that a specification is the one that its hash was made of.

    Raises:
        SpecError: it was edited.
    """
    found = metadata.get("spec_hash")
    if found is not None and found != digest(metadata.get("spec")):
        raise SpecError(
            f"the metadata's spec_hash is {str(found)[:12]}, its spec hashes to "
            f"{digest(metadata.get('spec'))[:12]}: one of them was edited; measure "
            "again, or leave both out"
        )


def _as_type(column: pd.Series, kind: Any) -> np.ndarray:
    """The values of a column as `kind`.

    Raises:
        SpecError: one of them is no number.
    """
    try:
        return np.asarray(column.to_numpy().astype(kind))
    except (TypeError, ValueError, OverflowError) as error:
        raise SpecError(
            f"column {column.name} must hold numbers, got {column.dtype} values "
            f"({error})"
        ) from error


def sorted_rows(frame: pd.DataFrame) -> pd.DataFrame:
    """`frame` sorted by (layer, expert, atom), each row with its index label.

    Raises:
        SpecError: a row is there twice, or an index is negative.
    """
    if any(frame[name].min() < 0 for name in KEYS):
        raise SpecError("layer, expert and atom must count from 0, got a negative one")
    if not _increasing(frame):
        numbers = _numbers(frame)
        order = np.argsort(numbers, kind="stable")
        frame, numbers = frame.iloc[order], numbers[order]
        double = np.flatnonzero(numbers[1:] == numbers[:-1])
        if len(double):
            row = frame.iloc[double[0]]
            raise SpecError(
                f"{len(double)} rows are there twice, first (layer, expert, atom) "
                f"{tuple(int(row[name]) for name in KEYS)}; expected each once"
            )
    return frame


def _numbers(frame: pd.DataFrame) -> np.ndarray:
    """One number per row that sorts as (layer, expert, atom)."""
    layer, expert, atom = (frame[name].to_numpy(dtype=np.int64) for name in KEYS)
    numbers: np.ndarray = (layer << 48) | (expert << 32) | atom
    return numbers


def _increasing(frame: pd.DataFrame) -> bool:
    """Whether (layer, expert, atom) rises from row to row."""
    for start in range(0, len(frame), _PIECE):  # pieces stay in the processor's cache
        numbers = _numbers(frame.iloc[start : start + _PIECE + 1])
        if not (numbers[1:] > numbers[:-1]).all():
            return False
    return True


def merge_frames(ours: pd.DataFrame, theirs: pd.DataFrame) -> pd.DataFrame:
    """The rows of `ours` with the sums and maxima of both, on the index of `ours`.

    Raises:
        SpecError: the rows, the columns or the weights' norms differ, or no rule is
            known for a column.
    """
    if set(ours.columns) != set(theirs.columns):
        raise SpecError(
            "cannot merge tables with different columns: only one of them has "
            f"{', '.join(sorted(set(ours.columns) ^ set(theirs.columns)))}"
        )
    _check_rows(ours, theirs)
    merged = ours.copy(deep=False)
    for name in ours.columns.difference(list(KEYS)):
        a, b = ours[name].to_numpy(), theirs[name].to_numpy()
        if name in SUMS:
            merged[name] = _sum(a, b)
        elif name in MAXIMA:
            merged[name] = np.maximum(a, b)
        elif name not in NORMS:
            raise SpecError(
                f"cannot merge column {name}: it is neither a sum "
                f"({', '.join(SUMS)}) nor a maximum ({', '.join(MAXIMA)}); drop it"
            )
        elif not np.allclose(a, b, rtol=_SAME_NORM, atol=0):
            raise SpecError(
                f"cannot merge tables of different weights: {name} differs in "
                f"{np.count_nonzero(a != b)} of {len(a)} rows; collect both from one "
                "model"
            )
    return merged


def merge_metadata(
    ours: Mapping[str, Any], theirs: Mapping[str, Any]
) -> dict[str, Any]:
    """The metadata of a merged table.

    N adds; of a specification and a provenance the equal entries stay, and the whole
    ones are listed under `merged`; of other entries those stay that are equal.

    Raises:
        SpecError: the architectures, models or ways of measuring differ, only one
            table knows its N, or windows are in both.
    """
    _check_architecture(ours, theirs)
    _check_settings(_specs(ours) + _specs(theirs))
    _check_disjoint(ours, theirs)
    merged = _common([ours, theirs])
    merged.pop("spec_hash", None)
    windows = [*ours.get("windows", []), *theirs.get("windows", [])]
    if windows:
        merged["windows"] = windows
    if "N" in ours:
        merged["N"] = ours["N"] + theirs["N"]
    for name in ("spec", "provenance"):
        parts = [
            part
            for metadata in (ours, theirs)
            if name in metadata
            for part in metadata[name].get("merged", [metadata[name]])
        ]
        if parts:
            merged[name] = {**_common(parts), "merged": parts}
    if "spec" in merged:
        merged["spec_hash"] = digest(merged["spec"])
    return merged


def _common(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The entries that all of `parts` have, with one value."""
    first, *others = parts
    return {
        name: value
        for name, value in first.items()
        if all(name in part and part[name] == value for part in others)
    }


def _sum(a: np.ndarray, b: np.ndarray) -> Any:
    """The sum in the wider of both types, rounded once."""
    kind = np.result_type(a, b)
    if kind.kind != "f":
        return a + b
    return (a.astype(np.float64) + b).astype(kind)


def _check_rows(ours: pd.DataFrame, theirs: pd.DataFrame) -> None:
    if len(ours) != len(theirs):
        raise SpecError(
            f"cannot merge tables of different rows: {len(ours)} and {len(theirs)} "
            "atoms"
        )
    for name in KEYS:
        differs = ours[name].to_numpy() != theirs[name].to_numpy()
        if differs.any():
            row = int(np.argmax(differs))
            raise SpecError(
                f"cannot merge tables of different rows: row {row} has {name} "
                f"{ours[name].iloc[row]} in one and {theirs[name].iloc[row]} in the "
                "other"
            )


def _check_architecture(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> None:
    if ("N" in ours) != ("N" in theirs):
        raise SpecError("cannot merge: only one of the tables has N in its metadata")
    if ours.get("architecture") != theirs.get("architecture"):
        a, b = ours.get("architecture") or {}, theirs.get("architecture") or {}
        names = [n for n in sorted({*a, *b}) if a.get(n) != b.get(n)]
        raise SpecError(
            "cannot merge tables of different architectures: they differ in "
            f"{', '.join(names)}"
        )


def _check_settings(specs: Sequence[Mapping[str, Any]]) -> None:
    """Make sure that all was measured in one way, on whatever windows.

    Raises:
        SpecError: it was not.
    """
    told = [spec for spec in specs if spec]
    for name in sorted({name for spec in told for name in spec} - {"calibration"}):
        values = [spec.get(name, _DEFAULTS.get(name)) for spec in told]
        different = [value for value in values if value != values[0]]
        if different:
            raise SpecError(
                f"cannot merge tables whose specifications differ in {name}: "
                f"{values[0]} and {different[0]}; measure both alike"
            )


def _check_disjoint(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> None:
    """Make sure that no window counts twice, as far as the tables tell.

    Raises:
        SpecError: one would.
    """
    a, b = (
        {spec["calibration"] for spec in _specs(m) if "calibration" in spec}
        for m in (ours, theirs)
    )
    known = set(ours.get("windows", []))
    double = [window for window in theirs.get("windows", []) if window in known]
    if not a & b and not double:
        return
    told = (
        "the calibration set " + min(a & b)[:12]
        if a & b
        else f"{len(double)} of {len(theirs['windows'])} windows"
    )
    raise SpecError(
        f"cannot merge: {told} would count twice, being in both tables; expected "
        "disjoint windows, such as ids[:64] and ids[64:] of one calibration set"
    )


def _specs(metadata: Mapping[str, Any]) -> list[dict[str, Any]]:
    spec = metadata.get("spec") or {}
    specs: list[dict[str, Any]] = spec.get("merged", [spec])
    return specs
