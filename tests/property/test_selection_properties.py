"""Invariants of selections on tables that hypothesis makes.

Among them: what is selected is the best there is, by trying all masks.
"""

import math
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from hypothesis import assume, given
from hypothesis import strategies as st

from heapr_lab import ImportanceTable, select
from heapr_lab.errors import SpecError
from heapr_lab.models.architecture import Architecture, LayerShape
from heapr_lab.pruning.ranking import atom_sizes

N_ROUTED = 6
"""Routed tokens of every layer."""
SUMS = ("sum_h2", "sum_g2", "sum_ph2", "max_abs_ph", "w_down_sq")
WIDTHS: tuple[dict[str, Any], ...] = (
    {},
    {"structure": "aligned", "multiple": 2},
    {"structure": "aligned", "multiple": 3},
    {"structure": "per_layer"},
    {"structure": "per_layer", "multiple": 2},
)
UNIFORM: tuple[dict[str, Any], ...] = (
    {"structure": "uniform"},
    {"structure": "uniform", "multiple": 3, "scope": "layer"},
)
ROUNDED: tuple[dict[str, Any], ...] = (
    *WIDTHS[1:],
    {"granularity": "expert"},
    {"granularity": "expert", "scope": "layer"},
    {"structure": "aligned", "multiple": 2, "scope": "layer"},
    {"structure": "per_layer", "scope": "layer"},
    {"structure": "per_layer", "multiple": 2, "scope": "layer"},
)
"""What removes atoms in larger steps than one."""
ANY: tuple[dict[str, Any], ...] = ({}, {"scope": "layer"}, *ROUNDED)
Most = tuple[int, int, int]
FEW: Most = (2, 2, 5)
"""Layers, experts of each and atoms of these, of which all masks can be tried."""
MANY: Most = (3, 4, 7)
CAMERA = {"scope": "layer", "estimator": "camera"}

ratios = st.fractions(0, Fraction(999, 1000), max_denominator=1000) | st.decimals(
    0, "0.99", places=2
).map(float)


@st.composite
def tables(
    draw: st.DrawFn, *, most: Most = FEW, same_shapes: bool = False
) -> ImportanceTable:
    """Small whole models with many ties and idle experts.

    Args:
        draw: given by hypothesis.
        most: layers, whose numbers have gaps, experts and atoms.
        same_shapes: layers of equal shapes.

    Returns:
        A table whose fisher scores are whole numbers.
    """
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    largest = draw(st.sampled_from([1, 4, 50]))  # few values make ties
    # 0.1 and 0.3 make sums that round.
    values = draw(st.sampled_from([(1.0,), (0.0, 1.0), (0.1, 0.3, 2.0, 5.0)]))
    frames, layers = [], {}
    shape = _shape(rng, most)
    for layer in range(0, 2 * draw(st.integers(1, most[0])), 2):
        shape = shape if same_shapes else _shape(rng, most)
        tokens = rng.multinomial(N_ROUTED, rng.dirichlet(np.ones(shape.n_experts)))
        expert, atom = np.indices((shape.n_experts, shape.d_inter)).reshape(2, -1)
        columns = {
            "tokens": tokens[expert],
            "sum_hg2": 2.0 * rng.integers(0, largest + 1, expert.size),
            **{name: rng.choice(values, expert.size) for name in SUMS},
        }
        keys = {"layer": layer, "expert": expert, "atom": atom}
        frames.append(pd.DataFrame({**keys, **columns}))
        layers[layer] = shape
    routed = sum(s.n_atoms * s.atom_parameters for s in layers.values())
    model = Architecture(routed + 10, 2, 3, layers, 10, 0)
    frame = pd.concat(frames, ignore_index=True)
    return ImportanceTable.from_frame(frame, N=1, architecture=model.to_dict())


def _shape(rng: np.random.Generator, most: Most) -> LayerShape:
    highs = [most[1] + 1, most[2] + 1, 4, 4]
    n_experts, d_inter, d_expert, n_matrices = map(
        int, rng.integers([1, 1, 1, 2], highs)
    )
    return LayerShape(n_experts, d_inter, d_expert, n_matrices=n_matrices)


class Choice(NamedTuple):
    """What a mask removes in all."""

    atoms: int
    parameters: int
    score: float


def by_expert(table: ImportanceTable) -> dict[tuple[int, int], np.ndarray]:
    """What atoms count and score, (d_inter, 3) like `Choice`, of every expert."""
    frame = table.frame.assign(score=table.score("fisher"))
    for unit in ("atoms", "parameters"):
        sizes = atom_sizes(table, unit=unit)
        keys = zip(frame["layer"], frame["expert"], strict=True)
        frame[unit] = [sizes[layer][expert] for layer, expert in keys]
    groups = frame.groupby(["layer", "expert"])
    return {key: rows[[*Choice._fields]].to_numpy() for key, rows in groups}


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
    atoms = by_expert(table).items()
    gone = sum(rows[~keep.by_layer(layer)[e]].sum(0) for (layer, e), rows in atoms)
    return Choice(*map(int, gone))


# --- what goes and what stays --------------------------------------------------


@given(tables(most=MANY), ratios, st.sampled_from(("global", "layer")))
def test_the_count_is_exact(table, ratio, scope):
    """Exactly ⌊r · n⌋ atoms go, ties or not, and they have the lowest scores.

    They are of the model or, with scope layer, of every layer.
    """
    keep = select(table, ratio=ratio, scope=scope)
    frame = table.frame.assign(score=table.score("heapr"), gone=~keep.rows)
    for _, rows in frame.groupby(frame["layer"] * (scope == "layer")):
        scores, gone = rows["score"].sort_values(), rows.loc[rows["gone"], "score"]
        assert len(gone) == math.floor(Fraction(str(ratio)) * len(rows))
        assert gone.sort_values().tolist() == scores[: len(gone)].tolist()


@given(tables(most=MANY), ratios, ratios, st.sampled_from((*ANY, CAMERA)))
def test_masks_are_nested(table, a, b, settings):
    """What stays at the larger ratio stays at the smaller one."""
    low, high = (select(table, ratio=r, **settings) for r in sorted((a, b)))
    for layer in low.layers:
        assert not (high.by_layer(layer) & ~low.by_layer(layer)).any()


@given(tables(most=MANY), ratios, st.sampled_from(ROUNDED))
def test_rounded_structures_remove_enough(table, ratio, settings):
    """At least the ratio goes, of each layer if asked, and every width may be."""
    keep, least = select(table, ratio=ratio, **settings), Fraction(str(ratio))
    structure = settings.get("structure", "ragged")
    assert keep.n_removed >= least * table.n_atoms
    for layer, (_, d_inter) in table.shapes().items():
        gone = ~keep.by_layer(layer)
        assert "scope" not in settings or gone.sum() >= least * gone.size
        widths = {int(w) for w in keep.widths().loc[layer].dropna()}
        multiple = settings.get("multiple", 1)
        if structure != "ragged":
            assert all(w == d_inter or w % multiple == 0 for w in widths)
        if structure == "per_layer":
            assert len(widths) == 1
        if "granularity" in settings:
            assert widths <= {0, d_inter}


# --- the least score -------------------------------------------------------------


@given(tables(), ratios, st.sampled_from(WIDTHS))
def test_no_mask_of_a_structure_removes_as_many_atoms_for_less(table, ratio, settings):
    """Whatever the sizes of steps: the score is the least of all with as many gone."""
    got = selected(table, ratio=ratio, **settings)
    masks = choices(table, settings)
    assert got.score == min(x.score for x in masks if x.atoms >= got.atoms)


@given(tables(same_shapes=True), ratios, st.sampled_from(WIDTHS + UNIFORM))
def test_steps_of_one_size_are_exact_at_the_ratio(table, ratio, settings):
    """No mask that meets the ratio at all has a smaller score, also of one width."""
    (_, d_inter), *_ = table.shapes().values()
    assume(settings in UNIFORM or d_inter % settings.get("multiple", 1) == 0)
    got = selected(table, ratio=ratio, **settings)
    wanted = Fraction(str(ratio)) * table.n_atoms
    # Single atoms are rounded down, all others up.
    least = math.ceil(wanted) if settings else math.floor(wanted)
    assert got.score == min(
        x.score for x in choices(table, settings) if x.atoms >= least
    )


# --- a share of the parameters ----------------------------------------------------


@given(tables(), ratios, st.sampled_from(ANY))
def test_at_least_the_share_of_the_model_goes(table, ratio, settings):
    """The share is counted exactly."""
    got = selected(table, ratio=ratio, of="model", **settings)
    n_parameters = table.architecture.n_parameters
    assert Fraction(got.parameters, n_parameters) >= Fraction(str(ratio))
