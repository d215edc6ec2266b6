"""Checks of the options of `prune`, made before a model is loaded."""

from pathlib import Path
from typing import TYPE_CHECKING

from heapr_lab.cli import preflight
from heapr_lab.errors import SpecError

if TYPE_CHECKING:
    from heapr_lab.recipes.weights import WeightRecipe


def check_amount(
    ratio: str | None, max_rise: float | None, *, of: str, table_alone: bool
) -> None:
    """Make sure that the amount to prune is given once, and can be determined.

    Raises:
        SpecError: it is given twice or not at all, counts something else than atoms
            where it is searched for, or depends on a model that is not run where there
            is a table alone.
    """
    if table_alone and max_rise is not None:
        raise SpecError("--max-rise runs the model: leave --importance out")
    if max_rise is not None and of != "atoms":
        raise SpecError("--max-rise finds a ratio of atoms: leave --of out")
    given = sum(value is not None for value in (ratio, max_rise))
    if given != 1:
        raise SpecError(
            f"the amount to prune is given {given} times, expected once: give --ratio "
            "or --max-rise"
        )


def own_share(asked: float | None, importance: Path | None, *, default: float) -> float:
    """The windows that the model writes itself, for each of the corpus.

    Raises:
        SpecError: it is asked for although there is a table of `importance`.
    """
    if asked and importance is not None:
        raise SpecError("--own-text runs the model: leave --importance out")
    return default if asked is None else asked


def check_healed(
    recipe: "WeightRecipe", out: Path | None, *, table_alone: bool
) -> None:
    """Make sure that there are weights to train, and text.

    Raises:
        SpecError: only a table is given, or no checkpoint is written.
    """
    if recipe.heal and table_alone:
        raise SpecError("--heal runs the model: leave --importance out")
    if recipe.heal and not is_folder(out):
        raise SpecError(
            "--heal changes weights: give the folder of a checkpoint as --out"
        )


def is_folder(out: Path | None) -> bool:
    """Whether `out` is the folder of a checkpoint, and not the file of a mask."""
    return out is not None and out.suffix != ".parquet"


def check_out(out: Path | None, *, to_folder: bool) -> None:
    """Make sure that a mask or a checkpoint can be written to `out`, if given."""
    from heapr_lab.checkpoints.folder import check_new

    if out is not None and to_folder:
        preflight.check_folder(out)
        check_new(out)
    elif out is not None:
        preflight.check_file(out)
