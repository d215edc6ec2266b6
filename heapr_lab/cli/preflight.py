"""Checks made before a model is loaded: of paths, texts, and options of `prune`."""

import contextlib
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

from heapr_lab.errors import SpecError

_FILE_SUFFIXES = {
    ".bin", ".csv", ".gguf", ".json", ".md", ".npz", ".parquet", ".pdf", ".pkl", ".png",
    ".pt", ".pth", ".safetensors", ".tex", ".txt", ".zip",
}  # fmt: skip
"""Endings of names that are meant as files."""

_LONGEST_NAME = 220
"""Bytes; the 255 that file systems take, less what temporary names add."""
_ALWAYS_THERE = "pydocs"


# --- places -----------------------------------------------------------------------


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


# --- texts ------------------------------------------------------------------------


def check_corpora(names: Iterable[str], *, split: str) -> None:
    """Make sure that these corpora, or mixtures of them, are available.

    They are read; named corpora stay in memory and so are not read again. `pydocs` is
    left out: it is always available, and takes minutes the first time.

    Raises:
        SpecError: a mixture cannot be read.
        CorpusError: a corpus is unknown or not available.
    """
    from heapr_lab.text.calibration_spec import corpora_of

    every = [corpus for name in names for corpus in corpora_of(name)]
    for corpus in every:
        if corpus != _ALWAYS_THERE:
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
