"""One expert, and those of its layer, as HTML: pure functions of a table and a mask.

Colours follow the theme, and are never the only mark. Without torch.
"""

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from heapr_lab.figures.scores import ScoreBins, bin_scores
from heapr_lab.panel.looks import columns_html, status

_N_BINS: Final = 40
_WIDTH, _HEIGHT, _LINE = 440, 150, 18
"""Pixels of the bars, and of a line of text."""
_KEPT, _REMOVED = "var(--jp-ui-font-color3, #999)", "rgb(213,94,0)"


def expert_html(
    name: str, scores: np.ndarray, kept: np.ndarray, *, facts: str, unit: str
) -> str:
    """What is kept of an expert, and the histogram of its scores with the cut.

    Args:
        name: of the expert, for people.
        scores: of its atoms, (I,).
        kept: which are kept, bool (I,).
        facts: what else to say of it.
        unit: of the scores.
    """
    said = (
        f"{name}: {kept.sum():,} of {kept.size:,} atoms kept ({kept.mean():.1%}). "
        f"{facts} {_cut_text(scores, kept)}"
    )
    bins = bin_scores(scores, bins=_N_BINS)
    if bins.n_not_positive == len(scores):
        return status(f"{said} No score is above 0, so there is no histogram.")
    left_out = ""
    if bins.n_not_positive:
        left_out = f" Not drawn: {bins.n_not_positive:,} with a score of 0 or less."
    return status(said + left_out) + _histogram(bins, scores, kept, unit)


def layer_html(
    layer: int,
    experts: Sequence[int],
    columns: Mapping[str, Sequence[str]],
    *,
    chosen: int,
) -> str:
    """The numbers of a layer's experts, in a box that scrolls, the chosen one marked.

    Args:
        layer: its index.
        experts: the rows, from the top.
        columns: what is shown, as text for each expert as they are numbered.
        chosen: the expert that is marked.
    """
    names = [f"<b>▸ {one}</b>" if one == chosen else f"{one}" for one in experts]
    sorted_ = {k: [column[one] for one in experts] for k, column in columns.items()}
    caption = f"Experts of layer {layer}"
    table = columns_html(caption, {"expert": names, **sorted_})
    return (
        f'<div role="region" tabindex="0" aria-label="{caption}" '
        f'style="max-height:480px;overflow:auto">{table}</div>'
    )


def _cut_text(scores: np.ndarray, kept: np.ndarray) -> str:
    if kept.all():
        return f"None is pruned; its lowest score is {scores.min():.3g}."
    highest = f"Its highest pruned score is {scores[~kept].max():.3g}"
    if not kept.any():
        return f"{highest}."
    return f"{highest}, its lowest kept one {scores[kept].min():.3g}."


def _histogram(bins: ScoreBins, scores: np.ndarray, kept: np.ndarray, unit: str) -> str:
    """Bars of the removed scores, those of the kept ones on top of them, and the cut.

    Drawn as SVG in pixels of the page, so that its text is as large as the other.
    """
    every, removed = bins.counts(), bins.counts(~kept)
    scale, wide = _HEIGHT / every.max(), _WIDTH / len(every)
    bars = "".join(
        _bar(number * wide, wide, scale * gone, scale * count)
        for number, (gone, count) in enumerate(zip(removed, every, strict=True))
    )
    cut = _cut(bins, scores[~kept])
    ends = bins.edges[0], np.sqrt(bins.edges[0] * bins.edges[-1]), bins.edges[-1]
    ticks = "".join(
        f'<text x="{share * _WIDTH:.0f}" y="{_HEIGHT + _LINE}" text-anchor="{at}" '
        f'fill="currentColor">{end:.2g}</text>'
        for share, at, end in zip(
            (0, 0.5, 1), ("start", "middle", "end"), ends, strict=True
        )
    )
    legend = (
        f"Atoms by score [{unit}], at most {every.max()} in a bar: pruned "
        f'<span style="color:{_REMOVED}" aria-hidden="true">■</span> below, kept '
        f'<span style="color:{_KEPT}" aria-hidden="true">■</span> above; dashed, the '
        "highest pruned score."
    )
    return (
        f'<svg role="img" aria-label="histogram of the scores; the text has the cut" '
        f'width="{_WIDTH}" height="{_HEIGHT + _LINE + 6}" style="max-width:100%;'
        f'display:block;margin:8px 0 0">{bars}{cut}'
        f'<line x1="0" x2="{_WIDTH}" y1="{_HEIGHT}" y2="{_HEIGHT}" '
        f'stroke="currentColor"></line>{ticks}</svg><div>{legend}</div>'
    )


def _bar(x: float, wide: float, gone: float, every: float) -> str:
    """The bar of one bin; lengths in pixels."""
    parts = ((_REMOVED, _HEIGHT - gone, gone), (_KEPT, _HEIGHT - every, every - gone))
    return "".join(
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{wide - 1:.1f}" height="{high:.1f}" '
        f'style="fill:{color}"></rect>'
        for color, y, high in parts
        if high
    )


def _cut(bins: ScoreBins, removed: np.ndarray) -> str:
    """A dashed line at the highest removed score, if that is on the axis."""
    highest = removed.max(initial=0.0)
    if highest <= 0:
        return ""
    first, last = np.log(bins.edges[[0, -1]])
    x = _WIDTH * (np.log(highest) - first) / (last - first)
    return (
        f'<line x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{_HEIGHT}" stroke="currentColor" '
        'stroke-dasharray="4 3"></line>'
    )
