"""Differences of two models' losses on the same windows, without torch."""

import math
from collections.abc import Sequence

import numpy as np

from heapr_lab.errors import SpecError


def paired_difference(
    windows: Sequence[float], others: Sequence[float]
) -> tuple[float, float]:
    """How much larger one model's loss is than another's on the same windows.

    Texts differ more than models do, so that the error of the difference is far smaller
    than that of either loss.

    Shapes: both (n_windows,), as `Perplexity.windows`.

    Returns:
        The mean difference and its standard error over windows, in nats per token; the
        error of a single window is NaN.

    Raises:
        SpecError: there are no windows, or not the same number of them.

    Example:
        >>> paired_difference([1.0, 2.0, 4.5], [0.5, 1.5, 3.5])
        (0.6666666666666666, 0.16666666666666666)
    """
    if len(windows) != len(others) or not len(windows):
        raise SpecError(
            f"losses of {len(windows)} and of {len(others)} windows cannot be paired; "
            "measure both models on the same windows"
        )
    apart = np.subtract(windows, others)
    if len(apart) == 1:
        return float(apart[0]), math.nan
    return float(apart.mean()), float(apart.std(ddof=1) / math.sqrt(len(apart)))
