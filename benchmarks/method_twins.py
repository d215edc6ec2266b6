"""Methods beside plain restatements of what their public code does, in one run.

    OMP_NUM_THREADS=1 python benchmarks/method_twins.py [--model lab]

NAEE, REAP and HC-SMoE are restated from their rules as their public code proceeds, in
loops over batches, subsets and experts: NAEE runs a layer anew for each subset of its
experts; REAP and HC-SMoE run every expert on every token. Ours and the restatement are
fitted to the same model and windows, in turns, and must find the same. Below them,
HEAPr beside every other method of the registry that computes gradients. Seconds are CPU
time of one thread, the median of the turns, with nothing shared between methods.
"""

import argparse
import contextlib
import functools
import itertools
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast
from unittest import mock

import torch
from scipy.cluster.hierarchy import fcluster, linkage

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.latency import in_turns, timed
from benchmarks.machine import Rows
from benchmarks.quality import bench_of
from heapr_lab import methods
from heapr_lab.errors import HeaprLabError
from heapr_lab.methods.composing import distinct
from heapr_lab.methods.expert_axes import find_expert_axes
from heapr_lab.models.experts import ExpertsLayer
from heapr_lab.text.calibration import CalibrationSet
from heapr_lab.text.calibration_spec import Calibration

RATIO = 0.125
N_WINDOWS, SEQ_LEN, BATCH, N_ROUNDS = 16, 128, 4, 3
Kept = dict[int, tuple[int, ...]]


class Layer:
    """One layer of a model whose router is a softmax, as plain matrices."""

    def __init__(self, model: Any, layer: ExpertsLayer, router: torch.Tensor) -> None:
        """Take the matrices."""
        self.number, self.router = layer.layer, router
        self.up, self.down = layer.up_rows, layer.down
        self.n_experts = layer.n_experts
        config = model.config.get_text_config()
        self.top_k = int(config.num_experts_per_tok)
        self.normalised = bool(config.norm_topk_prob)
        self.inputs: list[torch.Tensor] = []

    def expert(self, number: int, x: torch.Tensor) -> torch.Tensor:
        """The output of one expert."""
        gate, up = (x @ self.up[number].T).chunk(2, dim=-1)
        return (torch.nn.functional.silu(gate) * up) @ self.down[number].T

    def routed(
        self, x: torch.Tensor, dropped: Sequence[int] = ()
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights and numbers of the experts of each token, without some experts."""
        logits = x @ self.router.T
        logits[:, list(dropped)] = -torch.inf
        weights, index = logits.softmax(-1).topk(self.top_k)
        if self.normalised:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights, index

    def output(self, x: torch.Tensor, dropped: Sequence[int] = ()) -> torch.Tensor:
        """What the routed experts return, one after the other."""
        weights, index = self.routed(x, dropped)
        total = torch.zeros_like(x)
        for number in range(self.n_experts):
            token, slot = (index == number).nonzero(as_tuple=True)
            if len(token):
                weighted = self.expert(number, x[token]) * weights[token, slot, None]
                total.index_add_(0, token, weighted)
        return total


@torch.no_grad()
def layers_of(model: Any, ids: torch.Tensor) -> list[Layer]:
    """The layers, with what each is called with for each batch of windows."""
    axes = find_expert_axes(model)
    layers = [Layer(model, axis.layer, cast(Any, axis.router).weight) for axis in axes]
    with contextlib.ExitStack() as hooks:
        for axis, layer in zip(axes, layers, strict=True):
            note = functools.partial(_note, layer)
            handle = axis.layer.module.register_forward_pre_hook(note)
            hooks.callback(handle.remove)
        for batch in ids.split(BATCH):
            model(batch)
    return layers


def _note(layer: Layer, _module: Any, args: tuple[Any, ...]) -> None:
    layer.inputs.append(args[0].flatten(0, -2))


@torch.no_grad()
def naee(model: Any, ids: torch.Tensor, n_gone: int) -> Kept:
    """By layer, the subset whose output is nearest: each is run on every batch.

    As ours, by one norm over all tokens; the public code adds the norms of batches, so
    that its choice depends on how windows are batched.
    """
    kept = {}
    for layer in layers_of(model, ids):
        outputs = [layer.output(x) for x in layer.inputs]
        losses = {
            gone: sum(
                float((z - layer.output(x, gone)).double().square().sum())
                for x, z in zip(layer.inputs, outputs, strict=True)
            )
            for gone in itertools.combinations(range(layer.n_experts), n_gone)
        }
        gone = min(losses, key=lambda subset: losses[subset])
        kept[layer.number] = _others(layer, gone)
    return kept


@torch.no_grad()
def reap(model: Any, ids: torch.Tensor, n_gone: int) -> Kept:
    """By layer, all but the lowest means of p · ‖f‖; experts run on all tokens."""
    kept = {}
    for layer in layers_of(model, ids):
        sums = torch.zeros(layer.n_experts, dtype=torch.float64)
        counts = torch.zeros(layer.n_experts)
        for x in layer.inputs:
            weights, index = layer.routed(x)
            outputs = [layer.expert(number, x) for number in range(layer.n_experts)]
            for number, out in enumerate(outputs):
                token, slot = (index == number).nonzero(as_tuple=True)
                norms = out[token].norm(dim=-1).double()
                sums[number] += float((norms * weights[token, slot]).sum())
                counts[number] += len(token)
        scores = sums / counts.clamp(min=1)
        kept[layer.number] = _others(
            layer, scores.argsort(stable=True)[:n_gone].tolist()
        )
    return kept


@torch.no_grad()
def hc_smoe(model: Any, ids: torch.Tensor, n_gone: int) -> dict[int, Any]:
    """By layer, merged W_down: clusters of mean outputs, merged by frequency."""
    merged = {}
    for layer in layers_of(model, ids):
        means = torch.zeros(layer.n_experts, layer.down.shape[1])
        used = torch.zeros(layer.n_experts)
        for x in layer.inputs:
            _, index = layer.routed(x)
            for number in range(layer.n_experts):
                means[number] += layer.expert(number, x).sum(0)
                used[number] += int((index == number).sum())
        n_left = layer.n_experts - n_gone
        tree = linkage(means.numpy(), method="average")
        label = torch.from_numpy(fcluster(tree, n_left, criterion="maxclust"))
        for weight in (layer.up, layer.down):
            matrices = []
            for cluster in label.unique():
                group = (label == cluster).nonzero()[:, 0]
                share = (used[group] / used[group].sum().clamp(min=1))[:, None, None]
                matrices.append((weight[group] * share).sum(0))
            merged[layer.number] = torch.stack(matrices)
    return merged


def _others(layer: Layer, gone: Sequence[int]) -> tuple[int, ...]:
    return tuple(sorted(set(range(layer.n_experts)) - set(gone)))


TWINS: dict[str, Callable[..., Any]] = {"naee": naee, "reap": reap, "hc-smoe": hc_smoe}


# --- measuring ------------------------------------------------------------------------


def fitted(name: str, model: Any, windows: CalibrationSet) -> Any:
    """What a method of the registry finds, measured anew."""
    return methods.get(name).fit(model, windows, ratio=RATIO)


def twin_rows(model: Any, windows: CalibrationSet) -> Iterator[dict[str, Any]]:
    """Ours and the restatement of each method that there is."""
    for name in [name for name in TWINS if name in methods.names()]:
        n_experts = find_expert_axes(model)[0].layer.n_experts
        restated = functools.partial(
            TWINS[name], model, windows.ids, int(RATIO * n_experts)
        )
        ours = functools.partial(fitted, name, model, windows)
        compression = ours()
        same = agree(compression, restated())
        seconds, plain = medians([ours, restated])
        yield row_of(name, "plain restatement", seconds, plain) | {"same": same}


def agree(ours: Any, restated: Any) -> bool:
    """Whether the same experts are kept, or the same matrices W_down merged."""
    if not ours.compositions:
        return bool(ours.kept == restated)
    merged = {
        layer: [w for name, w in distinct(experts).values() if name == "down"]
        for layer, experts in ours.compositions.items()
    }
    return merged.keys() == restated.keys() and all(
        len(w) == len(restated[layer])
        and torch.allclose(by_norm(w), by_norm(restated[layer]), rtol=1e-4, atol=1e-6)
        for layer, w in merged.items()
    )


def by_norm(matrices: Sequence[torch.Tensor]) -> torch.Tensor:
    """Matrices of the same shape, the smallest first."""
    return torch.stack(sorted(matrices, key=lambda matrix: float(matrix.norm())))


def gradient_rows(model: Any, windows: CalibrationSet) -> Iterator[dict[str, Any]]:
    """HEAPr beside each other method that computes gradients."""
    names = [name for name in methods.names() if by_gradients(name, model, windows)]
    calls = [functools.partial(fitted, name, model, windows) for name in names]
    seconds = dict(zip(names, medians(calls), strict=True))
    for name in names:
        if name != "heapr":
            yield row_of("heapr", name, seconds["heapr"], seconds[name])


def by_gradients(name: str, model: Any, windows: CalibrationSet) -> bool:
    """Whether fitting a method computes gradients; False if it refuses the model."""
    functions = [getattr(torch.autograd, key) for key in ("backward", "grad")]
    watched = [mock.Mock(side_effect=function) for function in functions]
    with (
        mock.patch.object(torch.autograd, "backward", watched[0]),
        mock.patch.object(torch.autograd, "grad", watched[1]),
    ):
        try:
            fitted(name, model, windows)
        except HeaprLabError:
            return False
    return any(function.called for function in watched)


def medians(calls: Sequence[Callable[[], Any]]) -> list[float]:
    """CPU seconds of each call, the median of its turns."""
    runs = [functools.partial(timed, call) for call in calls]
    turns = in_turns(runs, n_rounds=N_ROUNDS)
    return [statistics.median(seconds for _, seconds in of_call) for of_call in turns]


def row_of(name: str, other: str, ours: float, theirs: float) -> dict[str, Any]:
    """One comparison."""
    return {
        "method": name,
        "beside": other,
        "seconds": ours,
        "other_seconds": theirs,
        "ratio": ours / theirs,
    }


def main() -> None:
    """Measure all comparisons and write the table."""
    parser = argparse.ArgumentParser(description="Time methods beside restatements.")
    parser.add_argument("--model", default="lab")
    options = parser.parse_args()
    torch.set_num_threads(1)
    bench = bench_of(options.model)
    windows = bench.calibration_set(Calibration(n_sequences=N_WINDOWS, seq_len=SEQ_LEN))
    rows = Rows("method_twins")
    rows.rows = []  # all are of one run
    comparisons = itertools.chain(
        twin_rows(bench.model, windows), gradient_rows(bench.model, windows)
    )
    details = {"model": options.model, "ratio": RATIO, "n_threads": 1}
    details |= {"n_windows": N_WINDOWS, "seq_len": SEQ_LEN, "n_rounds": N_ROUNDS}
    rows.add(comparisons, details)


if __name__ == "__main__":
    main()
