"""A model's files, read and checked strictly: JSON, and the headers of safetensors.

Without torch.
"""

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from heapr_lab.errors import SpecError
from heapr_lab.models.named import hub_id, local_folder, names, what_is_expected

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"

PREDICTING = re.compile(r"(^|\.)mtp[._]")
"""A part of the names of layers that predict further tokens (MTP)."""


@dataclass(frozen=True)
class StoredTensor:
    """Place and type of a tensor in a file."""

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    n_bytes: int

    def __str__(self) -> str:
        return f"{self.file}: {self.name} ({self.dtype} {self.shape})"


Stored = dict[str, StoredTensor]
"""Tensors in files, by their names there."""


def check_there(name: str) -> None:
    """Make sure that a model can be found, before what needs torch is imported.

    Args:
        name: as it is given to `load_model`.

    Raises:
        SpecError: there is no such folder, its config.json is missing or damaged, or
            there is no such model on the hub or in the files that were fetched from it.
    """
    name = hub_id(name)
    if name in names():
        return
    if Path(name).is_dir():
        read_settings(Path(name))
        return
    refuse_path(name)
    if local_folder(name) is None:
        _ask_the_hub(name)


def refuse_path(name: str) -> None:
    """Check that a name that is no folder's can be one on the hub.

    Raises:
        SpecError: it is a path.
    """
    if name.startswith((".", "~", os.sep)):
        raise SpecError(f"no such folder: {name!r}; expected {what_is_expected()}")


def _ask_the_hub(name: str) -> None:
    """Make sure that the hub has a model.

    Raises:
        SpecError: it has not, or cannot be reached.
    """
    from huggingface_hub import hf_hub_download

    from heapr_lab import hub

    hub.is_reachable()  # if it does not, only local files are used
    try:
        hf_hub_download(name, "config.json")
    except (OSError, ValueError) as error:
        raise SpecError(
            f"cannot get the files of the model {name!r}: {error}\n"
            f"Expected {what_is_expected()}"
        ) from error


def read_settings(folder: Path) -> dict[str, Any]:
    """The content of config.json, with what modelopt may say in a file beside it.

    Raises:
        SpecError: there is none, or one of them is damaged.
    """
    settings = read_object(folder / "config.json")
    beside = folder / "hf_quant_config.json"
    if not settings.get("quantization_config") and beside.is_file():
        said = read_object(beside).get("quantization") or {}
        settings["quantization_config"] = {"quant_method": "modelopt", **said}
    return settings


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file of a model.

    Raises:
        SpecError: there is no such file, or it is not a JSON object.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise SpecError(
            f"{str(path.parent)!r} has no {path.name}: expected {what_is_expected()}"
        ) from error
    except (OSError, ValueError, RecursionError) as error:
        raise SpecError(
            f"{path} cannot be read as JSON ({error}): it is damaged; download it again"
        ) from error
    if not isinstance(content, dict):
        raise SpecError(
            f"{path} holds a {type(content).__name__}, expected a JSON object: it is "
            "damaged or another kind of file; download it again"
        )
    return content


def read_headers(source: Path) -> Stored:
    """The tensors in the files of a checkpoint.

    Raises:
        SpecError: a file is missing, incomplete or damaged.
    """
    if (source / SINGLE).is_file():
        return read_header(source / SINGLE)
    if not (source / INDEX).is_file():
        raise SpecError(
            f"{source} has neither {SINGLE} nor {INDEX}: expected a folder with a "
            "model's safetensors files; download them, or convert the weights"
        )
    index = read_object(source / INDEX)
    weight_map: Any = index.get("weight_map")
    files = list(weight_map.values()) if isinstance(weight_map, dict) else []
    if not files or not all(isinstance(file, str) for file in files):
        raise SpecError(
            f"{source / INDEX} has no weight_map with files: download it again"
        )
    headers: dict[Path, Stored] = {}
    for name, file in sorted(weight_map.items(), key=lambda item: item[::-1]):
        path = source / file
        if path not in headers:
            if Path(file).name != file or not path.is_file():
                raise SpecError(
                    f"{source / INDEX} names {file} for {name}, but there is no such "
                    "file beside it: download it"
                )
            headers[path] = read_header(path)
        if name not in headers[path]:
            raise SpecError(
                f"{path} lacks {name}, which {INDEX} expects there: their versions "
                "differ; download both again"
            )
    for path, tensors in headers.items():
        twice = [n for n in tensors if weight_map.get(n, path.name) != path.name]
        if twice:
            raise SpecError(
                f"{twice[0]} is in {path} and in {weight_map[twice[0]]}, expected it "
                "once: download the checkpoint again"
            )
    return {name: t for tensors in headers.values() for name, t in tensors.items()}


def names_in(source: Path) -> set[str]:
    """Names of all tensors in a folder; none if it has no safetensors files.

    Raises:
        SpecError: a file is missing, incomplete or damaged.
    """
    if not any((source / name).exists() for name in (SINGLE, INDEX)):
        return set()
    return set(read_headers(source))


def read_header(path: Path) -> Stored:
    """The tensors in a safetensors file, which the library has checked.

    Raises:
        SpecError: it is incomplete or damaged, or cannot be read.
    """
    try:
        with safe_open(path, "numpy"), path.open("rb") as file:
            end = 8 + int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(end - 8))
    except (OSError, SafetensorError) as error:
        raise SpecError(
            f"{path} cannot be read ({error}): it is incomplete, damaged or another "
            "kind of file; expected a whole file that may be read: download it again"
        ) from error
    header.pop("__metadata__", None)
    return {
        name: StoredTensor(
            path,
            name,
            entry["dtype"],
            tuple(entry["shape"]),
            end + entry["data_offsets"][0],
            entry["data_offsets"][1] - entry["data_offsets"][0],
        )
        for name, entry in header.items()
    }
