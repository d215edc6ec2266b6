"""An importance table: its rows, what it tells of itself, files and its card."""

from typing import Any

import numpy as np
import pandas as pd
import pytest

from heapr_lab.errors import CacheError, SpecError
from heapr_lab.importance.columns import atom_keys
from heapr_lab.importance.estimators import ESTIMATORS
from heapr_lab.importance.table import ImportanceTable
from heapr_lab.storage import files


def table(*shapes: tuple[int, int], **metadata: Any) -> ImportanceTable:
    """Layers 1, 3, 5 … of these many experts and atoms; the first expert unrouted."""
    keys = [pd.DataFrame(atom_keys(2 * i + 1, *s)) for i, s in enumerate(shapes)]
    frame = pd.concat(keys, ignore_index=True)
    frame["tokens"] = 10 * frame["expert"].astype(np.int64)
    for name in ("sum_h2", "sum_g2"):
        frame[name] = (frame["tokens"] * (1 + frame["atom"])).astype(np.float64)
    return ImportanceTable.from_frame(frame, **metadata)


def test_rows_keep_their_labels():
    """A score finds its row of the frame that was given."""
    index = pd.Index(list("abcd"), name="key")
    stats = ImportanceTable.from_frame(table((2, 2)).frame.set_index(index))
    assert stats.frame.index.equals(index)
    # ½ · 1 · 1 and ½ · 2 · 2 of the second expert
    assert stats.score("heapr").to_dict() == {"a": 0.0, "b": 0.0, "c": 0.5, "d": 2.0}


def test_table_does_not_change():
    """Neither the frame it was made of nor what it hands out changes it."""
    frame = table((1, 2)).frame
    stats = ImportanceTable.from_frame(frame)
    frame.loc[0, "sum_h2"] = 99.0
    handed_out = stats.frame
    handed_out.loc[0, "sum_h2"] = 99.0
    assert stats.frame.loc[0, "sum_h2"] == 0.0


def test_shapes_of_unequal_layers():
    """Each layer has its shape; what is handed out can be changed without harm."""
    stats = table((2, 3), (1, 4), (3, 1))
    assert stats.shapes() == {1: (2, 3), 3: (1, 4), 5: (3, 1)}
    assert {type(n) for shape in stats.shapes().values() for n in shape} == {int}
    stats.shapes().clear()
    assert len(stats.shapes()) == stats.n_layers == 3
    assert stats.n_atoms == 6 + 4 + 3
    with pytest.raises(SpecError, match="layer 1 has 3 rows, expected 2 experts × 2"):
        ImportanceTable.from_frame(table((2, 2)).frame.iloc[:3]).shapes()


def test_experts_of_unequal_layers():
    """Each expert has one row, even where its number is that of the one before."""
    stats = table((2, 2), (1, 2), (1, 2), N=5)
    assert stats.expert_tokens().to_dict("list") == {
        "layer": [1, 1, 3, 5],
        "expert": [0, 1, 0, 0],
        "tokens": [0, 10, 0, 0],
    }
    unrouted = stats.unrouted()
    assert unrouted.to_dict("list") == {"layer": [1, 3, 5], "expert": [0, 0, 0]}
    assert unrouted.index.tolist() == [0, 1, 2]
    assert repr(stats) == (
        "ImportanceTable(3 layers, 4 experts, 8 atoms, 5 predicted tokens (N), "
        "3 unrouted experts)"
    )


def test_what_cannot_have_been_measured_is_no_table():
    """Neither values nor a specification that was edited."""
    with pytest.raises(SpecError, match="column sum_h2 has -1"):
        ImportanceTable.from_frame(table((1, 1)).frame.assign(sum_h2=-1.0))
    with pytest.raises(SpecError, match="one of them was edited"):
        table((1, 1), spec={"a": 1}, spec_hash="0" * 64)


def test_estimators_that_the_columns_suffice_for():
    """Estimators that divide by N need it."""
    stats = table((1, 2))
    suffice = {
        name for name, row in ESTIMATORS.items() if set(row.needs) <= set(stats.frame)
    }
    per_token = {name for name in suffice if ESTIMATORS[name].per_predicted_token}
    assert per_token
    assert set(stats.estimators) == suffice - per_token
    assert set(table((1, 2), N=3).estimators) == suffice
    assert [n for n in ESTIMATORS if n in stats.estimators] == [*stats.estimators]


def test_scores_are_remembered_by_their_options():
    """The order of options does not matter; other options give other scores."""
    stats = table((1, 50))
    assert stats.scores("random", seed=1) is stats.scores("random", seed=1)
    assert (stats.scores("random", seed=1) != stats.scores("random", seed=2)).any()
    np.testing.assert_array_equal(stats.scores(), stats.score("heapr").to_numpy())
    assert stats.score().name == "heapr"
    assert stats.scores("random", seed=1).tolist() == (
        stats.score("random", seed=1).tolist()
    )


def test_the_latest_eight_values_are_remembered():
    """The oldest goes for a ninth."""
    stats = table((1, 1))
    first = [stats.memo(key, object) for key in range(8)]
    again = [stats.memo(key, object) for key in range(8)]
    assert all(a is b for a, b in zip(first, again, strict=True))
    stats.memo("ninth", object)
    assert stats.memo(1, object) is first[1]
    assert stats.memo(0, object) is not first[0]
    assert stats.memo("nothing", lambda: None) is None
    assert stats.memo("nothing", object) is None


def test_metadata_are_handed_out_as_copies():
    """What lies within them is copied too; it is plain data, as in a file."""
    stats = table((1, 1), spec={"sizes": (1, 2)})
    assert stats.metadata == {"spec": {"sizes": [1, 2]}}
    stats.metadata["spec"]["sizes"].append(3)
    assert stats.metadata == {"spec": {"sizes": [1, 2]}}


def test_a_column_that_is_missing_is_named_with_those_that_are_not():
    """The message lists what there is."""
    text = "no column sum_p, it has layer, expert, atom, tokens, sum_h2, sum_g2; read"
    with pytest.raises(SpecError, match=text):
        table((1, 1)).column("sum_p")


# --- files ------------------------------------------------------------------------


def test_file_round_trip(tmp_path):
    """What is written is read."""
    path = tmp_path / "table.parquet"
    written = table((2, 3), N=1, spec={"model": "toy", "n": [1]})
    written.write(path)
    read = ImportanceTable.read(path)
    pd.testing.assert_frame_equal(read.frame, written.frame)
    assert read.metadata == written.metadata


def test_other_files_are_refused(tmp_path):
    """Another kind of table is an error, and one with rows that repeat."""
    path, stats = tmp_path / "table.parquet", table((1, 2))
    for kind, label in (("Evaluation", "Evaluation"), (None, "another kind of table")):
        files.write_frame(path, stats.frame, {"kind": kind} if kind else {})
        with pytest.raises(CacheError, match=f"holds {label}, expected Importance"):
            ImportanceTable.read(path)
    files.write_frame(path, stats.frame.assign(atom=0), {"kind": "ImportanceTable"})
    with pytest.raises(CacheError, match=r"damaged: .* \(1, 0, 0\) follows"):
        ImportanceTable.read(path)


def test_columns_that_are_read(tmp_path):
    """The keys come first, and once."""
    path = tmp_path / "t.parquet"
    table((1, 2)).write(path)
    some = ImportanceTable.read(str(path), columns=["sum_g2", "atom"])
    assert list(some.frame) == ["layer", "expert", "atom", "sum_g2"]
    assert some.metadata == {}


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("N", 0, "has N=0, expected a positive number"),
        ("N", -1, "has N=-1, expected a positive number"),
        ("N", "7", "has N=7, expected a positive number"),
        ("N", None, "has N=None, expected a positive number"),
        ("spec", [], r"has spec=\[\], expected a dict"),
        ("spec_hash", 5, "has spec_hash=5, expected a str"),
        ("architecture", "a" * 50, f"has architecture={'a' * 40}, expected a dict"),
        ("provenance", 0, "has provenance=0, expected a dict"),
    ],
)
def test_metadata_of_other_kinds(tmp_path, name, value, expected):
    """A file that holds them is damaged, and what is wrong in it is told."""
    path = tmp_path / "t.parquet"
    metadata = {"kind": "ImportanceTable", name: value}
    files.write_frame(path, table((1, 1)).frame, metadata)
    with pytest.raises(CacheError, match=rf"t\.parquet is damaged: its .*{expected}"):
        ImportanceTable.read(str(path))


# --- display ----------------------------------------------------------------------


def test_the_card_has_quartiles_where_they_can_be_computed():
    """Least, quartiles and largest heapr score to three digits."""
    html = table((2, 5))._repr_html_()
    assert ">Importance table<" in html
    # ½ (a + 1)² for atoms a of the second expert, and five noughts
    assert ">heapr score (min, quartiles, max)<" in html
    assert "0  0  0.25  3.88  12.5" in html
    bare = ImportanceTable.from_frame(table((1, 2)).frame.drop(columns="sum_g2"))
    assert "heapr score" not in bare._repr_html_()
    broken = table((1, 1)).frame.assign(tokens=1, sum_h2=1e300, sum_g2=1e300)
    assert "not finite" in ImportanceTable.from_frame(broken)._repr_html_()
