"""The two methods: presets of an estimator and of how the weights are made."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from heapr_lab.errors import SpecError
from heapr_lab.recipes.weights import MASKED, WeightRecipe


@dataclass(frozen=True)
class Method:
    """An estimator, and how the kept weights are made."""

    name: str
    estimator: str
    """The estimator of its masks; with `compress`, before the best one is known."""
    of_table: str
    """Estimator where there is only a table, and no text to run the model on."""
    recipe: WeightRecipe
    """How its weights are made, where there is text to fit them to."""

    def estimator_for(self, importance: object | None) -> str:
        """The estimator, with or without a file of `importance`."""
        return self.estimator if importance is None else self.of_table

    def recipe_for(
        self, importance: object | None, *, estimator: str | None
    ) -> WeightRecipe:
        """How weights are made where an estimator may be given."""
        if importance is not None:
            return MASKED
        fixed = estimator is not None and self.recipe.chooses
        return WeightRecipe("compensated") if fixed else self.recipe


METHODS: Mapping[str, Method] = MappingProxyType(
    {
        method.name: method
        for method in (
            Method("best", "elimination", "shrunk", WeightRecipe("compress", 0.25)),
            Method("paper", "heapr", "heapr", MASKED),
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
