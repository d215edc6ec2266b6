"""A mask is what its fingerprint says, as long as it lives."""

import copy
import dataclasses
import pickle

import numpy as np
import pytest

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
