"""One line that says what the panel is of: model, table, calibration and device."""

import html
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from heapr_lab.panel.session import PruningSession
from heapr_lab.pruning.savings import context_length

_UNKNOWN = "not recorded"


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
