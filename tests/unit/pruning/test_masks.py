"""A mask is what its fingerprint says, as long as it lives."""

import copy
import dataclasses
import pickle
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from score_tables import TWO_LAYERS, make_table

from heapr_lab import KeepMask, select
from heapr_lab.errors import CacheError, SpecError
from heapr_lab.storage import files


@pytest.fixture
def keep() -> KeepMask:
    """Two layers; three of eight atoms go."""
    arrays = {0: [[True, False], [True, True]], 3: [[False, False], [True, True]]}
    return KeepMask.from_arrays(arrays, estimator="fisher")


def test_the_layers_of_a_mask_stay(keep):
    """None is replaced, added or taken away."""
    print_before = keep.fingerprint
    with pytest.raises(TypeError, match="does not support item assignment"):
        keep.arrays[0] = np.ones((2, 2), bool)  # type: ignore[index]
    with pytest.raises(TypeError, match="doesn't support item deletion"):
        del keep.arrays[0]  # type: ignore[attr-defined]
    assert KeepMask(keep.arrays).fingerprint == keep.fingerprint == print_before


@pytest.mark.parametrize("name", ["by_layer", "arrays", "rows"])
def test_the_atoms_of_a_mask_stay(keep, name):
    """No array can be written to, nor made so that it could."""
    array = {"by_layer": keep.by_layer(3), "arrays": keep.arrays[3], "rows": keep.rows}
    with pytest.raises(ValueError, match="read-only"):
        array[name][0] = True
    with pytest.raises(ValueError, match="cannot set WRITEABLE flag"):
        array[name].setflags(write=True)
    base = array[name].base
    assert not isinstance(base, np.ndarray) or not base.flags.writeable


def test_what_it_was_made_of_may_change():
    """Arrays and settings are copied."""
    array, settings = np.array([[True, False]]), {"ratio": 0.5}
    keep = KeepMask({0: array}, settings)
    array[:] = False
    settings["ratio"] = 0.7
    assert keep.n_kept == 1
    assert keep.settings == {"ratio": 0.5}
    assert KeepMask(keep.arrays).settings == {}


def test_copies_are_equal_and_as_fixed(keep):
    """Copies by pickle, copy, deepcopy and replace, with their settings."""
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


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (np.ones(7, bool), r"shape \(7,\), expected \(8,\): one for each atom"),
        (np.ones((2, 4), bool), r"shape \(2, 4\), expected \(8,\)"),
        (np.ones(8), r"mask of layer 0 is float64 \(2, 2\), expected bool"),
    ],
)
def test_rows_of_something_else_are_refused(keep, rows, message):
    """Another number of them, or no truth values."""
    with pytest.raises(SpecError, match=message):
        KeepMask.from_rows(keep, rows)


def test_a_mask_is_no_other_thing(keep):
    """Nor does it compare with one; equal masks are one key."""
    assert keep != keep.fingerprint
    assert keep.__eq__("x") is NotImplemented
    assert len({keep, KeepMask(keep.arrays)}) == 1


# --- files ------------------------------------------------------------------------

RAGGED = {7: [[True, False, True], [False, True, True]], 2: [[True], [False], [False]]}
"""Layers of other shapes, not in order."""


@pytest.fixture
def path(tmp_path) -> Path:
    """The file of a mask of `RAGGED`."""
    path = tmp_path / "mask.parquet"
    KeepMask.from_arrays(RAGGED, estimator="heapr", ratio=0.25).write(path)
    return path


def test_a_mask_comes_back_from_its_file(path):
    """It has its settings, and every atom where it was."""
    keep = KeepMask.read(path)
    assert keep == KeepMask.from_arrays(RAGGED)
    assert keep.settings == {"estimator": "heapr", "ratio": 0.25}
    assert {k: kept.tolist() for k, kept in keep.arrays.items()} == RAGGED


def test_the_file_of_a_mask_has_a_row_for_each_atom(path):
    """Anyone can read it without this package."""
    frame = pd.read_parquet(path)
    rows = [[k, *at, kept] for k in (2, 7) for at, kept in np.ndenumerate(RAGGED[k])]
    expected = pd.DataFrame(rows, columns=["layer", "expert", "atom", "keep"])
    types = {"layer": np.int16, "expert": np.int16, "atom": np.int32, "keep": bool}
    pd.testing.assert_frame_equal(frame, expected.astype(types))
    metadata = files.read_metadata(path)
    assert metadata["kind"] == "KeepMask"
    assert metadata["fingerprint"] == KeepMask.from_arrays(RAGGED).fingerprint


def test_a_file_of_another_kind_is_named(tmp_path):
    """A table of scores is no mask."""
    path = tmp_path / "table.parquet"
    make_table(TWO_LAYERS).write(path)
    message = "holds ImportanceTable, expected KeepMask; give"
    with pytest.raises(CacheError, match=message):
        KeepMask.read(path)


@pytest.mark.parametrize("name", ["layer", "expert", "keep"])
def test_a_mask_with_another_value_was_changed(path, name):
    """Its atoms are not those that it has the fingerprint of."""
    frame, metadata = files.read_frame(path)
    frame.loc[3:, name] = ~frame.loc[3:, name] if name == "keep" else 3
    files.write_frame(path, frame, metadata)
    wrong = r"was changed after it was written: its atoms have the fingerprint \w{12},"
    with pytest.raises(CacheError, match=wrong):
        KeepMask.read(path)


# --- what is shown ----------------------------------------------------------------


def test_widths_and_ratios_are_named():
    """Numbers where every layer has as many experts, else missing ones too."""
    keep = KeepMask.from_arrays(RAGGED)
    widths = keep.widths()
    assert (widths.index.name, widths.columns.name) == ("layer", "expert")
    assert set(widths.dtypes) == {pd.Int64Dtype()}
    expected = pd.DataFrame(
        {0: [1, 2], 1: [0, 2], 2: [0, pd.NA]}, index=[2, 7], dtype="Int64"
    )
    pd.testing.assert_frame_equal(widths, expected, check_names=False)
    whole = KeepMask.from_arrays({7: RAGGED[7]}).widths()
    assert set(whole.dtypes) == {np.dtype(np.int64)}
    ratios = pd.Series({2: 2 / 3, 7: 1 / 3}, name="pruning_ratio").rename_axis("layer")
    pd.testing.assert_series_equal(keep.layer_ratios(), ratios)


# --- counts and arrays ---


def test_fingerprint_tells_masks_apart():
    """Masks are equal by what they keep: bits, shapes and layers, not settings."""
    keep = KeepMask.from_arrays({0: [[True, False]]})
    assert keep == KeepMask.from_arrays({0: [[True, False]]}, ratio=0.5)
    others = [{0: [[False, True]]}, {1: [[True, False]]}, {0: [[True], [False]]}]
    assert all(keep != KeepMask.from_arrays(other) for other in others)
    assert len(keep.fingerprint) == 64


def test_full_mask_keeps_everything():
    """The full mask has the table's shapes and removes nothing."""
    table = make_table(TWO_LAYERS)
    assert KeepMask.full(table) == select(table, ratio=0)
    assert KeepMask.full(table).n_removed == 0


@pytest.mark.parametrize("array", [[[1, 0]], [True, False], np.ones((0, 2), bool)])
def test_bad_arrays_are_refused(array):
    """Only bool (n_experts, d_inter) is a mask."""
    with pytest.raises(SpecError, match=r"mask of layer 0 is .* expected bool"):
        KeepMask.from_arrays({0: array})


def test_absent_layers_are_errors():
    """A mask without layers, or asked for one it lacks, says so."""
    with pytest.raises(SpecError, match="at least one layer"):
        KeepMask.from_arrays({})
    with pytest.raises(SpecError, match="has no layer 3; it has 0"):
        KeepMask.from_arrays({0: [[True]]}).by_layer(3)
