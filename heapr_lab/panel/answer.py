"""The answer: four numbers for the dense and the pruned model, and what each is of.

They are parameters, bytes on disk, perplexity and accuracy. Each has its change, with
its standard error where it was measured, and says whether it was measured, or is of
something else than what is chosen. Two tables have all other numbers.
"""

import html
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import pandas as pd

from heapr_lab.evaluation.paired import paired_difference
from heapr_lab.importance.estimators import PER_TOKEN
from heapr_lab.panel.looks import MEASURED, STALE, badge, status
from heapr_lab.panel.session import NotKnownError, PruningSession, setting_text
from heapr_lab.pruning.masks import KeepMask
from heapr_lab.pruning.options import BUDGETS, Selection
from heapr_lab.pruning.savings import at_context
from heapr_lab.recipes.weights import MASKED
from heapr_lab.text.calibration_spec import Calibration, corpora_of

_STEPS = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_ERROR = "± one standard error"
_NOT_YET = "not measured yet: Evaluate"
_BOX = "display:inline-block;vertical-align:top;margin:0 28px 0 0;line-height:1.35"
_UNKNOWN = "not recorded"
_TOLERANCE = 0.01
"""Share by which more or less may be removed than was asked for, unmentioned."""

_DIGITS = 9
"""Digits to which shares are compared, so that 0.61 is a hundredth above 0.6."""
Row: TypeAlias = tuple[str, str, str, str]
"""What is counted, for the dense model and the pruned one, and the share saved."""
_HEADS: Row = ("", "dense", "pruned", "saved")
_LARGE = "font-size:1.35em;font-variant-numeric:tabular-nums"


class Answer(NamedTuple):
    """One of the four numbers."""

    name: str
    values: str
    """The values of the dense and of the pruned model; empty if not known."""
    change: str
    """The change, with its standard error if it has one."""
    of: str
    """What the number is of; its first word may be `MEASURED`."""
    stale: bool = False
    """Whether the number is of other settings than those that are chosen."""


def answers(session: PruningSession) -> list[Answer]:
    """The four numbers of the selection and the weights of a session."""
    return [*_sizes(session), _perplexity(session), _accuracy(session)]


def answers_html(answers: list[Answer]) -> str:
    """The numbers in a row, which a screen reader reads aloud when they change."""
    boxes = "".join(map(_box, answers))
    return f'<div role="status" aria-label="what pruning saves and costs">{boxes}</div>'


def compact(number: float, unit: str = "") -> str:
    """A number with three digits and its thousands as a letter.

    Example:
        >>> compact(134_515_008), compact(269_060_552, "B"), compact(980)
        ('135 M', '269 MB', '980')
    """
    for step, letter in _STEPS:
        if number >= 0.9995 * step:
            return f"{number / step:#.3g}".rstrip(".") + f" {letter}{unit}"
    return f"{number:.0f} {unit}".strip()


def _box(answer: Answer) -> str:
    name = f"{answer.name} ({_ERROR})" if "±" in answer.change else answer.name
    # Lines are broken after the arrow, not before a unit.
    values = html.escape(answer.values or "–").replace(" ", "&nbsp;")
    lines = [
        f"<small>{html.escape(name)}</small>",
        f'<span style="{_LARGE}">{values.replace("→&nbsp;", "→ ")}</span>',
        html.escape(answer.change.replace("-", "−")),
        f"<small>{_with_badge(answer.of)}</small>",
    ]
    grey = f' class="{STALE}"' if answer.stale else ""
    return f'<div{grey} style="{_BOX}">{"<br>".join(lines)}</div>'


def _with_badge(text: str) -> str:
    """The text, whose first word is a badge if it says that the number is measured."""
    first, _, rest = text.partition(" ")
    return f"{badge()} {html.escape(rest)}" if first == MEASURED else html.escape(text)


def _sizes(session: PruningSession) -> list[Answer]:
    names = ("parameters", "bytes on disk")
    try:
        saved = session.savings()
    except NotKnownError:
        return [Answer(name, "", "", "not known yet: Evaluate") for name in names]
    if saved is None:
        return [Answer(name, "", "", "not in the table") for name in names]
    kinds = ("parameters", "", "counted"), ("bytes", "B", session.bytes_are())
    answers = []
    for name, (what, unit, of) in zip(names, kinds, strict=True):
        before, after = _change(saved, what)
        span = _span(compact(before, unit), compact(after, unit))
        answers.append(Answer(name, span, f"−{_saved(before, after)}", of))
    return answers


def _change(saved: Mapping[str, Any], what: str) -> tuple[float, float]:
    return saved[f"{what}_before"], saved[f"{what}_after"]


def _span(before: str, after: str) -> str:
    return f"{before} → {after}"


def _saved(before: float, after: float) -> str:
    return f"{1 - after / before:.1%}"


# --- what is measured -----------------------------------------------------------------


def _perplexity(session: PruningSession) -> Answer:
    """The measured perplexity, else the nearest that was measured."""
    measured = session.measured()
    row = measured.iloc[0] if len(measured) else _nearest(session, "nll")
    if row is None:
        return _missing("perplexity", session)
    setting = "" if len(measured) else f" {_settings(session, row)}"
    span = _span(*_perplexities(row))
    change = f"{row.delta_nll:+.3f} {PER_TOKEN}{_error(row.stderr, '.3f')}"
    of = f"{MEASURED}{setting} on {_text_of(session, row)}"
    return Answer("perplexity", span, change, of, measured.empty)


def _missing(name: str, session: PruningSession) -> Answer:
    return Answer(name, "", "", _NOT_YET if session.workbench else "needs a model")


def _text_of(session: PruningSession, row: pd.Series) -> str:
    """The text that a loss is of, and how much it is."""
    amount = f"{row.n_tokens:,.0f}"
    if session.workbench is not None:
        seq_len = session.workbench.profile.seq_len
        amount = f"{row.n_tokens / (seq_len - 1):,.0f} windows × {seq_len:,}"
    return f"{amount} tokens of {row.dataset}"


def _perplexities(row: pd.Series) -> list[str]:
    """The perplexities of the dense and of the pruned model."""
    with np.errstate(over="ignore"):
        return [f"{np.exp(nll):,.1f}" for nll in (row.nll - row.delta_nll, row.nll)]


def _accuracy(session: PruningSession) -> Answer:
    """The mean over tasks, for what is chosen or else for the nearest measured."""
    last = _nearest(session, "accuracy")
    if last is None:
        return _missing("accuracy", session)
    shown, chosen = (last.selection, last.weights), _chosen(session)
    points = session.points[session.points["accuracy"].notna()]
    rows = session.points_for(*shown).dropna(subset="accuracy").set_index("dataset")
    dense = points[points["estimator"].eq("dense")].set_index("dataset").loc[rows.index]
    before, after = (100 * frame["accuracy"].mean() for frame in (dense, rows))
    errors = [
        _difference_error(session, dense.loc[task], rows.loc[task])
        for task in rows.index
    ]
    spread = 100 * float(np.linalg.norm(errors)) / len(rows)
    on = rows.index[0] if len(rows) == 1 else f"{len(rows)} tasks"
    setting = "" if shown == chosen else f" {_settings(session, last)}"
    return Answer(
        "accuracy [%]",
        _span(f"{before:.1f}", f"{after:.1f}"),
        f"{after - before:+.1f}{_error(spread, '.1f')}",
        f"{MEASURED}{setting} on {on}",
        shown != chosen,
    )


def _difference_error(
    session: PruningSession, dense: pd.Series, pruned: pd.Series
) -> float:
    """The error of a difference of accuracies, over items where both are known."""
    text = session.texts.get(str(pruned.name), "")
    right, before = (
        session.windows.get((row.selection, row.weights, text), ())
        for row in (pruned, dense)
    )
    if len(right) > 1 and len(right) == len(before):
        return paired_difference(right, before)[1]
    return float(np.hypot(dense["stderr"], pruned["stderr"]))


def _chosen(session: PruningSession) -> tuple[Selection | None, str]:
    if session.removes_nothing(session.selection):
        return None, "dense"
    return session.selection, session.recipe.text


def _nearest(session: PruningSession, column: str) -> pd.Series | None:
    """The point of a pruned model with a number that is nearest to what is chosen.

    That is what is chosen itself, else the same masked, else the last one.
    """
    pruned = session.points[session.points["estimator"].ne("dense")]
    nearest = _chosen(session), (session.selection, MASKED.text)
    for points in (*(session.points_for(*pair) for pair in nearest), pruned):
        known = points[points[column].notna()]
        if len(known):
            return known.iloc[-1]
    return None


def _settings(session: PruningSession, row: pd.Series) -> str:
    """The settings of a point, if not the current ones, as short as possible."""
    if row.selection == session.selection:
        return f"{row.weights}, not yet {session.recipe.text},"
    same_rules = setting_text(row.selection, row.weights) == setting_text(
        session.selection, session.recipe.text
    )
    rules = "" if same_rules else f", {setting_text(row.selection, row.weights)}"
    return f"for {float(row.ratio):.4g}{rules},"


def _error(stderr: float | None, form: str) -> str:
    return "" if pd.isna(stderr) else f" ± {stderr:{form}}"


# --- all numbers ----------------------------------------------------------------------


def numbers_of(session: PruningSession) -> list[Row]:
    """Sizes, savings, and measured losses; "" where there is no number."""
    return [*_counts(session), *_losses(session)]


def numbers_html(rows: Sequence[Row]) -> str:
    """The numbers as an HTML table."""
    head = "".join(f'<th style="text-align:right">{name}</th>' for name in _HEADS)
    body = "".join(_table_row(*row) for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def numbers_text(rows: Sequence[Row]) -> str:
    """The numbers as plain text, a line for each.

    Example:
        >>> numbers_text([("atomic experts", "16", "8", "50.0%")])
        'atomic experts: dense 16, pruned 8, saved 50.0%'
    """
    named = (zip(_HEADS, row, strict=True) for row in rows)
    return "\n".join(
        f"{name}: " + ", ".join(f"{head} {cell}" for head, cell in cells if cell)
        for (_, name), *cells in named
    )


def _counts(session: PruningSession) -> Iterator[Row]:
    try:
        keep = session.keep
    except NotKnownError:
        return
    yield _counted("atomic experts", keep.n_atoms, keep.n_kept)
    saved = session.savings()
    if saved is None:
        return
    yield _counted("parameters", *_change(saved, "parameters"))
    yield _counted(f"bytes ({session.bytes_are()})", *_change(saved, "bytes"))
    flops = f"FLOPs per token, {at_context(saved['seq_len'])}"
    yield _counted(flops, *_change(saved, "flops"))
    routed = f"{saved['routed_flops_reduction']:.1%}"
    yield "FLOPs of the routed experts", "", "", routed


def _losses(session: PruningSession) -> Iterator[Row]:
    for _, point in session.measured().iterrows():
        of = f"on {point.dataset}"
        dense, pruned = _perplexities(point)
        yield f"{MEASURED} perplexity {of}", dense, pruned, ""
        yield f"{MEASURED} Δloss {of} [{PER_TOKEN}]", "", f"{point.delta_nll:.3g}", ""


def _counted(name: str, before: float, after: float) -> Row:
    return name, f"{before:,.0f}", f"{after:,.0f}", _saved(before, after)


def _table_row(name: str, *cells: str) -> str:
    right = "text-align:right;padding:0 8px;font-variant-numeric:tabular-nums"
    values = "".join(f'<td style="{right}">{html.escape(cell)}</td>' for cell in cells)
    return f'<tr><th style="text-align:left">{_with_badge(name)}</th>{values}</tr>'


def layers_frame(session: PruningSession) -> pd.DataFrame:
    """The numbers of the picture, a row for each layer: pruned share, widths, load.

    Columns: layer, removed (share of its atoms), width of its narrowest, mean and
    widest expert, number of experts without atoms, and the load of its busiest
    expert relative to an even share.
    """
    keep = session.keep
    widths = keep.widths()
    frame = pd.DataFrame(
        {
            "layer": list(keep.layers),
            "removed": keep.layer_ratios().map("{:.1%}".format).to_numpy(),
            "narrowest": widths.min(axis=1).to_numpy(),
            "mean width": widths.mean(axis=1).map("{:.1f}".format).to_numpy(),
            "widest": widths.max(axis=1).to_numpy(),
            "experts gone": widths.eq(0).sum(axis=1).to_numpy(),
        }
    )
    if "tokens" in session.table.frame:
        tokens = session.table.expert_tokens().groupby("layer")["tokens"]
        busiest = (tokens.max() / tokens.mean()).map("{:.2f}".format)
        frame["busiest [× even share]"] = busiest.to_numpy()
    return frame


# --- what the panel is of -------------------------------------------------------------


def header_html(session: PruningSession) -> str:
    """The line as HTML, of the session as it is now."""
    facts = "".join(
        f'<span style="display:inline-block;padding-right:1.5em"><b>{name}</b> '
        f"{html.escape(text)}</span>"
        for name, text in header_facts(session).items()
    )
    return f'<div role="note" aria-label="what this panel is of">{facts}</div>'


def header_facts(session: PruningSession) -> dict[str, str]:
    """The parts of the line, by their names; without a model the last two are missing.

    What a table was measured on is read from the table, not from what was asked for.
    """
    origin = session.table.metadata.get("provenance") or {}
    facts = {
        "model": _model(session, origin),
        "importance": _sums(session),
        "calibration": _calibration(session.table.calibration),
    }
    return facts | _computed(session)


def _model(session: PruningSession, origin: Mapping[str, Any]) -> str:
    """The model's name and size; for a table alone, the name it was measured by."""
    table, bench = session.table, session.workbench
    recorded = str(origin.get("model") or _UNKNOWN)
    parts = [_short(recorded if bench is None else bench.name)]
    if "architecture" in table.metadata:
        parts.append(f"{table.architecture.n_parameters:,} parameters")
    return ", ".join(parts + ["table only"] * (bench is None))


def _short(name: str) -> str:
    """The name of a folder instead of its path; hub ids stay whole."""
    path = Path(name)
    return path.name if path.is_absolute() or path.is_dir() else name


def _sums(session: PruningSession) -> str:
    """How many estimators the table has the sums for, and the tokens they are over."""
    n_tokens = session.table.metadata.get("N")
    tokens = f"{n_tokens:,} predicted tokens" if n_tokens else f"tokens {_UNKNOWN}"
    return f"sums for {len(session.table.estimators)} estimators over {tokens}"


def _calibration(drawn: Mapping[str, Any]) -> str:
    """Corpus, seed and windows, with those that the model wrote."""
    if not {"corpus", "n_sequences", "seq_len"} <= drawn.keys():
        return _UNKNOWN
    windows = f"{drawn['n_sequences']:,} windows × {drawn['seq_len']:,} tokens"
    parts = [drawn["corpus"], f"seed {drawn.get('seed', _UNKNOWN)}", windows]
    added = drawn.get("joined", [])
    parts += [f"{part['n_sequences']:,} of them {part['corpus']}" for part in added]
    return ", ".join(parts)


def _computed(session: PruningSession) -> dict[str, str]:
    """What the model computes in, and where; nothing for a table alone."""
    if session.workbench is None:
        return {}
    if not session.is_ready:
        return {"device": "the model is not loaded yet"}
    from heapr_lab.models.backend import backend_of
    from heapr_lab.models.sources import dtype_name

    model: Any = session.workbench.model
    devices = {str(weight.device) for weight in model.parameters()} - {"meta"}
    places = filter(None, [*sorted(devices), backend_of(model).place])
    return {"dtype": dtype_name(model.dtype), "device": ", ".join(places)}


# --- what may be overlooked -----------------------------------------------------------


def cautions(session: PruningSession) -> list[str]:
    """The cautions about the selection, which must be feasible."""
    try:
        keep, chosen = session.keep, session.selection
        removed = removed_share(chosen, keep, session.savings())
    except NotKnownError:
        return []
    texts = emptied_layers(keep), rounded(chosen, removed)
    return [text for text in texts if text]


def cautions_html(texts: Iterable[str]) -> str:
    """The texts as notes that a screen reader reads aloud when they change."""
    return "".join(status(f"⚠ {text}") for text in texts)


def emptied_layers(keep: KeepMask) -> str:
    """The layers that lose all their atoms."""
    gone = [str(layer) for layer, kept in keep.arrays.items() if not kept.any()]
    if not gone:
        return ""
    which = f"Layers {', '.join(gone)} lose" if gone[1:] else f"Layer {gone[0]} loses"
    return f"{which} all routed atoms: nothing is left there for a token to go to."


def removed_share(
    selection: Selection, keep: KeepMask, savings: Mapping[str, Any] | None
) -> float | None:
    """The share that `keep` removes of what the ratio counts.

    Args:
        selection: its budget says what is counted.
        keep: its mask.
        savings: the mask's, as `savings_of` gives them; None if they are unknown, and
            then only atoms can be counted.
    """
    if selection.of == "atoms":
        return keep.achieved_ratio
    return None if savings is None else float(savings["parameter_reduction"])


def rounded(selection: Selection, removed: float | None) -> str:
    """What was asked for and what is removed, if they differ by more than a point."""
    asked = float(selection.ratio)
    if removed is None or round(abs(removed - asked), _DIGITS) <= _TOLERANCE:
        return ""
    return (
        f"Asked for {asked:.1%} of the {BUDGETS[selection.of]}, {removed:.1%} are "
        "removed."
    )


def judged_on_own(corpora: Iterable[str], calibration: Calibration) -> str:
    """Whether a model was only judged on the kind of text that it was calibrated on.

    Args:
        corpora: the corpora that its loss was measured on; tasks are not among them.
        calibration: what its atoms were measured on.
    """
    judged = set(corpora)
    if not judged or not judged <= {*corpora_of(calibration.corpus)}:
        return ""
    return (
        f"Perplexity was only measured on what was calibrated on, {calibration.corpus}"
        ": other text usually loses more. Evaluate another corpus as well."
    )
