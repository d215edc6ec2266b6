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
used where torch is not installed.
"""

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from functools import partial
from pathlib import Path
from typing import Any

from heapr_lab import registry
from heapr_lab.models import named

_HOMES = {
    "Calibration": "text.calibration_spec",
    "CalibrationSet": "text.calibration",
    "Compression": "methods.compression",
    "HeaprLabError": "errors",
    "ImportanceTable": "importance.table",
    "KeepMask": "pruning.masks",
    "Method": "methods.method",
    "Perplexity": "evaluation.perplexity",
    "Plan": "streaming.plan",
    "Selection": "pruning.options",
    "Setting": "workbench.settings",
    "Workbench": "workbench.workbench",
    "collect_statistics": "importance.collect",
    "compensate": "refinement.compensation",
    "compress": "refinement.compress",
    "evaluate_divergence": "evaluation.perplexity",
    "evaluate_perplexity": "evaluation.perplexity",
    "explore": "panel.opening",
    "heal": "refinement.healing",
    "load_calibration": "text.calibration",
    "load_corpus": "text.corpora",
    "load_model": "models.loading",
    "load_windows": "text.calibration",
    "masking": "pruning.surgery",
    "open_workbench": "workbench.workbench",
    "own_text": "refinement.own_text",
    "plan": "streaming.plan",
    "prune": "pruning.surgery",
    "read_provenance": "checkpoints.provenance",
    "run_tasks": "tasks.harness",
    "save_pruned": "checkpoints.save",
    "select": "pruning.selection",
}

__all__ = sorted(_HOMES)  # noqa: PLE0605 (a computed list of names)


_MODELS = "transformers.models.auto.modeling_auto"
_FAMILIES = ("pretrained.configs",)
_REGISTRIES = {
    "transformers.models.auto.configuration_auto": _FAMILIES,
    _MODELS: _FAMILIES,
    "transformers.quantizers.auto": ("models.ragged_experts",),
}
"""Modules of transformers, and what registers something with each."""


class _Registration(importlib.abc.MetaPathFinder):
    """Registers what is ours as soon as a registry of transformers is imported.

    After `import heapr_lab`, before or after transformers, `from_pretrained` loads
    pruned checkpoints, DeepSeekMoE and NemotronHPuzzle, although heapr_lab does not
    import torch by itself.
    """

    def __init__(self, registry: str) -> None:
        self._registry = registry

    def find_spec(
        self,
        fullname: str,
        path: Any,  # noqa: ARG002 (the interface of finders)
        target: Any = None,  # noqa: ARG002
    ) -> importlib.machinery.ModuleSpec | None:
        """The registry's own spec, with a loader that also registers."""
        if fullname != self._registry:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_register(module: Any) -> None:
            execute(module)
            if fullname == _MODELS or not _being_imported(_MODELS):
                _register_with(fullname)

        spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec


def _being_imported(name: str) -> bool:
    """Whether a module is not complete yet.

    The list of models imports that of configurations, and a configuration needs both.
    """
    spec = getattr(sys.modules.get(name), "__spec__", None)
    return bool(getattr(spec, "_initializing", False))


def _register_with(name: str) -> None:
    """Import what registers with a module of transformers, if it is there.

    Raises:
        ModuleNotFoundError: what it imports is not.
    """
    for module in _REGISTRIES[name]:
        registry.module_of(f"{__name__}.{module}")


for _registry in _REGISTRIES:
    if _registry in sys.modules:
        _register_with(_registry)
    else:
        sys.meta_path.insert(0, _Registration(_registry))


PARTS = {
    "models on disk": "streaming.opening:open_stepping",
    "why a model is streamed": "streaming.plan:why_on_disk",
    "settings of quantised weights": "streaming.quantisation:with_our_classes",
    "elimination": "refinement.elimination:eliminate",
    "key of elimination": "refinement.elimination:elimination_spec",
    "sums that weights are fitted with": "refinement.calibrated:CalibratedModel",
    "tasks": "tasks.items:AskedTask",
    "text of the model's own": "refinement.own_text:own_text",
}
"""What the core asks for by name, and does not import."""

for _part, _place in PARTS.items():
    registry.register(_part, f"{__name__}.{_place}")

NAMED = {
    "smollm2": ("pretrained.smollm2", "smollm2_folder"),
    "smolmoe": ("pretrained.carved", "smolmoe_folder"),
}
"""Models by a name of their own: the module and function that make their folder."""


def _made(module: str, function: str) -> Path:
    """The folder that a function of a wing makes, which is imported now."""
    folder: Path = getattr(importlib.import_module(f"{__name__}.{module}"), function)()
    return folder


for _name, _maker in NAMED.items():
    named.register(_name, partial(_made, *_maker))


def load_ipython_extension(ipython: Any) -> None:
    """Handle `%load_ext heapr_lab`; see `heapr_lab.panel.app`."""
    importlib.import_module(f"{__name__}.panel.app").load(ipython)


def unload_ipython_extension(ipython: Any) -> None:
    """Handle `%unload_ext heapr_lab`."""
    importlib.import_module(f"{__name__}.panel.app").unload(ipython)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
