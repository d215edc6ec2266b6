"""Checks that a table or a mask belongs to the model it is used with."""

from pathlib import Path

import numpy as np

from heapr_lab.checkpoints.slice_files import squared_norms
from heapr_lab.errors import SpecError
from heapr_lab.importance.table import ImportanceTable
from heapr_lab.models.folders import read_config, skeleton_of
from heapr_lab.models.identity import WEIGHTS_VERSION, architecture_identity
from heapr_lab.pruning.masks import KeepMask


def own_table(path: Path, source: Path, *, name: str) -> ImportanceTable:
    """The importance table in a file, if it was measured on the model in `source`.

    The model is not loaded: the configurations are compared, and the squared norms of
    every atom's weights in the table with those of the files, which are read once.

    Raises:
        SpecError: it was measured on another model, or does not name its model.
        CacheError: the file is damaged or of another kind.
    """
    table = ImportanceTable.read(path)
    spec = table.metadata.get("spec") or {}
    skeleton = skeleton_of(read_config(source))
    own = architecture_identity(skeleton)
    _check_identity(spec.get("model"), own, path=path, name=name)
    if "active" in spec["model"]:
        raise SpecError(
            f"{path} was measured while a mask was active, not on the dense {name}; "
            "make it with `heapr-lab score`"
        )
    _check_norms(squared_norms(source, skeleton), table, path=path, name=name)
    return table


_NORMS_DIFFER = {"bfloat16": 1e-2, "float16": 1e-2}
"""Relative change of a squared norm by rounding to a dtype; less in wider ones."""


def _check_norms(
    norms: dict[int, dict[str, np.ndarray]],
    table: ImportanceTable,
    *,
    path: Path,
    name: str,
) -> None:
    """Check that a table's squared norms are those of the model's weights.

    Raises:
        SpecError: they are not.
    """
    frame, spec = table.frame, table.metadata["spec"]
    tolerance = _NORMS_DIFFER.get(spec["model"].get("dtype"), 1e-4)
    for layer, own in norms.items():
        rows = frame[frame["layer"].eq(layer)]
        for column, expected in own.items():
            table.column(column)  # raises an error if it is missing
            found = rows[column].to_numpy()
            if len(found) != expected.size:
                raise SpecError(
                    f"{path} was made for another model than {name}: it has "
                    f"{len(found)} atoms in layer {layer}, the model {expected.size}; "
                    "make it from this model"
                )
            same = np.isclose(found, expected.ravel(), rtol=tolerance, atol=0)
            if not same.all():
                raise SpecError(
                    f"{path} was made for another model than {name}: the weights of "
                    f"expert {int(np.argmin(same)) // expected.shape[1]} in layer "
                    f"{layer} have other norms ({column}); make it from this model"
                )


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
    found: dict[str, str] | None, own: dict[str, str], *, path: Path, name: str
) -> None:
    """Check that the file `path` is of this model, in any dtype.

    Raises:
        SpecError: it is of another model, or does not name its model.
    """
    if not found:
        raise SpecError(
            f"{path} does not say which model it was made for; make it with "
            "`heapr-lab score` or `heapr-lab prune`"
        )
    if not str(found.get("weights")).startswith(WEIGHTS_VERSION):
        raise SpecError(
            f"{path} was made by an earlier version of heapr_lab, which identified a "
            f"model by some of its weights only, so that it may not be of {name}: make "
            "it again, a table with `heapr-lab score`, a mask with `heapr-lab prune`"
        )
    # Not the dtype: a table measured in bfloat16 is valid for the weights in float32.
    differ = [
        part
        for part in ("class", "config", "weights")
        if part in own and found.get(part) != own[part]
    ]
    if differ:
        shown = ", ".join(
            f"{part} {str(found.get(part))[:16]} instead of {own[part][:16]}"
            for part in differ
        )
        raise SpecError(
            f"{path} was made for another model than {name}: {shown}; make it from "
            "this model, with the same --dtype"
        )
