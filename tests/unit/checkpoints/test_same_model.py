"""Whether a table or a mask is of a model is told from all of its experts' weights."""

from pathlib import Path

import pytest
import torch
from families import tiny_windows
from stored_tensors import changed_tensors

from heapr_lab import ImportanceTable, collect_statistics, select
from heapr_lab.checkpoints.same_model import own_mask, own_table
from heapr_lab.errors import SpecError
from heapr_lab.models.folders import read_weights
from heapr_lab.models.identity import model_identity
from heapr_lab.recipes.making import with_model
from heapr_lab.storage.hashing import digest


def table_of(source: Path, dtype: torch.dtype = torch.float32) -> ImportanceTable:
    """A table of the model in a folder, measured in a type."""
    model = read_weights(source, dtype=dtype)
    return collect_statistics(model, tiny_windows())


@pytest.fixture(scope="module")
def table(source) -> Path:
    """The table of the model, in a file."""
    path = source.parent / "table.parquet"
    table_of(source).write(path)
    return path


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_table_of_the_model_is_taken(dtype, source, tmp_path):
    """It may be measured in a type that rounds the weights."""
    table_of(source, dtype).write(tmp_path / "table.parquet")
    assert own_table(tmp_path / "table.parquet", source, name="moe").n_atoms == 64


def test_a_table_of_a_twin_is_refused(source, table, tmp_path):
    """Two experts have changed places, with their rows of the router."""
    read_weights(source).save_pretrained(tmp_path / "twin")
    with changed_tensors(tmp_path / "twin") as tensors:
        for name in [name for name in tensors if ".1.mlp.experts.2." in name]:
            other = name.replace(".2.", ".3.")
            tensors[name], tensors[other] = tensors[other], tensors[name]
        router = "model.layers.1.mlp.gate.weight"
        tensors[router] = tensors[router][[0, 1, 3, 2]]
    with pytest.raises(SpecError, match="another model than twin: weights v2:"):
        own_table(table, tmp_path / "twin", name="twin")


def of_another_model(table: ImportanceTable, **changes: object) -> ImportanceTable:
    """The table, whose model differs in what its specification says of it."""
    spec = table.metadata["spec"]
    spec = {**spec, "model": {**spec["model"], **changes}}
    facts = {**table.metadata, "spec": spec, "spec_hash": digest(spec)}
    return ImportanceTable(table.frame, facts)


TYPES = "expected .*float32.*: make it again"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"dtype": "float8"}, f"measured in 'float8', {TYPES}"),
        ({"dtype": "load"}, f"measured in 'load', {TYPES}"),
        ({"dtype": None}, f"measured in None, {TYPES}"),
        ({"active": "0" * 64}, "while a mask was active"),
    ],
)
def test_what_else_was_measured_is_named(changes, said, source, table, tmp_path):
    """In an unknown type, which is the name of something else in torch, or masked."""
    other = of_another_model(ImportanceTable.read(table), **changes)
    other.write(tmp_path / "other.parquet")
    with pytest.raises(SpecError, match=said):
        own_table(tmp_path / "other.parquet", source, name="moe")


def test_what_was_made_before_is_refused_with_what_to_do(source, table, tmp_path):
    """It is not called another model's: its hash of weights cannot be compared."""
    new = ImportanceTable.read(table)
    old = of_another_model(new, weights="0" * 64)
    old.write(tmp_path / "old.parquet")
    with pytest.raises(SpecError, match=r"earlier version .* `heapr-lab score`"):
        own_table(tmp_path / "old.parquet", source, name="moe")

    identity = model_identity(read_weights(source))
    path, keep = tmp_path / "mask.parquet", select(new, ratio=0.5)
    with_model(keep, old).write(path)
    with pytest.raises(SpecError, match=r"earlier version .* `heapr-lab prune`"):
        own_mask(path, identity, name="moe")
    with_model(keep, new).write(path)
    assert own_mask(path, identity, name="moe") == keep
