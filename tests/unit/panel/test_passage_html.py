"""The views of a text, read back as HTML."""

import re

import numpy as np
import pandas as pd
import pytest
from html_text import cells, marked

from heapr_lab.panel import passage_html
from heapr_lab.panel.passage_html import (
    attribution_html,
    continuations_html,
    losses_html,
)

PRUNED = "half of <it>"
LEAST_TEXT_CONTRAST = 4.5
LEAST_LINE_CONTRAST = 3.0
"""WCAG 2.2, AA: text, and graphics that carry a meaning."""


def losses(*changes: float, tokens: str = "abcdefghijklmnop") -> pd.DataFrame:
    """A frame of `token_losses` whose tokens cost 1 nat, and so much more pruned."""
    change = np.array([np.nan, *changes])
    columns = {"dense_nll": 1 + 0 * change, "pruned_nll": 1 + change}
    texts = list(tokens[: len(change)])
    frame = pd.DataFrame({"position": range(len(change)), "token": texts, **columns})
    return frame.assign(delta_nll=change)


def span_of(page: str, position: int) -> str:
    """The span of the token at a position."""
    return re.search(rf'<span [^>]*title="position {position}: [^<]*</span>', page)[0]


# --- the loss of each token ---------------------------------------------------------


def test_losses_are_told_in_text():
    """Totals are those of the predicted tokens, and each token says its own numbers."""
    page = losses_html(losses(0.6, 2.5, -0.7, 0.0), pruned=PRUNED)
    # (0.6 + 2.5 - 0.7 + 0) / 4 = 0.6; e = 2.7, e^1.6 = 5.0
    assert "Dense 1.000, pruned 1.600, Δ +0.600 nats per token over 4" in page
    assert "perplexity 2.7 → 5.0" in page
    assert "0.5 nats or more, 2 of them are worse and 1 better" in page
    assert "half of &lt;it&gt;" in page
    assert 'role="status"' in page
    assert "Δ +2.50 nats (dense 1.00, pruned 3.50)" in span_of(page, 2)
    assert "no loss: it is the first token" in page


def test_changes_differ_by_more_than_colour():
    """Worse has a solid line, better a dotted one, thicker with every step."""
    page = losses_html(losses(0.05, 0.2, 0.7, 3.0, -0.2, -0.7, -3.0), pruned=PRUNED)
    styles = [re.search('style="(.*?)"', span_of(page, n))[1] for n in range(1, 8)]
    lines = [re.search(r"border-bottom:(\dpx \w+)", style) for style in styles]
    assert [line and line[1] for line in lines] == [
        None, "1px solid", "2px solid", "3px solid",
        "1px dotted", "2px dotted", "3px dotted",
    ]  # fmt: skip
    assert styles[0] == ""
    assert len(set(styles)) == 7


def test_the_ten_hurt_most():
    """The largest rises, largest first, with the text before; no falls among them."""
    page = losses_html(losses(*np.linspace(-0.3, 1.1, 15)), pruned=PRUNED)
    rows = cells(page)
    assert [int(row[0]) for row in rows] == list(range(15, 5, -1))
    assert rows[0] == ["15", "+1.100", "1.000", "2.100", "jklmnop"]
    better = losses_html(losses(-1.0, 0.0), pruned=PRUNED)
    assert cells(better) == []
    assert "No token has a higher loss" in better


def test_text_is_escaped_and_seen():
    """Markup is shown as it is; breaks and parts of characters have a sign."""
    page = losses_html(losses(9, 9, 9, tokens="<&\n>"), pruned=PRUNED)
    for shown in ("&lt;", "&amp;", "↵\n", "&gt;"):
        assert f">{shown}</span>" in page
    empty = losses(9).assign(token=["a", ""])
    assert ">▯</span>" in losses_html(empty, pruned=PRUNED)


def contrast(color: np.ndarray, other: np.ndarray) -> float:
    """The contrast of two colours (3,) in 0 to 255, as WCAG defines it."""
    light = []
    for values in (color / 255, other / 255):
        linear = np.where(
            values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4
        )
        light.append(float(linear @ [0.2126, 0.7152, 0.0722]) + 0.05)
    return max(light) / min(light)


@pytest.mark.parametrize(("paper", "ink"), [(255, 33), (17, 255)])
@pytest.mark.parametrize("color", [passage_html._WORSE, passage_html._BETTER])
def test_contrast_in_both_themes(paper, ink, color):
    """On light and on dark the text can be read on every step, and lines be seen."""
    pure = np.array([int(part) for part in color.split(",")], float)
    white = np.full(3, float(paper))
    assert contrast(pure, white) >= LEAST_LINE_CONTRAST
    for opacity in passage_html._OPACITY:
        ground = opacity * pure + (1 - opacity) * white
        assert contrast(np.full(3, float(ink)), ground) >= LEAST_TEXT_CONTRAST


# --- the map of layers and tokens --------------------------------------------------


def test_map_shows_the_most(monkeypatch):
    """Rows are in the order of the text; the rest is one row, so columns add up."""
    monkeypatch.setattr(passage_html, "_N_TOKENS", 2)
    tokens = np.array([[0.001, 0.0], [-0.008, 0.001], [0.0, 0.0005], [0.0, 0.002]])
    shares = {"layer": [1, 2], "n_removed": 5, "first_order": [-0.007, 0.0035]}
    layers, texts = pd.DataFrame(shares), ["<a", "b\n", "c", ""]
    page = attribution_html(layers, tokens, texts, change=0.25, pruned=PRUNED)
    assert cells(page) == [
        ["1", "5", "-0.0070"],
        ["2", "5", "+0.0035"],
        ["1", "b↵", "-7.00", "-8.00", "+1.00"],
        ["3", "▯", "+2.00", "+0.00", "+2.00"],
        ["–", "2 others", "+1.50", "+1.00", "+0.50"],
    ]
    assert "add up to -0.0035 nats per token; measured, Δ is +0.2500" in page
    assert "half of &lt;it&gt;" in page
    assert 'role="region" tabindex="0" aria-label=' in page
    assert "2 tokens of 4" in page


def test_map_differs_by_more_than_colour():
    """Each step of a share of the largest has a thicker line, dotted where better."""
    tokens = np.array([[1.0, -0.5, 0.3, -0.2, 0.1]])
    page = passage_html._map([0, 1, 2, 3, 4], tokens, ["a"])
    lines = [part.split(" rgb")[0] for part in page.split("border-bottom:")[1:]]
    drawn = [line for line in lines if line[1:3] == "px" and "var" not in line]
    assert drawn == ["3px solid", "3px dotted", "2px solid", "1px dotted"]
    nothing = passage_html._map([0], np.zeros((1, 1)), ["a"])
    assert "px solid rgb" not in nothing


# --- the other views ----------------------------------------------------------------


def written(*ids: int) -> pd.DataFrame:
    """A frame of `continue_text`; the text of a token is its id in letters."""
    texts = [f"{chr(97 + token)}<" for token in ids]
    return pd.DataFrame({"step": range(len(ids)), "token_id": ids, "token": texts})


def test_the_first_difference_is_marked():
    """Both columns have the mark; what follows has none; text says how many agree."""
    page = continuations_html(
        "a & b", written(0, 1, 2, 3), written(0, 1, 4, 3), pruned=PRUNED
    )
    assert marked(page) == ["c&lt;", "e&lt;"]
    assert "The same for 2 tokens" in page
    assert page.count("a &amp; b") == 2
    assert "Pruned model: half of &lt;it&gt;" in page


def test_continuations_that_agree_or_end():
    """No mark where they are the same; where one ends before the other it says so."""
    same = continuations_html("a", written(0, 1), written(0, 1), pruned=PRUNED)
    assert marked(same) == []
    assert "Both models write the same 2 tokens" in same
    shorter = continuations_html("a", written(0, 1), written(0), pruned=PRUNED)
    assert marked(shorter) == ["b&lt;"]
    assert shorter.count("(ends here)") == 1
