"""Tables are the results, with their units, the paper's rows marked."""

import pandas as pd
import pytest
from figure_rows import cost_rows

from heapr_lab import figures
from heapr_lab.errors import SpecError


def test_main_table_is_a_pivot_of_the_results(results: pd.DataFrame) -> None:
    """Cells are the evaluation values; HEAPr is the global one, CAMERA layer-wise."""
    data = figures.main_data(results)
    table = figures.main_table(data)
    assert list(table["method"]) == [
        "dense model",
        *("HEAPr", "CAMERA-P (layer-wise)") * 2,
    ]
    assert list(table["removed [%]"]) == [0, 20, 20, 50, 50]
    # 20 · (1 + harm · ratio), harm 0.1 and 0.5
    assert list(table["wikitext2 perplexity ↓"]) == pytest.approx(
        [20, 20.4, 22, 21, 25]
    )
    assert table["continuation accuracy [%] ↑"][1] == pytest.approx(49)
    assert table["± continuation accuracy"][1] == pytest.approx(1)
    paper = data[data["source"].eq("paper")]
    assert list(paper["value"]) == [6.54, 6.80]


def test_cost_table_states_units_and_marks_the_paper() -> None:
    """Seconds, MiB and the multiple of the baseline; the paper's rows are marked."""
    data = figures.cost_data(cost_rows(), baseline="plain")
    table = figures.cost_table(data)
    ours = table[table["source"].eq("measured here")]
    assert list(ours["time [s] ↓"]) == [10, 12]
    assert list(ours["peak memory [MiB] ↓"]) == [2, 2]
    assert list(ours["time ÷ baseline [×] ↓"]) == [1, 1.2]
    paper = table[table["source"].str.startswith("paper, not comparable")]
    assert len(paper) == len(figures.paper_table("cost"))
    ax = figures.plot_cost(data, quantity="seconds")
    assert [bar.get_width() for bar in ax.patches] == [10, 12]
    assert ax.get_xlabel() == "time [s] ↓"
    with pytest.raises(SpecError, match="no row of baseline 'two_stage'"):
        figures.cost_data(cost_rows(), baseline="two_stage")


def test_speed_is_that_of_sliced_models_against_the_dense() -> None:
    """Only sliced rows, with the share of the bytes that is left."""
    rows = [
        {"ratio": 0.0, "method": "dense_eager", "parameter_bytes": 100},
        {"ratio": 0.0, "method": "sliced", "parameter_bytes": 100},
        {"ratio": 0.4, "method": "masked", "parameter_bytes": 100},
        {"ratio": 0.4, "method": "sliced", "parameter_bytes": 70},
    ]
    measured = pd.DataFrame(rows).assign(
        mode="decode_batch_1",
        tokens_per_second=10.0,
        speedup_over_dense=1.3,
        predicted_speedup=1.4,
        share_of_predicted=1.3 / 1.4,
    )
    table = figures.speed_table(measured)
    assert table["mode"].tolist() == ["decode batch 1"]
    assert table["bytes ÷ dense ↓"].tolist() == [0.7]
    assert "at once ÷ dense ↑" not in table
    other = measured[measured["method"].eq("sliced")].assign(
        method="sliced_at_once", speedup_over_dense=[1.0, 1.5]
    )
    table = figures.speed_table(pd.concat([measured, other]))
    assert table["at once ÷ dense ↑"].tolist() == [1.5]


def test_serving_is_that_of_each_structure_against_the_dense() -> None:
    """A row for each mode and ratio as measured, two columns for each structure."""
    modes = ("prefill_batch_8", "decode_batch_1")
    models = [("dense", 0.0)]
    models += [(name, ratio) for name in ("uniform", "ragged") for ratio in (0.2, 0.4)]
    rows = [
        {"mode": mode, "structure": name, "ratio": ratio}
        for mode in modes
        for name, ratio in models
    ]
    numbers = [float(number) for number in range(len(rows))]
    measured = pd.DataFrame(rows).assign(
        speedup_over_dense=numbers, share_of_predicted=[-x for x in numbers]
    )
    table = figures.serving_table(measured)
    assert table["mode"].tolist() == ["prefill batch 8"] * 2 + ["decode batch 1"] * 2
    assert table["ratio"].tolist() == [0.2, 0.4] * 2
    assert table["uniform ÷ dense ↑"].tolist() == [1, 2, 6, 7]
    assert table["ragged: of predicted ↑"].tolist() == [-3, -4, -8, -9]


def test_paper_tables_are_found_or_named() -> None:
    """The published numbers load; an unknown table's error names those there are."""
    assert list(figures.paper_table("boundary")["accuracy_retained"]) == [0.93, 0.38]
    with pytest.raises(SpecError, match=r"no table 'speed'.*'boundary'"):
        figures.paper_table("speed")
