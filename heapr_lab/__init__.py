"""Score, prune and study the atomic experts of Mixture-of-Experts models.

The public names, in the order in which data flows:

    model, tokenizer = load_model("lab")
    calibration = load_calibration("pydocs", tokenizer, n_sequences=128, seq_len=256)
    table = collect_statistics(model, calibration)
    keep = select(table, ratio=0.25)
    with masking(model, keep):
        evaluate_perplexity(model, ids)
    smaller = prune(model, keep)
    save_pruned(smaller, "smaller")

Names are imported when they are first used, so that tables, masks and figures can be
worked with where torch is not installed.
"""

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from typing import Any

_HOMES = {
    "mask_for_budgets": "budgets",
    "pareto_front": "budgets",
    "ratio_for_latency": "budgets",
    "ratio_for_loss": "budgets",
    "CalibrationSet": "calibration",
    "save_pruned": "checkpoints",
    "load_calibration": "calibration",
    "load_windows": "calibration",
    "compensate": "compensation",
    "load_corpus": "corpora",
    "damage_map": "damage",
    "eliminate": "elimination",
    "fit_damage": "damage",
    "Display": "figures",
    "Perplexity": "evaluation",
    "evaluate_divergence": "evaluation",
    "evaluate_perplexity": "evaluation",
    "write_gguf": "gguf_file",
    "run_tasks": "harness",
    "continuation_task": "harness",
    "collect_statistics": "importance",
    "prune_in_rounds": "iterated",
    "learn_mask": "learned",
    "KeepMask": "masks",
    "load_model": "models",
    "Setting": "pipeline",
    "Workbench": "pipeline",
    "open_workbench": "pipeline",
    "read_provenance": "provenance",
    "recover": "recovery",
    "select": "selection",
    "HeaprLabError": "specs",
    "masking": "surgery",
    "prune": "surgery",
    "ImportanceTable": "table",
    "explore": "explorer",
}

__all__ = sorted(_HOMES)  # noqa: PLE0605 (a list of names, though made, not written)


_REGISTRY = "transformers.quantizers.auto"


class _Registration(importlib.abc.MetaPathFinder):
    """Registers the checkpoint format as soon as transformers' registry is imported.

    So that `from_pretrained` loads pruned checkpoints once heapr_lab is imported, in
    whatever order, and heapr_lab does not import torch by itself.
    """

    def find_spec(
        self,
        fullname: str,
        path: Any,  # noqa: ARG002 (the interface of finders)
        target: Any = None,  # noqa: ARG002
    ) -> importlib.machinery.ModuleSpec | None:
        """The registry's own spec, with a loader that registers the format as well."""
        if fullname != _REGISTRY:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_register(module: Any) -> None:
            execute(module)
            importlib.import_module(f"{__name__}.ragged")

        spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec


if _REGISTRY in sys.modules:
    importlib.import_module(f"{__name__}.ragged")
else:
    sys.meta_path.insert(0, _Registration())


def load_ipython_extension(ipython: Any) -> None:
    """Answer `%load_ext heapr_lab`; see `heapr_lab.extension`."""
    importlib.import_module(f"{__name__}.extension").load(ipython)


def unload_ipython_extension(ipython: Any) -> None:
    """Answer `%unload_ext heapr_lab`."""
    importlib.import_module(f"{__name__}.extension").unload(ipython)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
