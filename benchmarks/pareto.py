"""What saving operations instead of parameters costs: the measured Pareto front.

    python benchmarks/pareto.py [--model lab] [--corpus pydocs]

Shares of the whole model's parameters are removed with a price from 0 (parameters) to 1
(operations): the higher the price, the more atoms are removed from the experts that
most tokens are routed to. Each row has both savings, the summed score of the pruned
atoms (the predicted Δloss for additive estimators: fisher, not heapr), and Δloss in
nats per token on the test split of the corpus that importance was measured on. If all
experts have the same shape, as in the lab model, price 0 selects as the estimator does
without prices.
"""

import argparse
import functools
import sys
from pathlib import Path
from typing import Any

import pandas as pd

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.machine import machine, write_results
from heapr_lab.models.loading import LAB
from heapr_lab.pruning.masks import KeepMask
from heapr_lab.pruning.pareto import PRICES, pareto_front
from heapr_lab.text.calibration_spec import Calibration
from heapr_lab.workbench.workbench import Workbench, open_workbench

RATIOS = (0.2, 0.4, 0.6)
ESTIMATORS = ("fisher", "heapr")


def delta_nll(bench: Workbench, corpus: str, keep: KeepMask) -> dict[str, Any]:
    """The measured columns of one row."""
    windows = bench.test_windows(corpus)
    dense, found = (bench.perplexity(mask, windows) for mask in (None, keep))
    return {
        "nll": found.nll,
        "delta_nll": found.nll - dense.nll,
        "n_tokens": found.n_tokens,
    }


def main() -> None:
    """Measure every point and write the table."""
    parser = argparse.ArgumentParser(description="Measure the front of two budgets.")
    parser.add_argument("--model", default=LAB)
    parser.add_argument("--corpus", default="pydocs")
    options = parser.parse_args()
    bench = open_workbench(options.model, device="cpu", dtype="float32")
    table = bench.importance(Calibration(options.corpus))
    evaluate = functools.partial(delta_nll, bench, options.corpus)
    fronts = [
        pareto_front(
            table,
            ratios=RATIOS,
            prices=PRICES,
            estimator=estimator,
            evaluate=evaluate,
        ).assign(estimator=estimator)
        for estimator in ESTIMATORS
    ]
    frame = pd.concat(fronts, ignore_index=True).assign(model=bench.name)
    details = machine() | {"identity": bench.identity, "corpus": options.corpus}
    write_results("pareto", frame.to_dict("records"), details)


if __name__ == "__main__":
    main()
