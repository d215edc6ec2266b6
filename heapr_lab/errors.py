"""Exception classes and canonical JSON, shared by every other module.

The lowest layer: nothing here imports another module of the package.
"""

import operator
import sys
import traceback
from typing import Any


class HeaprLabError(ValueError):
    """Base of every error this package raises on purpose.

    A message says what was found, what was expected, and what to do about it. IPython
    shows it alone, in one line; `%tb` shows the whole traceback.
    """

    def _render_traceback_(self) -> list[str]:
        """What IPython shows: at first the message, when asked again everything."""
        if sys.exc_info()[1] is not self:  # not as it is raised, but by %tb
            return traceback.format_exception(self)
        message = " ".join(str(self).split())
        return [f"{type(self).__name__}: {message} (%tb shows the traceback)"]


class SpecError(HeaprLabError):
    """A setting has a value that cannot be used."""


class CorpusError(HeaprLabError):
    """A corpus, or a part of it, cannot be had."""


class LayoutError(HeaprLabError):
    """A model's experts cannot be measured, masked or sliced exactly."""


class CoverageError(HeaprLabError):
    """The calibration data does not reach what it has to reach."""


class CacheError(HeaprLabError):
    """A stored file is not what it should be."""


def whole_number(value: Any, *, name: str, least: int = 1) -> int:
    """`value` as an int, also where NumPy made it.

    Raises:
        SpecError: it is not a whole number from `least` (a bool is none).

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
    if number is None or isinstance(value, bool) or number < least:
        raise SpecError(f"{name} must be a whole number from {least}, got {value!r}")
    return number
