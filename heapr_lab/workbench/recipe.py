"""What it takes to prune once more: the source, the selection, the files.

Without torch. `as_python` and `as_command` write a recipe as text.
"""

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from heapr_lab.importance.estimators import find_estimator
from heapr_lab.pruning.options import Selection
from heapr_lab.text.calibration_spec import Calibration
from heapr_lab.workbench.opening import Opening


@dataclass(frozen=True)
class Written:
    """A checkpoint, and how its weights are made."""

    folder: str
    weights: str
    """A name in `presets.WEIGHTS`."""
    output_bias: bool = False
    distill: int = 0
    """Steps of distillation; 0 for none."""
    corpora: tuple[str, ...] | None = None
    """Whose perplexities the card has; None for those of the calibration."""
    dtype: str | None = None
    """The dtype of its files, if the model in memory has another one."""


@dataclass(frozen=True)
class Recipe:
    """From a model, or a table alone, to a mask or a checkpoint."""

    source: Opening | Path
    """How the model is opened, or the file of a table."""
    selection: Selection
    calibration: Calibration = field(default_factory=Calibration)
    """What the model is measured on, and weights are fitted to."""
    written: Written | None = None
    """The checkpoint; None stops at the mask, as a table alone has to."""

    @property
    def asked_windows(self) -> int | None:
        """Tokens of a window, if not the profile's."""
        own = self.source.seq_len if isinstance(self.source, Opening) else None
        return self.calibration.seq_len or own


@dataclass(frozen=True)
class Code:
    """Text to be copied, and what it does differently."""

    text: str
    notes: tuple[str, ...] = ()


def given_fields(value: Selection | Calibration) -> dict[str, Any]:
    """The fields that are not the defaults, of a selection always its ratio.

    Of the estimator's options only those that are not its defaults.
    """
    given = {
        own.name: getattr(value, own.name)
        for own in fields(value)
        if own.name == "ratio" or getattr(value, own.name) != own.default
    }
    if isinstance(value, Selection) and value.estimator_options:
        known = find_estimator(value.estimator).options
        options = {k: v for k, v in value.estimator_options if v != known[k].default}
        given["estimator_options"] = options
    return {name: part for name, part in given.items() if part != {}}
