"""Budgets and prices: what is selected is the best there is, by trying all masks."""

import math
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from heapr_lab.errors import SpecError
from heapr_lab.importance.table import ImportanceTable
from heapr_lab.models.architecture import Architecture, LayerShape
from heapr_lab.pruning.masks import KeepMask
from heapr_lab.pruning.ranking import atom_sizes
from heapr_lab.pruning.selection import select

pytestmark = pytest.mark.property

N_ROUTED = 6
"""Routed tokens of every layer."""
ROUNDING = 1e-9  # sums of a few dozen numbers below 100, divided by prices

WIDTHS: tuple[dict[str, Any], ...] = (
    {},
    {"structure": "aligned", "multiple": 2},
    {"structure": "aligned", "multiple": 3},
    {"structure": "per_layer"},
    {"structure": "per_layer", "multiple": 2},
)
UNIFORM: tuple[dict[str, Any], ...] = (
    {"structure": "uniform"},
    {"structure": "uniform", "multiple": 3},
)
KINDS: tuple[dict[str, Any], ...] = (
    *WIDTHS,
    {"scope": "layer"},
    {"granularity": "expert"},
    {"structure": "per_layer", "scope": "layer"},
)

ratios = st.fractions(0, Fraction(99, 100), max_denominator=100)
prices = st.sampled_from([0, 0.25, 0.5, 0.9, 1])


@st.composite
def tables(
    draw: st.DrawFn, *, same_shapes: bool = False, all_routed: bool = False
) -> ImportanceTable:
    """Small whole models of one or two layers, whose fisher scores are whole numbers.

    Args:
        draw: given by hypothesis.
        same_shapes: layers of equal shapes.
        all_routed: every expert has tokens.
    """
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    largest = draw(st.sampled_from([1, 4, 50]))  # few values make ties
    frames, layers = [], {}
    shape = _shape(rng)
    for layer in range(draw(st.integers(1, 2))):
        shape = shape if same_shapes else _shape(rng)
        tokens = np.full(shape.n_experts, int(all_routed))
        rest = N_ROUTED - tokens.sum()
        tokens += rng.multinomial(rest, rng.dirichlet(np.ones(len(tokens))))
        expert, atom = np.indices((shape.n_experts, shape.d_inter)).reshape(2, -1)
        columns = {
            "tokens": tokens[expert],
            "sum_hg2": 2.0 * rng.integers(0, largest + 1, expert.size),
            "sum_h2": rng.random(expert.size),
            "sum_g2": rng.random(expert.size),
        }
        keys = {"layer": layer, "expert": expert, "atom": atom}
        frames.append(pd.DataFrame({**keys, **columns}))
        layers[layer] = shape
    routed = sum(s.n_atoms * s.atom_parameters for s in layers.values())
    model = Architecture(routed + 10, 2, 3, layers, 10, 0)
    frame = pd.concat(frames, ignore_index=True)
    return ImportanceTable.from_frame(frame, N=1, architecture=model.to_dict())


def _shape(rng: np.random.Generator) -> LayerShape:
    n_experts, d_inter, d_expert, n_matrices = rng.integers([1, 1, 1, 2], [3, 6, 4, 4])
    return LayerShape(
        int(n_experts), int(d_inter), int(d_expert), n_matrices=int(n_matrices)
    )


class Choice(NamedTuple):
    """What a mask removes in all."""

    atoms: int
    parameters: int
    flops: int
    score: float


def shares(table: ImportanceTable, choice: Choice, traffic: float) -> float:
    """What `choice` removes of parameters and operations, weighted."""
    total = removed(table, {k: ~m for k, m in KeepMask.full(table).arrays.items()})
    size = Fraction(choice.parameters, total.parameters)
    return float(
        size + Fraction(traffic) * (Fraction(choice.flops, total.flops) - size)
    )


def by_expert(table: ImportanceTable) -> dict[tuple[int, int], np.ndarray]:
    """What atoms count and score, (d_inter, 4) like `Choice`, of every expert."""
    units = [atom_sizes(table, unit=u) for u in ("atoms", "parameters", "flops")]
    frame = table.frame.assign(score=table.score("fisher"))
    return {
        (layer, expert): np.column_stack(
            [
                *(np.full(len(rows), unit[layer][expert]) for unit in units),
                rows["score"],
            ]
        )
        for (layer, expert), rows in frame.groupby(["layer", "expert"])
    }


def removed(table: ImportanceTable, keep: dict[int, np.ndarray]) -> Choice:
    """What `keep`, {layer: (n_experts, d_inter)}, removes of `table`."""
    atoms = by_expert(table)
    gone = sum(rows[~keep[layer][e]].sum(axis=0) for (layer, e), rows in atoms.items())
    return Choice(*(int(n) for n in gone))


def choices(table: ImportanceTable, settings: dict[str, Any]) -> list[Choice]:
    """All masks of a structure in which experts keep their best atoms."""
    structure = settings.get("structure", "ragged")
    multiple = settings.get("multiple", 1)
    alone = structure in {"ragged", "aligned"}
    sharing: dict[Any, list[np.ndarray]] = {}
    for (layer, expert), rows in by_expert(table).items():
        # [n]: what goes with the n lowest atoms
        lowest = np.cumsum(rows[rows[:, 3].argsort()], axis=0)
        lowest = np.vstack([np.zeros((1, 4)), lowest])
        widths = len(rows) - np.arange(len(lowest))
        allowed = (widths % multiple == 0) | (widths == len(rows))
        if structure == "uniform":
            allowed &= widths > 0
            layer = 0
        knob = (layer, expert) if alone else layer
        sharing.setdefault(knob, []).append(lowest[allowed])
    options = [sum(experts) for experts in sharing.values()]
    found = options[0]
    for more in options[1:]:
        found = (found[:, None] + more[None]).reshape(-1, 4)
    return [Choice(*map(int, row)) for row in found]


def selected(table: ImportanceTable, **settings: Any) -> Choice:
    """What the fisher mask of `settings` removes; an example without one is left."""
    try:
        keep = select(table, estimator="fisher", **settings)
    except SpecError as error:
        assume("infeasible" not in str(error))
        raise
    return removed(table, dict(keep.arrays))


# --- the least score -------------------------------------------------------------


@given(tables(), ratios, st.sampled_from(WIDTHS))
def test_no_mask_of_a_structure_removes_as_many_atoms_for_less(
    table: ImportanceTable, ratio: Fraction, settings: dict[str, Any]
) -> None:
    """Whatever the sizes of steps: the score is the least of all with as many gone."""
    got = selected(table, ratio=ratio, **settings)
    others = choices(table, settings)
    assert got.score == min(x.score for x in others if x.atoms >= got.atoms)


@given(tables(same_shapes=True), ratios, st.sampled_from(WIDTHS))
def test_steps_of_one_size_are_exact_at_the_ratio(
    table: ImportanceTable, ratio: Fraction, settings: dict[str, Any]
) -> None:
    """No mask that meets the ratio at all has a smaller score."""
    (_, d_inter), *_ = table.shapes().values()
    assume(d_inter % settings.get("multiple", 1) == 0)
    got = selected(table, ratio=ratio, **settings)
    wanted = ratio * table.n_atoms
    # Single atoms are rounded down, all others up.
    least = math.ceil(wanted) if settings else math.floor(wanted)
    assert got.score == min(
        x.score for x in choices(table, settings) if x.atoms >= least
    )


@given(tables(same_shapes=True), ratios, st.sampled_from(UNIFORM))
def test_one_width_is_exact_at_the_ratio(
    table: ImportanceTable, ratio: Fraction, settings: dict[str, Any]
) -> None:
    """The largest width that meets the ratio, and every expert's best atoms."""
    got = selected(table, ratio=ratio, **settings)
    met = [x for x in choices(table, settings) if x.atoms >= ratio * table.n_atoms]
    assert got.score == min(x.score for x in met)


# --- shares of FLOPs and bytes ---------------------------------------------------


@given(tables(), ratios, st.sampled_from(KINDS), prices | st.none())
def test_at_least_the_share_of_flops_goes(
    table: ImportanceTable, ratio: Fraction, settings: dict[str, Any], price: float
) -> None:
    """Exactly counted, and as accounting counts them."""
    keep = select(table, ratio=ratio, of="flops", price=price, **settings)
    got = removed(table, dict(keep.arrays))
    total = removed(table, {k: ~m for k, m in KeepMask.full(table).arrays.items()})
    assert Fraction(got.flops, total.flops) >= ratio
    saved = table.architecture.routed_flops_saved(keep, table.expert_tokens())
    assert saved == pytest.approx(got.flops / total.flops)


@given(tables(), ratios, st.sampled_from(KINDS))
def test_bytes_are_those_of_the_model(
    table: ImportanceTable, ratio: Fraction, settings: dict[str, Any]
) -> None:
    """A share of the bytes is the share of the parameters, of one dtype."""
    got = selected(table, ratio=ratio, of="bytes", **settings)
    assert got == selected(table, ratio=ratio, of="model", **settings)
    model = table.architecture
    assert Fraction(got.parameters, model.n_parameters) >= ratio


# --- prices ------------------------------------------------------------------------


@given(
    tables(),
    ratios,
    prices,
    st.sampled_from(WIDTHS),
    st.sampled_from(["atoms", "model", "flops"]),
)
def test_prices_are_a_lagrangian(
    table: ImportanceTable,
    ratio: Fraction,
    price: float,
    settings: dict[str, Any],
    of: str,
) -> None:
    """For some λ no mask of the structure has a smaller Σ score − λ · Σ price."""
    got = selected(table, ratio=ratio, price=price, of=of, **settings)
    others = [(x.score, shares(table, x, price)) for x in choices(table, settings)]
    score, saved = got.score, shares(table, got, price)
    # λ has to lie above what cheaper masks, and below what dearer ones, could gain.
    low = max(
        ((score - s) / (saved - p) for s, p in others if saved > p + ROUNDING),
        default=0.0,
    )
    high = min(
        ((s - score) / (p - saved) for s, p in others if p > saved + ROUNDING),
        default=math.inf,
    )
    assert low <= high * (1 + ROUNDING) + ROUNDING
    same = [s for s, p in others if abs(p - saved) <= ROUNDING]
    assert score == min(same)


@given(
    tables(),
    ratios,
    ratios,
    prices,
    st.sampled_from(KINDS),
    st.sampled_from(["atoms", "flops"]),
)
def test_masks_of_a_price_are_nested(
    table: ImportanceTable,
    a: Fraction,
    b: Fraction,
    price: float,
    settings: dict[str, Any],
    of: str,
) -> None:
    """What stays at the larger ratio stays at the smaller one."""
    low, high = (
        select(table, ratio=r, price=price, of=of, estimator="fisher", **settings)
        for r in sorted((a, b))
    )
    assert all((low.by_layer(k) | ~high.by_layer(k)).all() for k in low.layers)


@given(tables(same_shapes=True), ratios, st.sampled_from(KINDS))
def test_the_price_of_size_changes_nothing_where_all_atoms_are_of_one_size(
    table: ImportanceTable, ratio: Fraction, settings: dict[str, Any]
) -> None:
    """Price 0 is no price in models of equal experts."""
    by_size, plain = (
        select(table, ratio=ratio, price=price, estimator="fisher", **settings)
        for price in (0, None)
    )
    assert by_size == plain


@given(tables(same_shapes=True), ratios)
def test_heapr_is_its_total_per_operation(
    table: ImportanceTable, ratio: Fraction
) -> None:
    """The paper's score ranks as the corpus-weighted one with the price of traffic."""
    total = select(table, ratio=ratio, estimator="heapr_total", price=1)
    assert total == select(table, ratio=ratio, estimator="heapr")


@given(tables(all_routed=True), ratios, prices, st.randoms(use_true_random=False))
def test_relabelling_experts_permutes_priced_masks(
    table: ImportanceTable, ratio: Fraction, price: float, random: Any
) -> None:
    """New numbers for the experts move what stays along with the rows."""
    arguments = {"ratio": ratio, "price": price, "estimator": "heapr_total"}
    numbers = {}
    for layer, (n_experts, _) in table.shapes().items():
        numbers[layer] = list(range(n_experts))
        random.shuffle(numbers[layer])
    frame = table.frame
    new = [numbers[k][e] for k, e in zip(frame["layer"], frame["expert"], strict=True)]
    renamed = ImportanceTable.from_frame(frame.assign(expert=new), **table.metadata)
    keep, moved = select(table, **arguments), select(renamed, **arguments)
    for layer in keep.layers:
        assert (moved.by_layer(layer)[numbers[layer]] == keep.by_layer(layer)).all()
