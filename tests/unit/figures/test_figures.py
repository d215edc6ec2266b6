"""Figures: the numbers that go in are the numbers that are drawn and written."""

import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from figure_rows import (
    ROUTED_SHARE,
    Keep,
    bins_frame,
    cost_rows,
    evaluation,
    evaluation_rows,
    measured_damage,
    measured_front,
    measured_quality,
    measured_structures,
    saving_rows,
)

from heapr_lab import figures
from heapr_lab.errors import SpecError
from heapr_lab.figures.bins import spearman_interval
from heapr_lab.figures.files import format_column, table_latex, table_markdown
from heapr_lab.storage.hashing import digest


@pytest.fixture(autouse=True)
def _close_figures() -> Iterator[None]:
    mpl.use("Agg")
    yield
    plt.close("all")


@pytest.fixture
def results() -> pd.DataFrame:
    """Perplexity 20 · (1 + harm · ratio) and accuracy 0.5 · (1 − harm · ratio)."""
    return evaluation_rows()


@pytest.fixture
def savings() -> pd.DataFrame:
    """0.75 of the model is routed; atoms save 0.4 of their ratio in FLOPs."""
    return saving_rows()


def lines_of(ax: plt.Axes) -> dict[str, np.ndarray]:
    """Points (n, 2) of every labelled curve or line of `ax`, by label."""
    return {
        label: (handle[0] if hasattr(handle, "lines") else handle).get_xydata()
        for handle, label in zip(*ax.get_legend_handles_labels(), strict=True)
    }


def test_layer_bars_are_the_removed_shares() -> None:
    """Bars are the layers' shares in per cent, the line is the global ratio."""
    data = figures.layer_ratios_data({0.25: Keep(0.4, 0.1), 0.5: Keep(0.7, 0.3)})
    by_hand = data.groupby("ratio")["layer_ratio"].mean().to_dict()
    assert by_hand == pytest.approx({0.25: 0.25, 0.5: 0.5})
    ax = figures.plot_layer_ratios(data[data["ratio"].eq(0.25)])
    assert [bar.get_height() for bar in ax.patches] == [0.4, 0.1]
    assert [bar.get_center()[0] for bar in ax.patches] == pytest.approx([1, 2])
    assert set(ax.get_lines()[0].get_ydata()) == {0.25}
    assert ax.get_ylabel() == "removed [% of the layer]"
    assert ax.yaxis.get_major_formatter()(0.4, 0) == "40"
    assert len(figures.figure_layer_ratios(data).axes) == 2


def test_spearman_is_that_of_pandas_and_its_interval_is_seeded() -> None:
    """ρ agrees with pandas, lies in its interval, and a seed repeats the interval."""
    data = figures.bins_data(bins_frame(), seed=3)
    found = data.attrs["spearman"]
    # 1 − 6 Σd² / (n (n² − 1)) with Σd² = 2 and n = 10
    assert found["index"]["rho"] == pytest.approx(1 - 12 / 990)
    rows = data[data["order"].eq("index")]
    by_pandas = rows["score_sum"].rank().corr(rows["delta_nll"].rank())
    assert found["index"]["rho"] == pytest.approx(by_pandas)
    assert found["index"]["rho_low"] < found["index"]["rho"]
    assert found["index"]["rho_high"] <= 1 + 1e-12
    assert figures.bins_data(bins_frame(), seed=3).attrs == data.attrs
    assert found["score"] == pytest.approx({"rho": 1, "rho_low": 1, "rho_high": 1})


def test_spearman_of_unrelated_numbers_has_an_interval_around_zero() -> None:
    """The interval covers 0 where there is nothing to see, and is wide."""
    rng = np.random.default_rng(0)
    x, y = pd.Series(rng.normal(size=10)), pd.Series(rng.normal(size=10))
    found = spearman_interval(x, y, n_resamples=500, seed=0)
    assert found["rho_low"] < 0 < found["rho_high"]
    assert found["rho_high"] - found["rho_low"] > 0.5


def test_bins_are_drawn_where_they_were_measured() -> None:
    """Points are (summed score, Δloss); ρ and its interval stand in the panel."""
    data = figures.bins_data(bins_frame())
    ax = figures.plot_bins(data, order="index")
    rows = data[data["order"].eq("index")]
    drawn = ax.get_lines()[0].get_xydata()
    assert drawn == pytest.approx(rows[["score_sum", "delta_nll"]].to_numpy())
    assert "[nats per routed token]" in ax.get_xlabel()
    assert "[nats per token]" in ax.get_ylabel()
    texts = " ".join(text.get_text() for text in ax.texts)
    assert "ρ = 0.99" in texts
    assert "95 % interval" in texts
    assert figures.plot_bins(data, order="score").get_xscale() == "log"


def test_bins_of_two_data_sets_must_be_told_apart() -> None:
    """An ambiguous frame is refused, with the data sets it holds."""
    both = pd.concat([bins_frame(), bins_frame().assign(dataset="ptb")])
    with pytest.raises(SpecError, match=r"'ptb', 'pydocs'"):
        figures.bins_data(both)
    assert len(figures.bins_data(both, dataset="ptb")) == 20


def test_calibration_size_is_mean_and_spread_over_seeds() -> None:
    """Values and error bars are pandas' mean and standard deviation over seeds."""
    rng = np.random.default_rng(0)
    frame = pd.DataFrame(
        [
            evaluation(
                0.2,
                "wikitext2",
                20 + rng.normal(),
                calibration=corpus,
                n_sequences=size,
                seed=seed,
            )
            for corpus in ("pydocs", "ptb")
            for size in (8, 128)
            for seed in range(3)
        ]
        + [evaluation(0.0, "wikitext2", 19.5, estimator="dense")]
    )
    data = figures.calibration_size_data(frame)
    pruned = frame[frame["estimator"].eq("heapr")]
    expected = pruned.groupby(["calibration", "n_sequences"])["value"].agg(
        ["mean", "std"]
    )
    assert data["value"].to_numpy() == pytest.approx(expected["mean"].to_numpy())
    assert data["spread"].to_numpy() == pytest.approx(expected["std"].to_numpy())
    assert set(data["n_seeds"]) == {3}
    assert set(data["dense"]) == {19.5}
    ax = figures.plot_calibration_size(data)
    drawn = lines_of(ax)["calibrated on PTB"]
    rows = data[data["calibration"].eq("ptb")]
    assert drawn == pytest.approx(rows[["n_sequences", "value"]].to_numpy())
    bar = ax.containers[0].lines[2][0].get_segments()[0]
    assert bar[1, 1] - bar[0, 1] == pytest.approx(2 * rows["spread"].iloc[0])
    assert ax.get_xlabel() == "calibration [sequences]"
    assert ax.get_ylabel() == "perplexity ↓"


def test_boundary_places_the_paper_on_the_axis_of_the_whole_model(
    results: pd.DataFrame, savings: pd.DataFrame
) -> None:
    """0.4 and 0.9 of the whole model are 0.4 / 0.75 and 0.9 / 0.75 of our atoms."""
    data = figures.boundary_data(results, savings)
    paper = data[data["source"].eq("paper") & data["metric"].eq("accuracy")]
    assert list(paper["ratio"]) == pytest.approx([0.4 / 0.75, 0.9 / 0.75])
    assert list(paper["parameter_reduction"]) == pytest.approx([0.4, 0.9])
    assert list(paper["relative"]) == [0.93, 0.38]
    assert list(paper["at_most"]) == [True, False]
    ax = figures.plot_boundary(data, quantity="flops_reduction")
    label = "paper: DeepSeekMoE-16B, not comparable (other model and data)"
    points = lines_of(ax)[label]
    assert points == pytest.approx(np.array([[0.4 / 0.75, 0.2], [1.2, 0.55]]))
    (top,) = ax.child_axes
    assert top.get_xlabel() == "of the whole model [%]"
    ax.figure.canvas.draw()
    assert list(top.get_xlim()) == pytest.approx(np.array(ax.get_xlim()) * ROUTED_SHARE)
    assert ax.get_ylabel() == "FLOPs saved [%] ↑"


def test_flops_say_at_which_context_they_were_counted(
    results: pd.DataFrame, savings: pd.DataFrame
) -> None:
    """In the legend of the boundary and the title of the granularity, where known."""
    told = "at 256 tokens of context"
    for frame, known in ((savings, False), (savings.assign(seq_len=256), True)):
        data = figures.boundary_data(results, frame)
        ax = figures.plot_boundary(data, quantity="flops_reduction")
        assert (f"FLOPs {told}" in lines_of(ax)) == known
        data = figures.granularity_data(results, frame)
        ax = figures.plot_granularity(data, metric="flops_reduction")
        title = ax.get_title(loc="left")
        assert title == "whole model" + f"\n{told}" * known


def test_boundary_curves_are_the_evaluation_rows(
    results: pd.DataFrame, savings: pd.DataFrame
) -> None:
    """Perplexity is absolute on a log axis, accuracy is relative to the dense model."""
    data = figures.boundary_data(results, savings)
    ax = figures.plot_boundary(data, quantity="perplexity")
    # 20 · (1 + 0.1 · ratio)
    expected = [[0, 20], [0.2, 20.4], [0.5, 21]]
    assert lines_of(ax)["WikiText-2"] == pytest.approx(np.array(expected))
    assert ax.get_yscale() == "log"
    ax = figures.plot_boundary(data, quantity="accuracy")
    expected = [[0, 1], [0.2, 0.98], [0.5, 0.95]]
    assert lines_of(ax)["continuation"] == pytest.approx(np.array(expected))
    # one choice of four, where the dense model is right half the time
    assert set(lines_of(ax)["guessing"][:, 1]) == {0.5}
    assert len(figures.figure_boundary(data).axes) == 3


def test_granularity_compares_atoms_with_experts(
    results: pd.DataFrame, savings: pd.DataFrame
) -> None:
    """Each granularity has its own curve, and the paper's points their own marker."""
    data = figures.granularity_data(results, savings)
    ax = figures.plot_granularity(data, metric="perplexity")
    drawn = lines_of(ax)
    assert drawn["atomic experts"][-1] == pytest.approx([0.5, 1.05])
    assert drawn["whole experts"][-1] == pytest.approx([0.5, 1.2])
    paper = data[data["source"].eq("paper") & data["metric"].eq("perplexity")]
    points = paper.set_index(["name", "ratio"])["relative"]
    assert points["atom", 0.2] == pytest.approx(6.54 / 6.38)
    assert points["expert", 0.4] == pytest.approx(8.00 / 6.38)
    hollow = [line for line in ax.get_lines() if line.get_markerfacecolor() == "none"]
    assert {line.get_marker() for line in hollow} == {"o", "s"}
    assert ax.get_ylabel() == "perplexity ÷ dense [×] ↓"
    flops = figures.plot_granularity(data, metric="flops_reduction")
    assert lines_of(flops)["atomic experts"][:, 1] == pytest.approx([0, 0.08, 0.2])


def test_scope_compares_global_with_layer_wise(results: pd.DataFrame) -> None:
    """Curves are named by scope; the paper's are Qwen1.5-MoE's accuracies kept."""
    data = figures.scope_data(results)
    drawn = lines_of(figures.plot_scope(data, metric="accuracy"))
    assert drawn["global (HEAPr-G)"][-1, 1] == pytest.approx(0.95)
    assert drawn["layer-wise (HEAPr-L)"][-1, 1] == pytest.approx(0.9)
    paper = data[data["source"].eq("paper")].set_index(["name", "ratio"])
    # means of the seven tasks as printed (the paper's own average here, 53.59, is not
    # that of its seven cells)
    pruned = (31.80 + 68.60 + 67.22 + 55.67 + 37.56 + 76.39 + 34.87) / 700
    dense = (0.31 + 0.70 + 0.66 + 0.59 + 0.40 + 0.79 + 0.35) / 7
    assert paper.loc[("global", 0.25), "relative"] == pytest.approx(pruned / dense)


def test_two_rows_for_one_point_are_refused(results: pd.DataFrame) -> None:
    """A frame with two seeds is ambiguous, and the error names the column."""
    two = pd.concat([results, results.assign(seed=1, value=results["value"] * 1.01)])
    with pytest.raises(SpecError, match=r"differ in \['seed', 'value'"):
        figures.main_data(two)


def test_a_missing_dense_row_is_refused(results: pd.DataFrame) -> None:
    """Relative values need the dense model's, and the error says which is missing."""
    without = results[results["estimator"].ne("dense")]
    with pytest.raises(SpecError, match=r"'continuation', 'accuracy'"):
        figures.main_data(without)


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


def test_an_atomic_expert_is_two_rows_and_a_column() -> None:
    """Atom k owns row k of W_gate and of W_up and column k of W_down, nothing else."""
    data = figures.atomic_expert_data(d_model=3, d_inter=5, atom=2)
    own = data[data["of_atom"]].groupby("matrix")
    assert own.size().to_dict() == {"W_down": 3, "W_gate": 3, "W_up": 3, "e_k": 3}
    assert set(own["row"].unique()["W_gate"]) == {2}
    assert set(own["row"].unique()["W_up"]) == {2}
    assert set(own["column"].unique()["W_down"]) == {2}
    sizes = data.groupby("matrix").size()
    assert sizes["W_gate"] == sizes["W_up"] == sizes["W_down"] == 15
    ax = figures.plot_atomic_expert(data)
    text = " ".join(artist.get_text() for artist in ax.texts)
    assert "column $k$ of $W_{\\mathrm{down}}$" in text
    with pytest.raises(SpecError, match="expected 0 to 4"):
        figures.atomic_expert_data(d_inter=5, atom=5)


def test_width_heat_map_holds_the_widths() -> None:
    """Cells are the widths, dots the used experts, crosses the unrouted ones."""
    widths = pd.DataFrame([[4, 0, 2], [1, 3, 4]], index=[1, 3])
    tokens = pd.DataFrame([[10, 0, 30], [5, 5, 10]], index=[1, 3])
    ax = figures.plot_widths(widths, tokens, full_width=4)
    mesh, dots, crosses = ax.collections
    assert mesh.get_array().tolist() == widths.to_numpy().tolist()
    assert [label.get_text() for label in ax.get_yticklabels()] == ["1", "3"]
    # areas are shares of the layer: 10/40 and 30/40, then 5/20, 5/20 and 10/20
    areas = dots.get_sizes() / dots.get_sizes().max()
    assert areas == pytest.approx([1 / 3, 1, 1 / 3, 1 / 3, 2 / 3])
    assert crosses.get_offsets().tolist() == [[1, 0]]
    assert ax.figure.axes[1].get_ylabel() == "atomic experts kept [count]"


def test_score_histogram_counts_every_positive_score_once() -> None:
    """Counts add up, the cut parts them exactly, and zeros are reported."""
    values = np.random.default_rng(0).lognormal(sigma=2, size=1000)
    scores = pd.Series([0.0, 0.0, *values], name="heapr")
    cut = float(np.sort(values)[250])
    data = figures.score_histogram_data(scores, cut)
    assert data["n_atoms"].sum() == 1000
    assert data.attrs["n_not_positive"] == 2
    assert data.loc[data["removed"], "n_atoms"].sum() == (values < cut).sum() == 250
    ax = figures.plot_score_histogram(scores, cut)
    assert sum(bar.get_height() for bar in ax.patches) == 1000
    assert ax.get_xlabel() == "score, HEAPr [nats per routed token]"
    with pytest.raises(SpecError, match="none of 2 scores is above 0"):
        figures.score_histogram_data(pd.Series([0.0, 0.0]))


def test_score_histogram_of_equal_scores_has_them_all() -> None:
    """One value, repeated, is one full bin."""
    data = figures.score_histogram_data(pd.Series([0.3] * 7))
    assert data["n_atoms"].sum() == 7


def test_the_same_figure_is_the_same_bytes(tmp_path: Path) -> None:
    """Two figures of the same data, and one figure saved twice, are equal files."""
    data = figures.layer_ratios_data({0.25: Keep(0.4, 0.1)})
    source = {"spec": "abc", "ratio": 0.25}
    figure = figures.figure_layer_ratios(data)
    first = figures.save_figure(figure, tmp_path / "a" / "bars", provenance=source)
    again = figures.save_figure(figure, tmp_path / "b" / "bars", provenance=source)
    anew = figures.save_figure(
        figures.figure_layer_ratios(data), tmp_path / "c" / "bars", provenance=source
    )
    assert [path.name for path in first] == ["bars.png", "bars.pdf"]
    for one, two, three in zip(first, again, anew, strict=True):
        assert one.read_bytes() == two.read_bytes() == three.read_bytes()
    other = figures.save_figure(
        figure, tmp_path / "d" / "bars", provenance={"spec": "other"}
    )
    assert other[0].read_bytes() != first[0].read_bytes()


_DRAW = """
import shutil, sys
from pathlib import Path
from matplotlib import font_manager
folder, of_system = Path(sys.argv[1]), sys.argv[2:]
if of_system:  # the list may have fonts of the system, and not those of matplotlib
    manager = font_manager.fontManager
    own = [e for e in manager.ttflist if e.name == "DejaVu Sans"]
    manager.ttflist.clear()
    for path in {e.fname for e in own}:
        manager.addfont(shutil.copy(path, folder))
    changed = folder / "DejaVuSans.ttf"
    from fontTools.ttLib import TTFont
    with TTFont(changed) as font:
        font["head"].created += 1
        font.save(changed)
from heapr_lab import figures
picture = figures.Display.from_results("atomic_expert")
picture.save(folder / picture.kind, provenance={"b": 1, "a": {}})
"""


def test_bytes_do_not_depend_on_the_machine(tmp_path: Path) -> None:
    """Another hash seed, folder, configuration and font list, and the same files."""
    folders = []
    for seed, *of_system in (("1",), ("2", "system")):
        folder = tmp_path / seed
        folder.mkdir()
        own = {"PYTHONHASHSEED": seed, "MPLCONFIGDIR": str(folder / "configuration")}
        command = [sys.executable, "-c", _DRAW, str(folder), *of_system]
        subprocess.run(command, check=True, cwd=folder, env=os.environ | own)
        folders.append(folder)
    for suffix in ("png", "pdf", "csv"):
        first, second = (folder / f"atomic_expert.{suffix}" for folder in folders)
        assert first.read_bytes() == second.read_bytes(), suffix


def test_files_carry_the_provenance_and_no_date(tmp_path: Path) -> None:
    """PNG and PDF name the hash of the provenance; the PDF has no creation date."""
    source = {"spec": "abc"}
    ax = figures.plot_atomic_expert()
    png, pdf = figures.save_figure(ax.figure, tmp_path / "x", provenance=source)
    mark = f"provenance sha256:{digest(source)}".encode()
    assert b"Description\x00heapr-lab " + mark in png.read_bytes()
    assert mark in pdf.read_bytes()
    assert b"CreationDate" not in pdf.read_bytes()
    assert b"/FontFile2" in pdf.read_bytes()  # TrueType (42), not Type 3


def test_tables_are_written_in_three_forms(tmp_path: Path) -> None:
    """CSV keeps every digit; Markdown and LaTeX are rounded, escaped and marked."""
    table = pd.DataFrame({"a_b [%] ↓": [28.31494, math.nan], "name": ["x|y", "50 %"]})
    source = {"spec": "abc"}
    csv, md, tex = figures.write_table(table, tmp_path / "t", provenance=source)
    pd.testing.assert_frame_equal(pd.read_csv(csv), table)
    assert md.read_text(encoding="utf-8").splitlines()[:4] == [
        "| a_b [%] ↓ | name |",
        "| ---: | --- |",
        r"| 28.31 | x\|y |",
        "| — | 50 % |",
    ]
    latex = tex.read_text(encoding="utf-8")
    assert r"a\_b [\%] $\downarrow$ & name \\" in latex
    assert r"--- & 50 \% \\" in latex
    for rule in (r"\toprule", r"\midrule", r"\bottomrule"):
        assert rule in latex
    assert '"spec":"abc"' in latex.splitlines()[0]
    assert '"spec":"abc"' in md.read_text(encoding="utf-8").splitlines()[-1]
    assert table_markdown(table) in md.read_text(encoding="utf-8")
    assert latex.endswith(table_latex(table))


def test_a_column_has_one_number_of_decimals() -> None:
    """The median gets four significant digits; whole numbers get no decimals."""
    assert format_column(pd.Series([28.3149, 9.5])) == ["28.31", "9.50"]
    assert format_column(pd.Series([10.0, 100 * 0.3])) == ["10", "30"]
    assert format_column(pd.Series([0.0, 0.012345])) == ["0.00000", "0.01235"]
    assert format_column(pd.Series([3, None], dtype="Int64")) == ["3", "—"]


def test_the_style_ends_with_the_figure() -> None:
    """Plotting leaves the caller's settings alone, and never draws on their Axes."""
    before = dict(mpl.rcParams)
    _, theirs = plt.subplots()
    ax = figures.plot_layer_ratios(figures.layer_ratios_data({0.5: Keep(0.7, 0.3)}))
    assert dict(mpl.rcParams) == before
    assert ax is not theirs
    assert not theirs.has_data()
    data = figures.layer_ratios_data({0.5: Keep(0.7, 0.3)})
    assert figures.plot_layer_ratios(data, ax=theirs) is theirs


def test_estimators_look_different_from_each_other() -> None:
    """No two estimators share a colour or a marker; a name always looks the same."""
    names = (
        *("heapr", "heapr_total", "fisher", "taylor"),
        *("camera", "magnitude", "frequency", "random"),
    )
    looks = [figures.look(name) for name in names]
    assert len({shown.color for shown in looks}) == len(names)
    assert len({shown.marker for shown in looks}) == len(names)
    assert figures.look("of my own") == figures.look("of my own")


def test_type_is_readable_at_readme_width(
    results: pd.DataFrame, savings: pd.DataFrame
) -> None:
    """Figures are 7 inches wide and no text is below 8 points."""
    figure = figures.figure_boundary(figures.boundary_data(results, savings))
    assert figure.get_size_inches()[0] == 7
    texts = figure.findobj(mpl.text.Text)
    assert min(text.get_fontsize() for text in texts if text.get_text()) >= 8


def test_paper_tables_are_found_or_named() -> None:
    """The published numbers load; an unknown table's error names those there are."""
    assert list(figures.paper_table("boundary")["accuracy_retained"]) == [0.93, 0.38]
    with pytest.raises(SpecError, match=r"no table 'speed'.*'boundary'"):
        figures.paper_table("speed")


def test_figures_import_without_torch() -> None:
    """Drawing needs no torch."""
    code = "import sys, heapr_lab.figures; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


# --- structures -------------------------------------------------------------------


def test_structures_are_a_row_each_and_a_panel_for_each_ratio() -> None:
    """Both show what is above ragged widths, which have no multiple, at equal atoms."""
    data = figures.structures_data(measured_structures())
    table = figures.structures_table(data)
    assert table["widths a multiple of"].tolist() == ["any", "6", "12", "6"]
    assert table["40 % [nats per token] ↓"].tolist() == pytest.approx([0.1, 1, 2, 3])
    figure = figures.figure_structures(data)
    assert [ax.get_title(loc="left") for ax in figure.axes] == [
        "20 % removed",
        "40 % removed",
    ]
    lines = [line.get_ydata() for line in figure.axes[1].get_lines()]
    heights = [height for line in lines for height in map(float, line)]
    assert heights == pytest.approx([0, 0, 1, 2, 3])


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


# --- damage -----------------------------------------------------------------------


def test_damage_table_counts_what_was_not_fitted() -> None:
    """Errors of unused ratios with a Δloss: 0.5 over, 0.4 under; 3 × and 1/4 ×."""
    table = figures.damage_table(figures.damage_data(measured_damage()))
    assert table["map of"].tolist() == ["pydocs"] * 3
    assert table["points"].tolist() == [2, 3, 3]
    assert table["median error [%] ↓"].tolist() == pytest.approx([200, 45, 75])
    assert table["largest error [%] ↓"].tolist() == pytest.approx([200, 50, 75])
    assert table["at ratio [%]"].tolist()[1] == 50
    assert table["naive ÷ measured"].tolist() == pytest.approx([0.25] * 3)


def test_damage_panels_fill_what_was_fitted() -> None:
    """Of the maps of most points: a panel for each corpus, on the same axes."""
    figure = figures.figure_damage(figures.damage_data(measured_damage()))
    assert [ax.get_title(loc="left") for ax in figure.axes] == [
        "pydocs\nby the map of pydocs",
        "WikiText-2\nby the map of pydocs",
    ]
    assert figure.axes[0].get_xlim() == figure.axes[1].get_ylim()
    drawn = {
        ax.get_title(loc="left"): {
            line.get_markerfacecolor(): line.get_xydata().tolist()
            for line in ax.get_lines()
            if line.get_marker() == figures.look("fisher").marker
        }
        for ax in figure.axes
    }
    fitted, carried = drawn.values()
    assert fitted["none"] == pytest.approx(np.array([[0.3, 0.2], [1.2, 2]]))
    assert fitted[figures.look("fisher").color] == [[0.1, 0.1]]
    assert len(carried["none"]) == 3
    assert set(carried) == {"none"}


def test_damage_without_a_measured_rise_has_no_error() -> None:
    """A Δloss of 0 cannot be divided by, nor drawn on a logarithmic axis."""
    data = figures.damage_data(measured_damage())
    assert data["relative_error"].isna().tolist() == [True, False, False, False] * 3


# --- the front of two budgets -----------------------------------------------------


def test_points_that_another_beats_are_not_on_the_front() -> None:
    """A point is dominated by one that saves as much of both and loses as little."""
    data = figures.pareto_data(measured_front())
    # (0.4, 0.5, 0.04) saves more of both than (0.2, 0.26, 0.05) and loses less.
    assert data["efficient"].tolist() == [True, False, True, False, True]
    twice = pd.concat([measured_front().iloc[:1]] * 2)
    assert figures.pareto_data(twice)["efficient"].all()


def test_the_front_has_a_panel_for_each_ratio_and_hollow_points() -> None:
    """A curve for each estimator along its prices; dominated points are hollow."""
    data = figures.pareto_data(measured_front())
    figure = figures.figure_pareto(data)
    titles = [ax.get_title(loc="left") for ax in figure.axes]
    assert titles == ["20 % of parameters", "40 % of parameters"]
    curves = lines_of(figure.axes[0])
    assert curves["HEAPr"].tolist() == [[0.22, 0.03], [0.26, 0.05]]
    assert curves["Fisher"].tolist() == [[0.2, 0.02], [0.21, 0.04]]
    hollow = [
        line.get_xydata().tolist()
        for line in figure.axes[0].get_lines()
        if line.get_markerfacecolor() == "white"
    ]
    assert [[0.26, 0.05]] in hollow
    assert [[0.21, 0.04]] in hollow
    assert figure.axes[0].xaxis.get_major_formatter()(0.2, 0) == "20"


def test_the_table_of_the_front_is_in_per_cent() -> None:
    """A row for each point by ratio, estimator and price."""
    table = figures.pareto_table(figures.pareto_data(measured_front()))
    assert table["estimator"].tolist() == ["heapr"] * 2 + ["fisher"] * 3
    assert table["parameters saved [%]"].tolist() == [20, 20, 20, 20, 40]
    assert table["routed FLOPs saved [%] ↑"].tolist() == pytest.approx(
        [22, 26, 20, 21, 50]
    )
    assert table["on the front"].tolist() == ["yes", "", "yes", "", "yes"]


# --- quality ----------------------------------------------------------------------


def test_quality_is_relative_to_the_paper() -> None:
    """Mean over HEAPr's mean, (0.05 + 0.12) / (0.1 + 0.2); the worst of a seed, 0.6."""
    data = figures.quality_data(measured_quality())
    own = data[data["variant"].eq("shrunk")]
    assert own["relative_worst"].tolist() == pytest.approx([0.6] * 4)
    assert own["delta_nll_std"].iloc[0] == pytest.approx(0.07 / 2**0.5)
    table = figures.quality_table(data).set_index("variant")
    assert table.loc["shrunk", "40 % [× HEAPr] ↓"] == pytest.approx(0.17 / 0.3)
    assert table.loc["shrunk", "worst at 40, 60 % [×]"] == pytest.approx(0.6)
    figure = figures.figure_quality(data)
    titles = [ax.get_title(loc="left") for ax in figure.axes]
    assert titles == ["pydocs", "wikitext2"]
    drawn = [bars.lines[0].get_ydata() for bars in figure.axes[0].containers]
    assert [values.tolist() for values in drawn] == [
        pytest.approx([0.15]),
        pytest.approx([0.085]),
    ]


def test_the_ratio_gained_is_where_the_loss_is_the_same() -> None:
    """Losses grow as the cube of the ratio, ours an eighth of the paper's: twice."""
    rows = [
        {"ratio": ratio, "variant": variant, "delta_nll": share * ratio**3}
        for ratio in (0.2, 0.4, 0.6, 0.8)
        for variant, share in (("heapr", 1.0), ("shrunk", 1 / 8))
    ]
    measured = pd.DataFrame(rows).assign(
        calibration="pydocs", test="pydocs", seed=0, equal="atoms", model="lab model",
        routed_flops_reduction=0.3, passes=3, seconds=1.0,
    )  # fmt: skip
    table = figures.quality_table(figures.quality_data(measured)).set_index("variant")
    gains = table["ratio of the loss of HEAPr at 40 % [×] ↑"]
    assert gains["heapr"] == pytest.approx(1)
    assert gains["shrunk"] == pytest.approx(2)
    at_most = table.loc["shrunk", "ratio of the loss of HEAPr at 60 % [×] ↑"]
    assert at_most == pytest.approx(0.8 / 0.6)  # no more than was measured


def test_accuracy_has_the_error_of_its_items() -> None:
    """Two corpora add their variances; two seeds, which share the items, do not."""
    rows = [
        {"calibration": c, "variant": "heapr", "ratio": 0.4, "seed": seed,
         "accuracy": 0.5 + 0.1 * seed, "stderr": 0.03, "dense": dense}
        for c, dense in (("pydocs", 0.7), ("wikitext2", 0.5))
        for seed in (0, 1)
    ]  # fmt: skip
    table = figures.accuracy_table(pd.DataFrame(rows))
    assert table.to_numpy().tolist() == [["heapr", "60.0%", "55.0% ± 2.1%"]]


def test_the_mixture_is_not_in_the_table() -> None:
    """It is in the data; the table is of the corpora alone."""
    measured = measured_quality()
    mixed = measured[measured["calibration"].eq("pydocs")].assign(
        calibration="0.5*pydocs + 0.5*wikitext2", delta_nll=100.0
    )
    data = figures.quality_data(pd.concat([measured, mixed]))
    assert data["calibration"].nunique() == 3
    table = figures.quality_table(data)
    assert table["worst at 40, 60 % [×]"].max() == pytest.approx(1.0)
    assert [ax.get_title(loc="left") for ax in figures.figure_quality(data).axes] == [
        "pydocs",
        "wikitext2",
    ]


def test_outliers_are_shown_with_who_prunes_them() -> None:
    """Losses in nats, and three of the counts."""
    counts = {"magnitude at 0.2": 11, "heapr at 0.8": 0, "shrunk at 0.8": 0}
    row = {"first by": "fisher", "atoms": 12, "of atoms": 100, "pydocs Δloss": 0.5}
    table = figures.outliers_table(pd.DataFrame([row | counts | {"heapr at 0.2": 0}]))
    assert table["pydocs Δloss [nats per token]"].tolist() == [0.5]
    assert table.filter(like="%").to_numpy().tolist() == [[11, 0, 0]]
