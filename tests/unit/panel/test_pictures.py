"""The pictures hold the numbers of the mask, and are quick."""

import time
from io import BytesIO

import numpy as np
import pandas as pd
from matplotlib.image import imread
from random_tables import random_table, small_table

from heapr_lab.importance.table import ImportanceTable
from heapr_lab.panel.pictures import ChoicePicture
from heapr_lab.panel.session import PruningSession
from heapr_lab.pruning.masks import KeepMask
from heapr_lab.pruning.options import Selection

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
        session = PruningSession(table)
        session.choose(Selection(ratio=ratio))
        picture.draw(session.keep, estimator="heapr")
        scores = table.score("heapr").to_numpy()
        gone = ~session.keep.rows
        (cut,) = {float(x) for x in picture.figure.axes[2].get_lines()[0].get_xdata()}
        step = (scores.max() / scores.min()) ** (1 / 80)
        assert scores[gone].max() <= cut <= scores[gone].max() * step**1.01


def test_picture_is_quick():
    """A change takes well under 150 ms of the processor, at 48 × 128 experts too."""
    table = random_table(48, 128, 4)
    session = PruningSession(table)
    picture = ChoicePicture(table)
    picture.draw(session.keep, estimator="heapr")
    started = time.thread_time()
    session.choose(Selection(ratio=0.5))
    picture.draw(session.keep, estimator="heapr")
    assert time.thread_time() - started < DRAW_SECONDS
