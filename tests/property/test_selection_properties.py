"""Invariants of scores, selections and files, on tables that hypothesis makes."""

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from heapr_lab.importance.table import ImportanceTable
from heapr_lab.pruning.selection import select

pytestmark = pytest.mark.property

SUMS = ("sum_h2", "sum_g2", "sum_hg2", "sum_ph2", "max_abs_ph", "w_down_sq")

STRUCTURES: tuple[dict[str, Any], ...] = (
    {},
    {"scope": "layer"},
    {"granularity": "expert"},
    {"granularity": "expert", "scope": "layer"},
    {"structure": "aligned", "multiple": 3},
    {"structure": "aligned", "multiple": 2, "scope": "layer"},
    {"structure": "per_layer"},
    {"structure": "per_layer", "multiple": 2, "scope": "layer"},
    {"scope": "layer", "estimator": "camera"},
)


@st.composite
def tables(draw: st.DrawFn) -> ImportanceTable:
    """Tables of a few layers of differing shapes, with many ties and idle experts."""
    frames = []
    # Few values make ties; 0.1 and 0.3 make sums that round.
    values = draw(st.sampled_from([(1.0,), (0.0, 1.0), (0.1, 0.3, 2.0, 5.0)]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    for layer in range(draw(st.integers(1, 3))):
        shape = draw(st.integers(1, 4)), draw(st.integers(1, 7))
        expert, atom = np.indices(shape).reshape(2, -1)
        tokens = rng.integers(0, 4, shape[0])[expert]
        sums = {name: rng.choice(values, expert.size) for name in SUMS}
        keys = {"layer": 2 * layer, "expert": expert, "atom": atom, "tokens": tokens}
        frames.append(pd.DataFrame({**keys, **sums}))
    return ImportanceTable.from_frame(pd.concat(frames, ignore_index=True), N=8)


ratios = st.fractions(0, Fraction(999, 1000), max_denominator=1000) | st.decimals(
    0, "0.99", places=2
).map(float)
structures = st.sampled_from(STRUCTURES)


@given(tables(), ratios)
def test_global_count_is_exact(table: ImportanceTable, ratio: float) -> None:
    """Exactly ⌊r · n⌋ atoms go, ties or not, and they have the lowest scores."""
    keep = select(table, ratio=ratio)
    assert keep.n_removed == math.floor(Fraction(str(ratio)) * table.n_atoms)
    stays = np.concatenate([keep.by_layer(layer).ravel() for layer in keep.layers])
    scores = table.score("heapr").to_numpy()
    lowest = np.sort(scores)[: keep.n_removed]
    assert np.sort(scores[~stays]).tolist() == lowest.tolist()


@given(tables(), ratios)
def test_layer_count_is_exact(table: ImportanceTable, ratio: float) -> None:
    """With scope layer exactly ⌊r · n⌋ atoms of every layer go."""
    keep = select(table, ratio=ratio, scope="layer")
    for layer in keep.layers:
        kept = keep.by_layer(layer)
        assert (~kept).sum() == math.floor(Fraction(str(ratio)) * kept.size)


@given(tables(), ratios, ratios, structures)
def test_masks_are_nested(
    table: ImportanceTable, a: float, b: float, settings: dict[str, Any]
) -> None:
    """What stays at the larger ratio stays at the smaller one."""
    low, high = (select(table, ratio=r, **settings) for r in sorted((a, b)))
    for layer in low.layers:
        assert not (high.by_layer(layer) & ~low.by_layer(layer)).any()


@given(tables(), ratios, st.sampled_from(STRUCTURES[2:-1]))
def test_rounded_structures_remove_enough(
    table: ImportanceTable, ratio: float, settings: dict[str, Any]
) -> None:
    """At least the ratio goes, and every width is one that may be."""
    keep = select(table, ratio=ratio, **settings)
    structure = settings.get("structure", "ragged")
    assert keep.n_removed >= Fraction(str(ratio)) * table.n_atoms
    for layer, (_, d_inter) in table.shapes().items():
        widths = {int(w) for w in keep.widths().loc[layer].dropna()}
        multiple = settings.get("multiple", 1)
        if structure != "ragged":
            assert all(w == d_inter or w % multiple == 0 for w in widths)
        if structure == "per_layer":
            assert len(widths) == 1
        if "granularity" in settings:
            assert widths <= {0, d_inter}
