"""Selection: from an importance table and a ratio to the kept atoms.

Without torch. What a ratio r means:

* `ragged` atoms, scope `global`: exactly ⌊r · n⌋ of all n routed atoms are pruned;
  scope `layer`: exactly ⌊r · n_l⌋ of each layer's. r is the decimal it was written as,
  so 0.9 of 100 is 90.
* whole experts and rounded structures: the smallest possible count that is at least r
  of the atoms; the mask's `achieved_ratio` has the result.
* `of="model"`: at least r of the parameters of the whole model are pruned, the
  lowest-ranked atoms first; with scope `layer`, the same share of the atoms of every
  layer that may be pruned.
* `exclude_layers` are not pruned. With scope `global` their atoms still count, so that
  more atoms of the others are pruned; with scope `layer` each of the others loses r.

Experts without routed tokens score 0 in the second-order estimators, and so are pruned
first.
"""

import inspect
import math
from fractions import Fraction
from typing import Any

import numpy as np

from heapr_lab.errors import SpecError
from heapr_lab.importance.table import ImportanceTable
from heapr_lab.pruning.masks import KeepMask
from heapr_lab.pruning.options import Selection, exact_ratio, selection_of
from heapr_lab.pruning.ranking import Ranking, atom_sizes, rank_atoms

_DIGITS = 6  # of the largest possible ratio, rounded down, in an error
_NAMES = {"atoms": "pruning ratio", "model": "pruning ratio of the model"}


def select(
    table: ImportanceTable, selection: Selection | float | None = None, **fields: Any
) -> KeepMask:
    """The mask that prunes the atoms with the lowest scores.

    Args:
        table: the importance table.
        selection: how atoms are selected, or the ratio alone; the docstring of this
            module describes what it counts.
        **fields: the fields of `Selection`, in its place: `select(table, ratio=0.25)`
            is short for `select(table, Selection(0.25))`.

    Raises:
        SpecError: there is no ratio, or the selection is invalid, names layers without
            routed experts, or asks for more than may be pruned; the largest possible
            ratio is named.
        TypeError: both a selection and fields are given, or a field is unknown.

    Example:
        Scores ½ · 1 · (1, 4, 9, 16): half of the atoms are pruned, those of 0.5 and 2.

        >>> import pandas as pd
        >>> keys = {"layer": 0, "expert": 0, "atom": range(4), "tokens": 1}
        >>> sums = {"sum_h2": 1.0, "sum_g2": [1.0, 4.0, 9.0, 16.0]}
        >>> table = ImportanceTable.from_frame(pd.DataFrame({**keys, **sums}))
        >>> select(table, ratio=0.5).by_layer(0).tolist()
        [[False, False, True, True]]
    """
    selection = selection_of(selection, fields)
    key = selection.ranking_key
    ranking = table.memo(key, lambda: rank_atoms(table, key))
    amounts = _amounts(selection, ranking, table=table)
    shapes = table.shapes()
    ends = np.cumsum([n_experts * d_inter for n_experts, d_inter in shapes.values()])
    positions = zip(shapes, np.split(ranking.positions, ends[:-1]), strict=True)
    rows = np.concatenate([position >= amounts[layer] for layer, position in positions])
    settings = {**selection.to_dict(), "table": table.metadata.get("spec_hash")}
    return KeepMask.from_rows(table, rows, **settings)


# What help shows and tab completes, in place of `**fields`.
_params, _fields = (inspect.signature(f).parameters for f in (select, Selection))
select.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
    [
        *list(_params.values())[:2],
        *(field.replace(kind=field.KEYWORD_ONLY) for field in _fields.values()),
    ],
    return_annotation=KeepMask,
)


def default_multiple(table: ImportanceTable) -> int:
    """The default for `multiple`: a power of two, at most an eighth of the width."""
    narrowest = min(d_inter for _, d_inter in table.shapes().values())
    return 1 << max(0, (narrowest // 8).bit_length() - 1)


def _amounts(
    selection: Selection, ranking: Ranking, *, table: ImportanceTable
) -> dict[int, int]:
    """The amount of its group to prune, by layer.

    Raises:
        SpecError: it is more than may be pruned; names the largest ratio.
    """
    # A ratio of the whole model is scaled to a ratio of the groups.
    factor = _factor(table, selection)
    ratio = exact_ratio(selection.ratio)
    exact = selection.counts_atoms_exactly and selection.of == "atoms"
    amounts: dict[int, int] = {}
    refused, largest = False, Fraction(1)
    for group, total, removable in zip(
        ranking.groups, ranking.totals, ranking.removable, strict=True
    ):
        if not selection.in_one_group and group[0] in selection.exclude_layers:
            amounts[group[0]] = 0
            continue
        wanted = factor * ratio * total
        amount = math.floor(wanted) if exact else math.ceil(wanted)
        refused |= amount > removable
        largest = min(largest, Fraction(removable, total) / factor)
        amounts |= dict.fromkeys(group, amount)
    if refused:
        name = _NAMES[selection.of]
        raise SpecError(_refusal(name, ratio, largest, selection.multiple))
    return amounts


def _factor(table: ImportanceTable, selection: Selection) -> Fraction:
    """The whole that the ratio counts, divided by the part in pruned layers."""
    if selection.of == "atoms":
        return Fraction(1)
    sizes = atom_sizes(table, unit="parameters")
    counted = [
        int(sizes[layer].sum()) * d_inter
        for layer, (_, d_inter) in table.shapes().items()
        if selection.in_one_group or layer not in selection.exclude_layers
    ]
    return Fraction(table.architecture.n_parameters, sum(counted))


def _refusal(
    name: str, ratio: Fraction, largest: Fraction, multiple: int | None
) -> str:
    widths = f", and widths are multiples of {multiple}" if (multiple or 1) > 1 else ""
    shown = math.floor(largest * 10**_DIGITS) / 10**_DIGITS
    return (
        f"{name} {float(ratio):g} is infeasible: weights outside routed atoms, and "
        "atoms of excluded layers or in an expert's minimum, are kept"
        f"{widths}; the largest possible is {shown:g}"
    )
