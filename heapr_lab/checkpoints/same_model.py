"""Checks that a table or a mask belongs to the model it is used with."""

from pathlib import Path

import torch

from heapr_lab.errors import SpecError
from heapr_lab.importance.columns import differing
from heapr_lab.importance.table import ImportanceTable
from heapr_lab.models.experts import find_experts
from heapr_lab.models.formats import NAMES
from heapr_lab.models.identity import WEIGHTS_VERSION, model_identity
from heapr_lab.pruning.masks import KeepMask
from heapr_lab.pruning.surgery import check_table
from heapr_lab.streaming.opening import open_streamed

_PARTS = ("class", "config", "weights")
"""What is compared of the identity of a mask's model."""


def own_table(path: Path, source: Path, *, name: str) -> ImportanceTable:
    """The importance table in a file, if it was measured on the model in `source`.

    The model is streamed, in the type that the table was measured in.

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
    _check_recorded(record, path=path, name=name)
    if "active" in record:
        raise SpecError(
            f"{path} was measured while a mask was active, not on the dense {name}; "
            "make it with `heapr-lab score`"
        )
    model = open_streamed(
        source, dtype=getattr(torch, dtype), device=torch.device("cpu")
    )
    identity = model_identity(model) | {"dtype": record.get("dtype")}
    check_table(model, find_experts(model), table, identity)
    return table


def own_mask(path: Path, identity: dict[str, str], *, name: str) -> KeepMask:
    """The keep mask in a file, if it was selected for this model.

    Raises:
        SpecError: it was selected for another model, or does not name its model.
        CacheError: the file is damaged or of another kind.
    """
    keep = KeepMask.read(path)
    record = keep.settings.get("model") or {}
    _check_recorded(record, path=path, name=name)
    # Not the dtype: a mask selected in bfloat16 is valid for the weights in float32.
    ours, its = ({n: known.get(n) for n in _PARTS} for known in (identity, record))
    if differ := differing(ours, its):
        raise SpecError(
            f"{path} was made for another model than {name}: it differs in {differ}; "
            "make it from this model"
        )
    return keep


def _check_recorded(record: dict[str, str], *, path: Path, name: str) -> None:
    """Check that the file `path` names its model, in a way that can be compared.

    Raises:
        SpecError: it does not.
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
