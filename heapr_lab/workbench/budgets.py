"""Budgets people have, solved for the ratio: a perplexity, a latency, two savings.

Layer 4. A ratio of atoms, parameters, bytes or FLOPs needs no search: `select` takes it
(`of=`). Here are the budgets that have to be tried out: each try is a mask of the table
that is there already, and what is evaluated is read from the cache the next time.
"""

import functools
import math
import statistics
from collections.abc import Callable, Sequence

import pandas as pd
import torch
from scipy.optimize import brentq
from torch import nn

from heapr_lab.errors import SpecError
from heapr_lab.evaluation.latency import in_turns, seconds_of
from heapr_lab.evaluation.loss_prediction import DamageMap, fit_damage
from heapr_lab.pruning.savings import summed_scores
from heapr_lab.pruning.surgery import prune
from heapr_lab.workbench.settings import Setting
from heapr_lab.workbench.workbench import Workbench

DEFAULT_RATIOS = (0.2, 0.5, 0.8)
"""Where `damage_map` evaluates."""

_HIGHEST = 0.95

Rounds = list[list[float]]
"""Seconds of each round: of the dense model, then of the pruned one."""


def damage_map(
    bench: Workbench,
    setting: Setting,
    corpus: str,
    ratios: Sequence[float] = DEFAULT_RATIOS,
) -> DamageMap:
    """The map of `setting`, calibrated on the test windows of `corpus`.

    Evaluates the dense model and one pruned model for each ratio, through the cache.

    Args:
        bench: the model.
        setting: how atoms are chosen; its own ratio does not matter.
        corpus: whose loss is predicted.
        ratios: where to evaluate.
    """
    table, windows = bench.table_of(setting), bench.test_windows(corpus)
    dense = bench.perplexity(None, windows).nll
    points = []
    for ratio in ratios:
        keep = bench.keep(setting.at(ratio))
        score = summed_scores(table, keep, setting.selection.estimator)
        points.append((score, bench.perplexity(keep, windows).nll - dense))
    return fit_damage(points)


def ratio_for_loss(
    bench: Workbench,
    setting: Setting,
    corpus: str,
    *,
    rise: float = 0.02,
    tolerance: float = 0.01,
    highest: float = _HIGHEST,
) -> tuple[Setting, pd.DataFrame]:
    """The largest ratio whose perplexity rises by at most `rise`.

    Each try is one evaluation on the test windows, from the cache where it is there;
    about five are needed. What is returned was evaluated itself, and so keeps the limit
    also where the loss does not grow evenly.

    Args:
        bench: the model.
        setting: how atoms are chosen; its ratio is not used.
        corpus: where perplexity is measured.
        rise: relative to the dense model's perplexity; 0.02 is two per cent.
        tolerance: there is an evaluated ratio above the limit that is at most so much
            larger than what is returned.
        highest: no ratio above it is tried; lower it for a structure that has less.

    Returns:
        `setting` with the ratio, 0 if there is none; and what was tried, in order:
        ratio, achieved_ratio, perplexity, rise.

    Raises:
        SpecError: `rise` is not above 0.
    """
    if not rise > 0:
        raise SpecError(f"rise must be above 0, such as 0.02 for 2 %, got {rise}")
    windows = bench.test_windows(corpus)
    dense = bench.perplexity(None, windows)
    tried = [(0.0, 0.0, dense.value, 0.0)]
    limit = math.log1p(rise)

    @functools.cache  # brentq asks for the ends once more
    def excess(ratio: float) -> float:
        """∛Δloss above the limit's: the loss grows about as the cube of the ratio."""
        if ratio == 0:
            return -math.cbrt(limit)
        keep = bench.keep(setting.at(ratio))
        found = bench.perplexity(keep, windows)
        delta = found.nll - dense.nll
        tried.append((ratio, keep.achieved_ratio, found.value, math.expm1(delta)))
        return math.cbrt(delta) - math.cbrt(limit)

    if excess(highest) > 0:
        brentq(excess, 0.0, highest, xtol=tolerance)
    columns = ["ratio", "achieved_ratio", "perplexity", "rise"]
    history = pd.DataFrame(tried, columns=columns)
    ratio = float(history.loc[history["rise"] <= rise, "ratio"].max())
    return setting.at(ratio), history


def ratio_for_latency(
    bench: Workbench,
    setting: Setting,
    *,
    share: float,
    batch_size: int = 1,
    tolerance: float = 0.02,
    highest: float = _HIGHEST,
    measure: Callable[[nn.Module, nn.Module], Rounds] | None = None,
) -> tuple[Setting, pd.DataFrame]:
    """The smallest ratio whose decoding takes at most `share` of the dense time.

    What is timed is the sliced model, against the dense one in the same run: they take
    turns, and the share is the median over rounds. It is what this machine does, with
    these kernels; it is measured anew in each call, and differs a little.

    Args:
        bench: the model.
        setting: how atoms are chosen; its ratio is not used.
        share: of the dense model's time per step; 0.8 is a fifth faster.
        batch_size: sequences that decode together.
        tolerance: there is a measured ratio above the limit that is at most so much
            smaller than what is returned.
        highest: no ratio above it is tried.
        measure: times the dense and the pruned model; by default `decoding_rounds`
            after a prompt from the calibration windows.

    Returns:
        `setting` with the ratio; and what was tried, in order: ratio, achieved_ratio,
        dense_ms and pruned_ms (of a step, which is a token of each sequence), share.

    Raises:
        SpecError: `share` is not in (0, 1), or `highest` does not reach it.
    """
    if not 0 < share < 1:
        raise SpecError(f"share must be in (0, 1), such as 0.8, got {share}")
    timed = measure or functools.partial(
        decoding_rounds, _prompts(bench, setting, batch_size)
    )
    tried: list[tuple[float, ...]] = []

    @functools.cache  # brentq asks for the ends once more
    def excess(ratio: float) -> float:
        """The share of time above the limit."""
        if ratio == 0:
            return 1 - share
        keep = bench.keep(setting.at(ratio))
        dense, pruned = timed(bench.model, prune(bench.model, keep))
        found = statistics.median(p / d for p, d in zip(pruned, dense, strict=True))
        times = 1000 * statistics.median(dense), 1000 * statistics.median(pruned)
        tried.append((ratio, keep.achieved_ratio, *times, found))
        return found - share

    if excess(highest) > 0:
        raise SpecError(
            f"decoding takes {tried[0][-1]:.3g} of the dense time with {highest:g} of "
            f"the atoms gone, more than the {share:g} asked for; give a larger share"
        )
    brentq(excess, 0.0, highest, xtol=tolerance)
    columns = ["ratio", "achieved_ratio", "dense_ms", "pruned_ms", "share"]
    history = pd.DataFrame(tried, columns=columns)
    ratio = float(history.loc[history["share"] <= share, "ratio"].min())
    return setting.at(ratio), history


def _prompts(bench: Workbench, setting: Setting, batch_size: int) -> torch.Tensor:
    """The first calibration windows, LongTensor (batch_size, seq_len).

    Raises:
        SpecError: there are not so many.
    """
    windows = bench.calibration_set(setting.calibration)
    if not 1 <= batch_size <= windows.n_sequences:
        raise SpecError(
            f"batch_size must be from 1 to {windows.n_sequences}, the calibration "
            f"windows that prompts are taken from, got {batch_size}"
        )
    return windows.ids[:batch_size]


def decoding_rounds(
    prompts: torch.Tensor,
    dense: nn.Module,
    pruned: nn.Module,
    *,
    n_steps: int = 16,
    n_rounds: int = 7,
) -> Rounds:
    """Seconds of a decoding step of both models, which take turns.

    Args:
        prompts: token ids (batch, length) that are decoded after.
        dense: one model.
        pruned: the other.
        n_steps: steps of a round.
        n_rounds: rounds that count; one before them warms up.
    """
    ids = prompts.to(next(dense.parameters()).device)
    runs = [
        functools.partial(seconds_of, model, ids, n_steps=n_steps)
        for model in (dense, pruned)
    ]
    rounds = in_turns(runs, n_rounds=n_rounds)
    return [[seconds / n_steps for seconds in own] for own in rounds]


# --- two budgets --------------------------------------------------------------------
