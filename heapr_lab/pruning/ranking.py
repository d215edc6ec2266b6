"""The order in which a table's atoms are pruned, at any ratio.

Without torch. Atoms are pruned in *units*: single atoms, whole experts, or a step of
a width. In each group of layers that is pruned together, the units are sorted by cost,
and an atom's *position* is the amount of the group that is pruned before its unit. To
prune an amount is then one comparison: an atom is kept if its position >= amount. Hence
masks of growing ratios are nested, and a new ratio needs no new sort.

A unit's cost is the mean score of its atoms where units are steps of a width, and its
score where they are single atoms or whole experts.

The cheapest-first prefix is optimal. Let c be the cost of the last unit in it. Units
in it have score <= c · size, all others score >= c · size, so the prefix has the least
Σ score − c · Σ size of all sets of units, and hence, where c >= 0, the least score of
all that remove as many atoms or more. Steps are such units although they are pruned
from the lowest up: within an expert (or layer) their costs rise.

So single atoms and rounded structures have the least score among all masks of their
structure that remove as many atoms or more, whatever the sizes of the steps. Whole
experts do if they have one width; with different widths they are ranked by their sums,
as in the paper.

This holds for the amount that *is* removed. Where steps differ in size (a
lowest step that is the remainder of a width, layers of different numbers of experts),
the last one may remove more than the ratio asks for, and steps that remove just enough
may have cost less: by at most the score of that last step, where atoms are what the
ratio counts. No order avoids this, because the best masks of two such ratios need not
be nested.

Shapes: E n_experts, D d_inter of a block of experts; a table's rows are E · D a layer.
"""

from dataclasses import dataclass

import numpy as np

from heapr_lab.errors import SpecError
from heapr_lab.importance.table import ImportanceTable
from heapr_lab.pruning.options import Selection


@dataclass(frozen=True)
class Ranking:
    """The order in which the rows of a table are pruned."""

    groups: tuple[tuple[int, ...], ...]
    """Layers that are pruned together."""
    positions: np.ndarray
    """The amount pruned before an atom; the dtype's maximum for protected atoms."""
    totals: tuple[int, ...]
    """The amount of each group: its atoms or parameters."""
    removable: tuple[int, ...]
    """The part of each total that may be pruned."""


@dataclass(frozen=True)
class _Block:
    """Consecutive rows whose experts have one width: a layer, or several."""

    rows: slice
    d_inter: int
    sizes: np.ndarray
    """The size of one atom, int64 (E,)."""


@dataclass(frozen=True)
class _Units:
    """The units of a block; `labels` (E · D,) names each atom's, or all in order."""

    labels: np.ndarray | slice
    costs: np.ndarray
    sizes: np.ndarray
    locked: np.ndarray


def rank_atoms(table: ImportanceTable, selection: Selection) -> Ranking:
    """The order in which the atoms of `table` are pruned, lowest score first.

    Ties are broken by (layer, expert, atom), lowest first: sorts are stable and sums
    run in the order of the rows, so the order is the same on every machine.

    Args:
        table: the table whose rows are ranked.
        selection: the groups and constraints; its ratios do not matter.
    """
    scores = table.score(
        selection.estimator, **dict(selection.estimator_options)
    ).to_numpy()
    protected = np.isin(table.column("layer"), selection.exclude_layers)
    groups = selection.groups(tuple(table.shapes()))
    sizes = atom_sizes(table, unit=selection.unit)
    grouped = [
        _blocks(table, group, sizes=sizes, selection=selection) for group in groups
    ]
    totals = [sum(int(b.sizes.sum()) * b.d_inter for b in blocks) for blocks in grouped]
    # Where the amounts fit, half the memory and half the time of a selection.
    kind = np.int32 if max(totals) < np.iinfo(np.int32).max else np.int64
    positions = np.empty(len(scores), dtype=kind)
    removable = []
    for blocks in grouped:
        units = [_units(scores, protected, block, selection) for block in blocks]
        before, may_go = _positions(units, kind=kind)
        removable.append(may_go)
        for block, unit, position in zip(blocks, units, before, strict=True):
            positions[block.rows] = position[unit.labels]
    return Ranking(groups, positions, tuple(totals), tuple(removable))


def lowest(scores: np.ndarray, n: int) -> np.ndarray:
    """Whether each score is among the `n` lowest; of equal ones the first are.

    Shapes: scores (N,); result bool (N,).

    Example:
        >>> lowest(np.array([3.0, 1.0, 2.0, 1.0]), 2).tolist()
        [False, True, False, True]
    """
    mask = np.zeros(len(scores), bool)
    mask[np.argsort(scores, kind="stable")[:n]] = True
    return mask


def _positions(
    units: list[_Units], *, kind: type[np.int32 | np.int64]
) -> tuple[list[np.ndarray], int]:
    """The amount before each unit, block by block, and what may be pruned in all."""
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
    scores: np.ndarray, protected: np.ndarray, block: _Block, selection: Selection
) -> _Units:
    """The units of a block; scores and protected are of all rows of the table."""
    d_inter = block.d_inter
    scores = scores[block.rows].reshape(-1, d_inter)
    protected = protected[block.rows].reshape(-1, d_inter)
    rounded = selection.structure != "ragged"
    if selection.min_atoms or rounded:
        ranks = _ranks_within_experts(scores)
        protected = protected | (ranks >= d_inter - selection.min_atoms)
    sizes = np.repeat(block.sizes, d_inter)
    if selection.counts_atoms_exactly:
        return _Units(slice(None), scores.ravel(), sizes, protected.ravel())
    labels = np.repeat(np.arange(len(scores)), d_inter)
    if rounded:
        labels, n_steps = _steps(ranks, selection=selection)
    costs = np.bincount(labels, weights=scores.ravel())
    sizes = np.bincount(labels, weights=sizes).astype(np.int64)
    locked = np.bincount(labels, weights=protected.ravel()) > 0
    if rounded:
        means = (costs / np.bincount(labels)).reshape(-1, n_steps)
        # They already rise, except for rounding.
        costs = np.maximum.accumulate(means, axis=1).ravel()
    if selection.structure == "uniform":
        locked[-1] = True  # the width must not become 0
    return _Units(labels, costs, sizes, locked)


def _ranks_within_experts(scores: np.ndarray) -> np.ndarray:
    """Rank of each atom in its expert (E, D): 0 is pruned first."""
    order = np.argsort(scores, axis=1, kind="stable")
    ranks = np.empty(order.shape, dtype=np.int32)
    np.put_along_axis(ranks, order, np.arange(scores.shape[1])[None], axis=1)
    return ranks


def _steps(ranks: np.ndarray, *, selection: Selection) -> tuple[np.ndarray, int]:
    """Each atom's step of width, and the number of steps of an expert.

    Steps of `multiple` atoms are counted from the top, so that the width is a multiple
    after any of them; the lowest step, 0, has the remainder.
    """
    n_experts, d_inter = ranks.shape
    n_steps = -(-d_inter // selection.step)
    steps = n_steps - 1 - (d_inter - 1 - ranks) // selection.step
    if selection.structure == "aligned":
        steps = steps + n_steps * np.arange(n_experts)[:, None]
    return steps.ravel(), n_steps


# --- sizes of the table ---------------------------------------------------------


def _blocks(
    table: ImportanceTable,
    group: tuple[int, ...],
    *,
    sizes: dict[int, np.ndarray],
    selection: Selection,
) -> list[_Block]:
    """The rows of every layer of a group; one block of all layers for one width.

    Raises:
        SpecError: one width is asked for, but the layers' widths differ.
    """
    blocks, start = [], 0
    for layer, (n_experts, d_inter) in table.shapes().items():
        rows = slice(start, start := start + n_experts * d_inter)
        if layer in group:
            blocks.append(_Block(rows, d_inter, sizes[layer]))
    if selection.structure != "uniform":
        return blocks
    widths = {block.d_inter for block in blocks}
    if len(widths) > 1:
        raise SpecError(
            "structure 'uniform' needs layers of one width, got "
            f"{', '.join(map(str, sorted(widths)))}; use 'per_layer'"
        )
    # The group has every layer, so its rows are consecutive.
    whole = slice(0, start)
    size = np.concatenate([sizes[layer] for layer in group])
    return [_Block(whole, blocks[0].d_inter, size)]


def atom_sizes(table: ImportanceTable, *, unit: str) -> dict[int, np.ndarray]:
    """The size of one atom of each expert, by layer, int64 (E,).

    Args:
        table: the table whose atoms are counted.
        unit: "atoms", each 1; or "parameters".

    Raises:
        SpecError: parameters are counted, but the rows are not the model's atoms.
    """
    measured = table.shapes()
    if unit == "atoms":
        return {layer: np.ones(n, np.int64) for layer, (n, _) in measured.items()}
    model = table.architecture
    shapes = {k: (s.n_experts, s.d_inter) for k, s in model.layers.items()}
    if shapes != measured:
        raise SpecError(
            "a share of the parameters needs a row for each atom of the model, "
            f"(experts, atoms) by layer {shapes}, got {measured}"
        )
    return {
        layer: np.full(shape.n_experts, shape.atom_parameters, np.int64)
        for layer, shape in model.layers.items()
    }
