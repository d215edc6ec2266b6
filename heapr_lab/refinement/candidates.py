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
ALLOCATIONS = {
    "score": "",
    "measured": "layers by measured loss",
    "blended": "layers by score and measured loss",
}
"""What decides how much each layer loses, and as text."""
EXPONENTS = {"score": 0.0, "measured": 1.0, "blended": 0.5}
"""The power of each layer's measured over predicted loss that its scores are times."""


@dataclass(frozen=True)
class Candidate:
    """One way to choose atoms and to make the weights of those that stay."""

    estimator: str
    """A name in `estimators.ESTIMATORS`."""
    weights: str = "layer"
    """"unchanged", or compensated within each "expert" or across the "layer"."""
    allocation: str = "score"
    """By global rank of the "score", of the score times each layer's "measured" loss
    over the predicted one, or times its square root, "blended"."""

    def __post_init__(self) -> None:
        """Check the names.

        Raises:
            SpecError: one is unknown.
        """
        find_estimator(self.estimator)
        for name, known in (("weights", WEIGHTS), ("allocation", ALLOCATIONS)):
            if getattr(self, name) not in known:
                raise SpecError(
                    f"{name} is {getattr(self, name)!r}, expected one of "
                    f"{', '.join(known)}"
                )

    @property
    def name(self) -> str:
        """The candidate as text.

        Example:
            >>> Candidate("fisher", "expert").name
            'fisher, compensated within each expert'
        """
        parts = (self.estimator, WEIGHTS[self.weights], ALLOCATIONS[self.allocation])
        return ", ".join(filter(None, parts))


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
