"""Exception classes, and the checks of settings, for all other modules.

This module imports no other module of the package.
"""

import numbers
import operator
import sys
import traceback
from collections.abc import Hashable, Iterable
from typing import Any


class HeaprLabError(ValueError):
    """Base class of the errors that this package raises on purpose.

    A message says what was found, what was expected, and what to do about it. IPython
    shows only the message, on one line; `%tb` shows the whole traceback.
    """

    def _render_traceback_(self) -> list[str]:
        """What IPython shows: the message, or after `%tb` the whole traceback."""
        if sys.exc_info()[1] is not self:  # called by %tb, not by the failed cell
            return traceback.format_exception(self)
        message = " ".join(str(self).split())
        return [f"{type(self).__name__}: {message} (%tb shows the traceback)"]


class SpecError(HeaprLabError):
    """A setting has an invalid value."""


class CorpusError(HeaprLabError):
    """A corpus, or a part of it, is not available."""


class LayoutError(HeaprLabError):
    """A model's experts cannot be measured, masked or sliced exactly."""


class CoverageError(HeaprLabError):
    """The calibration data does not cover a part of the model that it has to cover."""


class CacheError(HeaprLabError):
    """A stored file is damaged, or is not the expected one."""


def whole_number(
    value: Any, *, name: str, least: int = 1, most: int | None = None
) -> int:
    """`value` as an int; NumPy's integers are accepted.

    Raises:
        SpecError: it is not a whole number from `least` to `most`, if there is a limit
            (a bool is not one).

    Example:
        >>> whole_number(0, name="batch_size")
        Traceback (most recent call last):
            ...
        heapr_lab.errors.SpecError: batch_size must be a whole number from 1, got 0
    """
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if (
        number is None
        or isinstance(value, bool)
        or not (least <= number <= (number if most is None else most))
    ):
        span = f"{least}" if most is None else f"{least} to {most}"
        raise SpecError(f"{name} must be a whole number from {span}, got {value!r}")
    return number


def one_of(value: Any, known: Iterable[Any], *, name: str) -> Any:
    """`value`, which is one of the known ones.

    Raises:
        SpecError: it is not.
    """
    if not isinstance(value, Hashable) or value not in known:
        words = ", ".join(map(repr, known))
        raise SpecError(f"{name} must be one of {words}, got {value!r}")
    return value


def check_names(
    given: Iterable[str], known: Iterable[str], *, of: str, noun: str
) -> None:
    """Check that all names that are given `of` something are known ones.

    Raises:
        SpecError: some are not.
    """
    if unknown := sorted(set(given) - set(known)):
        raise SpecError(
            f"{of} has no {noun} {', '.join(unknown)}; it has "
            f"{', '.join(known) or 'none'}"
        )


def number_to(most: float, value: Any, *, name: str) -> float:
    """`value` as a float, which is in [0, most].

    Raises:
        SpecError: it is not a number (a bool is not one), or is out of range.
    """
    real = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not real or not 0 <= value <= most:
        raise SpecError(f"{name} must be a number in [0, {most:g}], got {value!r}")
    return float(value)
