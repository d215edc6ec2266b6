"""The candidates among which `compress` chooses."""

from collections.abc import Sequence
from dataclasses import dataclass

from heapr_lab.errors import SpecError
from heapr_lab.importance.estimators import find_estimator

WEIGHTS = {
    "unchanged": "weights unchanged",
    "expert": "compensated within each expert",
    "layer": "compensated across the layer",
}
"""How the remaining weights are made, and as text."""


@dataclass(frozen=True)
class Candidate:
    """One way to choose atoms and to make the weights of those that stay."""

    estimator: str
    """A name in `estimators.ESTIMATORS`."""
    weights: str = "layer"
    """"unchanged", or compensated within each "expert" or across the "layer"."""

    def __post_init__(self) -> None:
        """Check the names.

        Raises:
            SpecError: one is unknown.
        """
        find_estimator(self.estimator)
        if self.weights not in WEIGHTS:
            raise SpecError(
                f"weights is {self.weights!r}, expected one of {', '.join(WEIGHTS)}"
            )

    @property
    def name(self) -> str:
        """The candidate as text.

        Example:
            >>> Candidate("fisher", "expert").name
            'fisher, compensated within each expert'
        """
        return f"{self.estimator}, {WEIGHTS[self.weights]}"


PAPER = Candidate("heapr", "unchanged")
"""HEAPr as published."""
_ESTIMATORS = ("elimination", "elimination_shrunk", "shrunk", "fisher", "heapr")
CANDIDATES = (
    PAPER,
    *(
        Candidate(estimator, weights)
        for weights in ("layer", "expert")
        for estimator in _ESTIMATORS
    ),
)
"""In the order in which they are tried while the time budget lasts."""


def usable(candidates: Sequence[Candidate], *, across: bool) -> tuple[Candidate, ...]:
    """HEAPr as published first, then the others, each once.

    Where experts cannot compensate `across` the layer, only candidates that do not are
    used.
    """
    found = (PAPER, *candidates)
    return tuple(dict.fromkeys(c for c in found if across or c.weights != "layer"))
