"""A recipe as a command: `heapr-lab prune`, quoted for the shell. Without torch.

What the command line has no option for is refused, so that what can be copied never
prunes anything else.
"""

import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from heapr_lab.errors import SpecError
from heapr_lab.pruning.options import Selection
from heapr_lab.text.calibration_spec import DEFAULT_CORPUS, Calibration
from heapr_lab.workbench.opening import Opening
from heapr_lab.workbench.presets import DEFAULT, METHODS
from heapr_lab.workbench.recipe import Code, Recipe, Written, given_fields

MODEL = "MODEL"
"""In place of the model of a table, whose name its file does not have."""
MASK = "mask.parquet"
"""The file that a recipe without a checkpoint writes."""
_BY_OTHER_RULES = {"estimator", "exclude_layers", "multiple", "protect_unrouted"}
_WITHOUT_OPTION = {"layer_ratios", "estimator_options"}
_STREAM = {"auto": [], True: ["--stream"], False: ["--no-stream"]}


def as_command(recipe: Recipe) -> Code:
    """The command that prunes as `recipe` says.

    Raises:
        SpecError: the command line has no option for a part of it.

    Example:
        >>> as_command(Recipe(Opening("my moe"), Selection(0.25, "shrunk"))).text
        "heapr-lab prune 'my moe' --ratio 0.25 --estimator shrunk --out mask.parquet"
    """
    source = recipe.source
    parts = [
        MODEL if isinstance(source, Path) else source.model,
        *_selection(recipe.selection),
        *_method(recipe),
        *(_table(source) if isinstance(source, Path) else _measured(recipe, source)),
        *_written(recipe.written),
    ]
    line = shlex.join(["heapr-lab", "prune", *parts])
    return Code(line, tuple(_notes(recipe)))


def weight_options(written: Written, *, own_text: float) -> list[str]:
    """The options on weights that are not the defaults.

    `own_text` is that of the calibration they are fitted to.
    """
    compressed = written.weights == "compress"
    usual = METHODS[DEFAULT].own_text if compressed else 0.0
    words = [] if own_text == usual else ["--own-text", f"{own_text}"]
    words += ["--bias"] if written.output_bias else []
    return words + (["--distill", f"{written.distill}"] if written.distill else [])


def _selection(selection: Selection) -> Iterator[str]:
    """The options of a selection, but for the estimator.

    Raises:
        SpecError: there is none for a field.
    """
    given = given_fields(selection)
    missing = sorted(_WITHOUT_OPTION & given.keys())
    if missing:
        raise SpecError(
            f"`heapr-lab prune` has no option for {' and '.join(missing)}: copy the "
            "Python"
        )
    for name, value in given.items():
        if name not in _BY_OTHER_RULES:
            yield from (_option(name), _word(value, name=name))
    # For these structures the command line has a default of its own, not 1.
    if selection.structure in {"aligned", "uniform"} or selection.multiple is not None:
        yield from ("--multiple", f"{selection.step}")
    if selection.exclude_layers:
        yield from ("--exclude-layers", ",".join(map(str, selection.exclude_layers)))
    if selection.protect_unrouted:
        yield "--protect-unrouted"


def _method(recipe: Recipe) -> list[str]:
    """The method and the estimator, where they are not the defaults."""
    estimator, made = recipe.selection.estimator, recipe.written
    if isinstance(recipe.source, Path):
        known = METHODS[DEFAULT].of_table
        return [] if estimator == known else ["--estimator", estimator]
    weights = "compensated" if made is None else made.weights
    if weights == "compress":
        return []
    if weights == "compensated":
        return ["--estimator", estimator]
    words = ["--method", "paper"]
    own = estimator == METHODS["paper"].estimator
    return words if own else [*words, "--estimator", estimator]


def _table(file: Path) -> list[str]:
    return ["--importance", str(file)]


def _measured(recipe: Recipe, source: Opening) -> Iterator[str]:
    """The options of the calibration and of the model, with those of the weights."""
    calibration, made = recipe.calibration, recipe.written
    if calibration.corpus != DEFAULT_CORPUS:
        yield from ("--corpus", calibration.corpus)
    if made is not None:
        yield from weight_options(made, own_text=calibration.own_text)
    elif calibration.own_text:
        yield from ("--own-text", f"{calibration.own_text}")
    if calibration.n_sequences is not None:
        yield from ("--n-sequences", f"{calibration.n_sequences}")
    if recipe.asked_windows is not None:
        yield from ("--seq-len", f"{recipe.asked_windows}")
    if calibration.seed != Calibration().seed:
        yield from ("--seed", f"{calibration.seed}")
    for name, value in source.given().items():
        if name not in {"seq_len", "stream"}:
            yield from (_option(name), f"{value}")
    yield from _STREAM[source.stream]


def _written(made: Written | None) -> Iterator[str]:
    """Where to, and the corpora of the card.

    Raises:
        SpecError: the name would make it a mask, or cannot be in a list of names.
    """
    if made is None:
        yield from ("--out", MASK)
        return
    if Path(made.folder).suffix == ".parquet":
        raise SpecError(
            f"to `heapr-lab prune` {made.folder!r} is the file of a mask, not a "
            "folder: choose a name that does not end in .parquet"
        )
    if made.corpora is not None:
        yield from ("--perplexity", ",".join(map(_name, made.corpora)))
    yield from ("--out", made.folder)


def _name(corpus: str) -> str:
    if "," in corpus or corpus != corpus.strip():
        raise SpecError(
            f"the corpus {corpus!r} cannot be in a list separated by commas, as "
            "--perplexity is: copy the Python"
        )
    return corpus


def _notes(recipe: Recipe) -> Iterator[str]:
    if isinstance(recipe.source, Path):
        yield f"The file of the table does not name its model: write it for {MODEL}."
    elif recipe.written is not None and recipe.calibration.seq_len is not None:
        yield "--seq-len is also that of the test windows in the card."


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _word(value: Any, *, name: str) -> str:
    """A value of an option, which is read as a float or as it is.

    Raises:
        SpecError: it is a number that no float is.
    """
    if not isinstance(value, str | int | float):
        raise SpecError(
            f"{name} is {value!r}, and the command line takes decimals that a float "
            "can have: copy the Python"
        )
    return f"{value}"
