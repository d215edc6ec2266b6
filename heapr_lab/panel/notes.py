"""What the panel says in words: what it is of, and what a person may overlook.

Each caution is a text, empty if there is nothing to say. They read counts only, so that
they keep up with a slider.
"""

import html
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from heapr_lab.panel.looks import status
from heapr_lab.panel.session import NotKnownError, PruningSession
from heapr_lab.pruning.masks import KeepMask
from heapr_lab.pruning.options import BUDGETS, Selection
from heapr_lab.pruning.savings import context_length
from heapr_lab.text.calibration_spec import Calibration, corpora_of

_UNKNOWN = "not recorded"
_TOLERANCE = 0.01
"""Share by which more or less may be removed than was asked for, unmentioned."""

_DIGITS = 9
"""Digits to which shares are compared, so that 0.61 is a hundredth above 0.6."""


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
    runs = [run.get("calibration") or {} for run in origin.get("merged", [origin])]
    facts = {
        "model": _model(session, origin),
        "importance": _sums(session),
        "calibration": "; and ".join(map(_calibration, runs)),
        "context": _context(session, runs),
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


def _context(session: PruningSession, runs: list[Mapping[str, Any]]) -> str:
    """The context length at which operations are counted."""
    text = f"{context_length(session.table):,} tokens"
    known = len(runs) == 1 and "seq_len" in runs[0]
    return text if known else f"{_UNKNOWN}: {text} assumed"


def _computed(session: PruningSession) -> dict[str, str]:
    """What the model computes in, and where; nothing for a table alone."""
    if session.workbench is None:
        return {}
    if not session.is_ready:
        return {"device": "the model is not loaded yet"}
    from heapr_lab.models.sources import dtype_name

    model: Any = session.workbench.model
    weights = list(model.parameters())
    places = sorted({str(weight.device) for weight in weights} - {"meta"})
    streamed = ["streamed from disk"] * any(weight.is_meta for weight in weights)
    dtype = dtype_name(model.dtype)
    return {"dtype": dtype, "device": ", ".join(places + streamed)}


# --- what may be overlooked -----------------------------------------------------------


def cautions(session: PruningSession) -> list[str]:
    """The cautions about the selection, which must be feasible."""
    try:
        keep, chosen = session.keep, session.selection
        removed = removed_share(chosen, keep, session.savings())
    except NotKnownError:
        return []
    texts = emptied_layers(keep), emptied_experts(keep), rounded(chosen, removed)
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


def emptied_experts(keep: KeepMask) -> str:
    """How many experts lose all their atoms."""
    kept = [np.count_nonzero(array, axis=1) for array in keep.arrays.values()]
    widths = np.concatenate(kept)
    gone = int(np.count_nonzero(widths == 0))
    if not gone:
        return ""
    verb = "loses" if gone == 1 else "lose"
    return f"{gone:,} of {len(widths):,} experts {verb} all atoms."


def removed_share(
    selection: Selection, keep: KeepMask, savings: pd.DataFrame | None
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
    if savings is None:
        return None
    return float(savings.iloc[0]["parameter_reduction"])


def rounded(selection: Selection, removed: float | None) -> str:
    """What was asked for and what is removed, if they differ by more than a point."""
    asked = float(selection.ratio)
    if removed is None or round(abs(removed - asked), _DIGITS) <= _TOLERANCE:
        return ""
    why = "; ".join(_why_rounded(selection))
    return (
        f"Asked for {asked:.1%} of the {BUDGETS[selection.of]}, {removed:.1%} are "
        f"removed{f': {why}' if why else ''}."
    )


def _why_rounded(selection: Selection) -> list[str]:
    """The settings that keep a ratio from being met exactly."""
    why = []
    if selection.structure != "ragged":
        widths = f"widths of the structure {selection.structure} are rounded down"
        many = f" to a multiple of {selection.step}" if selection.step > 1 else ""
        why.append(widths + many)
    if selection.granularity == "expert":
        why.append("experts are pruned whole")
    if selection.exclude_layers and not selection.in_one_group:
        why.append("with the scope layer no other layer makes up for those not pruned")
    return why


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
