"""What was measured, in words, and what is chosen, as Python that does it. No torch."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from heapr_lab.pruning.options import Selection, fields_given
from heapr_lab.recipes.weights import WeightRecipe
from heapr_lab.text.calibration_spec import OWN_TEXT, Calibration
from heapr_lab.workbench.settings import Opening

_IMPORTED = {"Fraction": "fractions", "Decimal": "decimal"}
"""Types of ratios that need an import, and their modules."""

# --- what was measured on, as recorded --------------------------------------------


def describe_calibration(record: Mapping[str, Any]) -> str:
    """The windows of a `CalibrationSet.record`, or of a table's `calibration`."""
    spec = calibration_of(record)
    if spec is None:
        return "not recorded"
    text = f"{spec.n_sequences} windows of {spec.seq_len} tokens of {spec.corpus}"
    if "split" in record:
        text += f" ({record['split']})"
    text += f", seed {spec.seed}" if "seed" in record else ""
    if spec.own_text:
        n_own = record["n_sequences"] - (spec.n_sequences or 0)
        text += f", and {n_own} that the model wrote itself"
    return text


def calibration_of(record: Mapping[str, Any]) -> Calibration | None:
    """The calibration that draws these windows; None where it is not recorded."""
    if not {"n_sequences", "seq_len", "corpus"} <= record.keys():
        return None
    names = ("corpus", "n_sequences", "seq_len", "seed")
    fields = {k: record[k] for k in names if k in record}
    added = {text["corpus"]: text["n_sequences"] for text in record.get("joined", [])}
    if added.keys() - {OWN_TEXT}:
        return None  # windows that no corpus and share describe
    n_own = added.get(OWN_TEXT, 0)
    n = fields["n_sequences"] = record["n_sequences"] - n_own
    return Calibration.from_dict(fields | {"own_text": n_own / n})


# --- a panel's settings as Python -------------------------------------------------


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

    Example:
        What everyone has is left out.

        >>> chosen = Calibration(own_text=0.25), Selection(0.25)
        >>> recipe = WeightRecipe("compress")
        >>> print(python_of_model(Opening("lab"), *chosen, recipe, folder="pruned"))
        import heapr_lab as hl
        <BLANKLINE>
        bench = hl.open_workbench('lab')
        calibration = hl.Calibration(own_text=0.25)
        selection = hl.Selection(ratio=0.25)
        windows = bench.calibration_set(calibration)
        smaller = hl.compress(bench.model, windows, selection)
        keep = smaller.heapr_keep
        hl.save_pruned(smaller, 'pruned', tokenizer=bench.tokenizer)
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
    options = ", ".join(_named(fields_given(value)))
    return f"{name} = hl.{type(value).__name__}({options})"


def _named(options: Mapping[str, Any]) -> list[str]:
    return [f"{name}={value!r}" for name, value in options.items()]


def _program(*lines: str) -> str:
    body = "\n".join(lines)
    more = [f"from {m} import {n}" for n, m in _IMPORTED.items() if f"{n}(" in body]
    return "\n".join([*more, "import heapr_lab as hl", "", body])
