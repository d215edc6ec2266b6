"""Budgets that are solved for the ratio: limits hold, and few evaluations are made."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest

from heapr_lab import Calibration, KeepMask, Setting, ratio_for_loss
from heapr_lab.errors import SpecError
from heapr_lab.evaluation.perplexity import Perplexity

DENSE_NLL = 3.0


@dataclass
class Bench:
    """A stand-in for a workbench whose Δloss is a curve of the achieved ratio."""

    delta: Callable[[float], float] = lambda ratio: ratio**3
    evaluated: list[float] = field(default_factory=list)

    def test_windows(self, corpus):
        """The name of the corpus stands for its windows."""
        return corpus

    def keep(self, setting: Setting) -> KeepMask:
        """A mask without the first atoms of each of 50 experts of 100."""
        atoms = np.arange(5000).reshape(100, 50).T
        return KeepMask.from_arrays({0: setting.selection.ratio * 5000 <= atoms})

    def perplexity(self, keep: KeepMask | None, windows: str) -> Perplexity:
        """What the curve says; every pruned model asked for is written down."""
        assert windows == "ptb"
        nll = DENSE_NLL
        if keep is not None:
            self.evaluated.append(keep.achieved_ratio)
            nll += self.delta(keep.achieved_ratio)
        return Perplexity(value=math.exp(nll), nll=nll, n_tokens=100)


# --- a perplexity -------------------------------------------------------------------

LAB = [0, 0.008, 0.026, 0.054, 0.106, 0.187, 0.31, 0.48, 0.74, 1.17, 2.2]
CURVES: dict[str, Callable[[float], float]] = {
    "cube": lambda r: 4 * r**3,
    "square": lambda r: 2 * r**2,
    "exponential": lambda r: 0.01 * math.expm1(8 * r),
    "better at first": lambda r: r**2 - 0.1 * r,
    "as the lab model": lambda r: float(np.interp(10 * r, range(11), LAB)),
}


@pytest.mark.parametrize("rise", [0.005, 0.02, 0.1, 0.5])
@pytest.mark.parametrize("curve", CURVES)
def test_the_largest_ratio_below_a_rise_is_found_in_few_evaluations(curve, rise):
    """At most six evaluations, and the limit holds at the ratio but not beyond."""
    bench = Bench(CURVES[curve])
    start = Setting(0.0, estimator="fisher")
    setting, history = ratio_for_loss(bench, start, "ptb", rise=rise)
    ratio = setting.selection.ratio
    assert len(bench.evaluated) <= 6
    assert math.expm1(bench.delta(ratio)) <= rise * 1.01  # in whole atoms
    assert math.expm1(bench.delta(ratio + 0.0105)) > rise
    assert setting == Setting(ratio, estimator="fisher")
    row = history.set_index("ratio").loc[ratio]
    assert row["rise"] <= rise
    assert row["perplexity"] <= math.exp(DENSE_NLL) * (1 + rise)
    assert history["achieved_ratio"].tolist() == [0.0, *bench.evaluated]


def test_a_limit_that_no_ratio_meets_leaves_the_model_whole():
    """Where any pruning breaks the limit the ratio is 0."""
    bench = Bench(lambda _: 5.0)
    setting, history = ratio_for_loss(bench, Setting(0.3), "ptb", rise=0.02)
    assert setting.selection.ratio == 0
    assert history["rise"].iloc[0] == 0


def test_a_limit_that_all_ratios_meet_gives_the_highest():
    """One evaluation says that the highest ratio may be had."""
    bench = Bench(lambda _: 0.0)
    setting, _ = ratio_for_loss(bench, Setting(0.0), "ptb", highest=0.5)
    assert setting.selection.ratio == 0.5
    assert len(bench.evaluated) == 1


def test_the_limit_holds_for_a_model(bench, root):
    """The ratio that is searched for keeps it, with unchanged weights."""
    text = str(root / "text.txt")
    calibrated = Setting(0.0, Calibration(text))
    setting, _ = ratio_for_loss(bench, calibrated, text, rise=0.01)
    keep, windows = bench.keep(setting), bench.test_windows(text)
    assert 0 < keep.achieved_ratio < 1
    dense = bench.perplexity(None, windows).value
    assert bench.perplexity(keep, windows).value <= 1.01 * dense


@pytest.mark.parametrize("rise", [0, -0.1, math.nan])
def test_a_rise_is_above_zero(rise):
    """A limit at or below the dense model's perplexity is an error."""
    with pytest.raises(SpecError, match="rise must be above 0"):
        ratio_for_loss(Bench(), Setting(0.0), "ptb", rise=rise)
