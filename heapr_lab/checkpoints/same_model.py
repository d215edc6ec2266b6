"""Checks that a table or a mask belongs to the model it is used with."""

from pathlib import Path

import torch

from heapr_lab.errors import SpecError
from heapr_lab.importance.table import ImportanceTable
from heapr_lab.models.formats import NAMES
from heapr_lab.models.identity import (
    WEIGHTS_VERSION,
    architecture_identity,
    model_identity,
)
from heapr_lab.pruning.masks import KeepMask
from heapr_lab.streaming.opening import open_streamed


def own_table(path: Path, source: Path, *, name: str) -> ImportanceTable:
    """The importance table in a file, if it was measured on the model in `source`.

    The model is streamed, in the type that the table was measured in: its configuration
    and a hash of all its weights are compared.

    Raises:
        SpecError: it was measured on another model or in an unknown type, or does not
            name its model.
        CacheError: the file is damaged or of another kind.
    """
    table = ImportanceTable.read(path)
    record = (table.metadata.get("spec") or {}).get("model") or {}
    dtype = record.get("dtype", NAMES[0])
    if dtype not in NAMES:
        raise SpecError(
            f"{path} says that it was measured in {dtype!r}, expected one of "
            f"{', '.join(NAMES)}: make it again with `heapr-lab score`"
        )
    model = open_streamed(
        source, dtype=getattr(torch, dtype), device=torch.device("cpu")
    )
    _check_identity(record, architecture_identity(model), path=path, name=name)
    if "active" in record:
        raise SpecError(
            f"{path} was measured while a mask was active, not on the dense {name}; "
            "make it with `heapr-lab score`"
        )
    _check_identity(record, model_identity(model), path=path, name=name)
    return table


def own_mask(path: Path, identity: dict[str, str], *, name: str) -> KeepMask:
    """The keep mask in a file, if it was selected for this model.

    Raises:
        SpecError: it was selected for another model, or does not name its model.
        CacheError: the file is damaged or of another kind.
    """
    keep = KeepMask.read(path)
    _check_identity(keep.settings.get("model"), identity, path=path, name=name)
    return keep


def _check_identity(
    record: dict[str, str] | None, identity: dict[str, str], *, path: Path, name: str
) -> None:
    """Check that the file `path` is of this model, in any dtype.

    Raises:
        SpecError: it is of another model, or does not name its model.
    """
    if not record:
        raise SpecError(
            f"{path} does not say which model it was made for; make it with "
            "`heapr-lab score` or `heapr-lab prune`"
        )
    if not str(record.get("weights")).startswith(WEIGHTS_VERSION):
        raise SpecError(
            f"{path} was made by an earlier version of heapr_lab, which identified a "
            f"model by some of its weights only, so that it may not be of {name}: make "
            "it again, a table with `heapr-lab score`, a mask with `heapr-lab prune`"
        )
    # Not the dtype: a table measured in bfloat16 is valid for the weights in float32.
    differ = [
        part
        for part in ("class", "config", "weights")
        if part in identity and record.get(part) != identity[part]
    ]
    if differ:
        shown = ", ".join(
            f"{part} {str(record.get(part))[:16]} instead of {identity[part][:16]}"
            for part in differ
        )
        raise SpecError(
            f"{path} was made for another model than {name}: {shown}; make it from "
            "this model, with the same --dtype"
        )
