"""Score, prune and study the atomic experts of Mixture-of-Experts models.

The public names, in the order in which data flows:

    model, tokenizer = load_model("lab")
    calibration = load_calibration("pydocs", tokenizer, n_sequences=128, seq_len=256)
    table = collect_statistics(model, calibration)
    keep = select(table, ratio=0.25)
    with masking(model, keep):
        evaluate_perplexity(model, ids)
    smaller = prune(model, keep)

Names are imported when they are first used, so that tables, masks and figures can be
worked with where torch is not installed.
"""

import importlib
from typing import Any

_HOMES = {
    "CalibrationSet": "calibration",
    "load_calibration": "calibration",
    "load_windows": "calibration",
    "load_corpus": "corpora",
    "Perplexity": "evaluation",
    "evaluate_divergence": "evaluation",
    "evaluate_perplexity": "evaluation",
    "run_tasks": "harness",
    "continuation_task": "harness",
    "collect_statistics": "importance",
    "KeepMask": "masks",
    "load_model": "models",
    "Setting": "pipeline",
    "Workbench": "pipeline",
    "open_workbench": "pipeline",
    "select": "selection",
    "HeaprLabError": "specs",
    "masking": "surgery",
    "prune": "surgery",
    "ImportanceTable": "table",
    "prune_and_evaluate": "widgets",
}

__all__ = sorted(_HOMES)  # noqa: PLE0605 (a list of names, though made, not written)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
