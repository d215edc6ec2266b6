"""What `compress` costs beside the scores.

    OMP_NUM_THREADS=1 python benchmarks/solves.py [--device cuda]
        [--only DeepSeekMoE-16B]

One layer of random float32 weights at the true widths of the paper's four models. The
three passes of `compress` are timed on random tokens and extrapolated to the paper's
calibration set (128 windows of 2048 tokens), because their time is proportional to
tokens: the scores, the sums of products, and the loss. The solves do not depend on the
number of tokens; they are timed on sums of random products, as large as those of that
set. Three quarters of the windows are scored, and summed for each of two masks; six
losses are of an eighth each; `compress` eliminates once and compensates twice. The
steps take a pass with gradients and one without over 16,384 tokens, and a loss more.
Where HEAPr's mask is returned, there are none, and the other windows are scored in
place of the last three losses. Experts are solved one by one; of the two larger models
a quarter of them is timed. Besides, `compress` as it is, on a whole model of 0.9
billion parameters (8 layers of 64 experts of 512 atoms, d_model 1024) and no more than
16 windows of 256 tokens, which are too few for steps. Seconds are of one run: on a CPU
those that its cores spend, on a GPU those of the clock.
"""

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.cost import Configuration, build_model, calibration_set
from benchmarks.machine import Rows, machine
from benchmarks.shapes import SHAPES
from heapr_lab.evaluation.perplexity import evaluate_perplexity
from heapr_lab.importance.collect import collect_statistics
from heapr_lab.models.experts import ExpertsLayer, find_experts
from heapr_lab.pruning.selection import select
from heapr_lab.refinement.activation_grams import LayerGrams, default_span, iter_grams
from heapr_lab.refinement.compensation import LayerSolver, compensation_of
from heapr_lab.refinement.compress import fit_compression
from heapr_lab.refinement.descent import MOST_TOKENS
from heapr_lab.refinement.elimination import with_elimination

RATIO = 0.4
N_TOKENS = 128 * 2048
"""Tokens of the paper's calibration set."""
SCORED = 0.75
"""The windows that are scored; where HEAPr's mask is returned, all are."""
SUMMED = 2 * 0.75
"""Those whose products are summed: for each mask anew, as all layers' do not fit."""
DECIDED = 3 / 8
"""Those whose loss is taken to decide, of three models."""
REPORTED = 3 / 8
"""Those whose loss is taken to report, of two models and of the dense one."""
STEPPED = MOST_TOKENS / N_TOKENS
"""Those that are run with gradients, and without, for the steps."""
JUDGED = 1 / 8
"""Those whose loss is taken to judge the steps."""
TIMED = 2048
SUMMED_TOKENS = 8 * TIMED
"""More tokens for sums, which are added to once in 8192 tokens."""
LAYERS = {
    name: Configuration(
        "qwen3_moe", s.d_model, s.d_inter, s.n_experts, 1, TIMED, TIMED, top_k=s.top_k
    )
    for name, s in SHAPES.items()
}
"""One layer of each; experts alone matter, and these are alike in all families."""
PARTS = {"Qwen3-30B-A3B": 4, "Qwen2-57B-A14B": 4}
"""The solves of one in so many experts are timed."""
WHOLE = Configuration("qwen3_moe", 1024, 512, 64, 8, 4096, 4096, top_k=8, d_vocab=32000)


def timed(work: Callable[[], Any], device: str) -> tuple[Any, float]:
    """The result of `work`, and its seconds."""
    clock = time.perf_counter if device == "cuda" else time.process_time
    began = clock()
    output = work()
    if device == "cuda":
        torch.cuda.synchronize()
    return output, clock() - began


def random_sums(layer: ExpertsLayer, n_tokens: int) -> LayerGrams:
    """Sums of products within each expert, of atoms that share half of their variance.

    Every expert has the same number of tokens.
    """
    n_experts, n_atoms = layer.n_experts, layer.d_inter
    sums = torch.empty(2, n_experts, n_atoms, n_atoms, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    for part in sums.flatten(0, 1):
        noise = torch.randn(n_atoms, 2 * n_atoms, generator=generator)
        common = torch.randn(n_atoms // 4, 2 * n_atoms, generator=generator)
        mixed = (
            noise
            + torch.randn(n_atoms, n_atoms // 4, generator=generator)
            @ common
            / (n_atoms // 4) ** 0.5
        )
        part.copy_(mixed @ mixed.T)
    tokens = torch.full((2, n_experts), n_tokens // 2)
    return LayerGrams("expert", sums.to(layer.device), tokens)


def scored(configuration: Configuration, device: str) -> tuple[Any, Any, float]:
    """A model of one layer, its table, and the seconds of it."""
    model = build_model(configuration, device)
    windows = calibration_set(configuration)
    return model, *timed(lambda: collect_statistics(model, windows), device)


def one_layer(
    configuration: Configuration, device: str, *, parts: int
) -> dict[str, Any]:
    """Seconds of the passes and of the solves of one layer."""
    passes = passed(configuration, device)
    solves = solved(configuration, device, parts=parts)
    row = {"tokens": N_TOKENS} | passes | solves | quotients(passes | solves)
    return row | {"extrapolated": True}


def quotients(seconds: dict[str, float]) -> dict[str, float]:
    """The time of `compress` over that of the scores, by what it returns."""
    shares = {"scores": SCORED, "sums": SUMMED, "losses": DECIDED}
    decided = sum(share * seconds[name] for name, share in shares.items())
    decided += seconds["elimination"] + 2 * seconds["compensation"]
    scores, losses = seconds["scores"], seconds["losses"]
    more = STEPPED * scores + (STEPPED + JUDGED + REPORTED) * losses
    return {
        "compress ÷ scores": (decided + more) / scores,
        "with HEAPr's mask": decided / scores + 1 - SCORED,
    }


def passed(configuration: Configuration, device: str) -> dict[str, float]:
    """Seconds of each kind of pass over the paper's calibration set."""
    model, _, scores = scored(configuration, device)
    _, losses = timed(lambda: judge(model, configuration), device)
    _, sums = timed(lambda: add_up(model, configuration), device)
    many = N_TOKENS / TIMED
    sums *= TIMED / SUMMED_TOKENS
    return {"scores": many * scores, "sums": many * sums, "losses": many * losses}


def judge(model: Any, configuration: Configuration) -> None:
    """A pass without gradients."""
    evaluate_perplexity(model, calibration_set(configuration).ids)


def add_up(model: Any, configuration: Configuration) -> None:
    """A pass that sums products within each expert."""
    longer = replace(configuration, n_tokens=SUMMED_TOKENS)
    for _layer, _sums in iter_grams(model, calibration_set(longer), span="expert"):
        pass


def solved(configuration: Configuration, device: str, *, parts: int) -> dict[str, Any]:
    """Seconds of the solves, from those of one in so many experts."""
    fewer = replace(configuration, n_experts=configuration.n_experts // parts)
    model, table, _ = scored(fewer, device)
    (layer,) = find_experts(model)
    assert default_span([layer]) == "expert"
    routed = N_TOKENS * configuration.top_k // configuration.n_experts
    pairs = [(layer, random_sums(layer, routed))]
    windows = calibration_set(configuration)
    table, elimination = timed(lambda: with_elimination(table, windows, pairs), device)
    keep = select(table, ratio=RATIO, estimator="elimination", scope="layer")
    solvers = [LayerSolver(*pair) for pair in pairs]
    _, compensation = timed(lambda: compensation_of(solvers, keep), device)
    return {"elimination": parts * elimination, "compensation": parts * compensation}


def whole_model(configuration: Configuration, device: str) -> dict[str, Any]:
    """Seconds of the scores and of `compress`, on few tokens."""
    model = build_model(configuration, device)
    windows = calibration_set(configuration)
    _, scores = timed(lambda: collect_statistics(model, windows), device)
    _, seconds = timed(lambda: fit_compression(model, windows, ratio=RATIO), device)
    return {
        "tokens": configuration.n_tokens,
        "scores": scores,
        "compress ÷ scores": seconds / scores,
        "extrapolated": False,
    }


def main() -> None:
    """Measure the rows that are not there yet, and write them after each."""
    parser = argparse.ArgumentParser(description="Measure what the solves cost.")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--only", default="", help="rows, separated by commas")
    options = parser.parse_args()
    names = options.only.split(",") if options.only else [*LAYERS, "whole"]
    rows = Rows("solves" if options.device == "cpu" else f"solves_{options.device}")
    details = machine(options.device) | {
        "ratio": RATIO,
        "n_threads": torch.get_num_threads(),
    }
    for name, configuration in {**LAYERS, "whole": WHOLE}.items():
        key = {"model": "0.9B, 8 layers" if name == "whole" else f"{name}, one layer"}
        if name not in names or rows.has(key):
            continue
        shape = {
            "experts": configuration.n_experts,
            "atoms": configuration.d_inter,
            "d_model": configuration.d_model,
        }
        if name == "whole":
            row = whole_model(configuration, options.device)
        else:
            parts = PARTS.get(name, 1)
            row = one_layer(configuration, options.device, parts=parts)
        rows.add([key | shape | row], details)


if __name__ == "__main__":
    main()
