"""Widths of experts learned by gradients, beside those that scores give.

    python benchmarks/learned_widths.py [--model smolmoe] [--ratio 0.4] [--epochs 2]

As FlexMoE learns them, as far as its paper says: the atoms of an expert are in the
order of their scores, and a width keeps the first of them; every expert has a logit for
each of nine widths, from which one is drawn at each step (Gumbel-softmax,
straight-through); logits are trained on −log q of calibration text, with a price on the
share of atoms that is used, which rises or falls until the share is the one asked for.
The weights are not trained. A guess are the number of widths, the rates, and that
logits begin at the widths that the scores give. At the end the atoms are ranked by the
probability that they are kept, so that the share is exact.

Text is 32 windows of 512 tokens of WikiText-2 for all; scores read it once, learning
once in each epoch, compensation once more. Losses are of 16 windows spread over the
test splits of WikiText-2, PTB and C4, as differences to the dense model and, paired, to
the mask of the same scores. Seconds are CPU time of what a row takes more than its
scores.

It is not a method of the package: on `smolmoe` it loses less with twice the text than
the mask that it begins at, and more than that mask compensated; on the lab models,
compensated, it is level with elimination.
"""

import argparse
import contextlib
import itertools
import logging
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import nn
from torch.nn.utils import parametrize

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import real
from benchmarks.machine import Rows
from heapr_lab.models.experts import find_experts
from heapr_lab.models.likelihood import token_nll
from heapr_lab.models.modes import differentiating
from heapr_lab.pruning.masks import KeepMask
from heapr_lab.pruning.options import Selection
from heapr_lab.pruning.selection import select
from heapr_lab.pruning.surgery import masking
from heapr_lab.refinement.activation_grams import default_span, iter_grams
from heapr_lab.refinement.compensation import LayerSolver, compensation_of
from heapr_lab.text.calibration import CalibrationSet

SCORES = ("fisher", "heapr")
"""Whose order atoms have within an expert, and whose widths logits begin at."""
ELIMINATION = "elimination"
"""The mask beside theirs, from which nothing is learned."""
N_STEPS = 8
"""Of width; with none of an expert's atoms there are nine widths."""
RATE, BEGIN = 0.1, 1.0
"""Of the logits, and how much they fall at first with each step of width."""
PRICE_RATE, PENALTY = 1.0, 20.0
"""By how much the price changes at each step, and the square of what is too much."""
TEMPERATURES = (2.0, 0.3)
"""At the first and at the last step."""

logger = logging.getLogger("learned_widths")


class NestedWidths(nn.Module):
    """A W_down (E, D, I) whose columns are kept as far as a drawn width.

    Attributes:
        logits: (E, C), of widths from none to all of the atoms.
        share: of the last draw, the share of atoms that is kept.
    """

    blocks: torch.Tensor

    def __init__(self, blocks: torch.Tensor, widths: torch.Tensor) -> None:
        """From the step of width (E, I) of each atom, 0 first, and widths in steps."""
        super().__init__()
        self.register_buffer("blocks", blocks, persistent=False)
        distance = (torch.arange(N_STEPS + 1) - widths[:, None]).abs()
        self.logits = nn.Parameter(-BEGIN * distance.float())
        self.temperature = TEMPERATURES[0]
        self.share = torch.zeros(())

    def forward(self, down: torch.Tensor) -> torch.Tensor:
        """W_down with the columns that a new draw does not keep set to 0."""
        drawn = nn.functional.gumbel_softmax(self.logits, self.temperature, hard=True)
        kept = self.kept(drawn)
        self.share = kept.mean()
        return down * kept[:, None, :]

    def kept(self, chosen: torch.Tensor) -> torch.Tensor:
        """By weights of widths (E, C), the weight with which each atom (E, I) stays."""
        above = chosen.flip(-1).cumsum(-1).flip(-1)[:, 1:]
        return above.gather(1, self.blocks)

    def probabilities(self) -> np.ndarray:
        """With which each atom (E, I) is kept."""
        shares: np.ndarray = self.kept(self.logits.softmax(-1)).detach().numpy()
        return shares


@contextlib.contextmanager
def nested(
    model: Any, scores: dict[int, np.ndarray], keep: KeepMask
) -> Iterator[dict[int, NestedWidths]]:
    """The widths of every layer by its number, drawn anew in each forward pass."""
    layers, widths = find_experts(model), {}
    for layer in layers:
        ranks = (-scores[layer.layer]).argsort(1, kind="stable").argsort(1)
        counts = torch.from_numpy(keep.by_layer(layer.layer).sum(1))
        widths[layer.layer] = NestedWidths(
            torch.from_numpy(ranks * N_STEPS // layer.d_inter),
            (counts * N_STEPS / layer.d_inter).round().long(),
        )
    for layer in layers:
        parametrize.register_parametrization(
            layer.module, "down_proj", widths[layer.layer]
        )
    try:
        yield widths
    finally:
        for layer in layers:
            parametrize.remove_parametrizations(
                layer.module, "down_proj", leave_parametrized=False
            )


def learned(
    model: Any,
    ids: torch.Tensor,
    scores: dict[int, np.ndarray],
    keep: KeepMask,
    n_epochs: int,
) -> KeepMask:
    """The mask of learned widths, with as many atoms as `keep`."""
    with nested(model, scores, keep) as widths:
        train(model, ids, [*widths.values()], 1 - keep.achieved_ratio, n_epochs)
        kept = {number: layer.probabilities() for number, layer in widths.items()}
    probabilities, ties = (
        np.concatenate([by_layer[number].ravel() for number in kept])
        for by_layer in (kept, scores)
    )
    rows = np.ones(len(ties), bool)
    rows[np.lexsort((ties, probabilities))[: keep.n_removed]] = False
    return KeepMask.from_rows(keep, rows, made="learned widths")


def train(
    model: Any,
    ids: torch.Tensor,
    widths: list[NestedWidths],
    wanted: float,
    n_epochs: int,
) -> None:
    """Train the logits until they use the `wanted` share of the atoms."""
    logits = [layer.logits for layer in widths]
    optimizer = torch.optim.Adam(logits, lr=RATE)
    price, n_steps = 0.0, n_epochs * len(ids)
    with differentiating(model, logits):
        for step in range(n_steps):
            first, last = TEMPERATURES
            for layer in widths:
                layer.temperature = first * (last / first) ** (step / n_steps)
            with parametrize.cached():
                loss = token_nll(model, ids[step % len(ids), None]).mean()
                share = torch.stack([layer.share for layer in widths]).mean()
                over = share - wanted
                (loss + price * share + PENALTY / 2 * over**2).backward()
            optimizer.step()
            optimizer.zero_grad()
            price += PRICE_RATE * over.item()
            logger.info("%d of %d: %.4f %.4f", step + 1, n_steps, loss, share)


# --- what it costs and gives ------------------------------------------------------


def main() -> None:
    """Measure the masks of both scores, and write the rows of each."""
    parser = argparse.ArgumentParser(description="Measure learned widths.")
    parser.add_argument("--model", default="smolmoe")
    parser.add_argument("--ratio", type=float, default=0.4)
    parser.add_argument("--epochs", default="2")
    parser.add_argument("--windows", type=int, default=real.N_SHARED)
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    rows = Rows("learned_widths")
    pruner = real.Pruner(options.model)
    state = next(real.states(options.model))
    name = Path(options.model).name.removeprefix("lab_")
    for estimator in (*SCORES, ELIMINATION):
        key = {"model": name, "ratio": options.ratio, "scores": estimator}
        learned = [] if estimator == ELIMINATION else options.epochs.split(",")
        epochs = [0, *map(int, learned)]
        missing = [n for n in epochs if not rows.has(key | {"epochs": n})]
        if not missing:
            continue
        case = case_of(pruner, state, Selection(options.ratio, estimator=estimator))
        for n in missing:
            measured = case.measured(n, options.windows)
            details = {"n_test": options.windows, "seq_len": real.SEQ_LEN}
            rows.add([key | {"epochs": n} | row for row in measured], details)


def case_of(pruner: real.Pruner, state: real.State, selection: Selection) -> "Case":
    """A selection's mask on the calibration windows of a state."""
    measured, windows = pruner.measured(state), pruner.windows(state)
    table = measured.table()
    if selection.estimator != ELIMINATION:
        scores = scores_of(table, selection.estimator)
        return Case(pruner, windows, scores, select(table, selection))
    began = time.process_time()
    keep = measured.calibrated.keep(selection)
    return Case(pruner, windows, {}, keep, time.process_time() - began)


def scores_of(table: Any, estimator: str) -> dict[int, np.ndarray]:
    """The scores of each layer's atoms, (E, I)."""
    shapes, scores = table.shapes(), table.score(estimator).to_numpy()
    ends = np.cumsum([n_experts * d_inter for n_experts, d_inter in shapes.values()])
    parts = zip(shapes.items(), np.split(scores, ends[:-1]), strict=True)
    return {number: part.reshape(shape) for (number, shape), part in parts}


def compensated(model: nn.Module, keep: KeepMask, windows: CalibrationSet) -> Any:
    """The W_down of a mask by least squares alone, whatever the loss says of it."""
    span = default_span(find_experts(model))
    solvers = itertools.starmap(LayerSolver, iter_grams(model, windows, span=span))
    return compensation_of(solvers, keep).down_projs


@dataclass(frozen=True)
class Case:
    """A model, and the mask that learning begins at."""

    pruner: real.Pruner
    windows: CalibrationSet
    scores: dict[int, np.ndarray]
    keep: KeepMask
    seconds: float = 0.0
    """CPU time that the mask took beyond its scores."""

    def measured(self, n_epochs: int, n_windows: int) -> Iterator[dict[str, Any]]:
        """The rows of one mask: with unchanged weights, and compensated."""
        model, keep, began = self.pruner.model, self.keep, time.process_time()
        if n_epochs:
            torch.manual_seed(0)
            keep = learned(model, self.windows.ids, self.scores, keep, n_epochs)
        seconds = [time.process_time() - began]
        down_projs = compensated(model, keep, self.windows)
        seconds.append(time.process_time() - began)
        dense = self._losses(None, None, n_windows)
        plain = self._losses(self.keep, None, n_windows)
        for ended, weights in zip(seconds, (None, down_projs), strict=True):
            cpu_seconds = round(self.seconds + ended, 1)
            row = {"compensated": weights is not None, "cpu_seconds": cpu_seconds}
            losses = self._losses(keep, weights, n_windows)
            for corpus in real.CORPORA:
                rise, stderr = real.difference(losses[corpus], dense[corpus])
                row |= {f"delta_nll {corpus}": rise, f"stderr {corpus}": stderr}
                change, stderr = real.difference(losses[corpus], plain[corpus])
                row |= {f"against {corpus}": change, f"against_stderr {corpus}": stderr}
            yield row

    def _losses(
        self, keep: KeepMask | None, down_projs: Any, n_windows: int
    ) -> dict[str, "pd.Series[float]"]:
        """The losses of a mask, or of the dense model, by corpus and window."""
        model = self.pruner.model
        masked = masking(model, keep, down_projs) if keep else contextlib.nullcontext()
        with masked:
            losses = real.window_losses(model, self.pruner.tokenizer, n_windows)
        return dict(iter(losses.set_index("window").groupby("corpus")["nll"]))


if __name__ == "__main__":
    main()
