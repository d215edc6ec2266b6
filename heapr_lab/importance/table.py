"""The importance table: what calibration measured, one row per routed atom.

Without torch. Rows are (layer, expert, atom), sorted. `tokens` belongs to
the expert and is repeated on its rows; all columns but the weights' norms
are sums or maxima over tokens.
"""

import functools
import itertools
import json
import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pandas as pd

from heapr_lab.errors import CacheError, SpecError
from heapr_lab.importance import estimators
from heapr_lab.importance.columns import (
    ELIMINATION,
    KEYS,
    check_spec,
    check_values,
    checked_rows,
    is_outdated,
)
from heapr_lab.models.architecture import Architecture
from heapr_lab.repr_html import card_html
from heapr_lab.storage import files
from heapr_lab.storage.hashing import canonical_json

logger = logging.getLogger(__name__)

_KIND = "ImportanceTable"
_MEMO_SIZE = 8
_QUANTILES = (0.0, 0.25, 0.5, 0.75, 1.0)
_ABSENT: Any = object()
_Value = TypeVar("_Value")


class ImportanceTable:
    """Measured sums of every routed atom, and how they were measured.

    It is immutable: `frame` and `metadata` give copies (the frame's are lazy, so they
    cost nothing).

    Attributes:
        frame: rows sorted by (layer, expert, atom), with their original index.
        metadata: plain data: `N` predicted tokens, `spec` of all that determined the
            numbers and its `spec_hash`, `architecture`, `provenance`.

    Example:
        >>> frame = pd.DataFrame(
        ...     {"layer": [0, 0], "expert": [0, 0], "atom": [0, 1], "sum_hg2": [2.0, 6]}
        ... )
        >>> ImportanceTable.from_frame(frame, N=2).score("fisher").tolist()
        [0.5, 1.5]
    """

    def __init__(self, frame: pd.DataFrame, metadata: Mapping[str, Any]) -> None:
        self._frame = checked_rows(frame)
        check_values(self._frame)
        # Through JSON and back, so that it is the same before and after a file.
        self._metadata: dict[str, Any] = json.loads(canonical_json(dict(metadata)))
        check_spec(self._metadata)
        self._memo: dict[Hashable, Any] = {}

    @classmethod
    def from_frame(cls, frame: pd.DataFrame, **metadata: Any) -> "ImportanceTable":
        """A table of the rows of `frame`, which may have any subset of the columns.

        They are sorted by (layer, expert, atom), and keep their index labels, so that a
        score can be matched to its row of `frame`.

        Raises:
            SpecError: they are not sorted, or have other types or impossible values.
        """
        return cls(frame, metadata)

    @property
    def frame(self) -> pd.DataFrame:  # noqa: D102 (described by the class)
        return self._frame.copy(deep=False)

    @property
    def metadata(self) -> dict[str, Any]:  # noqa: D102 (described by the class)
        return deepcopy(self._metadata)

    @property
    def n_atoms(self) -> int:
        """Number of rows."""
        return len(self._frame)

    @property
    def n_layers(self) -> int:
        """Number of layers with routed experts."""
        return int(self._frame["layer"].nunique())

    @property
    def architecture(self) -> Architecture:
        """The sizes of the measured model.

        Raises:
            SpecError: the metadata has none.
        """
        if "architecture" not in self._metadata:
            raise SpecError(
                "the table has no architecture in its metadata, which counting "
                "parameters needs; give from_frame(frame, architecture=...to_dict())"
            )
        return Architecture.from_dict(self._metadata["architecture"])

    @property
    def calibration(self) -> dict[str, Any]:
        """`CalibrationSet.record` of the measured windows; empty if not recorded."""
        origin = self.metadata.get("provenance") or {}
        # A table of an earlier version may have been merged from several.
        return {} if "merged" in origin else origin.get("calibration") or {}

    @property
    def estimators(self) -> tuple[str, ...]:
        """The estimators for which the table has all columns."""
        has_n, columns = bool(self._metadata.get("N")), set(self._frame.columns)
        return tuple(
            name
            for name, estimator in estimators.ESTIMATORS.items()
            if columns.issuperset(estimator.needs)
            and (has_n or not estimator.per_predicted_token)
        )

    def score(self, estimator: str = "heapr", **options: Any) -> pd.Series:
        """The score of every atom, on the frame's index, named after the estimator.

        Args:
            estimator: a name in `estimators.ESTIMATORS`.
            **options: options of the estimator: `alpha` of camera, `seed` of random.
        """
        values = estimators.score(
            self._frame, self._metadata, estimator=estimator, options=options
        )
        return pd.Series(values, index=self._frame.index, name=estimator)

    def scores(self, estimator: str = "heapr", **options: Any) -> np.ndarray:
        """The values of `score`, cached with the table."""
        return self.memo(
            ("scores", estimator, *sorted(options.items())),
            lambda: self.score(estimator, **options).to_numpy(),
        )

    def column(self, name: str) -> np.ndarray:
        """One column, read-only, without a copy.

        Raises:
            SpecError: the table lacks it.
        """
        if name not in self._frame:
            raise SpecError(
                f"the table has no column {name}, it has "
                f"{', '.join(self._frame.columns)}; read or collect it with that column"
            )
        values: np.ndarray = self._frame[name].to_numpy()
        return values

    def shapes(self) -> dict[int, tuple[int, int]]:
        """(n_experts, d_inter) of every layer.

        Raises:
            SpecError: rows of a layer are missing.
        """
        return dict(self._shapes)

    @functools.cached_property
    def _shapes(self) -> dict[int, tuple[int, int]]:
        layers, experts, atoms = (self.column(name) for name in KEYS)
        starts = np.r_[0, np.flatnonzero(np.diff(layers)) + 1, len(layers)]
        shapes = {}
        for start, stop in itertools.pairwise(starts):
            rows = slice(start, stop)
            shape = int(experts[rows].max()) + 1, int(atoms[rows].max()) + 1
            if shape[0] * shape[1] != stop - start:
                raise SpecError(
                    f"layer {layers[start]} has {stop - start} rows, expected "
                    f"{shape[0]} experts × {shape[1]} atoms; every expert of a layer "
                    "must have all its atoms, counted from 0"
                )
            shapes[int(layers[start])] = shape
        return shapes

    def expert_tokens(self) -> pd.DataFrame:
        """Columns layer, expert, tokens (routed to it): one row per expert."""
        columns = {name: self.column(name) for name in ("layer", "expert", "tokens")}
        new = np.diff(columns["expert"]) | np.diff(columns["layer"])
        first = np.r_[0, np.flatnonzero(new) + 1]
        return pd.DataFrame({name: column[first] for name, column in columns.items()})

    def unrouted(self) -> pd.DataFrame:
        """Columns layer, expert: the experts to which no token was routed."""
        experts = self.expert_tokens()
        unrouted = experts.loc[experts["tokens"] == 0, ["layer", "expert"]]
        return unrouted.reset_index(drop=True)

    def memo(self, key: Hashable, compute: Callable[[], _Value]) -> _Value:
        """`compute()`, or its earlier result for `key`; the latest few are kept."""
        # Correct, if perhaps computed twice, when threads call at the same time.
        entry: _Value = self._memo.get(key, _ABSENT)
        if entry is _ABSENT:
            entry = compute()
            for oldest in list(self._memo)[: 1 - _MEMO_SIZE]:
                self._memo.pop(oldest, None)
            self._memo[key] = entry
        return entry

    # --- files ------------------------------------------------------------------

    def write(self, path: Path | str) -> None:
        """Write a parquet file, atomically."""
        files.write_frame(path, self._frame, {**self._metadata, "kind": _KIND})

    @classmethod
    def read(
        cls, path: Path | str, columns: Sequence[str] | None = None
    ) -> "ImportanceTable":
        """The table in a parquet file.

        Args:
            path: the file.
            columns: columns to read beside the keys; by default all.

        Raises:
            CacheError: the file is truncated, damaged, or is not an importance table.
        """
        wanted = None if columns is None else list(dict.fromkeys([*KEYS, *columns]))
        frame, metadata = files.read_frame(path, wanted, kind=_KIND)
        del metadata["kind"]
        if is_outdated(frame.columns, metadata.get("spec")):
            logger.warning(
                "%s: left out %s, which an earlier version of heapr_lab computed in "
                "another way; measure it again with `heapr-lab score --eliminate`",
                path,
                ELIMINATION,
            )
            frame = frame.drop(columns=ELIMINATION)
        try:
            _check_metadata(metadata)
            return cls(frame, metadata)
        except SpecError as error:
            raise CacheError(
                f"{path} is damaged: {error}; {files.remedy(Path(path))}"
            ) from error

    # --- display ----------------------------------------------------------------

    def __repr__(self) -> str:
        facts = ", ".join(f"{value} {name}" for name, value in self._facts().items())
        return f"ImportanceTable({facts})"

    def _facts(self) -> dict[str, str]:
        layer, expert = self.column("layer"), self.column("expert")
        n_experts = 1 + np.count_nonzero(np.diff(expert) | np.diff(layer))
        facts = {
            "layers": f"{self.n_layers}",
            "experts": f"{n_experts:,}",
            "atoms": f"{self.n_atoms:,}",
        }
        if self._metadata.get("N"):
            facts["predicted tokens (N)"] = f"{self._metadata['N']:,}"
        if "tokens" in self._frame:
            facts["unrouted experts"] = f"{len(self.unrouted())}"
        return facts

    def _repr_html_(self) -> str:
        facts = self._facts()
        needed = estimators.ESTIMATORS["heapr"].needs
        if all(name in self._frame for name in needed):
            facts["heapr score (min, quartiles, max)"] = self._quantiles()
        return card_html("Importance table", facts)

    def _quantiles(self) -> str:
        try:
            quantiles = np.quantile(self.score("heapr"), _QUANTILES)
        except SpecError as error:  # a display shows the error and never fails
            return str(error)
        return "  ".join(f"{value:.3g}" for value in quantiles)


def _check_metadata(metadata: Mapping[str, Any]) -> None:
    """Check the types of a file's metadata.

    Raises:
        SpecError: an entry has another type than is written.
    """
    whole = ("spec", "architecture", "provenance")
    kinds: dict[str, type] = {"N": int, "spec_hash": str} | dict.fromkeys(whole, dict)
    for name, kind in kinds.items():
        value = metadata.get(name)
        negative = isinstance(value, int) and value <= 0
        if name in metadata and (negative or not isinstance(value, kind)):
            raise SpecError(
                f"its metadata has {name}={str(value)[:40]}, expected "
                f"{'a positive number' if kind is int else f'a {kind.__name__}'}"
            )
