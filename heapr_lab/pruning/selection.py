"""Selection: importance table and ratio to the atoms that stay.

Without torch. What a ratio r means:

* `ragged` atoms, scope `global`: exactly ⌊r · n⌋ of all n routed atoms go; scope
  `layer`: exactly ⌊r · n_l⌋ of each layer's. r is the decimal it was written as, so
  0.9 of 100 is 90.
* whole experts and rounded structures: the smallest count that can be had and is at
  least r of the atoms; `achieved_ratio` says which.
* `of="model"`: at least r of the parameters of the whole model go, the lowest-ranked
  atoms first; with scope `layer`, the same share of the atoms of every layer that may
  be pruned. `of="bytes"` is the share of the bytes of its weights: the same, because
  they are of one dtype.
* `of="flops"`: at least r of the *routed* experts' operations go, as the table's tokens
  used them (an atom's operations · the tokens of its expert); with scope `layer`, the
  same share of those of every layer that may be pruned. It is the
  `routed_flops_reduction` of `savings_of`, which depends on no sequence
  length; dense layers and attention, whose share of a model's operations does, are
  not counted.
* `layer_ratios` gives layers their own r; the others reach `ratio` among themselves.
* `exclude_layers` are left whole. With scope `global` their atoms still count, so that
  the others give what is missing; with scope `layer` the others lose r each.

Experts without routed tokens score 0 in the second-order estimators, and so go first
unless `protect_unrouted`.

Two budgets, parameters and operations, are what `price` is for. With a price μ, atoms
are ranked by score / ((1 − μ) · s + μ · f), where s is the atom's share of the routed
parameters and f its share of the routed operations. For every ratio the atoms that go
then have the least Σ score − λ · ((1 − μ) · Σ s + μ · Σ f) of all masks, for some λ:
the Lagrangian relaxation of both budgets, whose multipliers are as 1 − μ to μ (proof:
`ranking`). 0 prices parameters, 1 operations. An atom of an expert without routed
tokens saves no operations, so with μ = 1 it goes first if its score is 0, where it
costs nothing, and last if it is larger. Scores that are sums over the corpus (fisher,
heapr_total) can be added up and so are what to price; heapr is by itself heapr_total
with μ = 1, where all experts are of one shape.
"""

import math
from fractions import Fraction
from typing import Any

import numpy as np

from heapr_lab.errors import SpecError
from heapr_lab.importance.table import ImportanceTable
from heapr_lab.pruning.masks import KeepMask
from heapr_lab.pruning.options import Selection, exact_ratio
from heapr_lab.pruning.ranking import Ranking, atom_sizes, rank_atoms

_DIGITS = 6  # of the largest possible ratio, rounded down, in an error
_NAMES = {
    "atoms": "pruning ratio",
    "model": "pruning ratio of the model",
    "bytes": "pruning ratio of the model's bytes",
    "flops": "pruning ratio of the routed FLOPs",
}


def select(
    table: ImportanceTable, selection: Selection | None = None, **fields: Any
) -> KeepMask:
    """The atoms that stay when some go, lowest scores (per price) first.

    Args:
        table: what was measured.
        selection: how atoms are chosen; what its ratio counts is told at the head of
            this module.
        **fields: those of `Selection`, in place of one: `select(table, ratio=0.25)` is
            short for `select(table, Selection(0.25))`.

    Raises:
        SpecError: the selection cannot be used, names layers without routed experts,
            or asks for more than may go; the largest possible ratio is named.
        TypeError: both a selection and fields are given, or an unknown field.

    Example:
        Scores ½ · 1 · (1, 4, 9, 16): half of the atoms go, those of 0.5 and 2.

        >>> import pandas as pd
        >>> keys = {"layer": 0, "expert": 0, "atom": range(4), "tokens": 1}
        >>> sums = {"sum_h2": 1.0, "sum_g2": [1.0, 4.0, 9.0, 16.0]}
        >>> table = ImportanceTable.from_frame(pd.DataFrame({**keys, **sums}))
        >>> select(table, ratio=0.5).by_layer(0).tolist()
        [[False, False, True, True]]
    """
    if selection is None:
        selection = Selection(**fields)
    elif fields:
        raise TypeError(f"give a Selection or its fields, not both: {sorted(fields)}")
    key = selection.ranking_key
    ranking = table.memo(key, lambda: rank_atoms(table, key))
    amounts = _amounts(selection, ranking, table=table)
    shapes = table.shapes()
    ends = np.cumsum([n_experts * d_inter for n_experts, d_inter in shapes.values()])
    positions = zip(shapes, np.split(ranking.positions, ends[:-1]), strict=True)
    rows = np.concatenate([own >= amounts[layer] for layer, own in positions])
    settings = {**selection.to_dict(), "table": table.metadata.get("spec_hash")}
    return KeepMask.from_rows(table, rows, **settings)


def default_multiple(table: ImportanceTable) -> int:
    """Of widths: the largest power of two in an eighth of the narrowest layer's."""
    narrowest = min(d_inter for _, d_inter in table.shapes().values())
    return 1 << max(0, (narrowest // 8).bit_length() - 1)


def _amounts(
    selection: Selection, ranking: Ranking, *, table: ImportanceTable
) -> dict[int, int]:
    """How much of its group has to go, by layer.

    Raises:
        SpecError: not as much of a group may go; names the largest ratio.
    """
    # A ratio of a whole is scaled to the share of it that is in the groups.
    factor = _factor(table, selection)
    ratio = exact_ratio(selection.ratio)
    own_ratios = {layer: exact_ratio(r) for layer, r in selection.layer_ratios}
    exact = selection.counts_atoms_exactly and selection.of == "atoms"
    amounts: dict[int, int] = {}
    refused, largest = False, Fraction(1)
    for group, total, removable in zip(
        ranking.groups, ranking.totals, ranking.removable, strict=True
    ):
        if not selection.in_one_group and group[0] in selection.exclude_layers:
            amounts[group[0]] = 0
            continue
        own = own_ratios.get(group[0])
        wanted = (factor * ratio if own is None else own) * total
        amount = math.floor(wanted) if exact else math.ceil(wanted)
        if own is not None and amount > removable:
            name = f"layer_ratios[{group[0]}]"
            raise SpecError(_refusal(name, own, Fraction(removable, total)))
        if own is None:
            refused |= amount > removable
            largest = min(largest, Fraction(removable, total) / factor)
        amounts |= dict.fromkeys(group, amount)
    if refused:
        raise SpecError(_refusal(_NAMES[selection.of], ratio, largest))
    return amounts


def _factor(table: ImportanceTable, selection: Selection) -> Fraction:
    """What the ratio is of, for each of it that is in layers that are to lose some."""
    if selection.of == "atoms":
        return Fraction(1)
    sizes = atom_sizes(table, unit="parameters" if selection.of_weights else "flops")
    totals = {
        layer: int(sizes[layer].sum()) * d_inter
        for layer, (_, d_inter) in table.shapes().items()
    }
    whole = (
        table.architecture.n_parameters
        if selection.of_weights
        else sum(totals.values())
    )
    counted = [
        total
        for layer, total in totals.items()
        if selection.in_one_group or layer not in selection.exclude_layers
    ]
    return Fraction(whole, sum(counted))


def _refusal(name: str, ratio: Fraction, largest: Fraction) -> str:
    shown = math.floor(largest * 10**_DIGITS) / 10**_DIGITS
    return (
        f"{name} {float(ratio):g} cannot be had: what is not in routed atoms, or is "
        "excluded, protected or the least that an expert keeps, stays; the largest "
        f"possible is {shown:g}"
    )
