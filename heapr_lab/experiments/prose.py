"""Sentences that are made from numbers, as notebooks show them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import pandas as pd


class Prose(str):
    """Sentences that a notebook shows as text."""

    __slots__ = ()

    def _repr_markdown_(self) -> str:
        return str(self)

    def __repr__(self) -> str:
        return str(self)


@dataclass(frozen=True, repr=False)
class Answer:
    """The answer to the question of a notebook."""

    short: Prose
    """What was found against the paper, if anything, and one or two sentences more."""
    more: tuple[str, ...] = ()

    def _repr_markdown_(self) -> str:
        return " ".join([self.short, *self.more])

    def __repr__(self) -> str:
        return self._repr_markdown_()


def answer(short: str, more: Sequence[str] = (), against: Sequence[str] = ()) -> Answer:
    """An `Answer`, of the sentences that are not empty."""
    first = " ".join(filter(None, [*against, short]))
    return Answer(Prose(first), tuple(filter(None, more)))


def value_range(values: "pd.Series[float]", form: str = ".3f") -> str:
    """The least and the largest value, or the only one.

    Example:
        >>> value_range(pd.Series([2.0, 1.0]), ".1f")
        '1.0 to 2.0'
    """
    low, high = values.min(), values.max()
    return f"{low:{form}}" if low == high else f"{low:{form}} to {high:{form}}"


def listed(names: Iterable[object]) -> str:
    """Names as a list in a sentence.

    Example:
        >>> listed(["a", "b", "c"])
        'a, b and c'
    """
    *first, last = [str(name) for name in names]
    return f"{', '.join(first)} and {last}" if first else last
