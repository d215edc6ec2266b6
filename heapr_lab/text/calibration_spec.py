"""The settings of the calibration data, which atoms are measured on.

Without torch. `calibration.load_calibration` draws the windows.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Self

from heapr_lab.errors import SpecError, check_names, number_to, whole_number

DEFAULT_CORPUS = "pydocs"
"""The corpus that is available on every machine."""
OWN_TEXT = "own text"
"""The name of self-generated text."""
_MOST_OWN_TEXT = 8
_TERM = re.compile(r"\s*(\d+\.?\d*|\.\d+)\s*\*\s*(\S+)\s*")
"""A term of a mixture: a weight and a corpus."""


@dataclass(frozen=True)
class Calibration:
    """Which windows of a corpus atoms are measured on; hashable, to and from JSON.

    Raises:
        SpecError: a number of windows or tokens, or the seed, is invalid. The corpus is
            checked when its windows are loaded.

    Example:
        >>> calibration = Calibration("ptb", n_sequences=8, seed=1)
        >>> Calibration.from_dict(calibration.to_dict()) == calibration
        True
    """

    corpus: str = DEFAULT_CORPUS
    """A corpus, a file, or a weighted mixture such as "0.7*pydocs + 0.3*ptb"."""
    n_sequences: int | None = None
    """Number of windows; None takes that of the workbench's profile."""
    seq_len: int | None = None
    """Tokens in each window; None takes the profile's number."""
    seed: int = 0
    """Seed of the draw of windows, a whole number from -2⁶³ to 2⁶³ - 1."""
    own_text: float = 0.0
    """Windows that the model writes itself, in addition, for each of the corpus."""

    def __post_init__(self) -> None:
        if not isinstance(self.corpus, str):
            raise SpecError(f"corpus must be a name or a path, got {self.corpus!r}")
        for name, least in (("n_sequences", 1), ("seq_len", 2)):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(
                    self, name, whole_number(value, name=name, least=least)
                )
        check_seed(self.seed)
        object.__setattr__(self, "seed", int(self.seed))
        name = "own_text (windows that the model writes for each of the corpus)"
        share = number_to(_MOST_OWN_TEXT, self.own_text, name=name)
        object.__setattr__(self, "own_text", share)

    def n_own(self, n_sequences: int) -> int:
        """How many windows the model writes itself, beside so many of the corpus.

        Example:
            >>> Calibration(own_text=0.25).n_own(128)
            32
        """
        return round(self.own_text * n_sequences)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, which `from_dict` reads."""
        return asdict(self)

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Self:
        """The calibration that `to_dict` described.

        Raises:
            SpecError: a field is unknown or has an invalid value.
        """
        names = [field.name for field in fields(cls)]
        check_names(plain, names, of="a calibration", noun="field")
        return cls(**plain)


def check_seed(seed: int) -> None:
    """Check that windows can be drawn with `seed`.

    Raises:
        SpecError: it is not a whole number of 64 bits.
    """
    whole_number(seed, name="seed", least=-(2**63), most=2**63 - 1)


def corpora_of(corpus: str) -> tuple[str, ...]:
    """The names of the corpora in a mixture; one name if it is no mixture.

    Raises:
        SpecError: the mixture cannot be parsed.

    Example:
        >>> corpora_of("0.7*pydocs + 0.3*ptb")
        ('pydocs', 'ptb')
    """
    return tuple(_weights_of(corpus))


def shares_of(corpus: str, n_sequences: int) -> dict[str, int]:
    """The number of windows from each corpus of a mixture (largest remainders).

    Raises:
        SpecError: the mixture cannot be parsed, or a corpus would have no window.
    """
    weights = _weights_of(corpus)
    total = sum(weights.values())
    exact = {name: n_sequences * weight / total for name, weight in weights.items()}
    counts = {name: int(share) for name, share in exact.items()}
    by_remainder = sorted(exact, key=lambda name: counts[name] - exact[name])
    for name in by_remainder[: n_sequences - sum(counts.values())]:
        counts[name] += 1
    absent = [name for name, count in counts.items() if not count]
    if absent:
        raise SpecError(
            f"{n_sequences} windows of {corpus[:80]!r} have none of "
            f"{', '.join(absent)}, expected at least 1: "
            f"{-(-total // min(weights.values())):.0f} windows would have"
        )
    return counts


def _weights_of(corpus: str) -> dict[str, float]:
    """The weight of each corpus of a mixture.

    Raises:
        SpecError: the mixture cannot be parsed.
    """
    terms = corpus.split("+")
    matches = [_TERM.fullmatch(term) for term in terms]
    if not any(matches):
        return {corpus.strip(): 1.0}
    if not all(matches):
        raise SpecError(
            f"cannot read the mixture {corpus!r}: expected weights and names, such as "
            "'0.7*pydocs + 0.3*ptb'"
        )
    weights = {match[2]: float(match[1]) for match in matches if match}
    total = sum(weights.values())
    if len(weights) != len(terms) or not 0 < min(weights.values()) <= total < math.inf:
        raise SpecError(
            f"mixture {corpus[:80]!r} repeats a corpus or has a weight of 0, or one "
            "that is too large"
        )
    return weights


def spread(n_available: int, n: int) -> list[int]:
    """The places of `n` windows, or all, of `n_available`, spread evenly."""
    n = min(n, n_available)
    return [(2 * part + 1) * n_available // (2 * n) for part in range(n)]
