"""What compensation, elimination and `compress` cost beside the scores.

    python benchmarks/solves.py [--device cuda] [--only DeepSeekMoE-16B]

One layer of random float32 weights at the true widths of the paper's four models, on
2048 random tokens; and `compress` on a whole model of 0.9 billion parameters (8 layers
of 64 experts of 512 atoms, d_model 1024, 8 windows of 512 tokens). Seconds of one run.
FLOPs of the solves are those of dense float64 arithmetic on matrices of these sizes.
"""

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.cost import Configuration, build_model, calibration_set
from benchmarks.machine import machine, write_results
from heapr_lab.importance.activation_grams import collect_grams, default_span
from heapr_lab.importance.collect import collect_statistics
from heapr_lab.models.experts import find_experts
from heapr_lab.pruning.selection import select
from heapr_lab.refinement.compensation import solve_layers
from heapr_lab.refinement.compress import fit_compression
from heapr_lab.refinement.elimination import with_elimination

RATIO = 0.4
LAYERS = {
    "DeepSeekMoE-16B": Configuration(
        "qwen3_moe", 2048, 1408, 64, 1, 2048, 2048, top_k=6
    ),
    "Qwen1.5-MoE-A2.7B": Configuration(
        "qwen3_moe", 2048, 1408, 60, 1, 2048, 2048, top_k=4
    ),
    "Qwen3-30B-A3B": Configuration("qwen3_moe", 2048, 768, 128, 1, 2048, 2048, top_k=8),
    "Qwen2-57B-A14B": Configuration(
        "qwen3_moe", 3584, 2560, 64, 1, 2048, 2048, top_k=8
    ),
}
"""One layer of each; experts alone matter, and these are alike in all families."""
WHOLE = Configuration(
    "qwen3_moe", 1024, 512, 64, 8, 4096, 4096, top_k=8, d_vocab=32000, seq_len=512
)


def timed(work: Callable[[], Any], device: str) -> tuple[Any, float]:
    """The result of `work`, and its seconds."""
    began = time.perf_counter()
    found = work()
    if device == "cuda":
        torch.cuda.synchronize()
    return found, time.perf_counter() - began


def parts(configuration: Configuration, device: str, *, whole: bool) -> dict[str, Any]:
    """Seconds of each part on one random model."""
    model = build_model(configuration, device)
    windows = calibration_set(configuration)
    layers = find_experts(model)
    span = default_span(layers)
    table, scores = timed(lambda: collect_statistics(model, windows), device)
    row: dict[str, Any] = {
        "layers": len(layers),
        "experts": configuration.n_experts,
        "atoms": configuration.d_inter,
        "d_model": configuration.d_model,
        "tokens": configuration.n_tokens,
        "span": span,
        "scores": scores,
    }
    if whole:
        found, row["compress"] = timed(
            lambda: fit_compression(model, windows, ratio=RATIO), device
        )
        row["compress ÷ scores"] = row["compress"] / scores
        row["passes"] = found.passes
    grams, row["sums"] = timed(lambda: collect_grams(model, windows, span=span), device)
    pairs = [(layer, grams[layer.layer]) for layer in layers]
    table, row["elimination"] = timed(lambda: with_elimination(table, pairs), device)
    keep = select(table, ratio=RATIO, estimator="elimination")
    _, row["compensation"] = timed(lambda: solve_layers(layers, keep, grams), device)
    solves = row["elimination"] + row["compensation"]
    row["solves ÷ scores"] = solves / scores
    return row


def main() -> None:
    """Measure all rows, and write them after each."""
    parser = argparse.ArgumentParser(description="Measure what the solves cost.")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--only", default="", help="rows, separated by commas")
    options = parser.parse_args()
    asked = options.only.split(",") if options.only else [*LAYERS, "whole"]
    rows = []
    for name, configuration in {**LAYERS, "whole": WHOLE}.items():
        if name not in asked:
            continue
        found = parts(configuration, options.device, whole=name == "whole")
        label = "0.9B, 8 layers" if name == "whole" else f"{name}, one layer"
        rows.append({"model": label, **found})
        stem = "solves" if options.device == "cpu" else f"solves_{options.device}"
        write_results(stem, rows, machine(options.device) | {"ratio": RATIO})


if __name__ == "__main__":
    main()
