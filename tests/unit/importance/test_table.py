"""An importance table is sorted, typed, unchanging, and survives files and merging."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from heapr_lab.errors import CacheError, SpecError
from heapr_lab.importance.table import ImportanceTable
from heapr_lab.storage import files


def rows(**columns: object) -> pd.DataFrame:
    """One layer of two experts with two atoms each."""
    return pd.DataFrame(
        {
            "layer": [2, 2, 2, 2],
            "expert": [0, 0, 1, 1],
            "atom": [0, 1, 0, 1],
            "tokens": [4, 4, 0, 0],
            "sum_h2": np.array([1.0, 2.0, 0.0, 0.0], dtype=np.float32),
            "sum_g2": np.array([8.0, 16.0, 0.0, 0.0], dtype=np.float32),
            "max_abs_h": np.array([1.0, 5.0, 0.0, 0.0], dtype=np.float32),
            "w_down_sq": np.array([1.0, 2.0, 3.0, 4.0], dtype=np.float32),
            **columns,
        }
    )


# --- rows -----------------------------------------------------------------------


def test_rows_are_sorted_and_typed() -> None:
    """Rows in any order are sorted, keep their labels, and have the small types."""
    frame = rows().iloc[[3, 0, 2, 1]]
    table = ImportanceTable.from_frame(frame)
    assert table.frame.index.tolist() == [0, 1, 2, 3]
    kinds = ["int16", "int16", "int32", "int64"]
    assert table.frame.dtypes.astype(str).tolist()[:4] == kinds
    # heapr ½ · 1/4 · 8/4 and ½ · 2/4 · 16/4; a score finds its row of the user's frame.
    assert table.score("heapr")[frame.index].tolist() == [0.0, 0.25, 0.0, 1.0]


def test_score_is_on_the_index_of_the_frame() -> None:
    """Scores are named and lie on the index that the frame came with."""
    index = pd.Index(list("abcd"), name="key")
    scores = ImportanceTable.from_frame(rows().set_index(index)).score("heapr")
    assert scores.index.equals(index)
    assert scores.name == "heapr"
    assert scores.tolist() == [0.25, 1.0, 0.0, 0.0]


def test_sums_keep_their_precision() -> None:
    """float32 and float64 sums stay what they are; whole numbers become float64."""
    frame = rows(sum_h2=[1, 2, 0, 0], sum_g2=np.arange(4, dtype=np.float64))
    kinds = ImportanceTable.from_frame(frame).frame.dtypes
    assert [str(kinds[n]) for n in ("sum_h2", "sum_g2", "max_abs_h")] == [
        "float64",
        "float64",
        "float32",
    ]


def test_table_does_not_change() -> None:
    """Neither the frame it was made of nor what it hands out changes it."""
    frame = rows()
    table = ImportanceTable.from_frame(frame, N=3)
    frame.loc[0, "sum_h2"] = 99.0
    handed_out = table.frame
    handed_out.loc[0, "sum_h2"] = 99.0
    table.metadata["N"] = 99
    assert table.frame.loc[0, "sum_h2"] == 1.0
    assert table.metadata == {"N": 3}


@pytest.mark.parametrize(
    ("frame", "message"),
    [
        (rows().drop(columns="atom"), "lacks column atom"),
        (rows().iloc[:0], "has 0 rows"),
        (rows(atom=[0, 0, 0, 1]), r"1 rows are repeated, first .* \(2, 0, 0\)"),
        (rows(expert=[0, 0, -1, -1]), "count from 0"),
        (rows(tokens=[1.5, 1, 1, 1]), "column tokens must hold whole numbers"),
        (rows(layer=2**16 + 2), "column layer must hold whole numbers that fit int16"),
    ],
)
def test_bad_rows_are_refused(frame: pd.DataFrame, message: str) -> None:
    """What cannot be a table is an error that says why."""
    with pytest.raises(SpecError, match=message):
        ImportanceTable.from_frame(frame)


def test_shapes() -> None:
    """Shapes are read off the rows; an expert that lacks atoms is an error."""
    table = ImportanceTable.from_frame(rows())
    assert table.shapes() == {2: (2, 2)}
    assert (table.n_layers, table.n_atoms) == (1, 4)
    with pytest.raises(SpecError, match="layer 2 has 3 rows, expected 2 experts × 2"):
        ImportanceTable.from_frame(rows().iloc[:3]).shapes()


def test_unrouted_experts() -> None:
    """Tokens are read once per expert, and experts without any are named."""
    table = ImportanceTable.from_frame(rows())
    assert table.expert_tokens().to_numpy().tolist() == [[2, 0, 4], [2, 1, 0]]
    assert table.unrouted().to_numpy().tolist() == [[2, 1]]


def test_neighbouring_experts_of_two_layers_are_two() -> None:
    """Where the expert's number stays and only the layer changes, there are two."""
    frame = pd.DataFrame(
        {"layer": [0, 1], "expert": [0, 0], "atom": [0, 0], "tokens": [5, 7]}
    )
    table = ImportanceTable.from_frame(frame)
    assert table.expert_tokens()["tokens"].tolist() == [5, 7]


def test_missing_parts_are_named() -> None:
    """Columns and an architecture that the table lacks are errors."""
    table = ImportanceTable.from_frame(rows())
    with pytest.raises(SpecError, match="no column sum_hg2"):
        table.column("sum_hg2")
    with pytest.raises(SpecError, match="no architecture"):
        _ = table.architecture


def test_memo_computes_once_and_forgets_the_oldest() -> None:
    """A value is computed once while it is among the latest few."""
    table = ImportanceTable.from_frame(rows())
    computed: list[int] = []

    def ask(key: int) -> int:
        return table.memo(key, lambda: computed.append(key) or key)

    assert [ask(0), ask(0)] == [0, 0]
    assert computed == [0]
    for key in range(1, 9):
        ask(key)
    ask(8)
    ask(0)
    assert computed == [*range(9), 0]


# --- files ----------------------------------------------------------------------


def test_file_round_trip(tmp_path: Path) -> None:
    """What is written is read, whole or by column."""
    path = tmp_path / "table.parquet"
    table = ImportanceTable.from_frame(rows(), N=3, spec={"model": "toy", "n": [1]})
    table.write(path)
    read = ImportanceTable.read(path)
    pd.testing.assert_frame_equal(read.frame, table.frame)
    assert read.metadata == table.metadata
    part = ImportanceTable.read(path, columns=["sum_h2"])
    assert list(part.frame) == ["layer", "expert", "atom", "sum_h2"]


def test_other_files_are_refused(tmp_path: Path) -> None:
    """A truncated file, a foreign one, and another kind of table are errors."""
    path = tmp_path / "table.parquet"
    ImportanceTable.from_frame(rows()).write(path)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(CacheError, match=r"table\.parquet cannot be read"):
        ImportanceTable.read(path)
    rows().to_parquet(path)
    with pytest.raises(CacheError, match="was not written by heapr_lab"):
        ImportanceTable.read(path)
    files.write_frame(path, rows(), {"kind": "Evaluation"})
    with pytest.raises(CacheError, match="holds Evaluation, expected an Importance"):
        ImportanceTable.read(path)
    files.write_frame(path, rows(atom=0), {"kind": "ImportanceTable"})
    with pytest.raises(CacheError, match="is damaged: 2 rows are repeated"):
        ImportanceTable.read(path)


# --- merging --------------------------------------------------------------------


def test_merge_by_hand() -> None:
    """Sums and N add, maxima take the larger, norms and the architecture stay."""
    other = rows(
        tokens=[1, 1, 2, 2],
        sum_h2=np.float32(3.0),
        max_abs_h=np.array([2.0, 2.0, 2.0, 2.0], dtype=np.float32),
    )
    a = ImportanceTable.from_frame(
        rows(),
        N=3,
        spec={"model": "toy", "calibration": "A"},
        provenance={"device": "cpu"},
    )
    b = ImportanceTable.from_frame(
        other, N=4, spec={"model": "toy", "calibration": "B"}
    )
    c = ImportanceTable.from_frame(
        other, N=4, spec={"model": "toy", "calibration": "C"}
    )
    merged = a.merge(b)
    assert merged.frame["tokens"].tolist() == [5, 5, 2, 2]
    assert merged.frame["sum_h2"].tolist() == [4.0, 5.0, 3.0, 3.0]
    assert merged.frame["sum_h2"].dtype == np.float32
    assert merged.frame["max_abs_h"].tolist() == [2.0, 5.0, 2.0, 2.0]
    assert merged.frame["w_down_sq"].tolist() == [1.0, 2.0, 3.0, 4.0]
    assert merged.metadata["N"] == 7
    spec = merged.metadata["spec"]
    assert spec["model"] == "toy"
    assert [part["calibration"] for part in spec["merged"]] == ["A", "B"]
    assert len(merged.merge(c).metadata["spec"]["merged"]) == 3


@pytest.mark.parametrize(
    ("frame", "metadata", "message"),
    [
        (rows().drop(columns="sum_g2"), {"N": 1}, "only one of them has sum_g2"),
        (rows().iloc[:2], {"N": 1}, "different rows: 4 and 2 atoms"),
        (rows(atom=[0, 1, 0, 2]), {"N": 1}, "row 3 has atom 1 in one and 2 in the"),
        (rows(w_down_sq=1.0), {"N": 1}, "w_down_sq differs in 3 of 4 rows"),
        (rows(), {}, "only one of the tables has N"),
        (
            rows(),
            {"N": 1, "spec": {"model": "other"}},
            "differ in model: toy and other",
        ),
        (
            rows(),
            {"N": 1, "architecture": {"d_model": 4}},
            "different architectures: they differ in d_model",
        ),
    ],
)
def test_merging_what_differs_is_refused(
    frame: pd.DataFrame, metadata: dict[str, object], message: str
) -> None:
    """Tables of other atoms, weights or models do not add up."""
    table = ImportanceTable.from_frame(rows(), N=1, spec={"model": "toy"})
    with pytest.raises(SpecError, match=message):
        table.merge(ImportanceTable.from_frame(frame, **metadata))


def test_merging_needs_a_rule() -> None:
    """A column that is neither a sum nor a maximum is not guessed at."""
    table = ImportanceTable.from_frame(rows(mine=1.0))
    with pytest.raises(SpecError, match="cannot merge column mine"):
        table.merge(table)


# --- display --------------------------------------------------------------------


def test_display_is_a_summary() -> None:
    """The card counts layers, experts, atoms, tokens and unrouted experts."""
    table = ImportanceTable.from_frame(rows(), N=1234)
    html = table._repr_html_()
    for text in ("2</td>", "1,234", "unrouted experts", "var(--jp-", "0  0  0.125"):
        assert text in html
    assert "<script" not in html
    assert "4 atoms" in repr(table)
    broken = ImportanceTable.from_frame(rows(sum_h2=1e300, sum_g2=1e300))
    assert "not finite" in broken._repr_html_()
