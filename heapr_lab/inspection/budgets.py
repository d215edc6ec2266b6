"""The ratio that meets a budget of loss, found by measuring.

A ratio of atoms or parameters needs no search: `select` takes it (`of=`). That of a
loss is searched for: each trial is a pruned model, whose evaluation is cached.
"""

import math
from collections.abc import Callable


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
