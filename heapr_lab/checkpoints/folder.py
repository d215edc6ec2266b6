"""A checkpoint's folder: written under a temporary name, renamed when complete."""

import contextlib
import glob
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from safetensors import SafetensorError

from heapr_lab.checkpoints.provenance import MANIFEST_FILE
from heapr_lab.errors import CacheError, SpecError
from heapr_lab.storage import cache, files

_PROCESSOR = ("*processor*.json", "chat_template*")
"""Files that make images, sound and text into the inputs of a multimodal model."""
_PLAN_NAME = ".partial-plan.json"
"""The file that says what is written in an unfinished folder that is resumed."""
_OWN = re.compile(r"\.partial-[0-9a-f]{8}-")
"""The beginning of the name of a temporary folder that is not resumed."""


def partial_of(folder: Path) -> Path:
    """The temporary folder of `folder`, if writing it can be resumed."""
    return folder.with_name(f".partial-{folder.name}")


def check_new(folder: Path) -> None:
    """Check, before anything is measured, that a checkpoint can be written there.

    Raises:
        SpecError: `folder` exists and is not empty, is being written by another
            process, or is not writable.
    """
    _check_empty(folder)
    place = folder.resolve()
    if place.parent.is_dir():
        with cache.writing(place):
            pass


def _check_empty(folder: Path) -> None:
    """Check that `folder` is empty or does not exist.

    Raises:
        SpecError: it is not empty.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise SpecError(
            f"{folder} exists and is not empty: give a new folder for the checkpoint, "
            "or delete this one"
        )


@contextlib.contextmanager
def new_folder(folder: Path, *, resume: bool = False) -> Iterator[Path]:
    """A temporary folder that becomes `folder` if the block succeeds.

    With `resume` it is kept when the block fails, and is used again the next time.

    Raises:
        SpecError: `folder` exists and is not empty, is being written by another
            process, or is not writable.
        CacheError: its files changed while they were written.
    """
    folder = folder.resolve()
    with cache.writing(folder):
        _check_empty(folder)
        partial = partial_of(folder) if resume else _own_partial(folder)
        try:
            partial.mkdir(exist_ok=resume)
            yield partial
        except BaseException as error:
            if not resume:
                shutil.rmtree(partial, ignore_errors=True)
            if isinstance(error, OSError | SafetensorError):
                raise SpecError(
                    f"{folder} could not be written: {error}. Earlier files are "
                    "unchanged; free disk space, or give another folder"
                ) from error
            raise
        _name(partial, folder)
        _check_named(folder)


def claim(partial: Path, plan: Mapping[str, str]) -> None:
    """Record in a temporary folder what is written there, or find that it is the same.

    Raises:
        CacheError: another checkpoint was begun there.
    """
    path = partial / _PLAN_NAME
    record = files.read_object(path) if path.exists() else dict(plan)
    differing = [name for name in plan if record.get(name) != plan[name]]
    if differing:
        raise CacheError(
            f"{partial} holds an unfinished checkpoint of another "
            f"{' and '.join(differing)}: choose another folder, or delete it"
        )
    files.write_json(path, dict(plan))


def _own_partial(folder: Path) -> Path:
    """A unique temporary name; unfinished folders of killed processes are deleted."""
    for left in folder.parent.glob(f".partial-*-{glob.escape(folder.name)}"):
        if (
            _OWN.fullmatch(left.name.removesuffix(folder.name))
            and not (left / MANIFEST_FILE).exists()
        ):
            shutil.rmtree(left, ignore_errors=True)
    return folder.with_name(f".partial-{secrets.token_hex(4)}-{folder.name}")


def _name(partial: Path, folder: Path) -> None:
    """Give a finished folder its name.

    Raises:
        SpecError: there is something of that name by now.
    """
    for left in partial.glob(".partial-*"):  # left by killed processes
        left.unlink()
    files.share_mode(partial, like=partial / MANIFEST_FILE)
    try:
        if folder.exists():
            folder.rmdir()
        partial.replace(folder)
    except OSError as error:
        raise SpecError(
            f"{folder} appeared while it was written and is not replaced; the "
            f"finished checkpoint is in {partial}: rename that folder"
        ) from error


def _check_named(folder: Path) -> None:
    """Check that the weights in `folder` have the checksums of its manifest.

    Raises:
        CacheError: they have not.
    """
    expected = files.read_json(folder / MANIFEST_FILE)["sha256"]
    actual = checksums_in(folder)
    differing = sorted(name for name, _ in expected.items() ^ actual.items())
    if differing:
        raise CacheError(
            f"{folder / differing[0]} is not what was written there: another process, "
            "or the disk, changed it; delete the folder and make it again"
        )


def drop_foreign_code(folder: Path) -> None:
    """Remove what names code other than ours, and so is not in `folder`.

    `trust_remote_code`, with which ours is loaded, would run it.
    """
    from heapr_lab.models.ragged_experts import CODE_NAME

    carried = (folder / f"{CODE_NAME}.py").exists()  # then config.json names it alone
    for path in folder.glob("*_config.json" if carried else "*config.json"):
        content = files.read_object(path)
        if content.pop("auto_map", None) is not None:
            files.write_json(path, content)


def checksums_in(folder: Path) -> dict[str, str]:
    """The SHA-256 of each file of weights in `folder`."""
    paths = sorted(folder.glob("*.safetensors"))
    return {path.name: files.checksum(path) for path in paths}


def save_tokenizer(folder: Path, tokenizer: Any, *, base: str) -> str:
    """Write `tokenizer`, or that of the model `base`; the result, for the manifest."""
    if tokenizer is None and base:
        from heapr_lab.models.folders import read_tokenizer

        try:
            tokenizer = read_tokenizer(base)
        except SpecError as error:
            # A card is read elsewhere, where paths of this machine mean nothing.
            return f"none: {str(error).replace(base, Path(base).name)}"
    if tokenizer is None:
        return "none: no tokenizer was given, and the base model has no name"
    tokenizer.save_pretrained(folder)
    return "saved with the weights"


def save_processor(folder: Path, *, base: str) -> str:
    """Copy the files of the processor of the model `base`; the result, as above."""
    place = Path(base)
    try:
        if not place.is_dir():
            place = Path(snapshot_download(base, allow_patterns=list(_PROCESSOR)))
    except (OSError, ValueError) as error:
        return f"none: {' '.join(str(error).split())}"
    paths = sorted({path for name in _PROCESSOR for path in place.glob(name)})
    for path in paths:
        if path.is_file() and not (folder / path.name).exists():
            shutil.copyfile(path, folder / path.name)
    return f"copied: {', '.join(p.name for p in paths)}" if paths else "none: no files"
