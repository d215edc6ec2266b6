"""Verdicts come from intervals of paired differences."""

import math

import pandas as pd
import pytest
from figure_rows import item_rows

from heapr_lab.experiments.intervals import (
    accuracy_difference,
    interval_of,
    loss_difference,
    of_error,
)


def test_the_interval_is_students():
    """1, 2 and 3 have mean 2 and error 1/√3; t = 4.303 at two degrees of freedom."""
    mean = interval_of([1.0, 2.0, 3.0])
    half = 4.302653 / math.sqrt(3)
    assert mean.value == 2.0
    assert (mean.low, mean.high) == pytest.approx((2 - half, 2 + half), abs=1e-5)
    assert interval_of([1.0]).verdict == "undecided"


def test_an_error_gives_the_normal_interval():
    """1.96 standard errors on either side."""
    interval = of_error(1.0, 0.5)
    assert (interval.low, interval.high) == pytest.approx((0.02, 1.98), abs=1e-3)


def test_every_corpus_counts_as_much():
    """Two windows of one and four of another: the mean of both means."""
    gaps = {"few": [1.0, 3.0], "many": [0.0, 1.0, 0.0, 1.0]}
    rows = [
        (method, 0.2, corpus, window, gap * (method == "a"))
        for corpus, values in gaps.items()
        for window, gap in enumerate(values)
        for method in ("a", "b")
    ]
    columns = ["method", "ratio", "corpus", "window", "nll"]
    difference = loss_difference(pd.DataFrame(rows, columns=columns), "a", "b", 0.2)
    assert difference is not None
    assert difference.value == pytest.approx((2.0 + 0.5) / 2)
    halves = [interval_of(values).high - 2.0 for values in (gaps["few"],)]
    halves.append(interval_of(gaps["many"]).high - 0.5)
    half = math.hypot(*halves) / 2
    assert difference.high - difference.value == pytest.approx(half)


def test_items_are_paired():
    """Only items that both were asked count: the dense model had one more here."""
    items = item_rows({("a", 0.2): (1, 0, 0), ("dense", 0.0): (1, 0, 1, 1)})
    difference = accuracy_difference(items, "a", "dense", 0.2)
    assert difference is not None
    assert difference.value == pytest.approx(-1 / 3)
    assert accuracy_difference(items, "b", "dense", 0.2) is None
