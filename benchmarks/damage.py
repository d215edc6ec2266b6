"""How well Δloss is predicted from summed scores, at ratios that were not evaluated.

    python benchmarks/damage.py [--model lab] [--name damage]

Importance is measured on pydocs. For each estimator a map from summed score to Δloss is
fitted to two or three ratios and evaluated from 10 % to 90 %, on the test windows of
pydocs and, if available, of WikiText-2: with a map fitted there and with that of
pydocs, to see whether maps are transferable. `naive` is the summed score itself, the
prediction of second-order theory for scores in nats per predicted token; it is missing
for others.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.machine import machine, write_results
from heapr_lab.importance.estimators import ESTIMATORS
from heapr_lab.inspection.budgets import damage_map
from heapr_lab.models.named import LAB
from heapr_lab.pruning.savings import summed_scores
from heapr_lab.text.corpora import available_corpora
from heapr_lab.workbench.settings import Setting
from heapr_lab.workbench.workbench import Workbench, open_workbench

CALIBRATION = "pydocs"
FITTED = ((0.2, 0.5, 0.8), (0.3, 0.7))
"""The ratios that each map is fitted to."""
RATIOS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
METHODS = ("heapr", "heapr_total", "fisher")


def measure(bench: Workbench, estimator: str, corpus: str) -> list[dict[str, Any]]:
    """Summed score and Δloss on `corpus` at every ratio."""
    windows = bench.test_windows(corpus)
    dense = bench.perplexity(None, windows)
    per_token = ESTIMATORS[estimator].per_predicted_token
    rows = []
    for ratio in RATIOS:
        setting = Setting(ratio, estimator=estimator, calibration=CALIBRATION)
        keep = bench.keep(setting)
        score = summed_scores(bench.table_of(setting), keep, estimator)
        row = {
            "ratio": ratio,
            "summed_score": score,
            "measured": bench.perplexity(keep, windows).nll - dense.nll,
            "naive": score if per_token else None,
            "n_tokens": dense.n_tokens,
        }
        rows.append({"estimator": estimator, "corpus": corpus} | row)
    return rows


def predict(
    bench: Workbench,
    measured: list[dict[str, Any]],
    *,
    calibrated_on: str,
    ratios: tuple[float, ...],
) -> list[dict[str, Any]]:
    """`measured`, of one estimator and corpus, with the predictions of a map."""
    estimator, corpus = measured[0]["estimator"], measured[0]["corpus"]
    setting = Setting(0.0, estimator=estimator, calibration=CALIBRATION)
    damage = damage_map(bench, setting, calibrated_on, ratios)
    shared = {
        "estimator": estimator,
        "corpus": corpus,
        "calibrated_on": calibrated_on,
        "n_points": len(ratios),
        "spread": damage.spread,
    }
    return [
        shared
        | row
        | {
            "used_for_fit": corpus == calibrated_on and row["ratio"] in ratios,
            "predicted": float(damage.predict(row["summed_score"])),
        }
        for row in measured
    ]


def main() -> None:
    """Measure, predict and write the table."""
    parser = argparse.ArgumentParser(description="Measure how Δloss is predicted.")
    parser.add_argument("--model", default=LAB)
    parser.add_argument("--name", default="damage", help="of the files written")
    options = parser.parse_args()
    bench = open_workbench(options.model, device="cpu", dtype="float32")
    corpora, skipped = available_corpora((CALIBRATION, "wikitext2"))
    rows = []
    for estimator in METHODS:
        for corpus in corpora:
            measured = measure(bench, estimator, corpus)
            for ratios in FITTED:
                for source in dict.fromkeys((corpus, CALIBRATION)):
                    rows += predict(
                        bench, measured, calibrated_on=source, ratios=ratios
                    )
    rows = [{"model": bench.name} | row for row in rows]
    details = machine() | {"identity": bench.identity, "skipped": skipped}
    write_results(options.name, rows, details)


if __name__ == "__main__":
    main()
