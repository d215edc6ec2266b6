"""Maps from summed score to Δloss: monotone, exact where measured, honest elsewhere."""

import itertools
import math
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from heapr_lab.errors import SpecError
from heapr_lab.importance.table import ImportanceTable
from heapr_lab.inspection.budgets import damage_map
from heapr_lab.inspection.loss_prediction import DamageMap, fit_damage
from heapr_lab.pruning.masks import KeepMask
from heapr_lab.pruning.savings import summed_scores
from heapr_lab.pruning.selection import select
from heapr_lab.workbench.settings import Setting

RISING = [(1.0, 0.01), (4.0, 0.1), (9.0, 0.2), (20.0, 3.0)]
SCORES = np.geomspace(1e-3, 1e4, 400)


def scored_table() -> ImportanceTable:
    """Two layers of 2 x 2 and 1 x 3 atoms, whose heapr scores are 1 to 7."""
    keys = [(0, *pair) for pair in itertools.product(range(2), range(2))]
    keys += [(3, 0, atom) for atom in range(3)]
    frame = pd.DataFrame(keys, columns=["layer", "expert", "atom"])
    frame = frame.assign(tokens=1, sum_h2=2.0, sum_g2=np.arange(1.0, 8.0))
    return ImportanceTable.from_frame(frame)


def assert_knots(damage: DamageMap, expected: list[tuple[float, float]]) -> None:
    """The curve runs through these points and no others."""
    assert np.array(damage.knots) == pytest.approx(np.array(expected))


# --- the curve ------------------------------------------------------------------


def test_one_point_is_proportional() -> None:
    """Half the score costs half of what was measured."""
    assert fit_damage([(4.0, 0.2)]).predict([2.0, 8.0]) == pytest.approx([0.1, 0.4])


@pytest.mark.parametrize("scores", [(1.0, 5.0), (1.0, 5.0, 7.0), (0.1, 1.0, 5.0, 70.0)])
def test_a_power_law_is_recovered(scores: tuple[float, ...]) -> None:
    """Between its points and far beyond them, a power law comes back as it is."""
    damage = fit_damage([(s, 0.03 * s**1.7) for s in scores])
    assert damage.predict(SCORES) == pytest.approx(0.03 * SCORES**1.7)
    if len(scores) > 2:
        assert damage.spread == pytest.approx(1)


def test_the_map_is_exact_where_it_was_measured() -> None:
    """In whatever order the points come."""
    damage = fit_damage(reversed(RISING))
    scores, losses = zip(*RISING, strict=True)
    assert damage.points == tuple(RISING)
    assert_knots(damage, RISING)
    assert damage.predict(scores) == pytest.approx(losses)


def test_each_end_goes_on_as_its_outermost_points() -> None:
    """A step of the same factor in S changes Δloss as it did between the last two."""
    below, above = fit_damage(RISING).predict([1 / 4, 20 * 20 / 9])
    assert below == pytest.approx(0.01 / 10)  # from 1 to 4 it rose to 10 times
    assert above == pytest.approx(3.0 * 15)  # from 9 to 20 to 15 times


@pytest.mark.property
@given(
    st.lists(
        st.tuples(st.floats(1e-3, 1e3), st.floats(-0.1, 5.0)), min_size=1, max_size=6
    ).filter(lambda points: any(loss > 0.2 for _, loss in points))
)
def test_the_map_never_falls(points: list[tuple[float, float]]) -> None:
    """From 0 at 0 it only rises, however noisy the points."""
    try:
        damage = fit_damage(points)
    except SpecError:  # averaging can leave nothing above 0
        return
    predicted = damage.predict(np.r_[0.0, SCORES])
    assert predicted[0] == 0
    with np.errstate(invalid="ignore"):  # inf - inf where the power law is steep
        assert not (np.diff(predicted) < -1e-9 * predicted[1:]).any()
    assert all(b[1] > a[1] for a, b in itertools.pairwise(damage.knots))


def test_noise_is_averaged_in_nats() -> None:
    """A fall between two points becomes one knot: mean Δloss at the mean of log S."""
    damage = fit_damage([(1.0, 0.1), (4.0, 0.4), (9.0, 0.2), (20.0, 3.0)])
    assert_knots(damage, [(1.0, 0.1), (6.0, 0.3), (20.0, 3.0)])
    assert len(damage.points) == 4


def test_what_is_not_above_zero_shapes_nothing() -> None:
    """A Δloss below 0 at a small score is noise: the rest is fitted without it."""
    noisy = fit_damage([(0.1, -0.002), *RISING])
    assert_knots(noisy, RISING)
    assert noisy.predict(0.1) > 0
    # between others it is averaged first: 0.05 and -0.03 are 0.01 together
    mixed = fit_damage([(1.0, 0.05), (4.0, -0.03), (9.0, 0.2)])
    assert_knots(mixed, [(2.0, 0.01), (9.0, 0.2)])


def test_points_measured_twice_count_twice() -> None:
    """0.4 twice and 0.1 once are 0.3 together, nearer to the score of the two."""
    damage = fit_damage([(1.0, 0.3), (1.0, 0.5), (8.0, 0.1)])
    assert_knots(damage, [(2.0, 0.3)])


def test_equal_scores_are_averaged() -> None:
    """The same mask measured twice is one point; no removed score is none."""
    damage = fit_damage([(2.0, 0.1), (2.0, 0.3), (0.0, 0.5)])
    assert_knots(damage, [(2.0, 0.2)])
    assert not damage.extrapolates(2.0)
    assert damage.extrapolates(1.9)
    assert damage.extrapolates(2.1)


def test_spread_is_the_worst_point_left_out() -> None:
    """The second of three is 4 times what the others say; they miss more, or less."""
    assert fit_damage(RISING[:2]).spread is None
    middle = fit_damage([(1.0, 1.0), (10.0, 40.0), (100.0, 100.0)])
    # left out: 40 / 10 in the middle, 100 · 16 and 1 · 16 (40² / 100) at the ends
    assert middle.spread == pytest.approx(16)
    assert fit_damage([(1.0, -1.0), (2.0, -1.0), (3.0, 1.0)]).spread is None


def test_steep_maps_are_infinite_without_a_warning() -> None:
    """Two points close together make a steep power law; far away it overflows."""
    assert math.isinf(fit_damage([(1.0, 1e-6), (1.0001, 1.0)]).predict(1e6))


@pytest.mark.parametrize(
    ("points", "message"),
    [
        ([], "none has both above 0"),
        ([(0.0, 1.0)], "none has both above 0"),
        ([(1.0, -0.1), (2.0, 0.0)], r"2\.0, 0\.0.*evaluate a larger ratio"),
        ([(-1.0, 0.1)], r"-1\.0, 0\.1.*without negative scores"),
        ([(1.0, math.nan)], "nan.*expected finite"),
    ],
)
def test_points_that_make_no_map(
    points: list[tuple[float, float]], message: str
) -> None:
    """The error shows what was found and says what to do."""
    with pytest.raises(SpecError, match=message):
        fit_damage(points)


@pytest.mark.parametrize("score", [-0.1, math.nan, [1.0, math.inf]])
def test_scores_that_have_no_prediction(score: object) -> None:
    """Negative scores, as of taylor, and those that are not finite, are refused."""
    with pytest.raises(SpecError, match="expected none negative"):
        fit_damage(RISING).predict(score)  # type: ignore[arg-type]


# --- summed scores --------------------------------------------------------------


def test_summed_scores_are_of_what_goes() -> None:
    """Atoms 2 and 3 of layer 0, of scores 3 and 4, and the last of layer 3, of 7."""
    arrays = {3: [[True, True, False]], 0: [[True, True], [False, False]]}
    keep = KeepMask.from_arrays(arrays)
    assert summed_scores(scored_table(), keep, "heapr") == 3 + 4 + 7
    assert summed_scores(scored_table(), KeepMask.full(scored_table()), "heapr") == 0


def test_summed_scores_follow_the_estimator() -> None:
    """Another estimator has other sums of the same mask, of the same table."""
    table = scored_table()
    keep = select(table, ratio=0.5)
    assert summed_scores(table, keep, "heapr") == 1 + 2 + 3
    assert summed_scores(table, keep, "frequency") == 3


def test_summed_scores_need_the_mask_of_the_table() -> None:
    """A mask of another model is refused, with both shapes."""
    keep = KeepMask.from_arrays({0: [[True, False]]})
    with pytest.raises(SpecError, match=r"\{0: \(1, 2\)\}.*\{0: \(2, 2\), 3: \(1, 3\)"):
        summed_scores(scored_table(), keep, "heapr")


# --- on the bench ---------------------------------------------------------------


class Bench:
    """A bench whose loss is 3, and as much more as the square of what is removed."""

    def table_of(self, _setting: Setting) -> ImportanceTable:
        """The table of this module."""
        return scored_table()

    def keep(self, setting: Setting) -> KeepMask:
        """As a workbench selects."""
        return select(scored_table(), setting.selection)

    def test_windows(self, corpus: str) -> str:
        """The corpus itself."""
        return corpus

    def perplexity(self, keep: KeepMask | None, windows: str) -> SimpleNamespace:
        """0.01 nats for each pair of removed atoms."""
        assert windows == "text"
        n_removed = 0 if keep is None else keep.n_removed
        return SimpleNamespace(nll=3.0 + 0.01 * n_removed**2)


def test_damage_map_is_fitted_to_what_the_bench_measures() -> None:
    """Its points are summed scores and Δloss at the ratios, chosen as the setting says.

    By layer 1 atom of 4 and none of 3 go, then 3 of 4 and 2 of 3.
    """
    setting = Setting(0.9, scope="layer")
    damage = damage_map(Bench(), setting, "text", ratios=(0.8, 0.3))  # type: ignore[arg-type]
    expected = [(1.0, 0.01), (1 + 2 + 3 + 5 + 6, 0.25)]
    assert np.array(damage.points) == pytest.approx(np.array(expected))


def test_damage_map_evaluates_three_ratios_by_default() -> None:
    """1, 3 and 5 of 7 atoms go, so it also says how far off it may be."""
    damage = damage_map(Bench(), Setting(0.0), "text")  # type: ignore[arg-type]
    assert [score for score, _ in damage.points] == [1, 6, 15]
    assert damage.spread is not None
