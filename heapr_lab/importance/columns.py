"""The columns of importance tables: types, order of rows, and valid values.

Without torch. Used through `ImportanceTable`.
"""

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import pandas as pd

from heapr_lab.errors import SpecError
from heapr_lab.storage.hashing import digest

KEYS = ("layer", "expert", "atom")
"""Columns that identify a row."""
SUMS = ("tokens", "sum_h2", "sum_g2", "sum_hg", "sum_hg2", "sum_ph2")
"""Columns that are summed over samples.

No score reads `sum_hg` (Σ h · ∂ℓ/∂h): it shows where squares are too small for float32.
"""
MAXIMA = ("max_abs_h", "max_abs_ph")
"""Columns of which the maximum over samples is taken.

`max_abs_ph`, max p · |h|, is CAMERA-P's peak; `max_abs_h`, max |h|, is for the same as
`sum_hg`.
"""
FORMER = ("sum_p", "sum_p_out", "sum_abs_h")
"""Columns of earlier tables, which no score reads; they are left out."""
_SIGNED = ("sum_hg",)
"""Sums of terms that may be negative."""
NORMS = ("w_down_sq", "w_up_sq", "w_gate_sq")
"""Columns that depend on the weights only, equal in all tables of a model."""

ELIMINATION = "elimination"
"""Column of `refinement.elimination`, whose settings are in the specification."""
ELIMINATION_SCHEMA = 2
"""Raised whenever the same input would give other scores of elimination."""

_TYPES = {"layer": "int16", "expert": "int16", "atom": "int32", "tokens": "int64"}
_WHOLE, _REAL = {"int16", "int32", "int64"}, {"float32", "float64"}

_PIECE = 2**16


def atom_keys(layer: int, n_experts: int, d_inter: int) -> dict[str, np.ndarray]:
    """The columns `KEYS` of a layer, with a row for each atom."""
    return {
        "layer": np.full(n_experts * d_inter, layer, np.int16),
        "expert": np.repeat(np.arange(n_experts, dtype=np.int16), d_inter),
        "atom": np.tile(np.arange(d_inter, dtype=np.int32), n_experts),
    }


def differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """The names of what differs in two records, in words."""
    names = sorted({*one, *other})
    return ", ".join(name for name in names if one.get(name) != other.get(name))


def is_outdated(names: Collection[str], spec: Mapping[str, Any] | None) -> bool:
    """Whether an earlier version computed the scores of elimination in another way."""
    settings = (spec or {}).get(ELIMINATION) or {}
    schema = settings.get("schema", ELIMINATION_SCHEMA)
    return ELIMINATION in names and schema != ELIMINATION_SCHEMA


def checked_rows(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows of a table in the types of its columns, as a lazy copy.

    Raises:
        SpecError: they are not sorted, or not of such types.
    """
    rows = frame.drop(columns=[name for name in FORMER if name in frame])
    if fault := _fault(rows):
        raise SpecError(
            f"{fault}: expected rows sorted by layer, expert and atom, each once and "
            "counted from 0, whole numbers of tokens, and float32 or float64 in the "
            "other columns that are measured; sort_values and astype make them"
        )
    return rows.astype({name: kind for name, kind in _TYPES.items() if name in rows})


def _fault(rows: pd.DataFrame) -> str | None:
    """What keeps rows from being those of a table, if anything does."""
    missing = [name for name in KEYS if name not in rows]
    if missing:
        return f"the frame has no column {', '.join(missing)}"
    if not len(rows):
        return "the frame has no rows"
    for name in rows.columns.intersection([*_TYPES, *SUMS, *MAXIMA, *NORMS]):
        if str(rows[name].dtype) not in (_WHOLE if name in _TYPES else _REAL):
            return f"column {name} has {rows[name].dtype} values"
    for name in KEYS:
        least, most = rows[name].min(), rows[name].max()
        if least < 0 or most > np.iinfo(_TYPES[name]).max:
            return f"column {name} has numbers from {least} to {most}"
    return _disorder(rows)


def _disorder(rows: pd.DataFrame) -> str | None:
    """The first row that does not come after the one before it, if there is one."""
    for start in range(0, len(rows), _PIECE):  # pieces stay in the processor's cache
        numbers = _numbers(rows.iloc[start : start + _PIECE + 1])
        rises = numbers[1:] > numbers[:-1]
        if not rises.all():
            row = start + int(np.argmin(rises))
            one, other = rows[[*KEYS]].iloc[row : row + 2].to_numpy().tolist()
            return f"(layer, expert, atom) {tuple(other)} follows {tuple(one)}"
    return None


def _numbers(rows: pd.DataFrame) -> np.ndarray:
    """One number per row that sorts as (layer, expert, atom)."""
    layer, expert, atom = (rows[name].to_numpy(dtype=np.int64) for name in KEYS)
    numbers: np.ndarray = (layer << 48) | (expert << 32) | atom
    return numbers


def check_values(frame: pd.DataFrame) -> None:
    """Check that the measured values are possible.

    Raises:
        SpecError: a sum, a maximum, a norm or a score of elimination is not finite, or
            is negative although its terms cannot be (column, row and value are named).
    """
    for name in (*SUMS, *MAXIMA, *NORMS, ELIMINATION):
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
    """Check that the hash of a specification matches it.

    Raises:
        SpecError: one of them was edited.
    """
    spec_hash = metadata.get("spec_hash")
    if spec_hash is not None and spec_hash != digest(metadata.get("spec")):
        raise SpecError(
            f"the metadata's spec_hash is {str(spec_hash)[:12]}, its spec hashes to "
            f"{digest(metadata.get('spec'))[:12]}: one of them was edited; measure "
            "again, or leave both out"
        )


# --- tables of one model on different windows ------------------------------------

_POOLED = dict.fromkeys(SUMS, np.add) | dict.fromkeys(MAXIMA, np.maximum)


def pooled(ours: pd.DataFrame, theirs: pd.DataFrame) -> pd.DataFrame:
    """The sums and maxima over the windows of two tables of one model.

    What only one of them measured is left out.
    """
    weighed = ours[[name for name in ours if name in (*KEYS, *NORMS)]]
    measured = {
        name: how(ours[name].to_numpy(), theirs[name].to_numpy())
        for name, how in _POOLED.items()
        if name in ours and name in theirs
    }
    return weighed.assign(**measured)
