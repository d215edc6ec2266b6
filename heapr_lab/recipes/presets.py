"""The two methods: presets of an estimator and of how the weights are made."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from heapr_lab.errors import SpecError

WEIGHTS = {
    "compress": "compensated, or HEAPr's where held-out windows see no gain",
    "compensated": "W_down compensated for the pruned atoms",
    "unchanged": "as they are",
}
"""How the weights that stay are made, and as text."""


@dataclass(frozen=True)
class Method:
    """An estimator, and how the weights that stay are made."""

    name: str
    estimator: str
    """The estimator of its masks; with `compress`, before the best one is known."""
    of_table: str
    """Estimator where there is only a table, and no text to run the model on."""
    weights: str
    """A name in `WEIGHTS`, where there is text to fit them to."""
    own_text: float
    """Windows that the model writes itself for each of the corpus, for `compress`."""

    def estimator_for(self, importance: object | None) -> str:
        """The estimator, with or without a file of `importance`."""
        return self.estimator if importance is None else self.of_table

    def weights_for(self, importance: object | None, *, estimator: str | None) -> str:
        """The weights where an estimator may be given."""
        if importance is not None:
            return "unchanged"
        fixed = estimator is not None and self.weights == "compress"
        return "compensated" if fixed else self.weights


METHODS: Mapping[str, Method] = MappingProxyType(
    {
        method.name: method
        for method in (
            Method(
                "best",
                "elimination",
                of_table="shrunk",
                weights="compress",
                own_text=0.25,
            ),
            Method(
                "paper", "heapr", of_table="heapr", weights="unchanged", own_text=0.0
            ),
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
