"""The pictures hold the numbers of the mask, and are quick."""

import time
from io import BytesIO
from typing import Any

import numpy as np
import pandas as pd
import pytest
from figure_rows import dots_of
from matplotlib.colors import to_hex
from matplotlib.image import imread
from random_tables import random_table, small_table

from heapr_lab.importance.table import ImportanceTable
from heapr_lab.panel.compare_tab import CompareTab
from heapr_lab.panel.pictures import ChoicePicture, drawn_png, figure_points
from heapr_lab.panel.session import POINT_COLUMNS, PruningSession
from heapr_lab.pruning.masks import KeepMask
from heapr_lab.pruning.options import Selection
from heapr_lab.pruning.selection import select

DRAW_SECONDS = 0.15


def test_picture_shows_the_mask():
    """Bars, line, cells and bins hold the mask's numbers; one mask, the same bytes.

    A cell is white where nothing stays, and has its expert's colour where all does.
    """
    table = small_table()
    picture = ChoicePicture(table)
    arrays = {0: np.zeros((2, 4), bool), 1: np.ones((2, 4), bool)}
    arrays[0][1, :3] = True
    keep = KeepMask.from_arrays(arrays)
    first = picture.draw(keep, estimator="heapr")
    bars, cells, bins = picture.figure.axes[:3]
    assert [bar.get_height() for bar in bars.patches] == [5 / 8, 0]
    assert bars.get_lines()[0].get_ydata()[0] == 5 / 16
    shown = np.asarray(cells.images[0].get_array())
    assert (shown[0, 0] == 1).all()
    np.testing.assert_allclose(1 - shown[0, 1], 0.75 * (1 - shown[1, 1]))
    counts = [stairs.get_data().values.sum() for stairs in bins.patches]
    assert counts == [16, 5]

    full = picture.draw(KeepMask.full(table), estimator="heapr")
    assert full != first
    assert imread(BytesIO(first)).std() > 0.01  # not blank
    assert picture.draw(keep, estimator="heapr") == first
    other = picture.draw(keep, estimator="random")
    assert other != first
    assert picture.draw(keep, estimator="heapr") == first


def test_cells_have_the_colour_of_their_load():
    """The busiest is the reddest; where no token went it is as for an even share.

    Experts that a layer does not have are grey.
    """
    frame = random_table(2, 2, 4).frame
    tokens = np.repeat([0, 20, 0, 0], 4)
    few = ImportanceTable.from_frame(frame.assign(tokens=tokens))
    more = random_table(1, 3, 4).frame.assign(layer=5, tokens=7)
    table = ImportanceTable.from_frame(pd.concat([few.frame, more]))
    picture = ChoicePicture(table)
    picture.draw(KeepMask.full(table), estimator="heapr")
    cells = picture.figure.axes[1].images[0].get_array()
    assert cells[0, 0, 0] < cells[1, 0, 0] < cells[0, 1, 0]
    np.testing.assert_array_equal(cells[1, :2], cells[2, :2])
    assert (cells[:2, 2] == cells[0, 2, 0]).all()


def test_the_cut_is_the_highest_score_removed():
    """Every score below it goes, in a global choice; it is there for all scales."""
    table = small_table()
    picture = ChoicePicture(table)
    for ratio in (0.25, 0.75):
        keep = select(table, Selection(ratio))
        picture.draw(keep, estimator="heapr")
        scores = table.score("heapr").to_numpy()
        gone = ~keep.rows
        (cut,) = {float(x) for x in picture.figure.axes[2].get_lines()[0].get_xdata()}
        step = (scores.max() / scores.min()) ** (1 / 80)
        assert scores[gone].max() <= cut <= scores[gone].max() * step**1.01


def test_whole_experts_stand_in_the_histogram_of_whole_experts():
    """Scores are summed; all that go are below the cut where all sizes agree."""
    table = random_table(2, 4, 16)
    keep = select(table, Selection(0.5, granularity="expert"))
    picture = ChoicePicture(table)
    picture.draw(keep, estimator="heapr", granularity="expert")
    bins = picture.figure.axes[2]
    every, gone = (stairs.get_data().values for stairs in bins.patches)
    assert (every.sum(), gone.sum()) == (8, 4)
    (cut,) = {float(x) for x in bins.get_lines()[0].get_xdata()}
    sums = table.scores("heapr").reshape(8, 16).sum(1)
    assert (sums <= cut).sum() == 4
    assert bins.get_ylabel() == "whole experts [count]"
    assert bins.get_xlabel() == "score [nats per routed token]"
    picture.draw(keep, estimator="heapr")
    assert bins.get_ylabel() == "atomic experts [count]"


def test_picture_is_quick():
    """A change takes well under 150 ms of the processor, at 48 × 128 experts too."""
    table = random_table(48, 128, 4)
    picture = ChoicePicture(table)
    picture.draw(select(table, Selection(0.25)), estimator="heapr")
    started = time.thread_time()
    picture.draw(select(table, Selection(0.5)), estimator="heapr")
    assert time.thread_time() - started < DRAW_SECONDS


# --- of points and pins ---------------------------------------------------------------


def points_of(*rows: dict[str, Any]) -> pd.DataFrame:
    """Points of a session, each with a loss of its own unless it has an accuracy."""
    points = []
    for number, row in enumerate(rows):
        ratio = 0.25 + 0.01 * number
        plain = {"selection": Selection(ratio), "estimator": "heapr"}
        plain |= {"achieved_ratio": ratio, "dataset": "pydocs"}
        plain |= {"weights": "masked"}
        loss = 0.1 * (number + 1)
        if "accuracy" not in row:
            plain |= {"nll": 3 + loss, "delta_nll": loss, "perplexity": np.exp(3)}
        points.append(plain | row)
    return pd.DataFrame(points, columns=list(POINT_COLUMNS))


def test_each_choice_has_its_own_colour_and_marker():
    """Corpus and estimator are the same; the legend says what tells them apart."""
    (ax,) = figure_points(
        points_of(
            {},
            {"dataset": "ptb"},
            {"selection": Selection(0.3, structure="uniform", multiple=8)},
            {"selection": Selection(0.3, min_atoms=3)},
            {"selection": Selection(0.3, exclude_layers=(0, 2))},
            {"selection": Selection(0.3, of="model")},
        )
    ).axes
    lines = ax.get_lines()
    labels = [line.get_label() for line in lines]
    rules = "measured: heapr, global, by atom"
    assert labels == [
        f"pydocs, {rules}, ragged, masked",
        f"ptb, {rules}, ragged, masked",
        f"pydocs, {rules}, uniform, multiples of 8, masked",
        f"pydocs, {rules}, ragged, at least 3 atoms each, masked",
        f"pydocs, {rules}, ragged, layers 0, 2 not pruned, masked",
        f"pydocs, {rules}, ragged, of the parameters (model), masked",
    ]
    looks = [(to_hex(line.get_color()), line.get_marker()) for line in lines]
    assert looks[0] == looks[1]  # one choice
    assert lines[0].get_linestyle() != lines[1].get_linestyle()  # two corpora
    colors, markers = zip(*looks[1:], strict=True)
    assert len(set(colors)) == len(set(markers)) == 5


def test_accuracy_is_drawn_in_a_chart_of_its_own():
    """It is in per cent, with standard errors and a dense line, below the loss."""
    task = {"dataset": "continuation", "stderr": 0.05}
    alone = figure_points(points_of({}))
    dense = {"estimator": "dense", "selection": None, "achieved_ratio": 0.0}
    accuracies = {**task, **dense, "accuracy": 0.7}, {**task, "accuracy": 0.5}
    both = figure_points(points_of({}, *accuracies))
    heights = [drawn_png(lambda fig=fig: fig)[20:24] for fig in (alone, both)]
    assert int.from_bytes(heights[1], "big") == 2 * int.from_bytes(heights[0], "big")
    losses, accuracy = both.axes
    assert losses.get_position().width == alone.axes[0].get_position().width
    ((curve, _, bars),) = [c.lines for c in accuracy.containers]
    assert curve.get_ydata().tolist() == [50.0]
    (segment,) = bars[0].get_segments()
    assert np.ptp(segment[:, 1]) == pytest.approx(2 * 5)
    (line,) = [n for n in accuracy.get_lines() if "dense" in n.get_label()]
    assert set(line.get_ydata()) == {70.0}
    (of_tasks,) = figure_points(points_of(*accuracies)).axes
    assert of_tasks.get_ylabel() == accuracy.get_ylabel() == "accuracy [%] ↑"


def test_pins_have_one_colour_and_marker_and_corpora_one_filling():
    """Both charts of the comparison agree, with a legend for each."""
    session = PruningSession(random_table(2, 4, 16))
    tab = CompareTab(session)
    for ratio in (0.25, 0.5):
        session.choose(Selection(ratio=ratio))
        tab.pin()
    frame = tab.frame().assign(**{"Δloss pydocs": [0.1, 0.2], "Δloss ptb": [0.3, 0.4]})
    figure = tab.figure(frame)
    left, right = figure.axes
    of_pins = [(line.get_color(), line.get_marker()) for line in left.get_lines()]
    assert [len(set(looks)) for looks in zip(*of_pins, strict=True)] == [2, 2]
    dots = dots_of(right)
    looks = {(dot.get_color(), dot.get_marker(), dot.get_fillstyle()) for dot in dots}
    assert len(dots) == len(looks) == 4
    assert {look[:2] for look in looks} == set(of_pins)
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["A", "B"]
    named = [(line.get_color(), line.get_marker()) for line in legend.get_lines()]
    assert named == of_pins
    corpora = [text.get_text() for text in right.get_legend().get_texts()]
    assert corpora == ["pydocs", "ptb"]
