"""The tables of pretrained models, in absolute numbers."""

import math

import pandas as pd
import pytest
from figure_rows import item_rows, real_row, window_rows

from benchmarks.figures import real


def test_the_front_is_of_one_draw_and_of_what_all_of_its_states_have():
    """Other draws and controls are in the whole table alone."""
    named = {"model": real.MODEL, "fitted_to": real.FRONT_TEXT}
    dense = real_row("dense", 0.0)
    text = {"fitted_to": real.FRONT_TEXT}
    others = ("heapr", {}), ("heapr", {"seed": 1}), ("random", {})
    pruned = [real_row(name, 0.25, **text, **more) for name, more in others]
    rows = pd.DataFrame([dense, *pruned])
    losses = {("dense", 0.0): math.log(20), ("heapr", 0.25): math.log(45)}
    windows = window_rows(losses, "ptb").assign(**named, seed=0)
    few = windows["method"].eq("dense") | windows["window"].lt(1)
    answers = {("dense", 0.0): [1, 0, 1, 0], ("heapr", 0.25): [0, 1]}
    items = item_rows(answers).assign(**named, seed=0)
    front = real.real_front_table(rows, windows[few], items)
    assert front["method"].tolist() == ["dense", "HEAPr", "guessing"]
    assert front["perplexity ptb ↓"].tolist() == ["20.0", "45.0", "–"]
    assert front["mean accuracy ↑"].tolist()[:2] == ["50.0% ± 50.0%"] * 2
    said = real.measured_on(windows[few], items)
    assert "Perplexity of 1 windows" in said
    assert "2 items each" in said


def test_the_figure_has_both_methods_named_at_their_ends():
    """A panel for each corpus and one for accuracy, bars of 1.96 standard errors."""
    text = {"fitted_to": real.FRONT_TEXT}
    pruned = [real_row("heapr", 0.25, **text), real_row("compress", 0.25, **text)]
    rows = pd.DataFrame([real_row("dense", 0.0), *pruned, real_row("heapr", 0.4)])
    rows = rows.assign(against_dense=-0.02, against_dense_stderr=0.01)
    rows[[f"delta_nll_stderr {name}" for name in ("wikitext2", "ptb")]] = 0.025
    figure = real.figure_real(rows)
    titles = ["WikiText-2", "PTB", "mean accuracy of seven tasks"]
    assert [ax.get_title(loc="left") for ax in figure.axes] == titles
    for ax in figure.axes:
        assert [text.get_text() for text in ax.texts] == ["HEAPr", "compress"]
        assert {text.get_va() for text in ax.texts} == {"bottom", "top"}  # apart
    bars = figure.axes[0].containers[0]
    ((x, low), (_, high)) = bars[2][0].get_segments()[-1]
    assert x == 0.25
    assert (low, high) == pytest.approx((0.25 - 0.049, 0.25 + 0.049))
    few = rows["method"].eq("compress")
    fewer = rows.assign(windows=rows["windows"].where(~few, "2, 2, 2"))
    for name in ("wikitext2", "ptb"):
        fewer[[f"shared_delta_nll{part} {name}" for part in ("", "_stderr")]] = 0.125
    (line,) = real.plot_real(fewer, shown="ptb").containers[0].lines[:1]
    assert set(line.get_ydata()[1:]) == {0.125}


def test_few_windows_may_not_speak_for_all():
    """Of three pairs of states, every second window is far from the rest in two."""
    losses = {"dense": [0.0] * 8, "far": [9.0, 1.0, 9.0, 1.1, 9.0, 0.9, 9.0, 1.0]}
    losses["near"] = [0.9, 1.1, 1.0, 1.0] * 2
    rows = pd.DataFrame(
        [
            {"method": name, "ratio": 0.2, "fitted_to": "wikitext2", "seed": 0}
            | {"window": window, "nll": nll}
            for name, values in losses.items()
            for window, nll in enumerate(values)
        ]
    )
    few = rows[rows["window"].lt(4)].assign(method="few")
    assert real.share_covered(pd.concat([rows, few]), 4) == pytest.approx(1 / 3)
    assert math.isnan(real.share_covered(few, 4))
