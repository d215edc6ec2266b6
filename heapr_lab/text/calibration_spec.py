"""What atoms are measured on: the one `Calibration`, checked, hashable, JSON both ways.

Without torch. `calibration.load_calibration` makes the windows of it.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Self

import numpy as np

from heapr_lab.errors import SpecError, whole_number
from heapr_lab.repr_html import card_html

DEFAULT_CORPUS = "pydocs"
"""The corpus that every machine has."""


@dataclass(frozen=True)
class Calibration:
    """The windows of a corpus that atoms are measured on.

    Raises:
        SpecError: a number of windows or tokens, or the seed, cannot be used; whether
            there is such a corpus is told when its windows are loaded.

    Example:
        >>> calibration = Calibration("ptb", n_sequences=8, seed=1)
        >>> Calibration.from_dict(calibration.to_dict()) == calibration
        True
    """

    corpus: str = DEFAULT_CORPUS
    """A corpus, a file, or a weighted mixture such as "0.7*pydocs + 0.3*ptb"."""
    n_sequences: int | None = None
    """Windows; None takes as many as the profile of the workbench has."""
    seq_len: int | None = None
    """Tokens of a window; None takes the profile's number."""
    seed: int = 0
    """Of the draw of windows, a whole number from -2⁶³ to 2⁶³ - 1."""

    def __post_init__(self) -> None:
        for name, least in (("n_sequences", 1), ("seq_len", 2)):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(
                    self, name, whole_number(value, name=name, least=least)
                )
        check_seed(self.seed)

    def _repr_html_(self) -> str:
        facts = {name.replace("_", " "): str(v) for name, v in self.to_dict().items()}
        return card_html("Calibration", facts)

    def to_dict(self) -> dict[str, Any]:
        """Plain data; `from_dict` reads it."""
        return asdict(self)

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Self:
        """The calibration that `to_dict` gave.

        Raises:
            SpecError: a field is unknown or has a value that cannot be used.
        """
        names = [field.name for field in fields(cls)]
        unknown = sorted(plain.keys() - set(names))
        if unknown:
            raise SpecError(
                f"a calibration has the fields {', '.join(names)}, got "
                f"{', '.join(unknown)}"
            )
        return cls(**plain)


def check_seed(seed: int) -> None:
    """Make sure that windows can be drawn with `seed`.

    Raises:
        SpecError: it is no whole number of 64 bits.
    """
    whole = isinstance(seed, int | np.integer) and not isinstance(seed, bool)
    if not whole or not -(2**63) <= seed < 2**63:
        raise SpecError(
            f"seed is {seed!r}, expected a whole number from -2⁶³ to 2⁶³ - 1"
        )
