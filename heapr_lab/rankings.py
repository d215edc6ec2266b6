"""The order in which a table's atoms go, whatever the ratio.

Layer 3, without torch. Atoms go in *units*: single atoms, whole experts, or a step of
a width. In each group of layers that is pruned together the units are sorted by cost,
and an atom's *position* is how much of the group goes before its unit does. To remove
an amount is then one comparison: an atom stays if its position >= amount. Hence masks
of growing ratios are nested, and a new ratio costs no new sort.

Shapes: E n_experts, D d_inter of a block of experts; a table's rows are E · D a layer.
"""

from dataclasses import dataclass

import numpy as np

from heapr_lab.rules import Rules
from heapr_lab.specs import SpecError
from heapr_lab.table import ImportanceTable


@dataclass(frozen=True)
class Ranking:
    """The order, of a table's rows."""

    groups: tuple[tuple[int, ...], ...]
    """Layers that are pruned together."""
    positions: np.ndarray
    """What of its group goes before an atom; the type's maximum for one that stays."""
    totals: tuple[int, ...]
    """Atoms or parameters of each group."""
    removable: tuple[int, ...]
    """Of these, what may go."""


@dataclass(frozen=True)
class _Block:
    """Consecutive rows whose experts have one width: a layer, or several."""

    rows: slice
    d_inter: int
    weights: np.ndarray
    """What one atom counts, (E,)."""


@dataclass(frozen=True)
class _Units:
    """The units of a block; `labels` (E · D,) names each atom's, or all in order."""

    labels: np.ndarray | slice
    costs: np.ndarray
    sizes: np.ndarray
    locked: np.ndarray


def rank_atoms(table: ImportanceTable, *, rules: Rules) -> Ranking:
    """The order in which the atoms of `table` go, lowest score first.

    Ties go by (layer, expert, atom), lowest first: sorts are stable and sums run in
    the order of the rows, so every machine makes the same order.

    Args:
        table: whose rows are ranked.
        rules: what goes together, and what stays.
    """
    scores = table.score(rules.estimator, **dict(rules.estimator_options)).to_numpy()
    protected = protected_atoms(table, rules)
    groups = rules.groups(tuple(table.shapes()))
    grouped = [_blocks(table, group, rules=rules) for group in groups]
    totals = [
        sum(int(b.weights.sum()) * b.d_inter for b in blocks) for blocks in grouped
    ]
    # Half the memory, and half the time of a selection, where the amounts fit.
    kind = np.int32 if max(totals) < np.iinfo(np.int32).max else np.int64
    positions = np.empty(len(scores), dtype=kind)
    removable = []
    for blocks in grouped:
        units = [
            _units(
                scores[block.rows].reshape(-1, block.d_inter),
                protected[block.rows].reshape(-1, block.d_inter),
                weights=block.weights,
                rules=rules,
            )
            for block in blocks
        ]
        before, may_go = _positions(units, kind=kind)
        removable.append(may_go)
        for block, unit, position in zip(blocks, units, before, strict=True):
            positions[block.rows] = position[unit.labels]
    return Ranking(groups, positions, tuple(totals), tuple(removable))


def _positions(
    units: list[_Units], *, kind: type[np.int32 | np.int64]
) -> tuple[list[np.ndarray], int]:
    """What goes before each unit, block by block, and what may go at all."""
    costs, sizes, locked = (
        np.concatenate([getattr(unit, name) for unit in units])
        for name in ("costs", "sizes", "locked")
    )
    order = np.argsort(np.where(locked, np.inf, costs), kind="stable")
    before = np.empty(len(order), dtype=np.int64)
    before[order] = np.cumsum(sizes[order]) - sizes[order]
    before[locked] = np.iinfo(kind).max
    ends = np.cumsum([len(unit.costs) for unit in units])[:-1]
    return np.split(before, ends), int(sizes[~locked].sum())


# --- units ----------------------------------------------------------------------


def _units(
    scores: np.ndarray, protected: np.ndarray, *, weights: np.ndarray, rules: Rules
) -> _Units:
    """The units of a block; scores and protected (E, D), weights (E,)."""
    d_inter = scores.shape[1]
    rounded = rules.structure != "ragged"
    if rules.min_atoms or rounded:
        ranks = _ranks_within_experts(scores, protected)
        protected = protected | (ranks >= d_inter - rules.min_atoms)
    sizes = np.repeat(weights, d_inter)
    if rules.counts_atoms_exactly:
        return _Units(slice(None), scores.ravel(), sizes, protected.ravel())
    n_steps = 1
    labels = np.repeat(np.arange(len(scores)), d_inter)
    if rounded:
        labels, n_steps = _steps(ranks, rules=rules)
    costs: np.ndarray = np.bincount(labels, weights=scores.ravel())
    counts = np.bincount(labels)
    sizes = np.bincount(labels, weights=sizes).astype(np.int64)
    locked = np.bincount(labels, weights=protected.ravel()) > 0
    if rounded:
        # Per atom, costs rise with the width, except for rounding: a step of an expert
        # (or layer) never goes before a lower one. So the cheapest-first prefix is
        # always made of whole lower ends, and no other choice of as many atoms in
        # steps of one size costs less: each step in it costs at most any outside it.
        costs = (costs / counts).reshape(-1, n_steps)
        costs = np.maximum.accumulate(costs, axis=1).ravel()
    if rules.structure == "uniform":
        locked[-1] = True  # a width of 0 would leave no experts at all
    return _Units(labels, costs, sizes, locked)


def _ranks_within_experts(scores: np.ndarray, protected: np.ndarray) -> np.ndarray:
    """Rank of each atom in its expert (E, D): 0 goes first, protected ones last."""
    order = np.argsort(np.where(protected, np.inf, scores), axis=1, kind="stable")
    ranks = np.empty(order.shape, dtype=np.int32)
    np.put_along_axis(ranks, order, np.arange(scores.shape[1])[None], axis=1)
    return ranks


def _steps(ranks: np.ndarray, *, rules: Rules) -> tuple[np.ndarray, int]:
    """Each atom's step of width, and the number of steps of an expert.

    Steps of `multiple` atoms are cut from the top, so that what remains after any of
    them is a multiple; the lowest step, 0, is what is left over.
    """
    n_experts, d_inter = ranks.shape
    n_steps = -(-d_inter // rules.step)
    steps = n_steps - 1 - (d_inter - 1 - ranks) // rules.step
    if rules.structure == "aligned":
        steps = steps + n_steps * np.arange(n_experts)[:, None]
    return steps.ravel(), n_steps


# --- what the table says --------------------------------------------------------


def _blocks(
    table: ImportanceTable, group: tuple[int, ...], *, rules: Rules
) -> list[_Block]:
    """The rows of every layer of a group; of all layers at once for one width.

    Raises:
        SpecError: one width is asked for, and the layers' widths differ.
    """
    sizes = table.architecture.atom_parameters if rules.in_parameters else None
    blocks, start = [], 0
    for layer, (n_experts, d_inter) in table.shapes().items():
        rows = slice(start, start := start + n_experts * d_inter)
        if layer in group:
            weight = sizes(layer) if sizes else 1
            blocks.append(_Block(rows, d_inter, np.full(n_experts, weight)))
    if rules.structure != "uniform":
        return blocks
    widths = {block.d_inter for block in blocks}
    if len(widths) > 1:
        raise SpecError(
            "structure 'uniform' needs layers of one width, got "
            f"{', '.join(map(str, sorted(widths)))}; use 'per_layer'"
        )
    # The group is every layer, so its rows follow one another.
    weights = np.concatenate([block.weights for block in blocks])
    return [_Block(slice(0, start), blocks[0].d_inter, weights)]


def protected_atoms(table: ImportanceTable, rules: Rules) -> np.ndarray:
    """The atoms that stay for reasons other than their score, bool (rows,).

    Raises:
        SpecError: `max_abs_ph`, by which outliers are found, is not finite.
    """
    protected = np.zeros(table.n_atoms, dtype=bool)
    if rules.exclude_layers:
        protected |= np.isin(table.column("layer"), rules.exclude_layers)
    if rules.protect_unrouted:
        protected |= table.column("tokens") == 0
    n_outliers = int(rules.protect_outliers * table.n_atoms)
    if n_outliers:
        peaks = table.column("max_abs_ph")
        if not np.isfinite(peaks).all():
            raise SpecError(
                f"column max_abs_ph has {np.count_nonzero(~np.isfinite(peaks))} values "
                "that are not finite, so outliers cannot be protected; collect again"
            )
        protected[np.argsort(peaks, kind="stable")[-n_outliers:]] = True
    return protected
