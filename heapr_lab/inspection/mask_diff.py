"""Two masks of one model compared: what both remove, and what only one does.

Without torch. Chance is a random mask that removes as many atoms of every layer as the
other does, each atom alike: of N atoms, of which A removes n_A and B n_B, both remove a
hypergeometric number, with

    mean n_A n_B / N,   variance n_A n_B (N − n_A) (N − n_B) / (N² (N − 1)).

The mean holds for any random mask in which every atom is as likely to be removed. The
variance is that of single atoms: where whole experts or steps of a width are removed,
chance varies more, and z is too large.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import pandas as pd
import scipy  # its `stats` are imported when they are first used

from heapr_lab.errors import SpecError
from heapr_lab.importance.columns import differing
from heapr_lab.importance.table import ImportanceTable
from heapr_lab.pruning.masks import KeepMask
from heapr_lab.pruning.options import Selection
from heapr_lab.pruning.selection import select

_COUNTS = ["n_atoms", "removed_a", "removed_b", "both"]


@dataclass(frozen=True, eq=False)
class ScoredMask:
    """A mask, and the scores that it was selected by."""

    label: str
    """Its name in texts and pictures."""
    keep: KeepMask
    scores: np.ndarray
    """(n_atoms,), in the order of the mask's rows; the lowest are removed first."""
    model: Mapping[str, Any] | None = None
    """The identity of the measured model; None if it is not known."""

    @classmethod
    def select(cls, label: str, table: ImportanceTable, selection: Selection) -> Self:
        """The mask that `selection` selects from `table`, with the scores."""
        options = dict(selection.estimator_options)
        return cls(
            label,
            select(table, selection),
            table.scores(selection.estimator, **options),
            model=(table.metadata.get("spec") or {}).get("model"),
        )


# --- what both remove -------------------------------------------------------------


def overlap(a: KeepMask, b: KeepMask) -> pd.DataFrame:
    """How many atoms of each layer A, B and both remove, beside chance.

    Args:
        a: a mask.
        b: another mask of the same model.

    Returns:
        Columns layer, n_atoms, removed_a, removed_b, both; of `both` under chance the
        mean `expected`, the standard deviation `sd`, and z, (both − expected) ÷ sd,
        missing where chance cannot vary.

    Raises:
        SpecError: the masks are of different models.
    """
    check_same_model(a, b)
    rows = [
        (layer, *_counts(~a.by_layer(layer), ~b.by_layer(layer))) for layer in a.layers
    ]
    counts = pd.DataFrame(rows, columns=["layer", *_COUNTS])
    expected, sd = _chance(counts)
    z = (counts["both"] - expected) / sd.where(sd > 0)
    return counts.assign(expected=expected, sd=sd, z=z)


def _counts(gone_a: np.ndarray, gone_b: np.ndarray) -> tuple[int, int, int, int]:
    return gone_a.size, gone_a.sum(), gone_b.sum(), (gone_a & gone_b).sum()


def _chance(counts: pd.DataFrame) -> tuple[pd.Series, pd.Series]:
    """Mean and standard deviation of `both` under chance."""
    # As floats: products of four counts do not fit 64 bits.
    total, n_a, n_b, _ = (counts[name].astype(float) for name in _COUNTS)
    expected = n_a * n_b / total
    # One atom does not vary: the numerator is 0.
    variance = expected * (total - n_a) * (total - n_b) / total
    return expected, np.sqrt(variance / np.maximum(total - 1, 1))


# --- scores -----------------------------------------------------------------------


def rank_agreement(a: ScoredMask, b: ScoredMask) -> pd.DataFrame:
    """Spearman's correlation of the scores within each layer.

    Returns:
        Columns layer, n_atoms, spearman; missing where the scores of one are all equal.

    Raises:
        SpecError: the masks are of different models, or there is not one score for each
            atom.
    """
    check_scored(a, b)
    sizes = [math.prod(shape) for shape in a.keep.shapes().values()]
    layers = pd.Series(np.repeat(a.keep.layers, sizes))
    groups = layers.groupby(layers).groups.items()
    rows = [(k, len(at), spearman(a.scores[at], b.scores[at])) for k, at in groups]
    return pd.DataFrame(rows, columns=["layer", "n_atoms", "spearman"])


def spearman(x: np.ndarray, y: np.ndarray) -> float:
    """Spearman's correlation of x and y (n,); missing if one of them is constant."""
    if len(x) < 2 or np.ptp(x) == 0 or np.ptp(y) == 0:
        return float("nan")
    return float(scipy.stats.spearmanr(x, y).statistic)


# --- checks -----------------------------------------------------------------------


def check_same_model(a: KeepMask, b: KeepMask) -> None:
    """Check that two masks have the same layers, experts and atoms.

    Raises:
        SpecError: they differ, so that they are of different models.
    """
    if a.shapes() == b.shapes():
        return
    raise SpecError(
        f"the masks are of different models: the second has (experts, atoms) by layer "
        f"{b.shapes()}, expected those of the first, {a.shapes()}; select both from "
        "tables of one model"
    )


def check_scored(a: ScoredMask, b: ScoredMask) -> None:
    """Check that both are of one model, with a score for each atom.

    Raises:
        SpecError: they are not.
    """
    check_same_model(a.keep, b.keep)
    for mask in (a, b):
        if mask.scores.shape != (mask.keep.n_atoms,):
            raise SpecError(
                f"the scores of {mask.label} have the shape {mask.scores.shape}, "
                f"expected ({mask.keep.n_atoms},): one for each atom of the mask"
            )
    if a.model is not None and b.model is not None and dict(a.model) != dict(b.model):
        raise SpecError(
            f"the scores of {a.label} and {b.label} were measured on different models, "
            f"expected one: they differ in {differing(a.model, b.model)}; measure both "
            "on one"
        )
