"""Which routed atoms are kept: the mask of a pruned model. Without torch."""

import functools
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
import pandas as pd

from heapr_lab.errors import CacheError, SpecError
from heapr_lab.importance.columns import atom_keys
from heapr_lab.repr_html import bars_html, card_html
from heapr_lab.storage import files

_KIND = "KeepMask"
_COLUMNS = {"layer": "i", "expert": "i", "atom": "i", "keep": "b"}
"""Columns of a mask's file, with their kinds: signed integers and booleans."""


class Shaped(Protocol):
    """Anything with the shapes of a model: an `ImportanceTable`, another mask."""

    def shapes(self) -> dict[int, tuple[int, int]]:
        """(n_experts, d_inter) of every layer."""


@dataclass(frozen=True, eq=False, repr=False)
class KeepMask:
    """The kept atoms of every layer's experts; equal masks keep the same atoms.

    Example:
        >>> keep = KeepMask.from_arrays({3: [[True, False], [True, True]]})
        >>> keep.achieved_ratio
        0.25
        >>> keep.widths().loc[3].tolist()
        [1, 2]
    """

    arrays: Mapping[int, np.ndarray]
    """Layer to bool array (n_experts, d_inter), True = kept; read-only copies."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """How it was selected, as plain data."""

    def __post_init__(self) -> None:
        arrays = {
            int(k): _checked(self.arrays[k], layer=k) for k in sorted(self.arrays)
        }
        if not arrays:
            raise SpecError("a mask needs at least one layer, got none")
        object.__setattr__(self, "arrays", MappingProxyType(arrays))
        object.__setattr__(self, "settings", dict(self.settings))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (dict(self.arrays), self.settings)

    @classmethod
    def from_arrays(cls, arrays: Mapping[int, Any], **settings: Any) -> "KeepMask":
        """A mask of {layer: bool (n_experts, d_inter)}, True = kept."""
        return cls(arrays, settings)

    @classmethod
    def full(cls, table: Shaped) -> "KeepMask":
        """The mask that keeps every atom of `table`."""
        return cls({k: np.ones(shape, bool) for k, shape in table.shapes().items()})

    @classmethod
    def from_rows(cls, like: Shaped, rows: Any, **settings: Any) -> "KeepMask":
        """The mask whose `rows` are those given.

        Shapes: rows (n_atoms,), bool, in the order of the table.

        Args:
            like: the table, or a mask of the same model.
            rows: whether each atom is kept.
            **settings: how they were selected.

        Raises:
            SpecError: there is not one value for each atom.
        """
        shapes, flat = like.shapes(), np.asarray(rows)
        sizes = [n_experts * d_inter for n_experts, d_inter in shapes.values()]
        if flat.shape != (sum(sizes),):
            raise SpecError(
                f"the rows of a mask have the shape {flat.shape}, expected "
                f"({sum(sizes)},): one for each atom of the table"
            )
        parts = np.split(flat, np.cumsum(sizes)[:-1])
        named = zip(shapes.items(), parts, strict=True)
        return cls({k: part.reshape(shape) for (k, shape), part in named}, settings)

    # --- files ------------------------------------------------------------------

    def write(self, path: Path | str) -> None:
        """Write a parquet file atomically, with one row for each atom."""
        parts = []
        for layer, kept in self.arrays.items():
            columns = atom_keys(layer, *kept.shape) | {"keep": kept.ravel()}
            parts.append(pd.DataFrame(columns))
        metadata = {"settings": self.settings, "fingerprint": self.fingerprint}
        frame = pd.concat(parts, ignore_index=True)
        files.write_frame(path, frame, {**metadata, "kind": _KIND})

    @classmethod
    def read(cls, path: Path | str) -> "KeepMask":
        """The mask in a parquet file.

        Args:
            path: the file.

        Raises:
            CacheError: the file is truncated or changed, or is not a keep mask.
        """
        frame, metadata = files.read_frame(path, kind=_KIND)
        settings, expected = metadata.get("settings"), metadata.get("fingerprint")
        arrays = _arrays_of(frame)
        if not isinstance(settings, dict) or not arrays:
            raise CacheError(
                f"{path} is damaged: it lacks columns, atoms or settings of a mask; "
                "select the mask again"
            )
        mask = cls(arrays, settings)
        if mask.fingerprint != expected:
            raise CacheError(
                f"{path} was changed after it was written: its atoms have the "
                f"fingerprint {mask.fingerprint[:12]}, expected "
                f"{str(expected)[:12]}; select the mask again"
            )
        return mask

    # --- counts -----------------------------------------------------------------

    @property
    def layers(self) -> tuple[int, ...]:
        """Indices of the layers, ascending."""
        return tuple(self.arrays)

    def by_layer(self, layer: int) -> np.ndarray:
        """The kept atoms of `layer`: bool (n_experts, d_inter), read-only.

        Raises:
            SpecError: the mask has no such layer.
        """
        if layer not in self.arrays:
            raise SpecError(
                f"the mask has no layer {layer}; it has "
                f"{', '.join(map(str, self.arrays))}"
            )
        return self.arrays[layer]

    def shapes(self) -> dict[int, tuple[int, int]]:
        """(n_experts, d_inter) of every layer, as in a table."""
        return {k: (kept.shape[0], kept.shape[1]) for k, kept in self.arrays.items()}

    def widths(self) -> pd.DataFrame:
        """Kept atoms, layer × expert; missing where a layer has fewer experts."""
        rows = {
            k: pd.Series(np.count_nonzero(kept, axis=1), dtype="Int64")
            for k, kept in self.arrays.items()
        }
        frame = pd.DataFrame(rows).T.rename_axis(index="layer", columns="expert")
        return frame if frame.isna().to_numpy().any() else frame.astype(np.int64)

    @property
    def one_width(self) -> int | None:
        """The width of all experts in a mask of structure uniform; None in others."""
        if self.settings.get("structure") != "uniform":
            return None
        widths = {int(w) for kept in self.arrays.values() for w in kept.sum(1)}
        return widths.pop() if len(widths) == 1 else None

    @functools.cached_property
    def rows(self) -> np.ndarray:
        """Whether each atom is kept, bool (n_atoms,), in a table's order of rows."""
        return _frozen(np.concatenate([k.ravel() for k in self.arrays.values()]))

    @functools.cached_property
    def n_atoms(self) -> int:
        """Number of routed atoms."""
        return sum(kept.size for kept in self.arrays.values())

    @functools.cached_property
    def n_kept(self) -> int:
        """Number of kept atoms."""
        return sum(int(np.count_nonzero(kept)) for kept in self.arrays.values())

    @property
    def n_removed(self) -> int:
        """Number of pruned atoms."""
        return self.n_atoms - self.n_kept

    @property
    def achieved_ratio(self) -> float:
        """Pruning ratio: pruned atoms / all routed atoms."""
        return self.n_removed / self.n_atoms

    def layer_ratios(self) -> pd.Series:
        """Pruning ratio of every layer."""
        ratios = {k: (~kept).mean() for k, kept in self.arrays.items()}
        return pd.Series(ratios, name="pruning_ratio").rename_axis("layer")

    @functools.cached_property
    def fingerprint(self) -> str:
        """SHA-256 over every layer's index, shape and bits."""
        sha = hashlib.sha256()
        for layer, kept in self.arrays.items():
            sha.update(repr((layer, *kept.shape)).encode())
            sha.update(np.packbits(kept).tobytes())
        return sha.hexdigest()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, KeepMask):
            return NotImplemented
        return self.fingerprint == other.fingerprint

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    def __repr__(self) -> str:
        return (
            f"KeepMask({self.n_kept:,} of {self.n_atoms:,} atoms kept in "
            f"{len(self.arrays)} layers, pruning ratio {self.achieved_ratio:.4g})"
        )

    def _repr_html_(self) -> str:
        widths = np.concatenate([k.sum(axis=1) for k in self.arrays.values()])
        facts = {
            "pruning ratio": f"{self.achieved_ratio:.2%}",
            "atoms kept": f"{self.n_kept:,} of {self.n_atoms:,}",
            "experts without atoms": f"{sum(widths == 0)} of {len(widths)}",
            "width of an expert": f"{widths.min()} to {widths.max()}",
        }
        if "estimator" in self.settings:
            shown = ("estimator", "scope", "granularity", "structure")
            facts["selected by"] = ", ".join(str(self.settings[n]) for n in shown)
        kept = {f"layer {k}": 1 - ratio for k, ratio in self.layer_ratios().items()}
        return card_html("Keep mask", facts, below=bars_html("kept per layer", kept))


def _arrays_of(frame: pd.DataFrame) -> dict[int, np.ndarray]:
    """The arrays in a frame of `write`; empty where a row or column is missing."""
    kinds = {name: frame[name].dtype.kind for name in _COLUMNS if name in frame}
    if kinds != _COLUMNS:
        return {}
    arrays = {}
    for layer, rows in frame.groupby("layer"):
        n_experts = rows["expert"].nunique()
        if len(rows) % n_experts:
            return {}
        arrays[layer] = rows["keep"].to_numpy().reshape(n_experts, -1)
    return arrays


def _checked(kept: Any, *, layer: int) -> np.ndarray:
    """A read-only copy of `kept`.

    Raises:
        SpecError: it is not a bool array (n_experts, d_inter).
    """
    array = np.asarray(kept)
    if array.dtype != bool or array.ndim != 2 or not array.size:
        raise SpecError(
            f"the mask of layer {layer} is {array.dtype} {array.shape}, expected bool "
            "(n_experts, d_inter), True for a kept atom"
        )
    return _frozen(array)


def _frozen(array: np.ndarray) -> np.ndarray:
    """A copy that cannot be made writeable again: bytes own its values."""
    return np.frombuffer(array.tobytes(), array.dtype).reshape(array.shape)
