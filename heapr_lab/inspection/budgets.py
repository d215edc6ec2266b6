"""The ratio that meets a budget of perplexity, and the time that a mask saves.

A ratio of atoms, parameters, bytes or FLOPs needs no search: `select` takes it (`of=`).
That of a loss is searched for: each trial is a mask from the same table, and its
evaluation is cached.
"""

import functools
import math
import statistics
from collections.abc import Sequence

import pandas as pd
import torch
from scipy.optimize import brentq
from torch import nn

from heapr_lab.errors import SpecError
from heapr_lab.inspection.latency import in_turns, seconds_of
from heapr_lab.inspection.loss_prediction import DamageMap, fit_damage
from heapr_lab.models.backend import backend_of
from heapr_lab.pruning.masks import KeepMask
from heapr_lab.pruning.savings import summed_scores
from heapr_lab.pruning.surgery import prune
from heapr_lab.text.calibration_spec import Calibration
from heapr_lab.workbench.settings import Setting
from heapr_lab.workbench.workbench import Workbench

DEFAULT_RATIOS = (0.2, 0.5, 0.8)
"""The ratios at which `damage_map` evaluates."""

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
        setting: how atoms are selected; its ratio is not used.
        corpus: the corpus whose loss is predicted.
        ratios: the ratios to evaluate.
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
    highest: float = 0.95,
) -> tuple[Setting, pd.DataFrame]:
    """The largest ratio whose perplexity increases by at most `rise`.

    Each trial is one evaluation on the test windows, or read from the cache; about five
    are needed. The returned ratio was itself evaluated, so it meets the limit even if
    the loss is not monotone.

    Args:
        bench: the model.
        setting: how atoms are selected; its ratio is not used.
        corpus: the corpus on which perplexity is measured.
        rise: relative to the dense model's perplexity; 0.02 is two per cent.
        tolerance: an evaluated ratio that exceeds the limit is at most this much larger
            than the returned one.
        highest: the highest ratio tried; lower it for structures with a lower maximum.

    Returns:
        `setting` with the ratio, 0 if there is none; and the trials in order: ratio,
        achieved_ratio, perplexity, rise.

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
        """∛Δloss minus the limit's: Δloss is roughly cubic in the ratio."""
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


def share_of_time(rounds: Rounds) -> float:
    """The median over rounds of the pruned model's time by the dense one's."""
    dense, pruned = rounds
    return statistics.median(p / d for p, d in zip(pruned, dense, strict=True))


def share_of_decoding(
    bench: Workbench, keep: KeepMask, calibration: Calibration, *, batch_size: int = 1
) -> float:
    """The time of a decoding step of the sliced model, as share of the dense model's.

    Both are timed here, taking turns, after prompts from the calibration windows. What
    is done to the weights besides slicing takes no time.

    Args:
        bench: the dense model, in memory.
        keep: the mask.
        calibration: whose windows the prompts are.
        batch_size: number of sequences decoded together.

    Raises:
        SpecError: the model is streamed, so that its time is that of the disk, or there
            are fewer windows than `batch_size`.
    """
    backend_of(bench.model).require_loaded(
        remedy="its latency is that of the disk; save the pruned model, and load both"
    )
    prompts = _prompts(bench, calibration, batch_size)
    return share_of_time(
        decoding_rounds(prompts, bench.model, prune(bench.model, keep))
    )


def _prompts(
    bench: Workbench, calibration: Calibration, batch_size: int
) -> torch.Tensor:
    """The first calibration windows, LongTensor (batch_size, seq_len).

    Raises:
        SpecError: there are fewer.
    """
    windows = bench.calibration_set(calibration)
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
        prompts: token ids (batch, length) before the decoded tokens.
        dense: one model.
        pruned: the other.
        n_steps: steps of a round.
        n_rounds: timed rounds; one more before them is for warming up.
    """
    ids = prompts.to(next(dense.parameters()).device)
    runs = [
        functools.partial(seconds_of, model, ids, n_steps=n_steps)
        for model in (dense, pruned)
    ]
    rounds = in_turns(runs, n_rounds=n_rounds)
    return [[seconds / n_steps for seconds in own] for own in rounds]
