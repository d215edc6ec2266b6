"""The paper's claims, checked against our measurements."""

import pandas as pd

from heapr_lab.figures import bins_data

CALIBRATED = "on the calibrated corpus"
OTHERS = "on others"
_PAPER = {"scope": "global", "granularity": "atom", "structure": "ragged"}


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


def claims_by_corpus(found: pd.DataFrame) -> pd.DataFrame:
    """`claims` with one row for each claim and a column for each kind of corpus.

    Claims without a corpus (accuracy, tenths) are in the column of the calibrated one.
    """
    split = found["claim"].str.extract(rf"^(?:({CALIBRATED}|{OTHERS}), )?(.*)$")
    where, claim = split[0].fillna(CALIBRATED), split[1]
    holds = found["holds"].map({True: "yes: ", False: "**no**: "})
    long = pd.DataFrame(
        {"claim": claim, "where": where, "found": holds + found["found"]}
    )
    table = long.pivot(index="claim", columns="where", values="found")
    order = list(dict.fromkeys(claim))
    return table.loc[order, list(dict.fromkeys(where))].reset_index()


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
