"""A mask is what its fingerprint says, as long as it lives."""

import copy
import dataclasses
import pickle

import numpy as np
import pandas as pd
import pytest

from heapr_lab.errors import SpecError
from heapr_lab.importance.table import ImportanceTable
from heapr_lab.pruning.masks import KeepMask


@pytest.fixture
def keep() -> KeepMask:
    """Two layers; three of eight atoms go."""
    arrays = {0: [[True, False], [True, True]], 3: [[False, False], [True, True]]}
    return KeepMask.from_arrays(arrays, estimator="fisher")


def test_the_layers_of_a_mask_stay(keep: KeepMask) -> None:
    """None is replaced, added or taken away."""
    print_before = keep.fingerprint
    with pytest.raises(TypeError, match="does not support item assignment"):
        keep.arrays[0] = np.ones((2, 2), bool)  # type: ignore[index]
    with pytest.raises(TypeError, match="doesn't support item deletion"):
        del keep.arrays[0]  # type: ignore[attr-defined]
    assert KeepMask(keep.arrays).fingerprint == keep.fingerprint == print_before


@pytest.mark.parametrize("name", ["by_layer", "arrays", "rows"])
def test_the_atoms_of_a_mask_stay(keep: KeepMask, name: str) -> None:
    """No array can be written to, nor made so that it could."""
    array = {"by_layer": keep.by_layer(3), "arrays": keep.arrays[3], "rows": keep.rows}
    with pytest.raises(ValueError, match="read-only"):
        array[name][0] = True
    with pytest.raises(ValueError, match="cannot set WRITEABLE flag"):
        array[name].setflags(write=True)
    base = array[name].base
    assert not isinstance(base, np.ndarray) or not base.flags.writeable


def test_the_arrays_it_was_made_of_may_change() -> None:
    """They are copied."""
    array = np.array([[True, False]])
    keep = KeepMask.from_arrays({0: array})
    array[:] = False
    assert keep.n_kept == 1


def test_copies_are_equal_and_as_fixed(keep: KeepMask) -> None:
    """By pickle, copy, deepcopy and replace, with their settings."""
    assert keep.fingerprint
    for other in (
        pickle.loads(pickle.dumps(keep)),
        copy.copy(keep),
        copy.deepcopy(keep),
        dataclasses.replace(keep, settings=keep.settings),
    ):
        assert other == keep
        assert other.settings == keep.settings
        assert other.achieved_ratio == 3 / 8
        with pytest.raises(ValueError, match="cannot set WRITEABLE flag"):
            other.by_layer(0).setflags(write=True)


def test_rows_are_those_of_a_table() -> None:
    """Layers of other shapes: row after row is where the table's keys say it is."""
    shapes = {1: (2, 3), 4: (3, 2), 5: (1, 5)}
    keys = [
        (layer, expert, atom)
        for layer, (n_experts, d_inter) in shapes.items()
        for expert in range(n_experts)
        for atom in range(d_inter)
    ]
    frame = pd.DataFrame(keys, columns=["layer", "expert", "atom"])
    table = ImportanceTable.from_frame(frame.assign(tokens=1, sum_h2=1.0, sum_g2=1.0))
    stays = np.random.default_rng(0).random(len(keys)) < 0.5
    keep = KeepMask.from_rows(table, stays, estimator="fisher")
    found = [keep.by_layer(k)[expert, atom] for k, expert, atom in keys]
    assert found == stays.tolist()
    assert keep.rows.tolist() == found
    assert keep.shapes() == table.shapes() == shapes
    assert keep.settings == {"estimator": "fisher"}
    assert KeepMask.from_rows(keep, keep.rows) == keep


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (np.ones(7, bool), r"shape \(7,\), expected \(8,\): one for each atom"),
        (np.ones((2, 4), bool), r"shape \(2, 4\), expected \(8,\)"),
        (np.ones(8), r"mask of layer 0 is float64 \(2, 2\), expected bool"),
    ],
)
def test_rows_of_something_else_are_refused(
    keep: KeepMask, rows: np.ndarray, message: str
) -> None:
    """Another number of them, or no truth values."""
    with pytest.raises(SpecError, match=message):
        KeepMask.from_rows(keep, rows)
