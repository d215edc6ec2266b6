"""Budgets: what is selected is the best there is, by trying all masks."""

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
from heapr_lab.pruning.ranking import atom_sizes
from heapr_lab.pruning.selection import select

pytestmark = pytest.mark.property

N_ROUTED = 6
"""Routed tokens of every layer."""

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


@st.composite
def tables(draw: st.DrawFn, *, same_shapes: bool = False) -> ImportanceTable:
    """Small whole models of one or two layers, whose fisher scores are whole numbers.

    Args:
        draw: given by hypothesis.
        same_shapes: layers of equal shapes.
    """
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    largest = draw(st.sampled_from([1, 4, 50]))  # few values make ties
    frames, layers = [], {}
    shape = _shape(rng)
    for layer in range(draw(st.integers(1, 2))):
        shape = shape if same_shapes else _shape(rng)
        tokens = rng.multinomial(N_ROUTED, rng.dirichlet(np.ones(shape.n_experts)))
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
    score: float


def by_expert(table: ImportanceTable) -> dict[tuple[int, int], np.ndarray]:
    """What atoms count and score, (d_inter, 3) like `Choice`, of every expert."""
    units = [atom_sizes(table, unit=u) for u in ("atoms", "parameters")]
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
        lowest = np.cumsum(rows[rows[:, 2].argsort()], axis=0)
        lowest = np.vstack([np.zeros((1, 3)), lowest])
        widths = len(rows) - np.arange(len(lowest))
        allowed = (widths % multiple == 0) | (widths == len(rows))
        if structure == "uniform":
            allowed &= widths > 0
            layer = 0
        knob = (layer, expert) if alone else layer
        sharing.setdefault(knob, []).append(lowest[allowed])
    options = [sum(experts) for experts in sharing.values()]
    sums = options[0]
    for more in options[1:]:
        sums = (sums[:, None] + more[None]).reshape(-1, 3)
    return [Choice(*map(int, row)) for row in sums]


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
    masks = choices(table, settings)
    assert got.score == min(x.score for x in masks if x.atoms >= got.atoms)


@given(tables(same_shapes=True), ratios, st.sampled_from(WIDTHS + UNIFORM))
def test_steps_of_one_size_are_exact_at_the_ratio(
    table: ImportanceTable, ratio: Fraction, settings: dict[str, Any]
) -> None:
    """No mask that meets the ratio at all has a smaller score, also of one width."""
    (_, d_inter), *_ = table.shapes().values()
    assume(settings in UNIFORM or d_inter % settings.get("multiple", 1) == 0)
    got = selected(table, ratio=ratio, **settings)
    wanted = ratio * table.n_atoms
    # Single atoms are rounded down, all others up.
    least = math.ceil(wanted) if settings else math.floor(wanted)
    assert got.score == min(
        x.score for x in choices(table, settings) if x.atoms >= least
    )


# --- a share of the parameters ----------------------------------------------------


@given(tables(), ratios, st.sampled_from(KINDS))
def test_at_least_the_share_of_the_model_goes(
    table: ImportanceTable, ratio: Fraction, settings: dict[str, Any]
) -> None:
    """The share is counted exactly."""
    got = selected(table, ratio=ratio, of="model", **settings)
    assert Fraction(got.parameters, table.architecture.n_parameters) >= ratio
