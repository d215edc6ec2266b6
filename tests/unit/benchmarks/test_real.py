"""The tables of pretrained models, in absolute numbers."""

import math

import pandas as pd
import pytest
from figure_rows import item_rows, real_row, window_rows

from benchmarks.figures import real


def test_the_front_has_one_model_and_one_draw_ratio_by_ratio():
    """Less text, other draws, corpora and controls are in the whole table alone."""
    ours, text = real.DEFAULT, {"fitted_to": real.FRONT_TEXT}
    rows = pd.DataFrame(
        [
            real_row("dense", 0.0),
            real_row(ours, 0.4, **text),
            real_row("heapr", 0.4, **text),
            real_row(ours, 0.25, **text),
            real_row("heapr", 0.25, **text),
            real_row("heapr", 0.25),
            real_row("heapr", 0.25, seed=1),
            real_row("heapr", 0.25, fitted_to="c4"),
            real_row("random", 0.25, **text),
            real_row("heapr", 0.25, model="smollm2", **text),
        ]
    )
    front = real.real_front_table(rows)
    default = "compress"
    methods = ["dense", "HEAPr", default, "HEAPr", default, "guessing"]
    assert front["method"].tolist() == methods
    assert front["atoms removed"].tolist() == ["0%", "25%", "25%", "40%", "40%", "–"]
    assert front["mean accuracy ↑"].iloc[-1] == "31.4%"
    assert front["perplexity wikitext2 ↓"].tolist()[:2] == ["20.0", "45.0"]
    assert "16 / 16 / 16 windows" in real.measured_on(rows)
    dense = rows["method"].eq("dense")
    whole = rows.assign(windows=dense.map({True: "595, 206, 54", False: "16, 16, 16"}))
    assert "In brackets: the dense model" in real.measured_on(whole)
    columns = [f"delta_nll {corpus}" for corpus in ("wikitext2", "ptb")]
    whole[columns] = math.log(2)
    perplexities = real.real_front_table(whole)["perplexity wikitext2 ↓"]
    assert perplexities.tolist()[:2] == ["20.0", "45.0 (dense 22.5)"]


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
    bars = figure.axes[0].containers[0]
    ((x, low), (_, high)) = bars[2][0].get_segments()[-1]
    assert x == 0.25
    assert (low, high) == pytest.approx((0.25 - 0.049, 0.25 + 0.049))


def test_the_main_table_is_of_whole_splits():
    """Lowest perplexity first; a state with fewer windows is left out."""
    whole = {"windows": "2, 2, 2", "items": 2}
    losses = {("dense", 0.0): 2.0, ("heapr", 0.2): 1.5, ("naee", 0.2): 1.0}
    losses["d2-moe", 0.2] = 2.0
    rows = pd.DataFrame([real_row(*state, **whole) for state in losses])
    rows.loc[rows["method"].eq("naee"), "perplexity wikitext2"] = 1.0
    rows.loc[rows["method"].eq("d2-moe"), "windows"] = "1, 1, 1"
    keys = {"model": "smolmoe", "fitted_to": "wikitext2", "seed": 0}
    corpora = [window_rows(losses, corpus) for corpus in ("wikitext2", "ptb")]
    windows, items = pd.concat(corpora), item_rows({state: [1] for state in losses})
    table = real.main_table(rows, windows.assign(**keys), items.assign(**keys))
    assert table["method"].tolist() == ["dense", "naee", "heapr"]
    gaps = table.filter(like="minus HEAPr's")
    assert gaps.iloc[[0, 2]].eq("–").all(axis=None)
    assert gaps.iloc[1].iloc[0].startswith("-0.500 (")


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
