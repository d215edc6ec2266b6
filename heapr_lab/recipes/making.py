"""Make the weights of a pruned model, as a recipe says."""

import contextlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd

from heapr_lab.checkpoints.save import structure_of
from heapr_lab.checkpoints.stored_type import stored_dtype
from heapr_lab.checkpoints.uniform import uniform_width
from heapr_lab.importance.table import ImportanceTable
from heapr_lab.models.experts import find_experts
from heapr_lab.progress import StartPart, no_parts
from heapr_lab.pruning.masks import KeepMask
from heapr_lab.pruning.selection import select
from heapr_lab.pruning.surgery import check_table, prune
from heapr_lab.recipes.weights import MASKED, WeightRecipe
from heapr_lab.refinement.compensation import describe_weights, fit_compensation
from heapr_lab.refinement.compress import FittedCompression, fit_compression
from heapr_lab.refinement.healing import forget, heal
from heapr_lab.storage import cache
from heapr_lab.storage.hashing import without_nan
from heapr_lab.text.calibration import CalibrationSet
from heapr_lab.text.calibration_spec import Calibration
from heapr_lab.workbench.settings import Setting
from heapr_lab.workbench.workbench import Workbench


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class PruningResult(FittedCompression):
    """What was kept and fitted, of which table and recipe, and on what text."""

    table: ImportanceTable
    """The statistics that they were selected by; with `compress`, of a part of its
    windows."""
    recipe: WeightRecipe = MASKED
    calibration: Calibration | None = None
    """What the atoms were measured on, if the model is at hand."""
    windows: CalibrationSet | None = None
    """The windows that weights are fitted to, if any are."""

    @property
    def differs(self) -> bool:
        """Whether other weights are written than slices of the dense ones."""
        return self.compensation is not None or self.recipe.heal > 0


def make(
    bench: Workbench,
    table: ImportanceTable,
    setting: Setting,
    recipe: WeightRecipe,
    *,
    part: StartPart = no_parts,
) -> PruningResult:
    """The kept atoms of the model of `bench`, and the compensation of the others.

    Args:
        bench: the dense model.
        table: the table of `bench`, measured on the setting's calibration.
        setting: how atoms are selected; weights are fitted to its calibration, on which
            `compress` also chooses the estimator.
        recipe: how the kept weights are made.
        part: takes the progress of each part.

    Raises:
        SpecError: the table is of another model, the selection is infeasible, or its
            uniform width is not supported in the dtype of the files; raised before
            anything is run.
        CorpusError: there is too little text; likewise.
    """
    _check_table(bench, table)
    selection = recipe.asked(setting.selection)
    keep = select(table, selection)
    if structure_of(keep) == "uniform":
        uniform_width(keep, stored_dtype(bench.model))
    made = PruningResult(
        with_model(keep, table),
        table=table,
        recipe=recipe,
        calibration=setting.calibration,
    )
    if not recipe.fits:
        return made
    calibration = recipe.calibration(setting.calibration)
    writing = part(f"own text of {bench.name}", "token")
    windows = bench.calibration_set(calibration, progress=writing)
    made = replace(made, windows=windows)
    if not recipe.chooses:
        step = part(f"compensation on {windows.label}", "window")
        new = fit_compensation(bench.model, made.keep, windows, progress=step)
        return replace(made, compensation=new)
    fitted = bench.fitted(calibration)
    step = part(f"compression on {windows.label}", "window")
    best = fit_compression(
        bench.model, windows, selection, fitted=fitted, progress=step
    )
    return replace(
        made,
        keep=with_model(best.keep, table),
        table=fitted.table(),
        compensation=best.compensation,
        report=best.report,
    )


def _check_table(bench: Workbench, table: ImportanceTable) -> None:
    """Check that `table` is of the model of `bench`, in any dtype.

    Raises:
        SpecError: it is of another model.
    """
    record = (table.metadata.get("spec") or {}).get("model") or {}
    identity = bench.identity | {"dtype": record.get("dtype")}
    check_table(bench.model, find_experts(bench.model), table, identity)


def with_model(keep: KeepMask, table: ImportanceTable) -> KeepMask:
    """`keep` with the identity of its model, which is checked when it is used."""
    identity = (table.metadata.get("spec") or {}).get("model")
    return replace(keep, settings={**keep.settings, "model": identity})


Healing = tuple[CalibrationSet, Path] | None
"""The text to heal on, and the file where the training is saved, and resumes."""


@contextlib.contextmanager
def healing_of(bench: Workbench, made: PruningResult) -> Iterator[Healing]:
    """The training that a recipe asks for, if it does, of no other process meanwhile.

    It is forgotten when the block ends, unless by an error or an interruption.

    Raises:
        SpecError: another process has it.
    """
    if not made.recipe.heal:
        yield None
        return
    assert made.calibration is not None
    text = bench.calibration_set(made.recipe.healed_on(made.calibration))
    key = {
        "model": bench.identity,
        "keep": made.keep.fingerprint,
        "recipe": asdict(made.recipe),
        "fitted": None if made.windows is None else made.windows.fingerprint,
        "text": text.fingerprint,
    }
    state = cache.cache_path("healing", key, extension="safetensors")
    state.parent.mkdir(parents=True, exist_ok=True)
    with cache.writing(state):
        yield text, state
        forget(state)


def pruned_model(
    bench: Workbench, made: PruningResult, healing: Healing, part: StartPart
) -> tuple[Any, dict[str, Any]]:
    """The pruned copy of the model of `bench`, and the facts on its weights."""
    compensation, windows = made.compensation, made.windows
    pruned: Any = prune(bench.model, made.keep, down_projs=made.down_projs)
    facts: dict[str, Any] = {}
    if compensation is not None:
        assert windows is not None
        pruned.__dict__["heapr_weights"] = describe_weights(compensation, windows)
        errors = records(compensation.report)
        facts |= {"compensation": compensation.settings, "errors": errors}
    if healing is not None:
        text, state = healing
        step = part(f"healing on {text.label}", "step")
        heal(pruned, bench.model, text, state=state, progress=step)
        facts |= {"healing": records(pruned.heapr_healing)}
    return pruned, facts


def records(frame: pd.DataFrame) -> Any:
    """The rows of a table for the manifest, with null for what was not measured."""
    return without_nan(frame.to_dict("records"))
