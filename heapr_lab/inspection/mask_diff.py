"""Two masks of one model compared: what both remove, and what only one does.

Without torch. Chance is a random mask that removes as many atoms of every layer as the
other does, each atom alike: of N atoms, of which A removes n_A and B n_B, both remove a
hypergeometric number, with

    mean n_A n_B / N,   variance n_A n_B (N − n_A) (N − n_B) / (N² (N − 1)).

The mean holds for any random mask in which every atom is as likely to be removed. The
variance is that of single atoms: where whole experts or steps of a width are removed,
chance varies more, and z is too large.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import pandas as pd
import scipy  # its `stats` are imported when they are first used

from heapr_lab.errors import SpecError
from heapr_lab.importance.columns import atom_keys, differing
from heapr_lab.importance.table import ImportanceTable
from heapr_lab.pruning.masks import KeepMask
from heapr_lab.pruning.options import Selection
from heapr_lab.pruning.selection import select

FATES = ("neither", "a", "b", "both")
"""Who removes an atom."""
_COUNTS = ["n_atoms", "removed_a", "removed_b", "both"]


@dataclass(frozen=True, eq=False)
class ScoredMask:
    """A mask, and the scores that it was selected by."""

    label: str
    """Its name in texts and pictures."""
    keep: KeepMask
    scores: np.ndarray
    """(n_atoms,), in the order of the mask's rows; the lowest are removed first."""
    within_layer: bool = False
    """Whether atoms were ranked within their layer."""
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
            within_layer=selection.scope == "layer",
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


# --- ranks ------------------------------------------------------------------------


def ranks(a: ScoredMask, b: ScoredMask) -> tuple[np.ndarray, np.ndarray]:
    """The rank of every atom in A and in B, in (0, 1]: 1 is needed most.

    It is the share of the atoms that are removed before it or with it, by score alone.
    Both rank all atoms together, or, if one of them ranks within layers, those of each
    layer. Equal scores rank in the order of the rows, as they do for `select`.

    Shapes: float64 (n_atoms,) each.

    Raises:
        SpecError: the masks are of different models, or there is not one score for each
            atom.
    """
    _check_scored(a, b)
    layers = _places(a.keep)["layer"]
    among = layers if a.within_layer or b.within_layer else np.zeros(len(layers))
    rank_a, rank_b = (
        pd.Series(mask.scores).groupby(among).rank("first", pct=True).to_numpy()
        for mask in (a, b)
    )
    return rank_a, rank_b


def rank_agreement(a: ScoredMask, b: ScoredMask) -> pd.DataFrame:
    """Spearman's correlation of the scores within each layer.

    Returns:
        Columns layer, n_atoms, spearman; missing where the scores of one are all equal.

    Raises:
        SpecError: as `ranks`.
    """
    _check_scored(a, b)
    groups = _places(a.keep).groupby("layer").groups.items()
    rows = [(k, len(at), spearman(a.scores[at], b.scores[at])) for k, at in groups]
    return pd.DataFrame(rows, columns=["layer", "n_atoms", "spearman"])


def rank_agreement_in_all(a: ScoredMask, b: ScoredMask) -> float:
    """Spearman's correlation of the scores of all atoms.

    If A or B ranks within layers, whose scores cannot be compared: the mean over the
    layers, weighted by their atoms, without those that have no correlation.

    Raises:
        SpecError: as `ranks`.
    """
    _check_scored(a, b)
    if not (a.within_layer or b.within_layer):
        return spearman(a.scores, b.scores)
    known = rank_agreement(a, b).dropna()
    if known.empty:
        return float("nan")
    return float(np.average(known["spearman"], weights=known["n_atoms"]))


def spearman(x: np.ndarray, y: np.ndarray) -> float:
    """Spearman's correlation of x and y (n,); missing if one of them is constant."""
    if len(x) < 2 or np.ptp(x) == 0 or np.ptp(y) == 0:
        return float("nan")
    return float(scipy.stats.spearmanr(x, y).statistic)


def cut(removed: np.ndarray, rank: np.ndarray) -> float:
    """The highest rank of a removed atom, if all kept ones rank higher, else missing.

    Missing, too, if nothing is removed. Atoms that are protected, removed as whole
    experts or counted by layer leave no single cut.

    Shapes: bool (n_atoms,), float64 (n_atoms,).
    """
    if not removed.any():
        return float("nan")
    highest = rank[removed].max()
    lowest = rank[~removed].min(initial=np.inf)
    return float(highest) if highest < lowest else float("nan")


def rank_points(a: ScoredMask, b: ScoredMask, *, most: int = 20_000) -> pd.DataFrame:
    """Every atom with its ranks in A and B; for a large model a fixed sample.

    Args:
        a: a mask with its scores.
        b: another of the same model.
        most: atoms to return; if there are more, drawn with a fixed seed, each alike.

    Returns:
        Columns layer, expert, atom, rank_a, rank_b (of `ranks`), removed_by (one of
        `FATES`), in the order of the rows. `attrs` has `n_atoms`, of which they are
        drawn, and `cut_a` and `cut_b`, of all atoms.

    Raises:
        SpecError: as `ranks`.
    """
    rank_a, rank_b = ranks(a, b)
    gone_a, gone_b = ~a.keep.rows, ~b.keep.rows
    rows = np.arange(len(rank_a))
    if len(rows) > most:
        rows = np.sort(np.random.default_rng(0).choice(rows, most, replace=False))
    points = _places(a.keep).iloc[rows].reset_index(drop=True)
    points = points.assign(rank_a=rank_a[rows], rank_b=rank_b[rows])
    points["removed_by"] = np.array(FATES)[gone_a[rows] + 2 * gone_b[rows]]
    cuts = {"cut_a": cut(gone_a, rank_a), "cut_b": cut(gone_b, rank_b)}
    points.attrs.update(n_atoms=len(rank_a), **cuts)
    return points


def _places(keep: KeepMask) -> pd.DataFrame:
    """Layer, expert and atom of every row of a mask."""
    parts = [
        pd.DataFrame(atom_keys(layer, *shape)) for layer, shape in keep.shapes().items()
    ]
    return pd.concat(parts, ignore_index=True)


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


def _check_scored(a: ScoredMask, b: ScoredMask) -> None:
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
