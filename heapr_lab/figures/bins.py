"""Figure 2: does the summed score of a group of atoms predict the loss increase?"""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from heapr_lab.figures.curves import matching, require_one_row
from heapr_lab.figures.style import (
    LABELS,
    REFERENCE_LINE,
    add_legend,
    figure_of,
    look,
    name_points,
    own_axes,
    styled,
)
from heapr_lab.importance.estimators import unit_of

ORDERS = {"index": "bins by original index", "score": "bins by score rank"}
_INTERVAL = 0.95
_N_RESAMPLES = 5000


def bins_data(bins: pd.DataFrame) -> pd.DataFrame:
    """Predicted and measured loss change per bin, with Spearman's correlation.

    Args:
        bins: one row per order and bin: order, bin, score_sum, delta_nll, estimator,
            dataset.

    Returns:
        The rows sorted by order and bin, with rho, rho_low and rho_high (95 %
        percentile interval) of their order; `attrs["spearman"]` maps each order to
        those three.

    Raises:
        SpecError: a bin has several rows, as of several data sets.
    """
    rows = require_one_row(bins, ["order", "bin"]).sort_values(["order", "bin"])
    spearman = {
        str(order): spearman_interval(group["score_sum"], group["delta_nll"])
        for order, group in rows.groupby("order")
    }
    data = rows.reset_index(drop=True)
    for field in ("rho", "rho_low", "rho_high"):
        data[field] = data["order"].map({key: s[field] for key, s in spearman.items()})
    data.attrs["spearman"] = spearman
    return data


def spearman_interval(x: pd.Series, y: pd.Series) -> dict[str, float]:
    """Spearman's correlation and the percentile interval of its bootstrap.

    Pairs are resampled with replacement; resamples in which x or y is constant have no
    correlation and are ignored.

    Returns:
        rho, rho_low and rho_high.
    """
    pairs = np.stack([np.asarray(x, dtype=float), np.asarray(y, dtype=float)])
    rng = np.random.default_rng(0)
    picks = rng.integers(pairs.shape[1], size=(_N_RESAMPLES, pairs.shape[1]))
    # row 0 is the sample itself
    picks = np.vstack([np.arange(pairs.shape[1]), picks])
    ranks = [pd.DataFrame(values[picks]).rank(axis=1).to_numpy() for values in pairs]
    centred = [rank - rank.mean(axis=1, keepdims=True) for rank in ranks]
    spread = np.sqrt((centred[0] ** 2).sum(axis=1) * (centred[1] ** 2).sum(axis=1))
    product = (centred[0] * centred[1]).sum(axis=1)
    rho = np.divide(product, spread, out=np.full_like(spread, np.nan), where=spread > 0)
    tail = (1 - _INTERVAL) / 2
    drawn = rho[1:][~np.isnan(rho[1:])]
    low, high = np.quantile(drawn, [tail, 1 - tail]) if len(drawn) else (np.nan, np.nan)
    return {"rho": float(rho[0]), "rho_low": float(low), "rho_high": float(high)}


@styled
def plot_bins(data: pd.DataFrame, *, order: str, ax: Axes | None = None) -> Axes:
    """Measured against predicted loss change, one point per bin of 10 % of the atoms.

    Each point is labelled with the number of its bin; on the dashed line the loss is
    the score. The costliest bin also says how many times its score it costs. Axes are
    logarithmic (linear around 0 where a measured change is not positive).

    Args:
        data: from `bins_data`.
        order: "index" or "score".
        ax: where to draw; None makes a new figure.

    Returns:
        The Axes.
    """
    rows = matching(data, {"order": order})
    estimator = str(rows["estimator"].iloc[0])
    shown = look(estimator)
    ax = own_axes(ax)
    ax.plot(
        rows["score_sum"],
        rows["delta_nll"],
        linestyle="none",
        marker=shown.marker,
        color=shown.color,
        label=f"a tenth of the atomic experts, by {shown.label}; 0 is the first",
    )
    ends = [rows["score_sum"].min(), rows["score_sum"].max()]
    ax.plot(ends, ends, label="as much as its score", **REFERENCE_LINE)
    _use_log_axes(ax, rows)
    first = rows.iloc[0]
    note = (
        f"Spearman ρ = {first['rho']:.2f}, "
        f"95 % interval [{first['rho_low']:.2f}, {first['rho_high']:.2f}]"
    ).replace("-", "−")
    # the second line of the title, in regular type
    ax.set_title(ORDERS[order] + "\n")
    ax.text(0, 1.03, note, transform=ax.transAxes, fontsize=8)
    ax.margins(0.1)
    name_points(ax, _bin_names(rows))
    ax.set_xlabel(f"summed score [{unit_of(estimator)}]")
    ax.set_ylabel(LABELS["delta_nll"])
    add_legend(ax)
    return ax


def _bin_names(rows: pd.DataFrame) -> dict[str, tuple[float, float]]:
    """Number and place of each bin; the costliest with the multiple of its score."""
    costliest = rows["delta_nll"].idxmax()
    names = {}
    for row in rows.itertuples():
        name = str(row.bin)
        if row.Index == costliest and row.score_sum > 0:
            name += f": {row.delta_nll / row.score_sum:.1f} × its score"
        names[name] = (row.score_sum, row.delta_nll)
    return names


def _use_log_axes(ax: Axes, rows: pd.DataFrame) -> None:
    scores, losses = rows["score_sum"], rows["delta_nll"]
    if scores.gt(0).all():
        ax.set_xscale("log")
        ax.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        ax.xaxis.set_major_formatter("{x:g}")
        ax.xaxis.set_minor_formatter(NullFormatter())
    if losses.gt(0).all():
        ax.set_yscale("log")
    elif losses.gt(0).any():
        ax.set_yscale("symlog", linthresh=losses[losses.gt(0)].min())


@styled
def figure_bins(data: pd.DataFrame) -> Figure:
    """Bins by original index (as in the paper) and by score rank, side by side."""
    return figure_of(
        ORDERS, lambda order, ax: plot_bins(data, order=order, ax=ax), height=3.0
    )
