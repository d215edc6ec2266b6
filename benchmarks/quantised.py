"""What pruning and rounding the experts' weights cost, apart and together.

    python benchmarks/quantised.py [--models lab,unbalanced,fine] [--corpus pydocs]

Δloss in nats per token against the bytes of the checkpoint's files. Atoms are selected
by HEAPr as published, at up to 70 %; the weights of the experts that are left are in
bfloat16, int8 or int4 (`heapr-lab convert --quantise`), all others in bfloat16. Every
checkpoint is written, loaded again and evaluated in float32, on held-out windows of the
corpus that importance was measured on. `stderr` is the standard error over windows of
the difference to the dense model.
"""

import argparse
import dataclasses
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.machine import machine, write_results
from benchmarks.quality import model_folder
from heapr_lab.checkpoints.convert import quantise_model
from heapr_lab.checkpoints.save import save_pruned
from heapr_lab.evaluation.paired import paired_difference
from heapr_lab.evaluation.perplexity import evaluate_perplexity
from heapr_lab.models.folders import read_weights
from heapr_lab.models.ragged_experts import QUANTISED
from heapr_lab.models.sources import weights_bytes
from heapr_lab.pruning.masks import KeepMask
from heapr_lab.pruning.surgery import prune
from heapr_lab.text.calibration_spec import Calibration
from heapr_lab.workbench.settings import Setting
from heapr_lab.workbench.workbench import Workbench, open_workbench

RATIOS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7)
FLOATS = "bfloat16"
N_TEST = 40


def mask(bench: Workbench, ratio: float, corpus: str) -> KeepMask:
    """The atoms kept; at ratio 0 all of them."""
    if ratio:
        return bench.keep(Setting(ratio, calibration=corpus))
    return KeepMask.full(bench.importance(Calibration(corpus)))


def write(bench: Workbench, keep: KeepMask, weights: str, folder: Path) -> Path:
    """The checkpoint of a mask, with experts in `weights`."""
    pruned = prune(bench.model, keep).to(torch.bfloat16)
    pruned.config.dtype = torch.bfloat16
    if weights != FLOATS:
        quantise_model(pruned, weights)
    return save_pruned(pruned, folder)


def measure(bench: Workbench, name: str, corpus: str) -> list[dict[str, Any]]:
    """A row of the model `name` for each ratio and kind of weights."""
    windows = bench.test_windows(corpus)
    dense = bench.perplexity(None, windows).windows
    rows = []
    for ratio in RATIOS:
        keep = mask(bench, ratio, corpus)
        for weights in (FLOATS, *QUANTISED):
            with tempfile.TemporaryDirectory() as place:
                folder = write(bench, keep, weights, Path(place) / "out")
                loaded = read_weights(folder, dtype="float32")
                n_bytes = weights_bytes(folder)
            found = evaluate_perplexity(loaded, windows.ids)
            rise, stderr = paired_difference(found.windows, dense)
            rows.append(
                {
                    "model": f"{name} model",
                    "weights": weights,
                    "ratio": ratio,
                    "bytes": n_bytes,
                    "nll": found.nll,
                    "delta_nll": rise,
                    "stderr": stderr,
                    "n_tokens": found.n_tokens,
                }
            )
    return rows


def main() -> None:
    """Measure every model and write the table."""
    parser = argparse.ArgumentParser(description="Measure pruned, quantised and both.")
    parser.add_argument("--models", default="lab,unbalanced,fine")
    parser.add_argument("--corpus", default="pydocs")
    options = parser.parse_args()
    rows, identities = [], {}
    for name in options.models.split(","):
        bench = open_workbench(
            model_folder(name), device="cpu", dtype="float32", profile="lab"
        )
        bench.profile = dataclasses.replace(bench.profile, n_test=N_TEST)
        rows += measure(bench, name, options.corpus)
        identities[f"{name} model"] = bench.identity
    details = machine() | {
        "corpus": options.corpus,
        "identities": identities,
        "n_test": N_TEST,
    }
    write_results("quantised", rows, details)


if __name__ == "__main__":
    main()
