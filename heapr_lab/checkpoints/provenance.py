"""Where a file came from: what it says of its origin itself.

Parquet files have their provenance in the metadata of their schema, figures in that of
PNG and PDF, checkpoints in a manifest. Figures of earlier versions have it behind a
hash; tables of text have none.
"""

import json
from pathlib import Path
from typing import Any

from heapr_lab.errors import CacheError, SpecError
from heapr_lab.storage import files

MANIFEST_FILE = "heapr_manifest.json"
"""File in the folder of a checkpoint that says how it was made."""
_SIZES = "architecture"
"""The part of an importance table's metadata that says nothing of its origin."""


def read_provenance(path: Path | str) -> dict[str, Any]:
    """What a file of heapr_lab says of its origin, as plain data.

    Args:
        path: a figure (png), an importance table, a keep mask or a comparison of the
            panel (parquet), or the folder of a checkpoint.

    Raises:
        SpecError: there is no such file, or it is of another kind.
        CacheError: the file is damaged, or heapr_lab did not write it.
    """
    path = Path(path)
    if path.is_dir():
        return _of_checkpoint(path)
    if not path.is_file():
        raise SpecError(f"there is no file {path}; give the path of one")
    match path.suffix.lower():
        case ".parquet":
            metadata = files.read_metadata(path)
            return {name: value for name, value in metadata.items() if name != _SIZES}
        case ".png":
            return _of_figure(path)
    raise SpecError(
        f"{path} is of a kind that says nothing of its origin, or says it to readers "
        "alone: expected png, parquet, or the folder of a checkpoint"
    )


def _of_figure(path: Path) -> dict[str, Any]:
    """The provenance in the Description of a PNG file.

    Raises:
        CacheError: it is damaged, or has none.
    """
    from PIL import Image

    try:
        with Image.open(path) as image:
            text = str(image.info["Description"])
        provenance: dict[str, Any] = json.loads(text[text.index("{") :])
    except (OSError, KeyError, ValueError, RecursionError) as error:
        raise CacheError(
            f"{path} says nothing of its origin ({error}): give a figure that "
            "heapr_lab wrote and that was not converted since"
        ) from error
    return provenance


def _of_checkpoint(folder: Path) -> dict[str, Any]:
    """The manifest of a checkpoint.

    Raises:
        CacheError: there is none, or it is damaged.
    """
    path = folder / MANIFEST_FILE
    if not path.is_file():
        raise CacheError(
            f"{folder} is not a checkpoint of heapr_lab: it has no {MANIFEST_FILE}; "
            "give a folder that save_pruned or `heapr-lab prune` wrote"
        )
    return files.read_object(path)
