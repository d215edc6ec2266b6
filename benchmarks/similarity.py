"""How alike the experts of a layer are: whether averaging them can keep anything.

    python benchmarks/similarity.py [--models lab,upcycled]

For every pair of experts of a layer: the cosine of their weights, all three matrices as
one vector; and the mean cosine of their outputs on the same tokens, whether routed to
them or not. The mean of two vectors of equal length keeps √((1 + cosine) / 2) of it.
`benchmarks/methods.py` measures what merging and removing random atoms lose.
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.machine import machine, write_results
from benchmarks.quality import model_folder
from heapr_lab.methods.collectors import expert_output
from heapr_lab.models.experts import ExpertsLayer
from heapr_lab.models.loading import load_model
from heapr_lab.refinement.expert_calls import iter_expert_calls
from heapr_lab.text.calibration import load_calibration

MODELS = ("lab", "unbalanced", "fine", "upcycled", "smolmoe")
CORPUS = "pydocs"
N_WINDOWS, SEQ_LEN = 2, 128


def layers_of(name: str) -> Iterator[dict[str, Any]]:
    """A row for each layer of a model."""
    model, tokenizer = load_model(model_folder(name), device="cpu", stream=False)
    windows = load_calibration(
        CORPUS, tokenizer, n_sequences=N_WINDOWS, seq_len=SEQ_LEN
    )
    for calls in iter_expert_calls(model, windows.ids):
        layer = calls.layer
        yield {
            "model": name,
            "layer": layer.layer,
            "n_experts": layer.n_experts,
            "weights_cosine": mean_cosine(weights(layer)[:, None]),
            "outputs_cosine": mean_cosine(outputs(layer, calls.hidden_states)),
        }


def weights(layer: ExpertsLayer) -> torch.Tensor:
    """All weights of each expert in a row, (E, n)."""
    experts = (layer.expert(number) for number in range(layer.n_experts))
    return torch.stack(
        [torch.cat([part.flatten() for part in one.values()]) for one in experts]
    )


@torch.no_grad()
def outputs(layer: ExpertsLayer, x: torch.Tensor) -> torch.Tensor:
    """What every expert makes of every token x (T, D), (E, T, D)."""
    experts = range(layer.n_experts)
    return torch.stack([expert_output(layer, number, x) for number in experts])


def mean_cosine(vectors: torch.Tensor) -> float:
    """The mean cosine over pairs of experts and tokens.

    Shapes: vectors (E, T, n).
    """
    units = F.normalize(vectors.double(), dim=-1)
    sums = units.sum(0).square().sum(-1)  # of all pairs, an expert with itself too
    n_experts = len(units)
    return float(((sums - n_experts) / (n_experts * (n_experts - 1))).mean())


def main() -> None:
    """Measure the models and write the table."""
    parser = argparse.ArgumentParser(description="Compare the experts of a layer.")
    parser.add_argument("--models", default=",".join(MODELS))
    options = parser.parse_args()
    rows = [row for name in options.models.split(",") for row in layers_of(name)]
    text = f"{N_WINDOWS} windows of {SEQ_LEN} tokens of {CORPUS}"
    write_results("similarity", rows, machine() | {"calibration": text})


if __name__ == "__main__":
    main()
