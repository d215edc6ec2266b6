"""The rows of importance tables: their types, their order, and how tables add up.

Layer 1, without torch. Used through `ImportanceTable`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from heapr_lab.specs import SpecError, digest

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
NORMS = ("w_down_sq", "w_up_sq", "w_gate_sq")
"""Columns of the weights alone, equal in every table of one model."""

_TYPES = {"layer": np.int16, "expert": np.int16, "atom": np.int32}

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
                typed[name] = frame[name].to_numpy().astype(kind)
            if not np.array_equal(typed[name], frame[name]):
                raise SpecError(
                    f"column {name} must hold whole numbers that fit "
                    f"{np.dtype(kind).name}, got {frame[name].dtype} values up to "
                    f"{frame[name].max()}"
                )
    for name in (*SUMS, *MAXIMA, *NORMS):
        measured = name in typed and name not in whole
        if measured and typed[name].dtype not in (np.float32, np.float64):
            typed[name] = typed[name].to_numpy(dtype=np.float64)
    return typed


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
        SpecError: the architectures or models differ, or only one table knows its N.
    """
    _check_model(ours, theirs)
    merged = _common([ours, theirs])
    merged.pop("spec_hash", None)
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


def _check_model(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> None:
    if ("N" in ours) != ("N" in theirs):
        raise SpecError("cannot merge: only one of the tables has N in its metadata")
    if ours.get("architecture") != theirs.get("architecture"):
        a, b = ours.get("architecture") or {}, theirs.get("architecture") or {}
        names = [n for n in sorted({*a, *b}) if a.get(n) != b.get(n)]
        raise SpecError(
            "cannot merge tables of different architectures: they differ in "
            f"{', '.join(names)}"
        )
    models = [
        spec["model"] for m in (ours, theirs) for spec in _specs(m) if "model" in spec
    ]
    if any(model != models[0] for model in models):
        raise SpecError(
            f"cannot merge tables of different models: {models[0]} and "
            f"{next(model for model in models if model != models[0])}"
        )


def _specs(metadata: Mapping[str, Any]) -> list[dict[str, Any]]:
    spec = metadata.get("spec") or {}
    specs: list[dict[str, Any]] = spec.get("merged", [spec])
    return specs
