"""Merges importance tables of different windows into one."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from heapr_lab.errors import SpecError
from heapr_lab.importance.columns import KEYS, MAXIMA, NORMS, SUMS, differing
from heapr_lab.storage.hashing import digest

# Two devices sum a squared norm in different orders; other weights differ by more.
_SAME_NORM = 1e-5


def merge_frames(ours: pd.DataFrame, theirs: pd.DataFrame) -> pd.DataFrame:
    """The rows of `ours` with the sums and maxima of both, on the index of `ours`.

    Raises:
        SpecError: the rows, the columns or the weights' norms differ, or a column is
            neither a sum nor a maximum.
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
            merged[name] = a + b
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

    N is summed. Of the specifications and of the provenances, equal entries are kept,
    and the originals are listed under `merged`; other entries are kept if equal.

    Raises:
        SpecError: the architectures, models or settings differ, only one table has N,
            or a window is in both.
    """
    _check_architecture(ours, theirs)
    _check_settings(_parts("spec", ours, theirs))
    _check_disjoint(ours, theirs)
    merged = _common([ours, theirs])
    merged.pop("spec_hash", None)
    windows = [*ours.get("windows", []), *theirs.get("windows", [])]
    if windows:
        merged["windows"] = windows
    if "N" in ours:
        merged["N"] = ours["N"] + theirs["N"]
    for name in ("spec", "provenance"):
        if parts := _parts(name, ours, theirs):
            merged[name] = {**_common(parts), "merged": parts}
    if "spec" in merged:
        merged["spec_hash"] = digest(merged["spec"])
    return merged


def _common(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The entries that are equal in all of `parts`."""
    return {
        name: value
        for name, value in parts[0].items()
        if all(name in part and part[name] == value for part in parts)
    }


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
        raise SpecError(
            "cannot merge tables of different architectures: they differ in "
            f"{differing(a, b)}"
        )


def _check_settings(specs: Sequence[Mapping[str, Any]]) -> None:
    """Check that all parts were measured with the same settings, except the windows.

    Raises:
        SpecError: a setting differs.
    """
    given = [spec for spec in specs if spec]
    for name in sorted({name for spec in given for name in spec} - {"calibration"}):
        values = [spec.get(name) for spec in given]
        different = [value for value in values if value != values[0]]
        if different:
            raise SpecError(
                f"cannot merge tables whose specifications differ in {name}: "
                f"{values[0]} and {different[0]}; measure both with the same settings"
            )


def _check_disjoint(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> None:
    """Check that no window would count twice, as far as the tables list them.

    Raises:
        SpecError: a window would count twice.
    """
    a, b = (
        {spec["calibration"] for spec in _parts("spec", m) if "calibration" in spec}
        for m in (ours, theirs)
    )
    known = set(ours.get("windows", []))
    double = [window for window in theirs.get("windows", []) if window in known]
    if not a & b and not double:
        return
    repeated = (
        "the calibration set " + min(a & b)[:12]
        if a & b
        else f"{len(double)} of {len(theirs['windows'])} windows"
    )
    raise SpecError(
        f"cannot merge: {repeated} would count twice, being in both tables; expected "
        "disjoint windows, such as ids[:64] and ids[64:] of one calibration set"
    )


def _parts(name: str, *tables: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What the metadata of tables record as `name`, of each that was merged in them."""
    records = (metadata.get(name) for metadata in tables)
    return [p for r in records if r is not None for p in r.get("merged", [r])]
