"""The paper's claims, checked against our measurements, and a summary of these."""

import pandas as pd

from heapr_lab.figures import bins_data
from heapr_lab.pruning.savings import at_context

CALIBRATED = "on the calibrated corpus"
OTHERS = "on others"
_PAPER = {"scope": "global", "granularity": "atom", "structure": "ragged"}
SUMMARY_RATIOS = (0.0, 0.1, 0.2, 0.25, 0.4, 0.5, 0.6, 0.8)


def claims(results: pd.DataFrame, bins: pd.DataFrame) -> pd.DataFrame:
    """The paper's claims, our findings, and whether the claims hold.

    Args:
        results: evaluation rows of the boundary and the ablations.
        bins: rows of `paper.bin_results`.

    Returns:
        Columns claim, found, holds.
    """
    within = results["dataset"].eq(results["calibration"].iloc[0])
    parts = {CALIBRATED: results[within], OTHERS: results[~within]}
    rows = [_accuracy_kept(results), *_predicts_loss(bins)]
    for where, part in parts.items():
        if part["metric"].eq("nll").any():
            rows += [
                _nearly_lossless(part, where),
                _lower_loss(part, where, "scope", ("global", "layer")),
                _lower_loss(part, where, "granularity", ("atom", "expert")),
            ]
    return pd.DataFrame(rows, columns=["claim", "found", "holds"])


def summary_table(results: pd.DataFrame, savings: pd.DataFrame) -> pd.DataFrame:
    """Perplexities, accuracy and savings of the paper's method over the ratios.

    Args:
        results: evaluation rows, including those of the dense model.
        savings: parameters and FLOPs saved per setting.
    """
    ours = results_of_method(results, "heapr")
    dense = results[results["estimator"].eq("dense")]
    rows = pd.concat([dense, ours])
    rows = rows[rows["metric"].isin(["perplexity", "accuracy"])]
    rows = rows[rows["ratio"].isin(SUMMARY_RATIOS)].drop_duplicates(
        ["ratio", "dataset", "metric"]
    )
    label = rows["metric"] + " " + rows["dataset"]
    order = list(dict.fromkeys(label))
    values = rows.assign(label=label).pivot(
        index="ratio", columns="label", values="value"
    )[order]
    saved = (
        results_of_method(savings, "heapr").drop_duplicates("ratio").set_index("ratio")
    )
    shares = ["parameter_reduction", "flops_reduction", "routed_flops_reduction"]
    joined = values.join(saved[shares])
    joined[shares] = joined[shares].fillna(0.0)
    (context,) = set(saved["seq_len"].map(at_context))
    names = {
        "parameter_reduction": "parameters saved",
        "flops_reduction": f"FLOPs saved {context}",
        "routed_flops_reduction": "routed FLOPs saved",
    }
    return joined.rename(columns=names).reset_index()


def results_of_method(
    frame: pd.DataFrame, estimator: str, **changes: str
) -> pd.DataFrame:
    """Rows of an estimator with the paper's settings, except for `changes`."""
    chosen = frame["estimator"].eq(estimator)
    for column, value in (_PAPER | changes).items():
        chosen &= frame[column].eq(value)
    return frame[chosen]


def _values(frame: pd.DataFrame, metric: str, ratio: float | None = None) -> pd.Series:
    rows = frame[frame["metric"].eq(metric)]
    if ratio is not None:
        rows = rows[rows["ratio"].eq(ratio)]
    keys = ["dataset"] if ratio is not None else ["dataset", "ratio"]
    return rows.drop_duplicates(keys).set_index(keys)["value"]


def _dense(results: pd.DataFrame, metric: str) -> pd.Series:
    return _values(results[results["estimator"].eq("dense")], metric, 0.0)


def _nearly_lossless(results: pd.DataFrame, where: str) -> tuple[str, str, bool]:
    pruned = _values(results_of_method(results, "heapr"), "perplexity", 0.2)
    rise = pruned / _dense(results, "perplexity") - 1
    found = ", ".join(f"{name} {value:+.2%}" for name, value in rise.items())
    claim = f"{where}, at 20 % perplexity rises by at most 1 %"
    return claim, found, bool((rise <= 0.01).all())


def _accuracy_kept(results: pd.DataFrame) -> tuple[str, str, bool]:
    rows = results[results["metric"].eq("accuracy")]
    dense = rows[rows["estimator"].eq("dense")].iloc[0]
    pruned = _values(results_of_method(rows, "heapr"), "accuracy", 0.2).iloc[0]
    found = f"{dense['value']:.3f} → {pruned:.3f}, standard error {dense['stderr']:.3f}"
    holds = abs(pruned - dense["value"]) <= dense["stderr"]
    return "at 20 % accuracy stays within one standard error", found, bool(holds)


def _lower_loss(
    results: pd.DataFrame, where: str, column: str, order: tuple[str, str]
) -> tuple[str, str, bool]:
    """Mean loss difference of two variants over corpora, at every common ratio."""
    better, worse = order
    first = _values(results_of_method(results, "heapr", **{column: better}), "nll")
    second = _values(results_of_method(results, "heapr", **{column: worse}), "nll")
    gaps = (second - first).dropna().groupby("ratio").mean()
    found = ", ".join(f"{gap:+.4f} at {ratio:.0%}" for ratio, gap in gaps.items())
    claim = f"{where}, {column}: {better} loses less than {worse}"
    return (
        claim,
        f"{worse} − {better} [nats per token]: {found}",
        bool((gaps > 0).all()),
    )


def _predicts_loss(bins: pd.DataFrame) -> list[tuple[str, str, bool]]:
    rows = []
    data = bins_data(bins)
    for order, name in (("index", "original index"), ("score", "score rank")):
        found = data.attrs["spearman"][order]
        interval = f"{found['rho_low']:.2f} to {found['rho_high']:.2f}"
        rows.append(
            (
                f"Spearman of Δloss with the score, tenths by {name}: at least 0.8",
                f"{found['rho']:.2f} (95 % interval {interval})",
                bool(found["rho"] >= 0.8),
            )
        )
    return rows
