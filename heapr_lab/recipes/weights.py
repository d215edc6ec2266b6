"""How the kept weights of a pruned model are made, and the two methods. No torch.

A method is a preset: an estimator, and how the weights are made.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from heapr_lab.errors import SpecError, one_of
from heapr_lab.pruning.options import Selection
from heapr_lab.text.calibration_spec import Calibration

WEIGHTS = {
    "compress": "compensated, or HEAPr's where held-out windows see no gain",
    "compensated": "W_down compensated for the pruned atoms",
    "unchanged": "as they are",
}
"""How the kept weights are made, and as text."""
_TO_HEAL = 4
"""The least number of windows to heal on."""
_PASSES = {"compress": 4, "compensated": 1, "unchanged": 0}


@dataclass(frozen=True)
class WeightRecipe:
    """How the kept weights are made, in evaluations and in what is written.

    Raises:
        SpecError: an unknown kind of weights, or a negative number.
    """

    weights: str = "unchanged"
    """A name in `WEIGHTS`."""
    own_text: float = 0.0
    """Self-generated windows for `compress`, as in `Calibration`."""
    heal: int = 0
    """Windows to heal on before a checkpoint is written: 0 for none, or at least 4."""

    def __post_init__(self) -> None:
        one_of(self.weights, WEIGHTS, name="weights")
        if not self.own_text >= 0:
            raise SpecError(f"own_text is {self.own_text}, expected at least 0")
        if self.heal < 0 or 0 < self.heal < _TO_HEAL:
            raise SpecError(
                f"heal is {self.heal}, expected 0, or at least {_TO_HEAL} windows"
            )

    @property
    def text(self) -> str:
        """The recipe in points, tables and legends, where nothing is healed."""
        if self.weights == "unchanged":
            return "masked"
        suffix = f", own text {self.own_text:.0%}" if self.own_text else ""
        return f"{self.weights}{suffix}"

    @property
    def chooses(self) -> bool:
        """Whether the mask is chosen with the weights, whatever the estimator."""
        return self.weights == "compress"

    @property
    def fits(self) -> bool:
        """Whether any weights are fitted to text."""
        return self.weights != "unchanged"

    @property
    def n_passes(self) -> int:
        """About how many forward passes over the calibration windows it takes."""
        return _PASSES[self.weights]

    def asked(self, selection: Selection) -> Selection:
        """What matters of a selection: no estimator, if another may be chosen."""
        if not self.chooses:
            return selection
        return replace(selection, estimator="heapr", estimator_options=())

    def calibration(self, measured_on: Calibration) -> Calibration:
        """What weights are fitted to: the table's text, and self-generated text."""
        if not self.chooses:
            return measured_on
        return replace(measured_on, own_text=self.own_text)

    def healed_on(self, measured_on: Calibration) -> Calibration:
        """The text to heal on: more of what the table was measured on."""
        return replace(measured_on, n_sequences=self.heal, own_text=0.0)


MASKED = WeightRecipe()
"""The dense weights, masked."""


# --- methods ----------------------------------------------------------------------


@dataclass(frozen=True)
class Method:
    """An estimator, and how the kept weights are made."""

    estimator: str
    """The estimator of its masks; with `compress`, before the best one is known."""
    of_table: str
    """Estimator where there is only a table, and no text to run the model on."""
    recipe: WeightRecipe
    """How its weights are made, where there is text to fit them to."""


METHODS: Mapping[str, Method] = MappingProxyType(
    {
        "best": Method("elimination", "fisher", WeightRecipe("compress", 0.25)),
        "paper": Method("heapr", "heapr", MASKED),
    }
)
DEFAULT = "best"
"""The method of the command line and of the panel's export."""
