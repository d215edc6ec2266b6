"""What pruning and rounding the experts' weights cost, apart and together.

    python benchmarks/quantised.py [--models lab,unbalanced,fine] [--corpus pydocs]

Δloss in nats per token against the bytes of the weights. Atoms are selected
by HEAPr as published, at up to 70 %; the weights of the experts that are left are in
bfloat16, int8 (a scale for each row of W_gate, W_up and column of W_down) or int4 (one
for each 32 weights of it), rounded to the nearest, all others in bfloat16. They are
evaluated in float32, on held-out windows of the corpus that importance was measured on;
bytes are those of weights and scales. `stderr` is the standard error over windows of
the difference to the dense model.
"""

import argparse
import copy
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.machine import machine, write_results
from benchmarks.quality import bench_of
from heapr_lab.evaluation.paired import paired_difference
from heapr_lab.evaluation.perplexity import evaluate_perplexity
from heapr_lab.models.experts import sliced_experts
from heapr_lab.pruning.masks import KeepMask
from heapr_lab.pruning.surgery import prune
from heapr_lab.text.calibration_spec import Calibration
from heapr_lab.workbench.settings import Setting
from heapr_lab.workbench.workbench import Workbench

RATIOS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7)
FLOATS = "bfloat16"
INTEGERS: dict[str, tuple[int, int | None]] = {"int8": (8, None), "int4": (4, 32)}
"""Bits of a weight, and how many in a row share a scale: None for all of them."""


def mask(bench: Workbench, ratio: float, corpus: str) -> KeepMask:
    """The atoms kept; at ratio 0 all of them."""
    if ratio:
        return bench.keep(Setting(ratio, calibration=corpus))
    return KeepMask.full(bench.importance(Calibration(corpus)))


def pruned(bench: Workbench, keep: KeepMask, weights: str) -> tuple[Any, int]:
    """The model of a mask with experts in `weights`, and the bytes of its weights."""
    model = copy.deepcopy(prune(bench.model, keep))
    model = model.to(torch.bfloat16).to(torch.float32)
    n_bytes = torch.bfloat16.itemsize * sum(p.numel() for p in model.parameters())
    if weights == FLOATS:
        return model, n_bytes
    bits, size = INTEGERS[weights]
    for experts in sliced_experts(model).values():
        for matrix in (experts.up_rows, experts.down_columns):
            matrix.data, n_scales = rounded(matrix.data, bits, size or matrix.shape[1])
            n_bytes += torch.bfloat16.itemsize * (n_scales - matrix.numel())
            n_bytes += matrix.numel() * bits // 8
    return model, n_bytes


def rounded(weight: torch.Tensor, bits: int, size: int) -> tuple[torch.Tensor, int]:
    """The nearest integer times a scale of each group, and the number of groups.

    Shapes: weight and result (n, D); a group has `size` weights in a row.
    """
    groups = weight.unflatten(1, (-1, size))
    most = 2 ** (bits - 1) - 1
    scale = (groups.abs().amax(2, keepdim=True) / most).bfloat16().float()
    steps = torch.where(scale > 0, scale, 1)
    whole = (groups / steps).round().clamp(-most, most)
    return (whole * scale).flatten(1), scale.numel()


def measure(bench: Workbench, name: str, corpus: str) -> list[dict[str, Any]]:
    """A row of the model `name` for each ratio and kind of weights."""
    windows = bench.test_windows(corpus)
    dense = bench.perplexity(None, windows).windows
    rows = []
    for ratio in RATIOS:
        keep = mask(bench, ratio, corpus)
        for weights in (FLOATS, *INTEGERS):
            smaller, n_bytes = pruned(bench, keep, weights)
            perplexity = evaluate_perplexity(smaller, windows.ids)
            rise, stderr = paired_difference(perplexity.windows, dense)
            rows.append(
                {
                    "model": f"{name} model",
                    "weights": weights,
                    "ratio": ratio,
                    "bytes": n_bytes,
                    "nll": perplexity.nll,
                    "delta_nll": rise,
                    "stderr": stderr,
                    "n_tokens": perplexity.n_tokens,
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
        bench = bench_of(name)
        rows += measure(bench, name, options.corpus)
        identities[f"{name} model"] = bench.identity
    details = machine() | {
        "corpus": options.corpus,
        "identities": identities,
        "n_test": bench.profile.n_test,
    }
    write_results("quantised", rows, details)


if __name__ == "__main__":
    main()
