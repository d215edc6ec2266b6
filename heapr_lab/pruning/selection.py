"""Selection: importance table and ratio to the atoms that stay.

Layer 3, without torch. What a ratio r means:

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
`rankings`). 0 prices parameters, 1 operations. An atom of an expert without routed
tokens saves no operations, so with μ = 1 it goes first if its score is 0, where it
costs nothing, and last if it is larger. Scores that are sums over the corpus (fisher,
heapr_total) can be added up and so are what to price; heapr is by itself heapr_total
with μ = 1, where all experts are of one shape.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from types import MappingProxyType
from typing import Any

import numpy as np

from heapr_lab.errors import SpecError
from heapr_lab.importance.table import ImportanceTable
from heapr_lab.pruning.masks import KeepMask
from heapr_lab.pruning.options import Rules, as_fraction, exact_ratio, layer_numbers
from heapr_lab.pruning.ranking import Ranking, atom_sizes, rank_atoms

__all__ = ["KeepMask", "select"]

_DIGITS = 6  # of the largest possible ratio, rounded down, in an error
_NAMES = {
    "atoms": "pruning ratio",
    "model": "pruning ratio of the model",
    "bytes": "pruning ratio of the model's bytes",
    "flops": "pruning ratio of the routed FLOPs",
}


def select(
    table: ImportanceTable,
    *,
    ratio: float,
    estimator: str = "heapr",
    scope: str = "global",
    granularity: str = "atom",
    structure: str = "ragged",
    multiple: int | None = None,
    of: str = "atoms",
    layer_ratios: Mapping[int, float] | None = None,
    exclude_layers: Iterable[int] = (),
    min_atoms: int = 0,
    protect_outliers: float = 0.0,
    protect_unrouted: bool = False,
    price: float | None = None,
    estimator_options: Mapping[str, Any] = MappingProxyType({}),
) -> KeepMask:
    """The atoms that stay when `ratio` of them goes, lowest scores (per price) first.

    Args:
        table: what was measured.
        ratio: in [0, 1); what it counts is told at the head of this module.
        estimator: a name in `estimators.ESTIMATORS`.
        scope: rank atoms of all layers together ("global"), or "layer" by layer.
        granularity: remove single atoms ("atom") or whole experts ("expert"), whose
            score is the sum of their atoms'.
        structure: "ragged", a width for each expert; "aligned", that is a multiple;
            "per_layer", one width for each layer; "uniform", one width for the model.
            Every expert keeps its own best atoms.
        multiple: widths are a multiple of it (or 0, or whole); needed for "aligned",
            1 for "per_layer" and "uniform" unless given.
        of: the ratio counts routed "atoms", the parameters of the whole "model", its
            "bytes", or the routed experts' "flops".
        layer_ratios: {layer: ratio} of layers with a ratio of their own.
        exclude_layers: layers to leave whole.
        min_atoms: every expert keeps at least so many (or all it has).
        protect_outliers: share of all atoms, with the largest max_abs_ph, that stays.
        protect_unrouted: keep experts without routed tokens whole.
        price: in [0, 1], what scores are divided by: from parameters (0) to operations
            (1), told at the head of this module; None for nothing.
        estimator_options: `alpha` of camera, `seed` of random.

    Example:
        Scores ½ · 1 · (1, 4, 9, 16): half of the atoms go, those of 0.5 and 2.

        >>> import pandas as pd
        >>> keys = {"layer": 0, "expert": 0, "atom": range(4), "tokens": 1}
        >>> sums = {"sum_h2": 1.0, "sum_g2": [1.0, 4.0, 9.0, 16.0]}
        >>> table = ImportanceTable.from_frame(pd.DataFrame({**keys, **sums}))
        >>> select(table, ratio=0.5).by_layer(0).tolist()
        [[False, False, True, True]]
    """
    own_layers = layer_numbers(layer_ratios or (), name="layer_ratios")
    own = {int(layer): r for layer, r in (layer_ratios or {}).items()}
    ratios = _Ratios(
        exact_ratio(ratio),
        {k: exact_ratio(r, name=f"layer_ratios[{k}]") for k, r in own.items()},
    )
    rules = Rules(
        estimator=estimator,
        estimator_options=tuple(estimator_options.items()),
        scope=scope,
        granularity=granularity,
        structure=structure,
        multiple=multiple,
        of=of,
        own_layers=own_layers,
        exclude_layers=layer_numbers(exclude_layers, name="exclude_layers"),
        min_atoms=min_atoms,
        protect_outliers=as_fraction(protect_outliers, name="protect_outliers"),
        protect_unrouted=bool(protect_unrouted),
        price=None if price is None else as_fraction(price, name="price"),
    )
    ranking = table.memo(rules, lambda: rank_atoms(table, rules=rules))
    amounts = _amounts(ratios, ranking, rules=rules, table=table)
    settings = {
        **rules.to_dict(),
        "ratio": float(ratio),
        "layer_ratios": {str(layer): float(r) for layer, r in own.items()},
        "table": table.metadata.get("spec_hash"),
    }
    return KeepMask(_kept(ranking, amounts, table=table), settings)


@dataclass(frozen=True)
class _Ratios:
    """The ratios asked for, exactly."""

    ratio: Fraction
    own: dict[int, Fraction]


def default_multiple(table: ImportanceTable) -> int:
    """Of widths: the largest power of two in an eighth of the narrowest layer's."""
    narrowest = min(d_inter for _, d_inter in table.shapes().values())
    return 1 << max(0, (narrowest // 8).bit_length() - 1)


def _kept(
    ranking: Ranking, amounts: dict[int, int], *, table: ImportanceTable
) -> dict[int, np.ndarray]:
    """What stays in every layer when `amounts` go, by layer."""
    kept, start = {}, 0
    for layer, shape in table.shapes().items():
        stop = start + shape[0] * shape[1]
        positions = ranking.positions[start:stop].reshape(shape)
        kept[layer] = positions >= amounts[layer]
        start = stop
    return kept


def _amounts(
    ratios: _Ratios, ranking: Ranking, *, rules: Rules, table: ImportanceTable
) -> dict[int, int]:
    """How much of its group has to go, by layer.

    Raises:
        SpecError: not as much of a group may go; names the largest ratio.
    """
    # A ratio of a whole is scaled to the share of it that is in the groups.
    factor = _factor(table, rules)
    exact = rules.counts_atoms_exactly and rules.of == "atoms"
    amounts: dict[int, int] = {}
    refused, largest = False, Fraction(1)
    for group, total, removable in zip(
        ranking.groups, ranking.totals, ranking.removable, strict=True
    ):
        if not rules.in_one_group and group[0] in rules.exclude_layers:
            amounts[group[0]] = 0
            continue
        own = ratios.own.get(group[0])
        wanted = (factor * ratios.ratio if own is None else own) * total
        amount = math.floor(wanted) if exact else math.ceil(wanted)
        if own is not None and amount > removable:
            name = f"layer_ratios[{group[0]}]"
            raise SpecError(_refusal(name, own, Fraction(removable, total)))
        if own is None:
            refused |= amount > removable
            largest = min(largest, Fraction(removable, total) / factor)
        amounts |= dict.fromkeys(group, amount)
    if refused:
        raise SpecError(_refusal(_NAMES[rules.of], ratios.ratio, largest))
    return amounts


def _factor(table: ImportanceTable, rules: Rules) -> Fraction:
    """What the ratio is of, for each of it that is in layers that are to lose some."""
    if rules.of == "atoms":
        return Fraction(1)
    sizes = atom_sizes(table, unit="parameters" if rules.of_weights else "flops")
    totals = {
        layer: int(sizes[layer].sum()) * d_inter
        for layer, (_, d_inter) in table.shapes().items()
    }
    whole = (
        table.architecture.n_parameters if rules.of_weights else sum(totals.values())
    )
    counted = [
        total
        for layer, total in totals.items()
        if rules.in_one_group or layer not in rules.exclude_layers
    ]
    return Fraction(whole, sum(counted))


def _refusal(name: str, ratio: Fraction, largest: Fraction) -> str:
    shown = math.floor(largest * 10**_DIGITS) / 10**_DIGITS
    return (
        f"{name} {float(ratio):g} cannot be had: what is not in routed atoms, or is "
        "excluded, protected or the least that an expert keeps, stays; the largest "
        f"possible is {shown:g}"
    )
