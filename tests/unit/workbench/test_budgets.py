"""Budgets that are solved for the ratio: limits hold, and few evaluations are made."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from families import tiny_ids, tiny_model
from torch import nn

from heapr_lab.errors import SpecError
from heapr_lab.evaluation.latency import in_turns
from heapr_lab.evaluation.perplexity import Perplexity
from heapr_lab.pruning.masks import KeepMask
from heapr_lab.text.calibration import CalibrationSet
from heapr_lab.workbench.budgets import (
    decoding_rounds,
    ratio_for_latency,
    ratio_for_loss,
)
from heapr_lab.workbench.settings import Setting

DENSE_NLL = 3.0
LATENCY_FLOOR = 0.4
"""Share of the dense time that the stand-in takes without any atoms."""


@dataclass
class Bench:
    """A stand-in for a workbench whose Δloss is a curve of the achieved ratio."""

    delta: Callable[[float], float] = lambda ratio: ratio**3
    model: nn.Module = field(default_factory=nn.Module)
    evaluated: list[float] = field(default_factory=list)
    shapes: dict[int, tuple[int, int]] = field(default_factory=lambda: {0: (50, 100)})

    def test_windows(self, corpus: str) -> str:
        """The name of the corpus stands for its windows."""
        return corpus

    def calibration_set(self, _: object) -> CalibrationSet:
        """Three windows."""
        return CalibrationSet.from_ids(tiny_ids())

    def keep(self, setting: Setting) -> KeepMask:
        """A mask of the first atoms of each expert."""
        return KeepMask.from_arrays(
            {
                layer: setting.selection.ratio * n * width
                <= np.arange(n * width).reshape(width, n).T
                for layer, (n, width) in self.shapes.items()
            }
        )

    def perplexity(self, keep: KeepMask | None, windows: str) -> Perplexity:
        """What the curve says; every pruned model asked for is written down."""
        assert windows == "ptb"
        nll = DENSE_NLL
        if keep is not None:
            self.evaluated.append(keep.achieved_ratio)
            nll += self.delta(keep.achieved_ratio)
        return Perplexity(value=math.exp(nll), nll=nll, n_tokens=100)


# --- a perplexity -------------------------------------------------------------------

CURVES: dict[str, Callable[[float], float]] = {
    "cube": lambda r: 4 * r**3,
    "square": lambda r: 2 * r**2,
    "exponential": lambda r: 0.01 * math.expm1(8 * r),
    "better at first": lambda r: r**2 - 0.1 * r,
    "as the lab model": lambda r: float(
        np.interp(
            r,
            [0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1],
            [0, 0.008, 0.026, 0.054, 0.106, 0.187, 0.31, 0.48, 0.74, 1.17, 2.2],
        )
    ),
}


@pytest.mark.parametrize("rise", [0.005, 0.02, 0.1, 0.5])
@pytest.mark.parametrize("curve", CURVES)
def test_the_largest_ratio_below_a_rise_is_found_in_few_evaluations(
    curve: str, rise: float
) -> None:
    """At most six evaluations, and the limit holds at the ratio but not beyond."""
    bench = Bench(CURVES[curve])
    setting, history = ratio_for_loss(
        bench, Setting(0.0, estimator="fisher"), "ptb", rise=rise
    )
    assert len(bench.evaluated) <= 6
    assert (
        math.expm1(CURVES[curve](setting.selection.ratio)) <= rise * 1.01
    )  # in whole atoms
    assert math.expm1(CURVES[curve](setting.selection.ratio + 0.0105)) > rise
    assert setting == Setting(setting.selection.ratio, estimator="fisher")
    found = history.set_index("ratio").loc[setting.selection.ratio]
    assert found["rise"] <= rise
    assert found["perplexity"] <= math.exp(DENSE_NLL) * (1 + rise)
    assert history["achieved_ratio"].tolist() == [0.0, *bench.evaluated]


def test_a_limit_that_no_ratio_meets_leaves_the_model_whole() -> None:
    """Where any pruning breaks the limit the ratio is 0."""
    setting, history = ratio_for_loss(
        Bench(lambda _: 5.0), Setting(0.3), "ptb", rise=0.02
    )
    assert setting.selection.ratio == 0
    assert history["rise"].iloc[0] == 0


def test_a_limit_that_all_ratios_meet_gives_the_highest() -> None:
    """One evaluation says that the highest ratio may be had."""
    bench = Bench(lambda _: 0.0)
    setting, _ = ratio_for_loss(bench, Setting(0.0), "ptb", highest=0.5)
    assert setting.selection.ratio == 0.5
    assert len(bench.evaluated) == 1


@pytest.mark.parametrize("rise", [0, -0.1, math.nan])
def test_a_rise_is_above_zero(rise: float) -> None:
    """A limit at or below the dense model's perplexity is an error."""
    with pytest.raises(SpecError, match="rise must be above 0"):
        ratio_for_loss(Bench(), Setting(0.0), "ptb", rise=rise)


# --- a latency ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny() -> nn.Module:
    """A model of two layers of routed experts."""
    return tiny_model("qwen2_moe").eval()


def tiny_bench(tiny: nn.Module) -> Bench:
    """The stand-in with a model that can be sliced."""
    config: Any = tiny.config
    size = config.num_experts, config.moe_intermediate_size
    return Bench(
        model=tiny, shapes=dict.fromkeys(range(config.num_hidden_layers), size)
    )


def straight(dense: nn.Module, pruned: nn.Module) -> list[list[float]]:
    """Rounds that drift, in which time falls evenly with what is left."""
    kept = 1 - pruned.heapr_keep.achieved_ratio
    drift = (1.0, 3.0, 2.0)
    share = LATENCY_FLOOR + (1 - LATENCY_FLOOR) * kept
    return [list(drift), [share * seconds for seconds in drift]]


def test_the_smallest_ratio_below_a_latency_is_found(tiny: nn.Module) -> None:
    """What is returned was itself measured below the limit, with the sliced model."""
    bench = tiny_bench(tiny)
    setting, history = ratio_for_latency(
        bench, Setting(0.0), share=0.7, measure=straight
    )
    chosen = history.set_index("ratio").loc[setting.selection.ratio]
    assert chosen["share"] <= 0.7
    # 0.4 + 0.6 · (1 − r) = 0.7 at r = ½, on a grid of whole atoms
    n_atoms = bench.keep(Setting(0.0)).n_atoms
    assert chosen["achieved_ratio"] == pytest.approx(0.5, abs=0.02 + 1 / n_atoms)
    assert chosen["dense_ms"] == 2000
    assert chosen["pruned_ms"] == pytest.approx(2000 * chosen["share"])


def test_a_latency_that_cannot_be_had_is_an_error(tiny: nn.Module) -> None:
    """The error says how far the highest ratio gets."""
    with pytest.raises(SpecError, match=r"takes 0\.4.* of the dense time with 0\.95"):
        ratio_for_latency(tiny_bench(tiny), Setting(0.0), share=0.3, measure=straight)
    with pytest.raises(SpecError, match=r"share must be in \(0, 1\)"):
        ratio_for_latency(tiny_bench(tiny), Setting(0.0), share=1.2)
    with pytest.raises(SpecError, match="batch_size must be from 1 to 3"):
        ratio_for_latency(tiny_bench(tiny), Setting(0.0), share=0.8, batch_size=4)


def test_decoding_is_timed_for_both_models(tiny: nn.Module) -> None:
    """A positive time for every round of each, after prompts of a batch."""
    found = decoding_rounds(tiny_ids(), tiny, tiny, n_steps=2, n_rounds=3)
    assert np.shape(found) == (2, 3)
    assert np.min(found) > 0


def test_runs_take_turns_after_a_warm_up() -> None:
    """Another run is first in each round; the first round is not written down."""
    order: list[str] = []

    def run(name: str) -> float:
        order.append(name)
        return float(len(order))

    found = in_turns([lambda: run("a"), lambda: run("b")], n_rounds=2)
    assert order == ["a", "b", "b", "a", "a", "b"]
    assert found == [[4, 5], [3, 6]]
