"""A checkpoint's folder: written under a temporary name, renamed when whole."""

import contextlib
import glob
import re
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from heapr_lab.errors import CacheError, SpecError
from heapr_lab.models.folders import read_tokenizer
from heapr_lab.storage import cache, files
from heapr_lab.storage.provenance import MANIFEST_FILE

_OWN = re.compile(r"\.partial-[0-9a-f]{8}-")
"""How the name begins of a folder that is made in one go."""


def partial_of(folder: Path) -> Path:
    """Where `folder` is made before it has its name, if that can be resumed."""
    return folder.with_name(f".partial-{folder.name}")


def check_new(folder: Path) -> None:
    """Make sure, before anything is measured, that a checkpoint can be made there.

    Raises:
        SpecError: `folder` is there and not empty, is being written by another, or
            cannot be written.
    """
    _check_empty(folder)
    place = folder.resolve()
    if place.parent.is_dir():
        with cache.writing(place):
            pass


def _check_empty(folder: Path) -> None:
    """Make sure that nothing is in `folder`.

    Raises:
        SpecError: something is.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise SpecError(
            f"{folder} is there and not empty: give a new folder for the checkpoint, "
            "or delete this one"
        )


@contextlib.contextmanager
def new_folder(folder: Path, *, resume: bool = False) -> Iterator[Path]:
    """A temporary folder that becomes `folder` if the block succeeds.

    With `resume` it stays when the block fails, and is found again the next time.

    Raises:
        SpecError: `folder` is there and not empty, is being written by another, or
            cannot be written.
        CacheError: it is not what was written there.
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
                    f"{folder} could not be written: {error}. What was there before "
                    "is untouched; make room, or give another folder"
                ) from error
            raise
        _name(partial, folder)
        _check_named(folder)


def _own_partial(folder: Path) -> Path:
    """A name that no other call has; what killed ones left unfinished is deleted."""
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
        SpecError: something has it by now.
    """
    for left in partial.glob(".partial-*"):  # of a call that was killed
        left.unlink()
    files.share_mode(partial, like=partial / MANIFEST_FILE)
    try:
        if folder.exists():
            folder.rmdir()
        partial.replace(folder)
    except OSError as error:
        raise SpecError(
            f"{folder} appeared while it was written and is left as it is; the "
            f"finished checkpoint is in {partial}: rename that"
        ) from error


def _check_named(folder: Path) -> None:
    """Check that the weights in `folder` are those that its manifest tells of.

    Raises:
        CacheError: they are not.
    """
    told = files.read_json(folder / MANIFEST_FILE)["sha256"]
    found = checksums_in(folder)
    differing = sorted(n for n in told | found if told.get(n) != found.get(n))
    if differing:
        raise CacheError(
            f"{folder / differing[0]} is not what was written there: another process, "
            "or the disk, changed it; delete the folder and make it again"
        )


def checksums_in(folder: Path) -> dict[str, str]:
    """The SHA-256 of each file of weights in `folder`."""
    found = sorted(folder.glob("*.safetensors"))
    return {path.name: files.checksum(path) for path in found}


def save_tokenizer(folder: Path, tokenizer: Any, *, base: str) -> str:
    """Write `tokenizer`, or that of the model `base`; what the manifest says of it."""
    if tokenizer is None and base:
        try:
            tokenizer = read_tokenizer(base)
        except SpecError as error:
            # A card is read elsewhere, where this machine's folders say nothing.
            return f"none: {str(error).replace(base, Path(base).name)}"
    if tokenizer is None:
        return "none: no tokenizer was given, and the base model has no name"
    tokenizer.save_pretrained(folder)
    return "saved with the weights"
