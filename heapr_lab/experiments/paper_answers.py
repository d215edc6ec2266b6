"""What the notebooks about the paper's figures answer, in sentences of their numbers.

As in `answers`; here are the layers, the calibration, the boundary and the ablations.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np
import pandas as pd

from heapr_lab.experiments.intervals import (
    AGREES,
    DISAGREES,
    UNDECIDED,
    Interval,
    interval_of,
    loss_difference,
    of_error,
)
from heapr_lab.experiments.prose import Answer, answer, listed, value_range
from heapr_lab.figures.paper import paper_table


def layers(shares: pd.DataFrame, bins: pd.DataFrame) -> Answer:
    """Which layers lose most, and whether scores predict losses.

    Args:
        shares: from `paper.layer_shares`.
        bins: from `figures.bins_data`.
    """
    rho, worst, times = prediction(bins)
    groups = shares.groupby("ratio")
    text = "; ".join(f"at {ratio:.0%} {_extremes(part)}" for ratio, part in groups)
    short = (
        f"Global pruning takes different shares of the layers: {text}. The score "
        "predicts the order of the losses of ten tenths of the model, Spearman "
        f"{rho.said('.2f')}, but tenth {worst}, which costs most, costs {times:.1f} "
        "times the sum of its scores."
    )
    late = {ratio: late_rise(part) for ratio, part in groups}
    against = [
        f"The rise in the last layers that the paper draws is absent at {ratio:.0%}: "
        "the share that the last layer loses, minus that of the middle third, is "
        f"{rise.said('+.2f')} over draws."
        for ratio, rise in late.items()
        if rise.verdict == DISAGREES
    ]
    return answer(short, against=against)


def _extremes(part: pd.DataFrame) -> str:
    mean = part.groupby("layer")["share"].mean()
    return (
        f"layer {mean.idxmax()} loses most ({mean.max():.0%}) and layer "
        f"{mean.idxmin()} least ({mean.min():.0%})"
    )


def early_peak(part: pd.DataFrame) -> Interval:
    """How much more the first third of the layers loses than the middle, over draws."""
    first, middle, _ = _early_middle_last(part)
    return interval_of((first - middle).to_numpy())


def late_rise(part: pd.DataFrame) -> Interval:
    """How much more the last layer loses than the middle third, over draws."""
    _, middle, last = _early_middle_last(part)
    return interval_of((last - middle).to_numpy())


def _early_middle_last(part: pd.DataFrame) -> tuple["pd.Series[float]", ...]:
    """What the first and the middle third and the last layer lose, for each draw."""
    wide = part.pivot(index="seed", columns="layer", values="share")
    third = max(1, wide.shape[1] // 3)
    cuts = (slice(0, third), slice(third, -third), slice(-1, None))
    return tuple(wide.iloc[:, cut].mean(axis="columns") for cut in cuts)


def prediction(bins: pd.DataFrame) -> tuple[Interval, int, float]:
    """How scores predict the losses of tenths by index.

    Args:
        bins: from `figures.bins_data`.

    Returns:
        Spearman's correlation; the tenth that costs most, and its loss ÷ its scores.
    """
    spearman = bins.attrs["spearman"]["index"]
    rho = Interval(spearman["rho"], spearman["rho_low"], spearman["rho_high"])
    rows = bins[bins["order"].eq("index")]
    worst = rows.loc[rows["delta_nll"].idxmax()]
    return rho, worst["bin"], worst["delta_nll"] / worst["score_sum"]


def boundary(data: pd.DataFrame) -> Answer:
    """How much accuracy is kept at the paper's two positions.

    Args:
        data: from `figures.boundary_data`.
    """
    ours = data[data["source"].eq("ours") & data["metric"].eq("accuracy")]
    stated = paper_table("boundary")
    shares = stated["share_of_model_removed"].str.lstrip("<").astype(float)
    most = ours["parameter_reduction"].max()
    within = ours[ours["parameter_reduction"].le(shares.min())]
    at = within.loc[within["parameter_reduction"].idxmax()]
    last = ours.loc[ours["parameter_reduction"].idxmax()]
    below, extreme = stated["accuracy_retained"].iloc[[0, -1]].map("{:.0%}".format)
    short = (
        f"With {at['parameter_reduction']:.0%} of the whole model removed, "
        f"{_kept(at, f'the paper below {shares.min():.0%}: {below}')}; with "
        f"{most:.0%}, the most that was measured, "
        f"{_kept(last, f'the paper at {shares.max():.0%}: {extreme}')}."
    )
    whole = data.loc[data["ratio"].gt(0), "parameter_reduction"]
    routed = (whole / data.loc[whole.index, "ratio"]).max()
    beyond = (
        f"Nine tenths of this model cannot be removed: {routed:.0%} of its parameters "
        "are routed experts."
    )
    return answer(short, [_flops(data), beyond if routed < shares.max() else ""])


def _kept(row: "pd.Series[float]", paper: str) -> str:
    error = row["relative_stderr"]
    if pd.isna(error):
        return f"all of the accuracy is kept ({paper})"
    kept = of_error(row["relative"], error)
    return (
        f"{kept.value:.0%} of the accuracy is kept (95 % interval {kept.low:.0%} to "
        f"{kept.high:.0%}; {paper})"
    )


def _flops(data: pd.DataFrame) -> str:
    rows = data[data["metric"].eq("flops_reduction") & data["source"].eq("ours")]
    last = rows.loc[rows["ratio"].idxmax()]
    return (
        f"Operations fall in proportion: by {last['value']:.0%} where "
        f"{last['ratio']:.0%} of the atomic experts are removed."
    )


def calibration(sizes: pd.DataFrame, losses: pd.DataFrame) -> Answer:
    """Whether the amount of text matters, and whether the corpus does.

    Args:
        sizes: from `figures.calibration_size_data`.
        losses: from `corpus_masks.mask_losses`.
    """
    rows = sizes[sizes["metric"].eq("perplexity")].sort_values("n_sequences")
    ends = rows.groupby(["calibration", "dataset"])["value"].agg(["first", "last"])
    matched = ends[[a == b for a, b in ends.index]]
    gain = np.log(matched["first"] / matched["last"])
    counts = rows["n_sequences"]
    alien = costs_of_other_text(losses)
    more = "more" if alien.min() > gain.max() else "not always more"
    short = (
        f"Which corpus ({' or '.join(alien.index)}) matters {more} than the amount of "
        f"text. With {counts.max()} "
        f"windows instead of {counts.min()}, Δloss on the calibrated corpus is "
        f"{value_range(gain)} nats per token lower; calibrated on the other corpus "
        f"instead, {value_range(alien)} higher."
    )
    return answer(short, [_papers_corpora(rows)], [_against_any_corpus(alien)])


def costs_of_other_text(losses: pd.DataFrame) -> "pd.Series[float]":
    """How much more another corpus's mask loses on each corpus than its own mask.

    Args:
        losses: from `corpus_masks.mask_losses`.
    """
    table = losses.pivot(index="mask", columns="dataset", values="delta_nll")
    one, other = (name for name in table.index if name in table.columns)
    apart = {
        a: table.loc[b, a] - table.loc[a, a] for a, b in ((one, other), (other, one))
    }
    return pd.Series(apart)


def _against_any_corpus(alien: "pd.Series[float]") -> str:
    if alien.min() <= 0:
        return ""
    return (
        'That performance is "largely unaffected by the choice of calibration data", '
        f"as the paper has it, does not hold between {listed(alien.index)}."
    )


def _papers_corpora(rows: pd.DataFrame) -> str:
    largest = rows[rows["n_sequences"].eq(rows["n_sequences"].max())]
    table = largest.pivot(index="calibration", columns="dataset", values="value")
    names = ("wikitext2", "c4")
    if not {*names} <= {*table.index}:
        return (
            "The paper's two corpora, WikiText-2 and C4, are not both available here."
        )
    text = "; ".join(
        f"on {name} {table.loc[names[0], name]:.2f} and {table.loc[names[1], name]:.2f}"
        for name in table.columns
    )
    return f"Perplexity calibrated on WikiText-2 and on C4, the paper's pair: {text}."


def ablations(
    windows: pd.DataFrame, savings: pd.DataFrame, corpus: str, ratios: Sequence[float]
) -> Answer:
    """What the global ranking and the atom as a unit contribute, and CAMERA-P.

    Args:
        windows: from `paper.window_losses`.
        savings: parameters and FLOPs saved by each setting.
        corpus: the corpus of the calibration.
        ratios: the ratios at which the methods are compared.
    """
    same = windows["corpus"].eq(corpus)
    parts = {corpus: windows[same], "other text": windows[~same]}
    clauses: dict[bool, list[str]] = {True: [], False: []}
    for claim, (method, other) in PAIRS.items():
        for where, part in parts.items():
            gaps = gaps_of(part, method, other, ratios)
            refuted = DISAGREES in [gap.verdict for gap in gaps.values()]
            if gaps:
                clauses[refuted].append(f"{claim} on {where}: {_gaps(gaps)}")
    unit = "(nats per token, 95 % intervals over windows)"
    held = f"As in the paper, or undecided {unit}: {'; '.join(clauses[False])}."
    against = f"Against the paper {unit}: {'; '.join(clauses[True])}."
    return answer(
        held if clauses[False] else "No claim holds everywhere.",
        [_flops_of_experts(savings)],
        [against if clauses[True] else ""],
    )


PAIRS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "layer-wise ranking loses more than global": ("heapr-l", "heapr"),
        "whole experts lose more than atoms": ("heapr-expert", "heapr"),
        "CAMERA-P loses more than HEAPr layer by layer": ("camera-p", "heapr-l"),
    }
)
"""For each claim of the paper, the method that it says loses more, and the other."""


def gaps_of(
    windows: pd.DataFrame, method: str, other: str, ratios: Sequence[float]
) -> dict[float, Interval]:
    """How much more `method` loses than `other`, at each ratio with both measured."""
    gaps = {ratio: loss_difference(windows, method, other, ratio) for ratio in ratios}
    return {ratio: gap for ratio, gap in gaps.items() if gap is not None}


def _gaps(gaps: Mapping[float, Interval]) -> str:
    """At which ratios the claim holds, and the range of the differences."""
    words = {AGREES: "yes", DISAGREES: "**no**", UNDECIDED: "undecided"}
    texts = [
        f"{word} at {listed(f'{r:.0%}' for r in ratios)}"
        for verdict, word in words.items()
        if (ratios := [r for r, gap in gaps.items() if gap.verdict == verdict])
    ]
    values = pd.Series([gap.value for gap in gaps.values()])
    return f"{', '.join(texts)} ({value_range(values, '+.3f')})"


def _flops_of_experts(savings: pd.DataFrame) -> str:
    rows = savings[savings["granularity"].eq("expert")]
    saved = rows.set_index("ratio")["flops_reduction"]
    text = listed([f"{value:.0%} at {ratio:.0%}" for ratio, value in saved.items()])
    return (
        f"Whole experts save operations here ({text}), in the paper none: there the "
        "router chooses as many experts as before among those that are left; here it "
        "chooses as before, and what it sends to a removed expert is not computed."
    )
