"""What healing gains on a pretrained model, by the text that it is given.

    python benchmarks/healing.py [--model smolmoe] [--ratios 0.25,0.4]
        [--text 0,32,64] [--items 100]

`compress` at each ratio, calibrated on 32 windows of 512 tokens of WikiText-2, healed
on so many windows of the same corpus (an eighth to a quarter of them is held out, 16 at
most): perplexity on windows spread over the test splits of WikiText-2, PTB and C4, and
the paper's seven tasks, with paired differences to the dense model and to the model
before healing. A row that is there is not measured again. Seconds are CPU time of
healing alone.
"""

import argparse
import logging
import math
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import real
from benchmarks.machine import RESULTS, Rows
from heapr_lab.pruning.surgery import prune
from heapr_lab.refinement.compress import fit_compression
from heapr_lab.refinement.healing import heal
from heapr_lab.storage.files import replacing
from heapr_lab.tasks.paper_tasks import task_summary
from heapr_lab.text.calibration import load_calibration

ITEMS = "healing_items.parquet"
"""Which items a model answers rightly, by its ratio and the windows of its healing."""


def main() -> None:
    """Measure every ratio and amount of text that has no row, and write each."""
    parser = argparse.ArgumentParser(description="Measure healing.")
    parser.add_argument("--model", default="smolmoe", choices=("smolmoe", "smollm2"))
    parser.add_argument("--ratios", default="0.25,0.4")
    parser.add_argument("--text", default="0,32,64", help="windows, comma-separated")
    parser.add_argument("--windows", type=int, default=real.N_SHARED)
    parser.add_argument("--items", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    rows = Rows("healing")
    amounts = [*map(int, options.text.split(","))]
    for ratio in map(float, options.ratios.split(",")):
        key = {"model": options.model, "ratio": ratio}
        missing = [n for n in amounts if not rows.has(key | {"windows": n})]
        if not missing:
            continue
        for row in _measured(ratio, missing, options):
            details = {"n_test": options.windows, "seq_len": real.SEQ_LEN}
            rows.add([key | row], details | {"n_items": options.items})


def _measured(
    ratio: float, n_windows: list[int], options: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """A row for each number of windows; the model is pruned in the same way."""
    dense = next(real.states(options.model))
    reference = real.stored(RESULTS)[dense]
    pruner = real.Pruner(options.model)
    fitted = fit_compression(pruner.model, pruner.windows(dense), ratio=ratio)
    for n in n_windows:
        model = prune(pruner.model, fitted.keep, down_projs=fitted.down_projs)
        began = time.process_time()
        tokens = _healed(model, pruner, n)
        seconds = round(time.process_time() - began, 1)
        results = real.read(model, pruner.tokenizer, options, {})
        unhealed = _items(results, {"model": options.model, "ratio": ratio}, n)
        row = {"windows": n, "tokens": tokens, "cpu_seconds": seconds}
        yield row | _row(results, reference, unhealed)


def _healed(model: Any, pruner: real.Pruner, n_windows: int) -> int:
    """Heal a pruned model; returns the tokens that it was trained on."""
    if not n_windows:
        return 0
    text = load_calibration(
        real.FITTED_TO,
        pruner.tokenizer,
        n_sequences=n_windows,
        seq_len=real.SEQ_LEN,
    )
    heal(model, pruner.model, text)
    return int(model.heapr_healing["tokens"].iloc[-1])


def _items(results: real.Results, pruned: dict[str, Any], n: int) -> pd.DataFrame:
    """The items of the model that is not healed, after those of this one are added."""
    path = RESULTS / ITEMS
    every = results.items.assign(**pruned, windows=n)
    if path.exists():
        before = pd.read_parquet(path)
        every = pd.concat([before[~_are(before, pruned, n)], every])
    with replacing(path) as temporary:
        every.to_parquet(temporary, index=False)
    return every[_are(every, pruned, 0)].drop(columns=[*pruned, "windows"])


def _are(items: pd.DataFrame, pruned: dict[str, Any], n: int) -> "pd.Series[bool]":
    """Which rows are of a pruned model that was healed on `n` windows."""
    values = pd.Series({**pruned, "windows": n})
    return items[values.index].eq(values).all(axis=1)


def _row(
    results: real.Results, dense: real.Results, unhealed: pd.DataFrame
) -> dict[str, Any]:
    """Perplexities and accuracies, with differences."""
    row: dict[str, Any] = {}
    for corpus in real.CORPORA:
        losses = results.losses(corpus)
        row[f"perplexity {corpus}"] = math.exp(statistics.fmean(losses))
        difference, error = real.difference(losses, dense.losses(corpus))
        row |= {f"delta_nll {corpus}": difference, f"stderr {corpus}": error}
    row |= real.mean_of("accuracy", task_summary(results.items).set_index("task"))
    for name, items in {"dense": dense.items, "unhealed": unhealed}.items():
        change = real.more_right(results.items, items)
        row |= real.mean_of(f"against_{name}", change)
    return row


if __name__ == "__main__":
    main()
