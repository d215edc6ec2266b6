"""The answer: four numbers, of the dense and of the pruned model, and what each is of.

They are parameters, bytes on disk, perplexity and accuracy. Each has its change, with
its standard error where it was measured, and says whether it was measured, or is of
something else than what is chosen.
"""

import html
import math
from typing import NamedTuple

import numpy as np
import pandas as pd

from heapr_lab.importance.estimators import PER_TOKEN
from heapr_lab.panel.looks import MEASURED, STALE, badge
from heapr_lab.panel.session import NotKnownError, PruningSession, setting_text
from heapr_lab.pruning.options import Selection
from heapr_lab.recipes.weights import MASKED

_ARROW = " → "
_MINUS = "−"
_STEPS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_NOT_YET = "not measured yet: Evaluate"
_BOX = "display:inline-block;vertical-align:top;margin:0 28px 0 0;line-height:1.35"
_LARGE = "font-size:1.35em;font-variant-numeric:tabular-nums"


class Answer(NamedTuple):
    """One of the four numbers."""

    name: str
    values: str
    """Of the dense and of the pruned model; empty if not known."""
    change: str
    """With its standard error, if it has one."""
    of: str
    """What it is of; its first word may be `MEASURED`."""
    stale: bool = False
    """Whether it is of other settings than those that are chosen."""

    @property
    def text(self) -> str:
        """One line for people."""
        return f"{self.name} {self.values} {self.change} ({self.of})"


def answers(session: PruningSession) -> list[Answer]:
    """The four numbers of the selection and the weights of a session."""
    return [*_sizes(session), _perplexity(session), _accuracy(session)]


def answers_html(found: list[Answer]) -> str:
    """The numbers in a row, which a screen reader reads aloud when they change."""
    boxes = "".join(map(_box, found))
    return f'<div role="status" aria-label="what pruning saves and costs">{boxes}</div>'


def compact(number: float, unit: str = "") -> str:
    """A number with three digits and its thousands as a letter.

    Example:
        >>> compact(134_515_008), compact(269_060_552, "B"), compact(980)
        ('135 M', '269 MB', '980')
    """
    for step, letter in _STEPS:
        if number >= 0.9995 * step:
            shown = number / step
            digits = max(0, 2 - int(math.log10(max(1.0, shown))))
            return f"{shown:.{digits}f} {letter}{unit}"
    return f"{number:.0f} {unit}".strip()


def _box(one: Answer) -> str:
    kind, _, rest = one.of.partition(" ")
    said = html.escape(one.of)
    if kind == MEASURED:
        said = f"{badge()} {html.escape(rest)}"
    lines = [
        f"<small>{html.escape(one.name)}</small>",
        f'<span style="{_LARGE}">{html.escape(one.values or "–")}</span>',
        html.escape(one.change),
        f"<small>{said}</small>",
    ]
    grey = f' class="{STALE}"' if one.stale else ""
    return f'<div{grey} style="{_BOX}">{"<br>".join(lines)}</div>'


def _sizes(session: PruningSession) -> list[Answer]:
    names = ("parameters", "bytes on disk")
    try:
        saved = session.savings()
    except NotKnownError:
        return [Answer(name, "", "", "not known yet: Evaluate") for name in names]
    if saved is None:
        return [Answer(name, "", "", "not in the table") for name in names]
    row = saved.iloc[0]
    parameters = row.parameters_before, row.parameters_after
    size = row.bytes_before, row.bytes_after
    return [
        _counted(names[0], *parameters, of="counted"),
        _counted(names[1], *size, of=session.bytes_are(), unit="B"),
    ]


def _counted(
    name: str, before: float, after: float, *, of: str, unit: str = ""
) -> Answer:
    values = f"{compact(before, unit)}{_ARROW}{compact(after, unit)}"
    return Answer(name, values, f"{_MINUS}{1 - after / before:.1%}", of)


# --- what is measured -----------------------------------------------------------------


def _perplexity(session: PruningSession) -> Answer:
    """Measured, else the nearest that was measured."""
    measured = session.measured()
    if len(measured):
        return _loss(measured.iloc[0], "measured")
    other = _nearest(session, "nll")
    if other is None:
        return _missing("perplexity", session)
    return _loss(other, f"measured {_settings(session, other)}", stale=True)


def _missing(name: str, session: PruningSession) -> Answer:
    return Answer(name, "", "", _NOT_YET if session.workbench else "needs a model")


def _loss(row: pd.Series, of: str, *, stale: bool = False) -> Answer:
    dense = row.nll - row.delta_nll
    change = f"{row.delta_nll:+.3f} {PER_TOKEN}{_error(row.stderr, '.3f')}"
    name = f"{of} on {row.dataset}"
    return Answer("perplexity", _span(dense, row.nll), change, name, stale)


def _span(dense: float, pruned: float) -> str:
    with np.errstate(over="ignore"):
        before, after = np.exp([dense, pruned])
    return f"{before:,.1f}{_ARROW}{after:,.1f}"


def _accuracy(session: PruningSession) -> Answer:
    """The mean over tasks, of what is chosen or else of the nearest measured."""
    last = _nearest(session, "accuracy")
    if last is None:
        return _missing("accuracy", session)
    shown, chosen = (last.selection, last.weights), _chosen(session)
    points = session.points[session.points["accuracy"].notna()]
    own = points[[pair == shown for pair in _pairs(points)]].set_index("dataset")
    dense = points[points["estimator"].eq("dense")].set_index("dataset").loc[own.index]
    before, after = (100 * one["accuracy"].mean() for one in (dense, own))
    error = 100 * np.hypot(dense["stderr"], own["stderr"]) / len(own)
    spread = float(np.sqrt((error.astype(float) ** 2).sum()))
    on = own.index[0] if len(own) == 1 else f"{len(own)} tasks"
    of = "" if shown == chosen else f" {_settings(session, last)}"
    return Answer(
        "accuracy [%]",
        f"{before:.1f}{_ARROW}{after:.1f}",
        f"{after - before:+.1f}{_error(spread, '.1f')}",
        f"measured{of} on {on}",
        shown != chosen,
    )


def _chosen(session: PruningSession) -> tuple[Selection, str]:
    return session.selection, session.recipe.text


def _pairs(points: pd.DataFrame) -> list[tuple[object, str]]:
    return list(zip(points["selection"], points["weights"], strict=True))


def _nearest(session: PruningSession, column: str) -> pd.Series | None:
    """The point of a pruned model with a number that is nearest to what is chosen.

    That is what is chosen itself, else the same masked, else the last one.
    """
    points = session.points[session.points["estimator"].ne("dense")]
    points = points[points[column].notna()]
    if points.empty:
        return None
    for pair in (_chosen(session), (session.selection, MASKED.text)):
        same = [one == pair for one in _pairs(points)]
        if any(same):
            return points[same].iloc[-1]
    return points.iloc[-1]


def _settings(session: PruningSession, row: pd.Series) -> str:
    """What a point that is not of the current settings is of, as short as possible."""
    if row.selection == session.selection:
        return f"{row.weights}, not yet {session.recipe.text},"
    same_rules = setting_text(row.selection, row.weights) == setting_text(
        session.selection, session.recipe.text
    )
    rules = "" if same_rules else f", {setting_text(row.selection, row.weights)}"
    return f"for {float(row.ratio):.4g}{rules},"


def _error(stderr: object, form: str) -> str:
    found = float(stderr) if stderr is not None else math.nan  # type: ignore[arg-type]
    return f" ± {found:{form}}" if math.isfinite(found) else ""
