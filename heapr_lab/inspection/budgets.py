"""The ratio that meets a budget of perplexity.

A ratio of atoms or parameters needs no search: `select` takes it (`of=`). That of a
loss is searched for: each trial is a mask from the same table, and its evaluation is
cached.
"""

import functools
import math
from collections.abc import Sequence

import pandas as pd
from scipy.optimize import brentq

from heapr_lab.errors import SpecError
from heapr_lab.inspection.loss_prediction import DamageMap, fit_damage
from heapr_lab.pruning.savings import summed_scores
from heapr_lab.workbench.settings import Setting
from heapr_lab.workbench.workbench import Workbench

DEFAULT_RATIOS = (0.2, 0.5, 0.8)
"""The ratios at which `damage_map` evaluates."""


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
