"""A panel's settings as Python: the lines that do the same. No torch."""

from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from heapr_lab.pruning.options import Selection
from heapr_lab.recipes.weights import WeightRecipe
from heapr_lab.text.calibration_spec import Calibration
from heapr_lab.workbench.settings import Opening

_IMPORTED = {"Fraction": "fractions", "Decimal": "decimal"}
"""Types of ratios that need an import, and their modules."""


def python_of_table(file: Path, selection: Selection) -> str:
    """The lines that make the mask `keep` from the table in `file`.

    Example:
        >>> print(python_of_table(Path("table.parquet"), Selection(0.25)))
        import heapr_lab as hl
        <BLANKLINE>
        selection = hl.Selection(ratio=0.25)
        table = hl.ImportanceTable.read('table.parquet')
        keep = hl.select(table, selection)
    """
    return _program(
        _assigned("selection", selection),
        f"table = hl.ImportanceTable.read({str(file)!r})",
        "keep = hl.select(table, selection)",
    )


def python_of_model(
    opening: Opening,
    calibration: Calibration,
    selection: Selection,
    recipe: WeightRecipe,
    *,
    folder: str,
) -> str:
    """The lines that prune a model and write it to `folder`; the mask is `keep`.

    Args:
        opening: how the model is opened.
        calibration: what it is measured on, and weights are fitted to.
        selection: how its atoms are selected.
        recipe: how its weights are made.
        folder: the folder of the checkpoint.
    """
    selection = recipe.asked(selection)
    return _program(
        f"bench = hl.open_workbench({_opened(opening)})",
        _assigned("calibration", calibration),
        _assigned("selection", selection),
        *_smaller(recipe, selection.estimator),
        *_healed(recipe, calibration),
        f"hl.save_pruned(smaller, {folder!r}, tokenizer=bench.tokenizer)",
    )


def _smaller(recipe: WeightRecipe, estimator: str) -> Iterator[str]:
    """The lines that make `keep` and `smaller`; `windows` too, if weights change."""
    if recipe.fits:
        yield "windows = bench.calibration_set(calibration)"
    if recipe.chooses:
        yield "smaller = hl.compress(bench.model, windows, selection)"
        yield "keep = smaller.heapr_keep"
        return
    yield f"table = bench.importance(calibration, estimator={estimator!r})"
    yield "keep = hl.select(table, selection)"
    if recipe.weights == "compensated":
        yield "smaller = hl.compensate(bench.model, keep, windows)"
    else:
        yield "smaller = hl.prune(bench.model, keep)"


def _healed(recipe: WeightRecipe, calibration: Calibration) -> Iterator[str]:
    if recipe.heal:
        yield _assigned("more", recipe.healed_on(calibration))
        yield "hl.heal(smaller, bench.model, bench.calibration_set(more))"


def _opened(opening: Opening) -> str:
    return ", ".join([repr(opening.model), *_named(opening.given())])


def _assigned(name: str, value: Selection | Calibration) -> str:
    """The assignment of a value, by its fields that are not the defaults."""
    options = {
        field.name: getattr(value, field.name)
        for field in fields(value)
        if getattr(value, field.name) != field.default
    }
    return f"{name} = hl.{type(value).__name__}({', '.join(_named(options))})"


def _named(options: Mapping[str, Any]) -> list[str]:
    return [f"{name}={value!r}" for name, value in options.items()]


def _program(*lines: str) -> str:
    body = "\n".join(lines)
    more = [f"from {m} import {n}" for n, m in _IMPORTED.items() if f"{n}(" in body]
    return "\n".join([*more, "import heapr_lab as hl", "", body])
