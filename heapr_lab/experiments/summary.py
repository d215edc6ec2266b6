"""Perplexities, accuracy and savings of the paper's method, a row for each ratio."""

import pandas as pd

from heapr_lab.pruning.savings import at_context

_PAPER = {"scope": "global", "granularity": "atom", "structure": "ragged"}
SUMMARY_RATIOS = (0.0, 0.1, 0.2, 0.25, 0.4, 0.5, 0.6, 0.8)


def summary_table(results: pd.DataFrame, savings: pd.DataFrame) -> pd.DataFrame:
    """Perplexities, accuracy and savings of the paper's method over the ratios.

    Args:
        results: evaluation rows, including those of the dense model.
        savings: parameters and FLOPs saved per setting.
    """
    ours = _rows_of(results, "heapr")
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
    saved = _rows_of(savings, "heapr").drop_duplicates("ratio").set_index("ratio")
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


def _rows_of(frame: pd.DataFrame, estimator: str) -> pd.DataFrame:
    """Rows of an estimator with the paper's settings."""
    chosen = frame["estimator"].eq(estimator)
    for column, value in _PAPER.items():
        chosen &= frame[column].eq(value)
    return frame[chosen]
