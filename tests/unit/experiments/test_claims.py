"""Claims are checked against results of known outcome."""

import pandas as pd
import pytest

from benchmarks.readme import claims_by_corpus
from heapr_lab.experiments.claims import claims, summary_table

_SHARED = {"structure": "ragged", "stderr": 0.02, "calibration": "text"}


def rows(
    ratio: float, nll: float, accuracy: float, **changes: str
) -> list[dict[str, object]]:
    """Perplexity, nll and accuracy rows of one setting."""
    setting = {
        "estimator": "heapr",
        "scope": "global",
        "granularity": "atom",
        "ratio": ratio,
        **_SHARED,
        **changes,
    }
    values = {"perplexity": 100 * nll, "nll": nll}
    found = [
        {**setting, "dataset": "text", "metric": metric, "value": value}
        for metric, value in values.items()
    ]
    accurate = {"dataset": "task", "metric": "accuracy", "value": accuracy}
    return [*found, {**setting, **accurate}]


def results(*, pruned: float, layer: float, expert: float) -> pd.DataFrame:
    """A dense model of perplexity 100, and three ways to prune 20 % of it."""
    return pd.DataFrame(
        [
            *rows(0.0, 1.0, 0.50, estimator="dense"),
            *rows(0.2, pruned, 0.49),
            *rows(0.2, layer, 0.40, scope="layer"),
            *rows(0.2, expert, 0.40, granularity="expert"),
        ]
    )


def bins(slope: float) -> pd.DataFrame:
    """Ten tenths whose loss is the score times `slope`, in both orders."""
    return pd.DataFrame(
        {
            "order": order,
            "bin": index,
            "score_sum": index + 1.0,
            "delta_nll": slope * (index + 1.0),
            "estimator": "heapr",
            "dataset": "text",
        }
        for order in ("index", "score")
        for index in range(10)
    )


def test_claims_that_hold() -> None:
    """Perplexity +0.5 %, accuracy −0.01, layer and expert worse, ρ = 1."""
    found = claims(results(pruned=1.005, layer=1.1, expert=1.2), bins(2.0))
    assert found["holds"].all()
    assert found["claim"].str.startswith("on the calibrated corpus").sum() == 3
    assert "+0.50%" in found["found"].iloc[3]
    assert "[nats per token]: +0.0950 at 20%" in found["found"].iloc[4]


def test_claims_that_do_not_hold() -> None:
    """Perplexity +2 %, layer and expert better, ρ = −1; accuracy still within."""
    found = claims(results(pruned=1.02, layer=1.01, expert=1.0), bins(-2.0))
    assert found["holds"].tolist() == [True, False, False, False, False, False]


def test_claims_stand_side_by_side() -> None:
    """Of 9 rows 6 stay: three claims were checked on both kinds of corpus."""
    within = results(pruned=1.02, layer=1.1, expert=1.2)
    other = results(pruned=1.005, layer=1.1, expert=1.2).assign(dataset="other")
    found = claims(pd.concat([within, other]), bins(2.0))
    table = claims_by_corpus(found).set_index("claim")
    assert (len(found), len(table)) == (9, 6)
    rise = table.loc["at 20 % perplexity rises by at most 1 %"]
    assert rise["on the calibrated corpus"] == "**no**: text +2.00%"
    assert rise["on others"] == "yes: other +0.50%"
    assert table["on others"].isna().sum() == 3


def test_the_summary_has_a_row_per_ratio() -> None:
    """Dense and 20 %, with what is saved; nothing is saved of the dense model."""
    savings = pd.DataFrame(
        [
            {
                "estimator": "heapr",
                "scope": "global",
                "granularity": "atom",
                "structure": "ragged",
                "ratio": 0.2,
                "parameter_reduction": 0.15,
                "flops_reduction": 0.08,
                "routed_flops_reduction": 0.19,
                "seq_len": 256,
            }
        ]
    )
    table = summary_table(results(pruned=1.005, layer=1.1, expert=1.2), savings)
    assert table["ratio"].tolist() == [0.0, 0.2]
    assert table["perplexity text"].tolist() == pytest.approx([100.0, 100.5])
    assert table["FLOPs saved at 256 tokens of context"].tolist() == [0.0, 0.08]
