"""How importance tables of different windows add up to one."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from heapr_lab.errors import SpecError
from heapr_lab.importance.columns import DEFAULTS, KEYS, MAXIMA, NORMS, SUMS
from heapr_lab.storage.hashing import digest

# Two devices add a squared norm in another order; different weights differ by more.
_SAME_NORM = 1e-5


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
        values = [spec.get(name, DEFAULTS.get(name)) for spec in told]
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
