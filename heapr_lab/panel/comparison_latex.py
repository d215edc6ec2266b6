"""The rows of the Compare tab for a paper: few columns, the rest in the caption."""

import pandas as pd

from heapr_lab.figures.files import latex_text, table_latex
from heapr_lab.importance.estimators import PER_TOKEN
from heapr_lab.pruning.savings import at_context

_SHARES = {
    "achieved_ratio": "removed [%] ↑",
    "parameter_reduction": "parameters saved [%] ↑",
    "bytes_reduction": "bytes saved [%] ↑",
    "flops_reduction": "FLOPs saved [%] ↑",
    "routed_flops_reduction": "routed FLOPs saved [%] ↑",
    "latency_reduction": "decoding time saved [%] ↑",
}
"""Columns that are shares, with the names that they get."""
_LEFT_OUT = ["ratio", "seq_len", "method"]
"""Asked for rather than reached; said by the caption; said by the label."""


def comparison_latex(frame: pd.DataFrame) -> str:
    """A LaTeX table (booktabs) of `CompareTab.frame`, with its caption.

    Shares are in per cent. Settings that are the same in all rows are in the caption,
    or nowhere if they are empty, with the context at which FLOPs are counted.
    """
    same = _same_settings(frame)
    left_out = [name for name in [*_LEFT_OUT, *same] if name in frame]
    shown = frame.drop(columns=left_out)
    shown = shown.rename(columns=str).apply(_in_units)
    shown.columns = [_name(str(name)) for name in shown.columns]
    lines = [
        r"\begin{table}",
        r"\centering",
        rf"\caption{{{latex_text(_caption(frame, same))}}}",
        table_latex(shown).rstrip("\n"),
        r"\end{table}",
    ]
    return "\n".join(lines) + "\n"


def _same_settings(frame: pd.DataFrame) -> dict[str, str]:
    """The settings with one value in all rows, as text; empty where there is none."""
    found = {}
    for name in frame.columns:
        values = frame[name]
        if _is_setting(str(name)) and values.nunique(dropna=False) == 1:
            value = values.iloc[0]
            found[str(name)] = "" if pd.isna(value) or not value else f"{value}"
    return found


def _is_setting(name: str) -> bool:
    measured = name.startswith(("Δloss ", "accuracy "))
    return not measured and name not in {"label", *_SHARES, *_LEFT_OUT}


def _caption(frame: pd.DataFrame, same: dict[str, str]) -> str:
    parts = [f"{name.replace('_', ' ')} {text}" for name, text in same.items() if text]
    if "seq_len" in frame and frame["seq_len"].notna().any():
        parts.append(f"FLOPs {at_context(int(frame['seq_len'].max()))}")
    return f"Pruned models compared: {', '.join(parts)}." if parts else "Pruned models."


def _in_units(column: pd.Series) -> pd.Series:
    name = str(column.name)
    return 100 * column if name in _SHARES or name.startswith("accuracy ") else column


def _name(name: str) -> str:
    if name.startswith("Δloss "):
        return f"{name} [{PER_TOKEN}] ↓"
    if name.startswith("accuracy "):
        return f"{name} [%] ↑"
    return _SHARES.get(name, name.replace("_", " "))
