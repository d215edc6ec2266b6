"""Predicting the loss increase of pruning: from summed scores to Δloss.

Without torch. By its definition, a score predicts that removing atoms costs the sum of
their scores; the true cost is larger, the more is removed. Since both rise together, a
few evaluations suffice to calibrate the prediction: on logarithmic axes, a monotone
curve through the measured points, extrapolated by straight lines.

S is the summed score of the removed atoms, in the unit of its estimator; Δloss is the
increase of the loss in nats per token. A map is valid for one model, estimator, corpus
and kind of selection (scope, granularity, structure), at any ratio.
"""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import scipy  # whose parts are imported when they are first used

from heapr_lab.errors import SpecError
from heapr_lab.importance.estimators import PER_TOKEN
from heapr_lab.repr_html import card_html

_LEAST_FOR_SPREAD = 3
_Array = npt.NDArray[np.float64]


@dataclass(frozen=True, repr=False)
class DamageMap:
    """Δloss as an increasing function of the summed score; made by `fit_damage`.

    With one knot it is proportional, with two a power law, with more the monotone
    cubic (PCHIP) in log S and log Δloss. It is extrapolated by the power law of the
    two outermost knots, so that Δloss is 0 at S = 0.

    Example:
        >>> damage = fit_damage([(1.0, 0.01), (10.0, 1.0)])
        >>> damage.predict([0.0, 1.0, 100.0]).round(6).tolist()
        [0.0, 0.01, 100.0]
    """

    points: tuple[tuple[float, float], ...]
    """Measured (S, Δloss), ascending; equal S averaged."""
    knots: tuple[tuple[float, float], ...]
    """(S, Δloss) of the curve: the points, averaged until both increase."""
    spread: float | None
    """The largest factor by which the curve misses a point that is left out.

    Each point is left out in turn and predicted from the others; the measured value
    then lies between `predict(S) / spread` and `predict(S) * spread`. This is not a
    confidence interval: between the points the error is mostly smaller, because a
    left-out end is extrapolated; well below the first point, where Δloss is small and
    noisy, it can be larger. None with fewer than three points.
    """

    def predict(self, score: npt.ArrayLike) -> _Array:
        """Δloss in nats per token, in the shape of `score`.

        Args:
            score: summed scores S, none negative.

        Raises:
            SpecError: a score is negative or not finite.
        """
        scores = np.asarray(score, dtype=np.float64)
        if not (np.isfinite(scores) & (scores >= 0)).all():
            raise SpecError(
                f"summed scores are {scores.ravel().tolist()}, expected none negative "
                "and all finite; use an estimator without negative scores"
            )
        # log 0 is -inf, with Δloss 0; values too large for a float become infinite.
        with np.errstate(divide="ignore", over="ignore"):
            found: _Array = np.exp(_log_curve(self.knots, np.log(scores)))
        return found

    def extrapolates(self, score: float) -> bool:
        """Whether `score` lies outside the measured points."""
        return not self.points[0][0] <= score <= self.points[-1][0]

    def _facts(self) -> dict[str, str]:
        scores, losses = zip(*self.points, strict=True)
        facts = {
            "points": f"{len(self.points)}",
            "summed score": f"{min(scores):.3g} to {max(scores):.3g}",
            f"Δloss [{PER_TOKEN}]": f"{min(losses):.3g} to {max(losses):.3g}",
        }
        if self.spread is not None:
            facts["off at a left-out point by at most"] = f"× {self.spread:.2f}"
        return facts

    def __repr__(self) -> str:
        facts = ", ".join(f"{name} {value}" for name, value in self._facts().items())
        return f"DamageMap({facts})"

    def _repr_html_(self) -> str:
        return card_html("Damage map", self._facts())


def fit_damage(points: Iterable[tuple[float, float]]) -> DamageMap:
    """The map through a few evaluations; two or three are enough.

    Noise is additive in nats: points that do not increase with S are averaged with
    their neighbours until they do (isotonic regression). Averages that are then not
    above 0 are too small to be measured, and are ignored.

    Args:
        points: (S, measured Δloss in nats per token) of each; points with S = 0 are
            ignored.

    Raises:
        SpecError: a number is not finite, S is negative, or no Δloss is above 0.
    """
    found = np.array(list(points), dtype=np.float64).reshape(-1, 2)
    if not (np.isfinite(found).all() and (found[:, 0] >= 0).all()):
        raise SpecError(
            f"points (summed score, Δloss) are {found.tolist()}, expected finite "
            "numbers and no negative score; use an estimator without negative scores"
        )
    measured = _averaged(found[found[:, 0] > 0])
    knots = _knots(measured)
    if not knots:
        raise SpecError(
            f"of the points (summed score, Δloss) {found.tolist()} none has both above "
            "0 after averaging, expected at least one; evaluate a larger ratio, or on "
            "more text"
        )
    pairs = zip(measured[0].tolist(), measured[1].tolist(), strict=True)
    return DamageMap(tuple(pairs), knots, _spread(measured))


# --- the curve ------------------------------------------------------------------


def _averaged(points: _Array) -> _Array:
    """Points (n, 2) as (3, m): S ascending, each once; mean Δloss; how many."""
    scores, which, sizes = np.unique(
        points[:, 0], return_inverse=True, return_counts=True
    )
    sums = np.bincount(which, weights=points[:, 1], minlength=len(scores))
    return np.stack([scores, sums / sizes, sizes])


def _knots(measured: _Array) -> tuple[tuple[float, float], ...]:
    """The increasing (S, Δloss) above 0 of `measured` (3, m); () if there are none.

    Points that are averaged become one, at the geometric mean of their S.
    """
    scores, losses, sizes = measured
    if not len(scores):
        return ()
    fitted = scipy.optimize.isotonic_regression(losses, weights=sizes)
    knots = []
    for start, stop in itertools.pairwise(fitted.blocks):
        if fitted.x[start] > 0:
            rows = slice(start, stop)
            score = np.exp(np.average(np.log(scores[rows]), weights=sizes[rows]))
            knots.append((float(score), float(fitted.x[start])))
    return tuple(knots)


def _log_curve(knots: tuple[tuple[float, float], ...], asked: _Array) -> _Array:
    """Logarithms of Δloss at `asked`, which are logarithms of S in any shape."""
    x, y = np.log(np.array(knots)).T
    inside = np.clip(asked, x[0], x[-1])
    if len(knots) == 1:
        slope, between = 1.0, y[0]
    else:
        slopes = np.diff(y) / np.diff(x)
        slope = np.where(asked < x[0], slopes[0], slopes[-1])
        between = scipy.interpolate.PchipInterpolator(x, y)(inside)
    found: _Array = between + slope * (asked - inside)
    return found


def _spread(measured: _Array) -> float | None:
    """`DamageMap.spread` of `measured` (3, m)."""
    n_points = measured.shape[1]
    if n_points < _LEAST_FOR_SPREAD:
        return None
    misses = []
    for index in range(n_points):
        knots = _knots(np.delete(measured, index, axis=1))
        score, loss, _ = measured[:, index]
        if knots and loss > 0:
            misses.append(np.abs(_log_curve(knots, np.log(score)) - np.log(loss)))
    with np.errstate(over="ignore"):
        return float(np.exp(max(misses))) if misses else None
