"""The ratio that meets a budget of loss, found by measuring.

A ratio of atoms or parameters needs no search: `select` takes it (`of=`). That of a
loss is searched for: each trial is a pruned model, whose evaluation is cached.
"""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import pandas as pd

from heapr_lab.errors import SpecError
from heapr_lab.workbench.settings import Setting

if TYPE_CHECKING:
    from heapr_lab.workbench.workbench import Workbench


def largest_ratio(
    loss_at: Callable[[float], float],
    limit: float,
    *,
    tolerance: float = 0.01,
    highest: float = 0.95,
) -> float:
    """The largest ratio tried whose loss increase is at most `limit`.

    About five ratios are tried, each once. The returned one was itself tried, so it
    meets the limit even if the loss is not monotone; it is 0 if no other does.

    Args:
        loss_at: measures the loss increase at a ratio, in nats per token.
        limit: in nats per token, not negative.
        tolerance: a ratio tried that exceeds the limit is at most this much larger than
            the returned one.
        highest: the highest ratio tried.

    Example:
        >>> round(largest_ratio(lambda ratio: ratio**2, 0.25, tolerance=1e-9), 6)
        0.5
    """
    losses = {0.0: 0.0}

    def excess(ratio: float) -> float:
        """∛Δloss minus the limit's: Δloss is roughly cubic in the ratio."""
        if ratio not in losses:
            losses[ratio] = loss_at(ratio)
        return math.cbrt(losses[ratio]) - math.cbrt(limit)

    if excess(highest) > 0:
        from scipy.optimize import brentq  # slow, and needed only here

        brentq(excess, 0.0, highest, xtol=tolerance)
    return max(ratio for ratio, loss in losses.items() if loss <= limit)


def ratio_for_loss(
    bench: "Workbench",
    setting: Setting,
    corpus: str,
    *,
    rise: float = 0.02,
    tolerance: float = 0.01,
    highest: float = 0.95,
) -> tuple[Setting, pd.DataFrame]:
    """The largest ratio whose perplexity increases by at most `rise`.

    Each trial is one evaluation on the test windows, or read from the cache; about five
    are needed, as by `largest_ratio`.

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
    trials = [(0.0, 0.0, dense.value, 0.0)]

    def loss_at(ratio: float) -> float:
        keep = bench.keep(setting.at(ratio))
        pruned = bench.perplexity(keep, windows)
        delta = pruned.nll - dense.nll
        trials.append((ratio, keep.achieved_ratio, pruned.value, math.expm1(delta)))
        return delta

    limit = math.log1p(rise)
    ratio = largest_ratio(loss_at, limit, tolerance=tolerance, highest=highest)
    columns = ["ratio", "achieved_ratio", "perplexity", "rise"]
    return setting.at(ratio), pd.DataFrame(trials, columns=columns)
