"""The two methods: presets of an estimator and of compensation."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from heapr_lab.errors import SpecError


@dataclass(frozen=True)
class Method:
    """An estimator, and whether pruned atoms are compensated."""

    name: str
    estimator: str
    of_table: str
    """Estimator where there is only a table, and no text to run the model on."""
    compensated: bool
    """Whether pruned atoms are compensated, where there is text for it."""

    def estimator_for(self, importance: object | None, *, rounds: int) -> str:
        """The estimator for `rounds` rounds, with or without a file of `importance`."""
        # Elimination already accounts for earlier removals, as rounds do.
        alone = importance is not None or rounds > 1
        return self.of_table if alone else self.estimator


METHODS: Mapping[str, Method] = MappingProxyType(
    {
        method.name: method
        for method in (
            Method("best", "elimination", of_table="shrunk", compensated=True),
            Method("paper", "heapr", of_table="heapr", compensated=False),
        )
    }
)
DEFAULT = "best"
"""The method of the command line and of the panel's export."""


def find_method(name: str) -> Method:
    """The method of that name.

    Raises:
        SpecError: there is none of that name.
    """
    if name not in METHODS:
        raise SpecError(f"method {name!r}: expected one of {', '.join(METHODS)}")
    return METHODS[name]


def describe_estimator(estimator: str) -> str:
    """The estimator with the method that uses it, as on the command line.

    Example:
        >>> describe_estimator("heapr")
        'heapr: the estimator of --method paper'
    """
    for name, method in METHODS.items():
        default = ", the command line's default" if name == DEFAULT else ""
        if estimator == method.estimator:
            return f"{estimator}: the estimator of --method {name}{default}"
        if estimator == method.of_table:
            return f"{estimator}: the estimator of --method {name} for a table alone"
    return f"{estimator}: of neither method, --estimator {estimator}"
