"""The options of the command line, each written once.

What they ask for is checked here, before a model is loaded, and opened.
"""

import contextlib
import functools
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from heapr_lab.errors import SpecError, one_of
from heapr_lab.models.formats import DTYPES, device_name
from heapr_lab.models.named import hub_id
from heapr_lab.models.safetensors_headers import check_there
from heapr_lab.streaming.plan import size_of
from heapr_lab.text.calibration_spec import DEFAULT_CORPUS, corpora_of

if TYPE_CHECKING:
    from heapr_lab.workbench.workbench import Workbench

_FILE_SUFFIXES = {
    ".bin", ".csv", ".gguf", ".json", ".md", ".npz", ".parquet", ".pdf", ".pkl", ".png",
    ".pt", ".pth", ".safetensors", ".tex", ".txt", ".zip",
}  # fmt: skip
"""Endings of names that are meant as files."""

_LONGEST_NAME = 220
"""Bytes; the 255 that file systems take, less what temporary names add."""


def _size(size: str | None) -> str | None:
    """`size`, if it is one, whether it is needed or not.

    Raises:
        SpecError: it is not.
    """
    if size is not None:
        size_of(size, least=0)
    return size


def model_name(name: str) -> str:
    """The hub id or folder of a model as it was named.

    Raises:
        SpecError: there is no such model.
    """
    check_there(name)
    return hub_id(name)


def dtype_name(name: str) -> str:
    """A type that models can be run in."""
    return str(one_of(name, DTYPES, name="dtype"))


def profile_name(name: str | None) -> str | None:
    """A profile that there is, if one is given."""
    if name is not None:
        from heapr_lab.workbench.settings import profile_of

        profile_of("", name)
    return name


_amount = functools.partial(typer.Option, rich_help_panel="How much")
_method = functools.partial(typer.Option, rich_help_panel="Method")
_shape = functools.partial(typer.Option, rich_help_panel="Shape")
_text = functools.partial(typer.Option, rich_help_panel="Text")
_machine = functools.partial(typer.Option, rich_help_panel="Machine")
_output = functools.partial(typer.Option, rich_help_panel="Output")

NAME_HELP = (
    "A hub id or a model of the paper, a local folder, `lab`, `smolmoe` or `smollm2`."
)
Model = Annotated[
    str, typer.Argument(metavar="MODEL", help=NAME_HELP, callback=model_name)
]
AsJson = Annotated[bool, _output("--json", help="Print one JSON object.")]
Profile = Annotated[
    str | None,
    _text(
        help="Amount of text to calibrate on: small (8 windows of 64 tokens), lab (128 "
        "of 256), pretrained (32 of 512), paper (128 of 2048) [default: the model's].",
        callback=profile_name,
    ),
]
Device = Annotated[
    str, _machine(help="auto, cpu, cuda, cuda:1, ...", callback=device_name)
]
Dtype = Annotated[
    str, _machine(help="auto, float32, bfloat16, ...", callback=dtype_name)
]
Stream = Annotated[
    bool | None,
    _machine(
        "--stream/--no-stream",
        help="Keep decoder layers on disk and read them one at a time [default: where "
        "the scores do not fit].",
    ),
]
HostMemory = Annotated[
    str | None,
    typer.Option(
        "--host-memory",
        metavar="SIZE",
        callback=_size,
        help="Of a streamed model: memory for the states of its layers, such as 16GB; "
        "others go to files in the cache [default: half of what is free].",
    ),
]
SeqLen = Annotated[
    int | None, _text(min=2, help="Tokens per window [default: the profile's].")
]
Corpus = Annotated[
    str, _text(help="Calibration text: a corpus, a file, or a mixture of them.")
]
Sequences = Annotated[
    int | None, _text(min=1, help="Number of windows [default: the profile's].")
]
OwnTextOrMethods = Annotated[
    float | None,
    _text(
        "--own-text",
        min=0,
        help="Windows that the model writes itself, for each of the corpus, so that "
        "what the corpus does not show is not pruned away [default: 0.25 with "
        "--method best, else 0].",
    ),
]
EstimatorOrMethods = Annotated[
    str | None,
    _method(
        "--estimator",
        help="heapr, heapr_total, fisher, elimination, magnitude, frequency or random "
        "[default: the method's].",
    ),
]
Importance = Annotated[
    Path | None,
    _method(
        exists=True,
        dir_okay=False,
        help="A table of `score` [default: measured, or from the cache].",
    ),
]
Mask = Annotated[
    Path | None, typer.Option(exists=True, dir_okay=False, help="A mask of `prune`.")
]
Limit = Annotated[int | None, typer.Option(min=1, help="Number of items of each task.")]
Tasks = Annotated[
    str,
    typer.Option(
        help="Tasks, separated by commas: those of the harness, such as arc_easy; "
        "continuation (of pydocs), or continuation:CORPUS."
    ),
]
Ratio = Annotated[
    str,
    _amount(metavar="SHARE", help="Share to prune, in [0, 1): 0.25 or 25%, not 25."),
]
MethodName = Annotated[
    str,
    _method(
        help="best: one of two masks with compensated weights, on enough text moved a "
        "few steps towards the dense model's predictions, or HEAPr where held-out "
        "calibration windows see no gain (with --estimator, compensated weights; with "
        "--importance, weights unchanged); paper: HEAPr as published."
    ),
]
Heal = Annotated[
    int,
    _method(
        min=0,
        help="Windows of the corpus on which what is kept is then trained to predict "
        "the text, and as the dense model does; 128 is a good start. Resumes after an "
        "interruption. Not with --importance.",
    ),
]
Engine = Annotated[
    str | None,
    _shape(
        "--for",
        help="Choose structure and multiple for an engine: transformers, vllm, "
        "vllm-fp8, sglang, sglang-fp8, tensorrt-llm, llama.cpp or llama.cpp-q4_k.",
    ),
]
Structure = Annotated[
    str | None, _shape(help="ragged, aligned, per_layer or uniform [default: ragged].")
]
Multiple = Annotated[
    int | None,
    _shape(
        min=1,
        help="Widths are multiples of it [default for aligned and uniform: the "
        "largest power of two up to d_inter / 8].",
    ),
]
Of = Annotated[
    str,
    _amount(
        help="What the ratio counts: routed atoms (atoms), or parameters of the whole "
        "model (model)."
    ),
]
PrunedOut = Annotated[
    Path | None,
    _output(help="FILE.parquet for only the mask, else a checkpoint folder."),
]


# --- what is opened ---------------------------------------------------------------


def open_bench(*asked: Any) -> "Workbench":
    """The workbench of an `Opening`, of whose fields these are the values in order.

    None stands for the default, as where an option is not given.
    """
    from heapr_lab.workbench.settings import Opening
    from heapr_lab.workbench.workbench import open_workbench

    opening = Opening(*asked)
    given = {k: v for k, v in opening.given().items() if v is not None}
    return open_workbench(opening.model, **given)


# --- checks of places -------------------------------------------------------------


def check_table(path: Path) -> None:
    """Make sure that a parquet file can be written at `path`, or replaced.

    Raises:
        SpecError: the name has another suffix, or no file can be written there.
    """
    if path.suffix != ".parquet":
        raise SpecError(
            f"{_shown(path)}: the output is a .parquet file, give a name that ends "
            "with .parquet"
        )
    if path.is_dir():
        raise SpecError(f"{_shown(path)} is a folder: give the name of a file in it")
    check_place(Path(os.path.realpath(path)))


def check_folder(path: Path) -> None:
    """Make sure that a folder of this name can be written.

    Raises:
        SpecError: the name is that of a file or has the ending of one, or nothing
            can be written there.
    """
    if (path.suffix or path.name).lower() in _FILE_SUFFIXES:
        raise SpecError(
            f"{_shown(path)} would be a folder, but is named like a file: give a name "
            "without a suffix, or one that ends with .parquet for the mask of `prune`"
        )
    if path == Path():
        raise SpecError(f"{_shown(path)} has no name: give the name of a folder")
    if os.path.lexists(path) and not path.is_dir():
        raise SpecError(f"{_shown(path)} is not a folder: give another name")
    check_place(Path(os.path.realpath(path)) / "file")


def check_place(path: Path) -> None:
    """Make sure that a file can be created at `path`, with the folders above it.

    Raises:
        SpecError: it cannot.
    """
    long = [part for part in path.parts if len(os.fsencode(part)) > _LONGEST_NAME]
    if long:
        raise SpecError(
            f"the name {long[0][:20]}… has {len(os.fsencode(long[0]))} bytes, expected "
            f"at most {_LONGEST_NAME}: give a shorter one"
        )
    place = next(folder for folder in path.parents if os.path.lexists(folder))
    try:
        with contextlib.suppress(FileNotFoundError):
            path.stat()
        # Permission bits do not tell everything, so a file is created.
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError as error:
        raise SpecError(
            f"{path.name} cannot be written to {place} ({error.strerror}): give "
            "another place"
        ) from error


def _shown(path: Path) -> str:
    """`path` as it was given; `Path` turns an empty name into `.`."""
    return "'.' (or an empty name)" if str(path) == "." else str(path)


# --- checks of texts --------------------------------------------------------------


def check_corpora(names: Iterable[str], *, split: str) -> None:
    """Make sure that these corpora, or mixtures of them, are available.

    They are read; named corpora stay in memory and so are not read again. `pydocs` is
    left out: it is always available, and takes minutes the first time.

    Raises:
        SpecError: a mixture cannot be read.
        CorpusError: a corpus is unknown or not available.
    """
    every = [corpus for name in names for corpus in corpora_of(name)]
    for corpus in every:
        if corpus != DEFAULT_CORPUS:
            from heapr_lab.text.corpora import load_corpus  # pandas comes with it

            load_corpus(corpus, split=split)


def check_tasks(names: Iterable[str]) -> None:
    """Make sure that these tasks, of the harness or continuations, are available.

    Raises:
        SpecError: there is no task of that name.
        CorpusError: the items or the corpus of a task are not available.
    """
    from heapr_lab.tasks.paper_tasks import check_defined, continued

    corpora, of_harness = continued(names)
    check_corpora(corpora, split="test")
    if of_harness:
        check_defined(of_harness)
        from heapr_lab.tasks.harness import load_tasks

        load_tasks(of_harness)


# --- options of prune -------------------------------------------------------------


def check_model_runs(
    importance: Path | None, out: Path | None, *, own_text: float | None, heal: int
) -> None:
    """Make sure that there is a model to write text, and weights to train.

    Raises:
        SpecError: only a table is given, or no checkpoint is written.
    """
    for name, asked in (("--own-text", own_text), ("--heal", heal)):
        if asked and importance is not None:
            raise SpecError(f"{name} runs the model: leave --importance out")
    if heal and not is_folder(out):
        raise SpecError(
            "--heal changes weights: give the folder of a checkpoint as --out"
        )


def is_folder(out: Path | None) -> bool:
    """Whether `out` is the folder of a checkpoint, and not the file of a mask."""
    return out is not None and out.suffix != ".parquet"


def check_out(out: Path | None) -> None:
    """Make sure that a mask or a checkpoint can be written to `out`, if given."""
    from heapr_lab.checkpoints.folder import check_new

    if out is not None and is_folder(out):
        check_folder(out)
        check_new(out)
    elif out is not None:
        check_table(out)
