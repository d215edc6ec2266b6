"""What a command refuses before it loads a model: places, names of texts and layers."""

import contextlib
import os
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from heapr_lab.errors import SpecError

_FILE_SUFFIXES = {
    ".bin", ".csv", ".gguf", ".json", ".md", ".npz", ".parquet", ".pdf", ".pkl", ".png",
    ".pt", ".pth", ".safetensors", ".tex", ".txt", ".zip",
}  # fmt: skip
"""Names that end so are meant as files."""

_LONGEST_NAME = 220
"""Bytes; the 255 that file systems take, less what temporary names add."""
_ALWAYS_THERE = "pydocs"


# --- places -----------------------------------------------------------------------


def check_file(path: Path, *, suffix: str | None = None) -> None:
    """Make sure that a file can be written at `path`.

    Args:
        path: the file; one that is there would be replaced.
        suffix: what its name has to end with, if anything.

    Raises:
        SpecError: the name is none for such a file, or nothing can be written there.
    """
    if suffix is not None and path.suffix != suffix:
        raise SpecError(
            f"{_shown(path)}: what is written is a {suffix} file, give a name that "
            "ends with that"
        )
    if path.is_dir():
        raise SpecError(f"{_shown(path)} is a folder: give the name of a file in it")
    check_place(Path(os.path.realpath(path)))


def check_folder(path: Path) -> None:
    """Make sure that a folder of this name can be written.

    Raises:
        SpecError: the name looks like that of a file or is one, or nothing can be
            written there.
    """
    if (path.suffix or path.name).lower() in _FILE_SUFFIXES:
        raise SpecError(
            f"{_shown(path)} would be a folder, but is named like a file: give a name "
            "without an ending, or one that ends with .parquet for the mask of `prune`"
        )
    if path == Path():
        raise SpecError(f"{_shown(path)} has no name: give that of a folder")
    if os.path.lexists(path) and not path.is_dir():
        raise SpecError(f"{_shown(path)} is not a folder: give the name of one")
    check_place(Path(os.path.realpath(path)) / "file")


def check_place(path: Path) -> None:
    """Make sure that a file can be made at `path`, with the folders above it.

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
        # What the system says of rights is not the whole truth: it is tried.
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError as error:
        raise SpecError(
            f"{path.name} cannot be written to {place} ({error.strerror}): give "
            "another place"
        ) from error


def _shown(path: Path) -> str:
    """`path` as it was asked for; what is empty becomes `.`, which says little."""
    return "'.' (or an empty name)" if str(path) == "." else str(path)


# --- texts ------------------------------------------------------------------------


def check_corpora(names: Iterable[str], *, split: str) -> None:
    """Make sure that these corpora, or mixtures of them, can be had here.

    They are read; those with names stay in memory, so that this is not done twice.
    Not so `pydocs`, which is there always and takes minutes the first time.

    Raises:
        SpecError: a mixture cannot be read.
        CorpusError: there is no such corpus, or it cannot be had.
    """
    from heapr_lab.text.calibration import corpora_of
    from heapr_lab.text.corpora import load_corpus

    for name in names:
        for corpus in corpora_of(name):
            if corpus != _ALWAYS_THERE:
                load_corpus(corpus, split=split)


def check_tasks(names: Iterable[str]) -> None:
    """Make sure that these tasks of the harness, or continuations, can be had here.

    Raises:
        SpecError: there is no task of that name.
        CorpusError: its items, or its corpus, cannot be had.
    """
    from heapr_lab.workbench.workbench import CONTINUATION

    of_harness = []
    for task in names:
        name, _, corpus = task.partition(":")
        if name == CONTINUATION:
            check_corpora([corpus or _ALWAYS_THERE], split="test")
        else:
            of_harness.append(task)
    if of_harness:
        from heapr_lab.evaluation.harness import check_tasks as check_harness

        check_harness(of_harness)


# --- layers -----------------------------------------------------------------------


def check_layers(source: Path, layers: Sequence[int]) -> None:
    """Make sure that a model has routed experts in `layers`, without its weights.

    Args:
        source: folder of the model.
        layers: to be left alone.

    Raises:
        SpecError: it has none in one of them, or in no other.
        LayoutError: its experts cannot be pruned.
    """
    if not layers:
        return
    from heapr_lab.checkpoints.uniform import skeleton_of
    from heapr_lab.models.experts import find_experts
    from heapr_lab.models.folders import read_config
    from heapr_lab.pruning.options import Selection

    skeleton = skeleton_of(read_config(source))
    found = tuple(layer.layer for layer in find_experts(skeleton))
    Selection(0.0, exclude_layers=tuple(layers)).groups(found)
