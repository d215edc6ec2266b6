"""The ratio that a limit of loss leaves: the limit holds, and few are tried."""

import math
from collections.abc import Callable
from unittest.mock import Mock

import numpy as np
import pytest

from heapr_lab.inspection.budgets import largest_ratio

LAB = [0, 0.008, 0.026, 0.054, 0.106, 0.187, 0.31, 0.48, 0.74, 1.17, 2.2]
CURVES: dict[str, Callable[[float], float]] = {
    "cube": lambda r: 4 * r**3,
    "square": lambda r: 2 * r**2,
    "exponential": lambda r: 0.01 * math.expm1(8 * r),
    "better at first": lambda r: r**2 - 0.1 * r,
    "as the lab model": lambda r: float(np.interp(10 * r, range(11), LAB)),
}


@pytest.mark.parametrize("limit", [0.005, 0.02, 0.1, 0.4])
@pytest.mark.parametrize("curve", CURVES)
def test_the_largest_ratio_below_a_limit_is_found_by_few_trials(curve, limit):
    """At most six, and the limit holds at the ratio but not beyond."""
    loss_at = Mock(side_effect=CURVES[curve])
    ratio = largest_ratio(loss_at, limit)
    assert loss_at.call_count <= 6
    assert CURVES[curve](ratio) <= limit < CURVES[curve](ratio + 0.0101)


@pytest.mark.parametrize(
    ("loss", "highest", "found"), [(5.0, 0.95, 0), (0.0, 0.5, 0.5)]
)
def test_where_none_or_all_meet_the_limit(loss, highest, found):
    """The model stays whole, or one trial says that the highest ratio may be had."""
    loss_at = Mock(return_value=loss)
    assert largest_ratio(loss_at, 0.02, highest=highest) == found
    assert found == 0 or loss_at.call_count == 1
