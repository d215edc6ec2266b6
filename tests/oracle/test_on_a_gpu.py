"""Whatever takes a model gives on a GPU the numbers that it gives on the CPU.

With `HEAPR_GPU=second` the GPU is made of the CPU, by `second_device`, and anything
that is left on the CPU is an error.
"""

import functools
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pandas as pd
import pytest
import torch
from devices import GPU, OF_DEVICES
from families import REPRESENTATIVES, tiny_model, tiny_windows
from keeps import logits_of, masked_nll, window_nll
from tiny_folder import opened, write_model, write_text

import heapr_lab
from heapr_lab import Calibration, CalibrationSet, Workbench, methods
from heapr_lab.inspection.attribution import attribute_loss
from heapr_lab.inspection.passages import read_passage, token_losses
from heapr_lab.models.experts import find_experts
from heapr_lab.refinement import descent
from heapr_lab.refinement.elimination import eliminate
from heapr_lab.refinement.own_text import continuations
from heapr_lab.tasks.harness import continuation_task
from heapr_lab.tasks.items import task_items
from heapr_lab.workbench.settings import PROFILES

pytestmark = pytest.mark.gpu

CLOSE = {"rtol": 1e-6, "atol": 1e-9}
"""In float64; the second device gives all but the last bits. CUDA's norms of the
differences are within `OF_DEVICES`."""
IDS = torch.randint(0, 250, (8, 16), generator=torch.Generator().manual_seed(0))


class Side:
    """A tiny model on one device, and what is made of it there."""

    def __init__(self, device: str, root: Path) -> None:
        self.device, self.root, self.place = device, root, root / device
        self.text = str(root / "text.txt")
        self.calibration = Calibration(self.text, n_sequences=8, seq_len=32)
        self.model, self.tokenizer = self.opened(stream=False)
        self.windows = CalibrationSet.from_ids(IDS)

    def opened(self, **options: Any) -> tuple[Any, Any]:
        """The model and its tokenizer from files."""
        options |= {"device": self.device, "dtype": "float64"}
        return heapr_lab.load_model(self.root / "moe", **options)

    @functools.cached_property
    def table(self) -> heapr_lab.ImportanceTable:
        """The statistics of its windows."""
        return heapr_lab.collect_statistics(self.model, self.windows)

    @functools.cached_property
    def keep(self) -> heapr_lab.KeepMask:
        """Half of the atoms."""
        return heapr_lab.select(self.table, ratio=0.5)

    @property
    def tasks(self) -> list[Any]:
        """Four items."""
        corpus = heapr_lab.load_corpus(self.text, split="test")
        return [continuation_task(corpus, n_items=4)]

    def pruned(self) -> Any:
        """A new model without the other half."""
        return heapr_lab.prune(self.model, self.keep)

    @functools.cached_property
    def bench(self) -> Workbench:
        """The model on a bench."""
        return Workbench(
            self.model, self.tokenizer, name="tiny", profile=PROFILES["small"]
        )


@pytest.fixture(scope="module")
def sides(tmp_path_factory) -> list[Side]:
    """The same model on both devices."""
    root = tmp_path_factory.mktemp("sides")
    write_model(root / "moe")
    write_text(root / "text.txt")
    pair = [Side(device, root) for device in ("cpu", GPU)]
    assert {p.device.type for p in pair[1].model.parameters()} == {GPU}
    return pair


def assert_close(theirs: torch.Tensor, ours: torch.Tensor) -> None:
    """The same numbers, as nearly as the device gives them; where one is NaN, both."""
    if GPU == "cuda":
        assert theirs.isnan().equal(ours.isnan())
        off = (theirs - ours).nan_to_num().double().norm()
        assert off <= OF_DEVICES * ours.nan_to_num().double().norm()
    else:
        torch.testing.assert_close(theirs, ours, equal_nan=True, **CLOSE)


def numbers(output: Any) -> Iterator[torch.Tensor]:
    """All numbers in a result, on the CPU; for a model, its logits."""
    if isinstance(output, torch.nn.Module):
        ids = IDS.to(next(output.parameters()).device)
        yield logits_of(output, ids).cpu()
    elif isinstance(output, pd.DataFrame):
        plain = output.select_dtypes("number").to_numpy(dtype=float)
        yield from torch.from_numpy(plain.copy()).T
    elif isinstance(output, torch.Tensor):
        yield output.cpu()
    elif isinstance(output, list | tuple):
        for part in output:
            yield from numbers(part)
    else:
        yield torch.tensor(float(output))


# --- public functions -----------------------------------------------------------------


def saved(side: Side) -> torch.Tensor:
    """Losses of the pruned model's files, on the CPU."""
    folder = heapr_lab.save_pruned(side.pruned(), side.place / "saved")
    return window_nll(opened(folder, stream=False), IDS)


def in_panel(side: Side) -> pd.DataFrame:
    """What the panel's Evaluate measures in its thread."""
    task = f"continuation:{side.text}"
    panel: Any = heapr_lab.explore(
        side.bench, corpora=(side.text,), tasks=(task,), calibration=side.calibration
    )
    panel.controls.ratio.value = "0.4"
    panel.evaluation.tasks.value = panel.evaluation.tasks.options
    panel.evaluation.job.button.click()
    panel.evaluation.job.wait(120)
    assert panel.evaluation.job.error.value == panel.error.value == ""
    points = panel.session.points
    assert points["dataset"].nunique() == 2
    return points


def benched(side: Side) -> float:
    """The loss of a model that a bench opened."""
    bench = heapr_lab.open_workbench(
        str(side.root / "moe"), device=side.device, dtype="float64", profile="small"
    )
    assert bench.model.device.type == side.device
    return bench.perplexity(None, side.windows).nll


def drawn(side: Side, draw: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Tokens that every draw gives, because the model is sure of each."""
    head = side.model.get_output_embeddings()
    with head.register_forward_hook(lambda _head, _states, logits: 1e3 * logits):
        return draw(side.model, *args, **options)


CALLS: dict[str, Callable[[Side], Any]] = {
    "collect_statistics": lambda side: side.table.frame,
    "compensate": lambda side: heapr_lab.compensate(
        side.model, side.keep, side.windows
    ),
    "compress": lambda side: heapr_lab.compress(side.model, side.windows, ratio=0.5),
    "evaluate_divergence": lambda side: (
        heapr_lab.evaluate_divergence(side.model, side.keep, IDS).kl
    ),
    "evaluate_perplexity": lambda side: (
        heapr_lab.evaluate_perplexity(side.model, IDS).windows
    ),
    "explore": in_panel,
    "heal": lambda side: heapr_lab.heal(side.pruned(), side.model, side.windows),
    "load_model": lambda side: side.opened()[0],
    "masking": lambda side: masked_nll(side.model, IDS, side.keep),
    "open_workbench": benched,
    "own_text": lambda side: (
        drawn(side, heapr_lab.own_text, side.tokenizer, n_sequences=3, seq_len=8).ids
    ),
    "prune": Side.pruned,
    "run_tasks": lambda side: heapr_lab.run_tasks(
        side.model, side.tokenizer, side.tasks
    ),
    "save_pruned": saved,
}
OTHERS = {"plan"}
"""Functions that read configurations alone."""
TAKEN = {"model", "dense", "bench", "name_or_path", "source"}
"""The names of parameters that take a model."""


def _takes_a_model(name: str) -> bool:
    function = getattr(heapr_lab, name)
    return inspect.isfunction(function) and bool(
        TAKEN & set(inspect.signature(function).parameters)
    )


def test_every_public_function_that_takes_a_model_is_here():
    """The calls are those functions and no others."""
    assert set(filter(_takes_a_model, heapr_lab.__all__)) == CALLS.keys() | OTHERS


# --- what the panel shows of a passage ------------------------------------------------


def passage_of(side: Side) -> Any:
    """A few tokens."""
    return read_passage(side.model, side.tokenizer, text="the panel and the theatre")


def stepped(side: Side) -> list[Any]:
    """W_down after steps from the model's own, in memory and of layers on disk."""
    downs = {e.layer: e.down.detach().clone() for e in find_experts(side.model)}
    models = side.model, side.opened(stream=True)[0]
    with patch.object(descent, "FEWEST_TOKENS", 0):
        moved = [descent.descended(m, side.keep, downs, side.windows) for m in models]
    return [down for new in moved for down in new.values()]


INSPECTED: dict[str, Callable[[Side], Any]] = {
    "steps": stepped,
    "generation": lambda side: drawn(side, continuations, IDS, n_new=4),
    "elimination": lambda side: eliminate(side.model, side.table, side.windows).frame,
    "attribution": lambda side: attribute_loss(
        side.model, side.keep, passage_of(side).ids
    ).layers(),
    "losses": lambda side: token_losses(side.model, passage_of(side), keep=side.keep),
    "items of tasks": lambda side: task_items(
        side.model, side.tokenizer, side.tasks, n_items=2
    ),
}


# --- methods, and layers on disk ------------------------------------------------------


def fitted(name: str, side: Side) -> list[Any]:
    """What a method makes of the model, on the device."""
    compression = methods.get(name).fit(side.model, side.windows, ratio=0.25)
    return [compression.achieved_ratio, compression.materialise(side.model)]


def streamed(side: Side) -> list[Any]:
    """Scored, masked, pruned, saved and compressed, a layer at a time."""
    model, _ = side.opened(stream=True)
    windows = side.windows
    table = heapr_lab.collect_statistics(model, windows)
    keep = heapr_lab.select(table, ratio=0.5)
    masked = masked_nll(model, windows.ids, keep)
    assert find_experts(model)[0].device.type == side.device
    pruned = heapr_lab.prune(model, keep)
    folder = heapr_lab.save_pruned(pruned, side.place / "streamed")
    again = opened(folder, stream=False)
    best = heapr_lab.compress(model, windows, ratio=0.5)
    return [table.frame, masked, again, window_nll(best, windows.ids)]


EVERY = {
    **CALLS,
    **INSPECTED,
    **{name: functools.partial(fitted, name) for name in methods.names()},
    "layers from disk": streamed,
}


@pytest.mark.parametrize("name", EVERY)
def test_both_devices_give_the_same_numbers(name, sides, monkeypatch):
    """Each function, inspection and method, with a cache of its own."""
    outputs = []
    for side in sides:
        monkeypatch.setenv("HEAPR_CACHE_DIR", str(side.place / "cache"))
        torch.manual_seed(0)
        outputs.append(list(numbers(EVERY[name](side))))
    assert outputs[0]
    for ours, theirs in zip(*outputs, strict=True):
        assert_close(theirs, ours)


# --- implementations and types --------------------------------------------------------


@pytest.mark.parametrize("family", REPRESENTATIVES)
def test_families_by_every_implementation(family):
    """Statistics and masked losses, by each experts implementation of transformers."""
    windows = tiny_windows(n_sequences=2)
    model: Any = tiny_model(family, dtype=torch.float32)
    table = heapr_lab.collect_statistics(model, windows)
    keep = heapr_lab.select(table, ratio=0.5)
    losses = masked_nll(model, windows.ids, keep)
    model.to(GPU)
    for name in ("eager", "batched_mm", "grouped_mm"):
        model.set_experts_implementation(name)
        frame = heapr_lab.collect_statistics(model, windows).frame
        assert frame["tokens"].equals(table.frame["tokens"]), name
        for column in ("sum_h2", "sum_hg2"):
            ours, theirs = (torch.tensor(f[column]) for f in (table.frame, frame))
            assert (theirs - ours).norm() < 1e-3 * ours.norm(), (name, column)
        again = masked_nll(model, windows.ids, keep)
        torch.testing.assert_close(again, losses, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype):
    """Statistics, masked, pruned and compressed losses, to its few digits."""
    model: Any = tiny_model("qwen3_moe", dtype=dtype)
    windows, outputs = CalibrationSet.from_ids(IDS % 48), []
    keep = heapr_lab.select(heapr_lab.collect_statistics(model, windows), ratio=0.5)
    for device in ("cpu", GPU):
        model.to(device)
        masked = masked_nll(model, windows.ids, keep)
        frame = heapr_lab.collect_statistics(model, windows).frame
        pruned = window_nll(heapr_lab.prune(model, keep), windows.ids)
        smaller = heapr_lab.compress(model, windows, ratio=0.2)
        best = window_nll(smaller, windows.ids).mean()
        sums = torch.tensor(frame["sum_h2"].sum())
        outputs.append([masked, pruned, sums.log(), best])
    torch.testing.assert_close(*outputs, rtol=0.02, atol=0.02)
