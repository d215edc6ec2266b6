"""A recipe as Python: the lines that do the same with the public names. No torch."""

from collections.abc import Iterator, Mapping
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from heapr_lab.pruning.options import as_fraction
from heapr_lab.workbench.recipe import Code, Recipe, Written, given_fields

_WIDTH = 88


def as_python(recipe: Recipe) -> Code:
    """The Python that prunes as `recipe` says; its mask is `keep`.

    Example:
        >>> from heapr_lab.pruning.options import Selection
        >>> print(as_python(Recipe(Path("table.parquet"), Selection(0.25))).text)
        import heapr_lab as hl
        <BLANKLINE>
        table = hl.ImportanceTable.read('table.parquet')
        keep = hl.select(table, ratio=0.25)
    """
    body = list(_lines(recipe))
    head = ["import heapr_lab as hl", ""]
    if any("Fraction(" in line for line in body):
        head = ["from fractions import Fraction", "", *head]
    return Code("\n".join([*head, *body]), tuple(_notes(recipe.written)))


def _lines(recipe: Recipe) -> Iterator[str]:
    yield from _table(recipe)
    made = recipe.written
    if made is None or made.weights != "compress":
        yield _call("keep", "hl.select", "table", **given_fields(recipe.selection))
    if made is not None:
        yield from _model(recipe, made)
        yield from _files(made)


def _table(recipe: Recipe) -> Iterator[str]:
    """The lines up to the table, which `compress` measures itself."""
    source, made = recipe.source, recipe.written
    if isinstance(source, Path):
        yield _call("table", "hl.ImportanceTable.read", repr(str(source)))
        return
    yield _call("bench", "hl.open_workbench", repr(source.model), **source.given())
    yield _call("calibration", "hl.Calibration", **given_fields(recipe.calibration))
    if made is None or made.weights != "compress":
        given = given_fields(recipe.selection)
        extra = {"estimator": given["estimator"]} if "estimator" in given else {}
        yield _call("table", "bench.importance", "calibration", **extra)


def _model(recipe: Recipe, made: Written) -> Iterator[str]:
    """The lines that make the smaller model of `bench`."""
    if made.weights != "unchanged" or made.output_bias or made.distill:
        yield "windows = bench.calibration_set(calibration)"
    if made.weights == "compress":
        given = given_fields(recipe.selection)
        for name in ("estimator", "estimator_options"):  # which compress chooses
            given.pop(name, None)
        yield _call("smaller", "hl.compress", "bench.model", "windows", **given)
        yield "keep = smaller.heapr_keep"
    elif made.weights == "compensated":
        yield "smaller = hl.compensate(bench.model, keep, windows)"
    else:
        yield "smaller = hl.prune(bench.model, keep)"


def _files(made: Written) -> Iterator[str]:
    """The lines that follow a model: what changes its weights, and its files."""
    both = "smaller", "bench.model", "windows"
    if made.output_bias:
        yield _call(None, "hl.add_output_bias", *both)
    if made.distill:
        yield _call(None, "hl.distill_layers", *both, n_steps=made.distill)
    folder = repr(made.folder)
    tokenizer = "tokenizer=bench.tokenizer"
    yield _call(None, "hl.save_pruned", "smaller", folder, tokenizer)


def _notes(made: Written | None) -> Iterator[str]:
    if made is not None:
        yield "Its card has no perplexities and savings; that of the command has."
    if made is not None and made.dtype is not None:
        yield (
            "The weights are written in the dtype in memory; Export and the command "
            f"write {made.dtype}, that of the dense files."
        )


def _call(result: str | None, name: str, *arguments: str, **options: Any) -> str:
    """A call of `name` in one line, or with a line for each argument."""
    parts = [*arguments, *(f"{k}={_literal(v)}" for k, v in options.items())]
    start = f"{name}(" if result is None else f"{result} = {name}("
    line = f"{start}{', '.join(parts)})"
    if len(line) <= _WIDTH:
        return line
    return "\n".join([start, *(f"    {part}," for part in parts), ")"])


def _literal(value: Any) -> str:
    """Python that evaluates to `value`; a number that no float is, as a Fraction."""
    if isinstance(value, Mapping):
        inner = (f"{_literal(k)}: {_literal(v)}" for k, v in value.items())
        return f"{{{', '.join(inner)}}}"
    if isinstance(value, tuple):
        return f"({''.join(f'{_literal(part)}, ' for part in value).rstrip(' ')})"
    if isinstance(value, Fraction | Decimal):
        return repr(as_fraction(value, name="a number"))
    return repr(value.item() if isinstance(value, np.generic) else value)
