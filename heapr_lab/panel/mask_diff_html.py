"""Two masks compared as HTML: a picture, and beside it its numbers as tables.

Importing this needs no torch.
"""

import html
from typing import Final

import pandas as pd
from matplotlib.figure import Figure

from heapr_lab.figures import figure_mask_diff, mask_diff_data
from heapr_lab.importance.columns import KEYS
from heapr_lab.inspection.mask_diff import (
    ScoredMask,
    overlap,
    overlap_text,
    rank_agreement,
)
from heapr_lab.panel.jobs import status
from heapr_lab.panel.looks import PICTURE, image_html
from heapr_lab.panel.passage_html import columns_html, numbers
from heapr_lab.panel.pictures import drawn_png

_ALT: Final = (
    "Left: what both remove of each layer and what only one does, beside chance. "
    "Right: every atom at its ranks in both. The tables below have the numbers."
)


def mask_diff_html(
    a: ScoredMask, b: ScoredMask, alone: pd.DataFrame, *, n: int, note: str = ""
) -> str:
    """A sentence, the picture, the layers as a table, and the first `n` of `alone`.

    Args:
        a: a mask with its scores.
        b: another of the same model.
        alone: what only one removes, as `removed_by_one` has it.
        n: atoms to show.
        note: what else to say of the picture.

    Raises:
        SpecError: the masks are of different models.
    """
    said = " ".join(filter(None, (overlap_text(a, b), note)))
    return f"{status(said)}{_picture(a, b)}{_layers(a, b)}{_atoms(a, b, alone, n)}"


def _picture(a: ScoredMask, b: ScoredMask) -> str:
    data = mask_diff_data(a, b)
    # Not one of pyplot, which a notebook would show below its next cell.
    empty = Figure(figsize=(10.0, 4.4), layout="constrained")
    png = drawn_png(lambda: figure_mask_diff(data, figure=empty))
    return image_html(png, _ALT, css=PICTURE)


def _layers(a: ScoredMask, b: ScoredMask) -> str:
    frame = overlap(a.keep, b.keep).merge(rank_agreement(a, b).drop(columns="n_atoms"))
    chance = zip(frame["expected"], frame["sd"], strict=True)
    columns = {
        "layer": frame["layer"],
        "atoms": numbers(frame["n_atoms"], ","),
        f"removed by {a.label}": numbers(frame["removed_a"], ","),
        f"removed by {b.label}": numbers(frame["removed_b"], ","),
        "by both": numbers(frame["both"], ","),
        "by both, chance": [f"{mean:,.1f} ± {sd:,.1f}" for mean, sd in chance],
        "Spearman ρ of the scores": numbers(frame["spearman"], "+.2f"),
    }
    caption = "Atoms that each layer loses; chance is its mean ± standard deviation"
    return columns_html(caption, columns)


def _atoms(a: ScoredMask, b: ScoredMask, alone: pd.DataFrame, n: int) -> str:
    if alone.empty:
        return "<p>Both remove the same atoms.</p>"
    labels = {"a": html.escape(a.label), "b": html.escape(b.label)}
    shown = alone.head(n)
    columns = {
        **{name: shown[name] for name in KEYS},
        "removed only by": shown["removed_by"].map(labels),
        f"score, {a.label}": numbers(shown["score_a"], ".3g"),
        f"score, {b.label}": numbers(shown["score_b"], ".3g"),
        f"rank, {a.label}": numbers(shown["rank_a"], ".1%"),
        f"rank, {b.label}": numbers(shown["rank_b"], ".1%"),
    }
    caption = (
        f"{len(shown)} of the {len(alone):,} atoms that only one removes: those that "
        "the other ranks highest. A rank is the share of atoms that are removed before "
        "it or with it."
    )
    return columns_html(caption, columns)
