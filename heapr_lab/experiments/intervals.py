"""Differences of two states of a model, paired over windows or items, with intervals.

A claim is about the sign of a difference. Its verdict comes from the 95 % interval: the
claim holds where the whole interval is on its side of zero, and is undecided where the
interval contains zero.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
import scipy  # its `stats` are imported when they are first used

from heapr_lab.tasks.paper_tasks import CHOICES, MEAN, task_difference

AGREES, DISAGREES, UNDECIDED = "agrees", "disagrees", "undecided"
UNTESTED = "cannot be tested here"
VERDICTS = (DISAGREES, UNDECIDED, AGREES, UNTESTED)
"""In the order in which they are told, and in which one of them decides."""
_LEVEL = 0.95


@dataclass(frozen=True)
class Interval:
    """A mean and its 95 % interval."""

    value: float
    low: float
    high: float

    @property
    def verdict(self) -> str:
        """Whether "above zero" agrees, disagrees, or is undecided."""
        if self.low > 0:
            return AGREES
        return DISAGREES if self.high < 0 else UNDECIDED

    def mapped(self, function: Callable[[float], float]) -> "Interval":
        """The interval of a monotone function of the value.

        Example:
            >>> Interval(0.5, 0.25, 0.75).mapped(lambda x: 1 - x)
            Interval(value=0.5, low=0.25, high=0.75)
        """
        low, high = sorted(map(function, (self.low, self.high)))
        return Interval(function(self.value), low, high)

    def said(self, form: str = "+.3f") -> str:
        """The three numbers as text.

        Example:
            >>> Interval(0.5, 0.25, 0.75).said("+.2f")
            '+0.50 (+0.25 to +0.75)'
        """
        value, low, high = (format(x, form) for x in (self.value, self.low, self.high))
        return f"{value} ({low} to {high})"

    def said_as(self, unit: str, form: str = ".3f") -> str:
        """A difference in words: how many of a unit it is more or less.

        Example:
            >>> Interval(-0.5, -0.75, -0.25).said_as("nats", ".2f")
            '0.50 (0.25 to 0.75) nats less'
        """
        if self.value < 0:
            return f"{self.mapped(lambda x: -x).said(form)} {unit} less"
        return f"{self.said(form)} {unit} more"

    def in_short(self, form: str = "+.3f") -> str:
        """The value and half of a symmetric interval.

        Example:
            >>> Interval(0.5, 0.25, 0.75).in_short("+.2f")
            '+0.50 ± 0.25'
        """
        half = format(self.high - self.value, form.replace("+", ""))
        return f"{format(self.value, form)} ± {half}"


def interval_of(differences: Sequence[float]) -> Interval:
    """The mean of independent differences with Student's interval.

    Shape: (n,). The interval of a single difference is infinite.

    Example:
        >>> interval_of([0.5, 0.5, 0.5])
        Interval(value=0.5, low=0.5, high=0.5)
    """
    values = np.asarray(differences, dtype=float)
    n = len(values)
    if n < 2:
        return Interval(float(values.mean()), -math.inf, math.inf)
    error = values.std(ddof=1) / math.sqrt(n)
    half = float(scipy.stats.t.ppf((1 + _LEVEL) / 2, n - 1) * error)
    mean = float(values.mean())
    return Interval(mean, mean - half, mean + half)


def mean_of(parts: Sequence[Interval]) -> Interval:
    """The mean of independent estimates, each with a symmetric interval.

    Example:
        >>> mean_of([Interval(1.0, -2.0, 4.0), Interval(2.0, -2.0, 6.0)])
        Interval(value=1.5, low=-1.0, high=4.0)
    """
    value = sum(part.value for part in parts) / len(parts)
    half = math.hypot(*(part.high - part.value for part in parts)) / len(parts)
    return Interval(value, value - half, value + half)


def of_error(value: float, error: float) -> Interval:
    """The normal interval of an estimate with that standard error."""
    half = float(scipy.stats.norm.ppf((1 + _LEVEL) / 2) * error)
    return Interval(value, value - half, value + half)


def ends_above_middle(shares: pd.DataFrame) -> tuple[Interval, Interval]:
    """How much more the first layers, and the last one, lose than those in the middle.

    Args:
        shares: columns seed, layer, share; of draws, which the intervals are over.

    Returns:
        The first third of the layers minus the middle third; the last layer minus it.
    """
    wide = shares.pivot(index="seed", columns="layer", values="share")
    third = max(1, wide.shape[1] // 3)
    cuts = (slice(0, third), slice(third, -third), slice(-1, None))
    first, middle, last = (wide.iloc[:, cut].mean(axis="columns") for cut in cuts)
    early, late = ((end - middle).to_numpy() for end in (first, last))
    return interval_of(early), interval_of(late)


def kept_of_boundary(boundary: pd.DataFrame) -> pd.DataFrame:
    """The share of the accuracy that is kept, from `figures.boundary_data`.

    Returns:
        Columns value, low, high; ratio, of the atoms; removed, the share of the whole
        model; flops, the share of its FLOPs; guessing, the share of the dense model's
        accuracy that guessing has.
    """
    ours = boundary[boundary["source"].eq("ours") & boundary["ratio"].gt(0)]
    rows = ours[ours["metric"].eq("accuracy")]
    saved = ours[ours["metric"].eq("flops_reduction")].set_index("ratio")["value"]
    pairs = zip(rows["relative"], rows["relative_stderr"], strict=True)
    kept = pd.DataFrame([vars(of_error(*pair)) for pair in pairs])
    guessing = rows["relative"] / rows["value"] / CHOICES["continuation"]
    return kept.assign(
        ratio=rows["ratio"].to_numpy(),
        removed=rows["parameter_reduction"].to_numpy(),
        flops=rows["ratio"].map(saved).to_numpy(),
        guessing=guessing.to_numpy(),
    )


def verdict_of(verdicts: Iterable[str]) -> str:
    """One verdict of several: a claim holds if it holds everywhere.

    Example:
        >>> verdict_of(["agrees", "undecided"]), verdict_of([])
        ('undecided', 'cannot be tested here')
    """
    distinct = set(verdicts)
    return next((verdict for verdict in VERDICTS if verdict in distinct), UNTESTED)


# --- states -----------------------------------------------------------------------


def state(frame: pd.DataFrame, method: str, ratio: float) -> pd.DataFrame:
    """The rows of one method at one ratio, of windows or items; "dense" has only 0."""
    at = 0.0 if method == "dense" else ratio
    return frame[frame["method"].eq(method) & frame["ratio"].eq(at)]


def loss_difference(
    windows: pd.DataFrame, method: str, other: str, ratio: float
) -> Interval | None:
    """How much more one method loses than another, paired over windows.

    Each corpus counts as much as any other, however many of its windows there are.

    Args:
        windows: columns method, ratio, corpus, window and nll [nats per token].
        method: the one that is expected to lose more.
        other: the other one, or "dense".
        ratio: the ratio of both.

    Returns:
        Nats per token; None if one of the two was not measured.
    """
    keys = ["corpus", "window"]
    sides = (state(windows, name, ratio)[[*keys, "nll"]] for name in (method, other))
    pairs = pd.merge(*sides, on=keys)
    if pairs.empty:
        return None
    gaps = (pairs["nll_x"] - pairs["nll_y"]).groupby(pairs["corpus"])
    return mean_of([interval_of(part) for _, part in gaps])


def loss_differences(
    windows: pd.DataFrame, method: str, other: str, ratios: Iterable[float]
) -> dict[float, Interval]:
    """`loss_difference` at each ratio at which both methods were measured."""
    gaps = {ratio: loss_difference(windows, method, other, ratio) for ratio in ratios}
    return {ratio: gap for ratio, gap in gaps.items() if gap is not None}


def accuracy_difference(
    items: pd.DataFrame, method: str, other: str, ratio: float
) -> Interval | None:
    """How much more of the tasks one state answers rightly, on the mean of the tasks.

    Only the items that both states were asked count; one may have had more.
    Arguments are those of `loss_difference`, with a frame of `task_items` for each
    state in `items`.

    Returns:
        A fraction; None if one of the two was not measured.
    """
    if items.empty:
        return None
    mine, theirs = (state(items, name, ratio) for name in (method, other))
    keys = ["task", "item"]
    common = pd.merge(mine[keys], theirs[keys])
    if common.empty:
        return None
    pair = task_difference(common.merge(mine), common.merge(theirs))
    mean = pair.set_index("task").loc[MEAN]
    return of_error(mean["value"], mean["stderr"])
