"""Two masks compared as HTML: a picture, and beside it its numbers as tables.

Importing this needs no torch.
"""

import base64
import html
from typing import Final

import pandas as pd
from matplotlib.figure import Figure

from heapr_lab.figures import figure_mask_diff, mask_diff_data
from heapr_lab.panel.jobs import status
from heapr_lab.panel.looks import PICTURE
from heapr_lab.panel.passage_html import rows_html
from heapr_lab.panel.pictures import drawn_png
from heapr_lab.pruning.mask_diff import (
    ScoredMask,
    overlap,
    overlap_text,
    rank_agreement,
)

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
    png = base64.b64encode(drawn_png(lambda: figure_mask_diff(data, figure=empty)))
    return (
        f'<img class="{PICTURE}" alt="{html.escape(_ALT)}" style="max-width:100%" '
        f'src="data:image/png;base64,{png.decode()}">'
    )


def _layers(a: ScoredMask, b: ScoredMask) -> str:
    frame = overlap(a.keep, b.keep).merge(rank_agreement(a, b).drop(columns="n_atoms"))
    rows = [
        [
            f"{row.layer}",
            f"{row.n_atoms:,}",
            f"{row.removed_a:,}",
            f"{row.removed_b:,}",
            f"{row.both:,}",
            f"{row.expected:,.1f} ± {row.sd:,.1f}",
            _number(row.spearman, "+.2f"),
        ]
        for row in frame.itertuples()
    ]
    names = [
        "layer",
        "atoms",
        f"removed by {a.label}",
        f"removed by {b.label}",
        "by both",
        "by both, chance",
        "Spearman ρ of the scores",
    ]
    caption = "Atoms that each layer loses; chance is its mean ± standard deviation"
    return rows_html(caption, names, rows)


def _atoms(a: ScoredMask, b: ScoredMask, alone: pd.DataFrame, n: int) -> str:
    if alone.empty:
        return "<p>Both remove the same atoms.</p>"
    labels = {"a": a.label, "b": b.label}
    rows = [
        [
            f"{row.layer}",
            f"{row.expert}",
            f"{row.atom}",
            html.escape(labels[row.removed_by]),
            _number(row.score_a, ".3g"),
            _number(row.score_b, ".3g"),
            _number(row.rank_a, ".1%"),
            _number(row.rank_b, ".1%"),
        ]
        for row in alone.head(n).itertuples()
    ]
    names = ["layer", "expert", "atom", "removed only by"]
    names += [f"{what}, {own.label}" for what in ("score", "rank") for own in (a, b)]
    caption = (
        f"{len(rows)} of the {len(alone):,} atoms that only one removes: those that "
        "the other ranks highest. A rank is the share of atoms that are removed before "
        "it or with it."
    )
    return rows_html(caption, names, rows)


def _number(value: float, form: str) -> str:
    return "–" if pd.isna(value) else format(value, form)
