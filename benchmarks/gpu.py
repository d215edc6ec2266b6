"""Everything that only a GPU can show, most valuable first, within a given time.

    python benchmarks/gpu.py --out DIR --minutes 25 [--parts tests,equal]
    python benchmarks/gpu.py --out DIR --device cpu [--small]

Each part is a process with a time limit of its own. After every measurement the table
DIR/gpu.csv is written again, so that a killed run keeps what is done; a run with the
same DIR goes on with the parts that have not ended. Their output is in DIR/gpu.log.

- `tests`: the tests marked `gpu`.
- `equal`: scores on the device against those of the CPU in float64.
- `memory:MODEL`: the models of the paper with random bfloat16 weights on 128 × 2048
  tokens: scores, forward and backward without statistics (`plain`), `compress` at 40 %,
  Algorithm 1.
- `streamed:MODEL`: scores of a random checkpoint on the disk, a layer at a time. It has
  just been written, so that much of it is read from the system's cache.
- `accounting`: kernels and seconds of a layer's experts, with and without statistics.
- `ragged`: tokens per second of sliced experts (`speed.py`), in DIR/speed_gpu.csv.

A model that does not fit has fewer layers (`n_layers` of `of_layers`);
`seconds_all_layers` then is in proportion to the layers, which counts the head too
often. On a CPU there are two layers and few tokens, in float32; with --small widths are
a sixteenth.
"""

import argparse
import dataclasses
import importlib.util
import logging
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import cost, speed
from benchmarks.machine import Rows, machine
from benchmarks.shapes import (
    SHAPES,
    Shape,
    depth_within,
    random_ids,
    random_model,
    write_checkpoint,
)
from benchmarks.two_stage import two_stage_scores
from heapr_lab.importance.collect import collect_statistics
from heapr_lab.models.experts import find_experts
from heapr_lab.models.hooks import probed
from heapr_lab.models.memory import is_out_of_memory
from heapr_lab.models.moments import LayerMoments
from heapr_lab.refinement.compress import fit_compression
from heapr_lab.streaming.opening import open_streamed
from heapr_lab.streaming.stream import stream_of
from heapr_lab.text.calibration import CalibrationSet

logger = logging.getLogger("gpu")

ROOT = Path(__file__).resolve().parents[1]

TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-3, torch.bfloat16: None}
"""Largest relative distance ‖s - s'‖/‖s'‖ of the scores; none is promised for bf16.

In a float64 model, too, transformers calculates the angles of rotary embeddings and the
softmax of routers in float32, which other kernels round in another way.
"""
TARGETS = {  # seconds of the scores, and GB on the device
    "memory:DeepSeekMoE-16B": (30, 40),
    "streamed:DeepSeekMoE-16B": (None, 8),
    "streamed:Qwen2-57B-A14B": (120, 12),
}
LIMITS = {"tests": 240, "equal": 120, "accounting": 120, "ragged": 400}
"""Seconds of a part; those of a model have 300."""
PARTS = (
    "tests",
    "equal",
    "memory:DeepSeekMoE-16B",
    "streamed:DeepSeekMoE-16B",
    "streamed:Qwen2-57B-A14B",
    "accounting",
    "memory:Qwen3-30B-A3B",
    "ragged",
    "memory:Qwen1.5-MoE-A2.7B",
    "streamed:Qwen3-30B-A3B",
    "memory:Qwen2-57B-A14B",
    "streamed:Qwen1.5-MoE-A2.7B",
)

RATIO = 0.4
"""What `compress` prunes."""
SUMS = "kernel" if importlib.util.find_spec("triton") else "expert by expert"
"""How `LayerMoments` adds up on a GPU."""

Row = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """Where the parts run, and how large they are."""

    device: str
    small: bool

    @property
    def on_gpu(self) -> bool:
        """Whether the sizes are those that are published."""
        return self.device != "cpu"

    @property
    def dtype(self) -> torch.dtype:
        """Type of the models' weights: few CPUs calculate in bfloat16."""
        return torch.bfloat16 if self.on_gpu else torch.float32

    @property
    def size(self) -> tuple[int, int]:
        """Windows, and tokens in each."""
        return (128, 2048) if self.on_gpu else (8, 16 if self.small else 128)

    def shape(self, name: str) -> Shape:
        """The sizes of a model of the paper."""
        return SHAPES[name].narrow() if self.small else SHAPES[name]

    def depth(self, shape: Shape, n_bytes: float) -> int:
        """Layers whose weights are within `n_bytes`; on a CPU two."""
        if not self.on_gpu:
            return 2
        return depth_within(shape, n_bytes, bytes_each=self.dtype.itemsize)

    def windows(self, shape: Shape) -> CalibrationSet:
        """Random ids, the same for all methods."""
        return CalibrationSet.from_ids(random_ids(shape.d_vocab, *self.size))

    def wait(self) -> None:
        """Wait until the device has done what it was given."""
        if self.on_gpu:
            torch.cuda.synchronize()


# --- the tests, and the scores of the CPU -------------------------------------------


class _Reports:
    """A pytest plugin that keeps the outcome of every test."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.collected = 0

    def pytest_collection_finish(self, session: Any) -> None:
        self.collected = len(session.items)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" or report.failed:
            row = {"case": report.nodeid, "outcome": report.outcome}
            message = report.longreprtext[-300:] if report.failed else ""
            self.rows.append(row | {"seconds": report.duration, "message": message})


def tests(run: Run) -> Iterator[Row]:
    """The outcome of each test marked `gpu`; on a CPU they are only found.

    Without the tests' conftest.py, which needs what a GPU machine may not have.
    """
    marked = [
        str(path)
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        if "pytest.mark.gpu" in path.read_text("utf-8")
    ]
    reports = _Reports()
    options = ["-m", "gpu", "--noconftest", "-W", "default", "-p", "no:cacheprovider"]
    options += [f"--rootdir={ROOT}", f"--config-file={ROOT / 'pyproject.toml'}"]
    options += [] if run.on_gpu else ["--collect-only"]
    pytest.main([*options, *marked], plugins=[reports])
    yield {"case": "collected", "n_tests": reports.collected}
    yield from reports.rows


def equal(run: Run) -> Iterator[Row]:
    """How far the scores on the device are from those of the CPU in float64."""
    configuration = dataclasses.replace(
        cost.CONFIGURATIONS[0 if run.small else 1], n_tokens=1024, batch_tokens=512
    )
    windows = cost.calibration_set(configuration)
    exact = cost.build_model(configuration, "cpu").double()
    expected = collect_statistics(exact, windows, batch_size=2).score("heapr")
    for dtype, tolerance in TOLERANCES.items():
        # From the rounded weights of one model, so that only the arithmetic differs.
        model = cost.build_model(configuration, "cpu").to(run.device, dtype)
        scores = collect_statistics(model, windows, batch_size=2).score("heapr")
        off = np.linalg.norm(scores - expected) / np.linalg.norm(expected)
        kept = [set(np.argsort(x, kind="stable")[len(x) // 4 :]) for x in
                (np.asarray(scores), np.asarray(expected))]  # fmt: skip
        yield {
            "case": str(dtype).removeprefix("torch."),
            "relative_error": off,
            "tolerance": tolerance,
            "same_kept": len(kept[0] & kept[1]) / len(kept[1]),
            "outcome": "passed" if tolerance is None or off <= tolerance else "failed",
        }


# --- the paper's cost table ---------------------------------------------------------


def in_memory(run: Run, name: str) -> Iterator[Row]:
    """Seconds and peak memory of the methods on one model."""
    shape = run.shape(name)
    free = torch.cuda.mem_get_info()[0] if run.on_gpu else 0
    depth = run.depth(shape, 0.8 * free)
    model = random_model(shape.config(depth), dtype=run.dtype, device=run.device)
    windows = run.windows(shape)
    collect_statistics(model, CalibrationSet.from_ids(windows.ids[:1]))
    sizes: list[int] = []

    def scores(batch_size: int | None = None) -> None:
        table = collect_statistics(model, windows, batch_size=batch_size)
        sizes.append(table.metadata["provenance"]["batch_size"])

    def plain() -> None:
        implementation = model.config._experts_implementation
        cost.run_plain(model, windows, sizes[0], implementation=implementation)

    methods: dict[str, Callable[[], Any]] = {
        "scores": scores,
        "plain": plain,
        "scores, same batch": lambda: scores(sizes[0]),
        "compress": lambda: fit_compression(model, windows, ratio=RATIO),
        "two_stage": lambda: two_stage_scores(model, windows, batch_size=sizes[0]),
        "scores, batch 1": lambda: scores(1),
    }
    if depth < shape.n_layers and run.on_gpu:
        methods = {name: methods[name] for name in ("scores", "plain", "compress")}
    for method, call in methods.items():
        row = _timed(run, call, resident=_bytes(model))
        batch = sizes[-1] if method.startswith("scores") else sizes[0]
        yield {"case": method, "batch": batch, **_depths(run, name, depth, row)}


def streamed(run: Run, name: str) -> Iterator[Row]:
    """Seconds, peak memory and bytes read of the scores, a layer at a time."""
    shape = run.shape(name)
    with tempfile.TemporaryDirectory(prefix="heapr_gpu_") as path:
        folder = Path(path)
        depth = run.depth(shape, 0.9 * shutil.disk_usage(folder).free)
        started = time.perf_counter()
        n_bytes = write_checkpoint(
            shape, depth, folder, dtype=run.dtype, device=run.device
        )
        written = time.perf_counter() - started
        yield {"case": "written", "seconds": written, "checkpoint_bytes": n_bytes}
        model = open_streamed(folder, dtype=run.dtype, device=torch.device(run.device))
        stream = stream_of(model)
        assert stream is not None
        table = {}

        def scores() -> None:
            table["scores"] = collect_statistics(model, run.windows(shape))

        row = _timed(run, scores, resident=0)
        yield {
            "case": "scores",
            "bytes_read": stream.n_bytes_read,
            "seconds_reading": stream.seconds_reading,
        } | _depths(run, name, depth, row)


def _timed(run: Run, call: Callable[[], Any], *, resident: int) -> Row:
    """Seconds of one call, and the highest memory with what was there before it."""
    run.wait()
    started = time.perf_counter()
    try:
        with cost.highest_memory(run.device) as added:
            call()
            run.wait()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return {"outcome": "out of memory"}
    seconds = time.perf_counter() - started
    return {"seconds": seconds, "peak_bytes": added[0] + resident}


def _depths(run: Run, name: str, depth: int, row: Row) -> Row:
    """`row` with what it says of the model with all layers."""
    n_layers = SHAPES[name].n_layers
    whole = row.get("seconds", np.nan) * n_layers / depth
    n_tokens = run.size[0] * run.size[1]
    sizes = {"n_layers": depth, "of_layers": n_layers, "n_tokens": n_tokens}
    return {**row, **sizes, "sums": SUMS, "seconds_all_layers": whole}


def _bytes(model: Any) -> int:
    return sum(p.nbytes for p in model.parameters())


# --- what the statistics add to a layer's experts -----------------------------------


def accounting(run: Run) -> Iterator[Row]:
    """Kernels and seconds of one layer's experts, with and without statistics."""
    for name in SHAPES:
        yield from _accounting(run, name, run.shape(name))


def _accounting(run: Run, name: str, shape: Shape) -> Iterator[Row]:
    n_tokens = 32768 if run.on_gpu else run.size[1]
    model = random_model(shape.config(2), dtype=run.dtype, device=run.device)
    layer = find_experts(model)[-1]
    generator = torch.Generator(run.device).manual_seed(0)

    def random(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator, device=run.device)

    x = random(n_tokens, shape.d_model).to(run.dtype)
    chosen = random(n_tokens, shape.n_experts).topk(shape.top_k)
    routing = chosen.indices, chosen.values.to(run.dtype)

    def forward_backward() -> None:
        rows = x.detach().requires_grad_()
        layer.module(rows, *routing).sum().backward()

    size = {"case": name, "n_experts": shape.n_experts, "n_rows": routing[0].numel()}
    yield {**size, "what": "experts, plain", **_kernels(run, forward_backward)}
    with probed([layer]):
        yield {**size, "what": "experts, measured", **_kernels(run, forward_backward)}

    h = random(routing[0].numel(), shape.d_inter).to(run.dtype)
    tokens = torch.bincount(routing[0].flatten(), minlength=shape.n_experts)
    moments = LayerMoments(shape.n_experts, shape.d_inter, h.device)
    costs = _kernels(run, lambda: moments.add(h, h, h[:, 0], tokens))
    yield {**size, "what": "statistics", **costs}


def _kernels(run: Run, call: Callable[[], Any]) -> Row:
    """Median seconds of a call, and its kernels: on a CPU calls of ATen operators."""
    seconds = []
    for _ in range(4):
        run.wait()
        started = time.perf_counter()
        call()
        run.wait()
        seconds.append(time.perf_counter() - started)
    kinds = torch.profiler.ProfilerActivity
    activities = [kinds.CPU, kinds.CUDA] if run.on_gpu else [kinds.CPU]
    with torch.profiler.profile(activities=activities) as profile:
        call()
        run.wait()
    names = ("cudaLaunchKernel", "cuLaunchKernel") if run.on_gpu else ("aten::",)
    waits = ("cudaStreamSynchronize", "cudaMemcpy")
    counted = [(e.key, e.count) for e in profile.key_averages()]
    return {
        "seconds": statistics.median(seconds[1:]),
        "launches": sum(n for key, n in counted if key.startswith(names)),
        "waits": sum(n for key, n in counted if key in waits) if run.on_gpu else None,
    }


def ragged(run: Run) -> Iterator[Row]:
    """Tokens per second of dense, masked and sliced experts, for each shape."""
    shapes = speed.SHAPES if run.on_gpu else {"small": speed.QUICK}
    for name, shape in shapes.items():
        yield from ({"model": name} | row for row in _ragged(run, shape))
        torch.cuda.empty_cache()


def _ragged(run: Run, configuration: speed.Configuration) -> Iterator[Row]:
    keeps = {r: speed.ragged_mask(configuration, r) for r in speed.RATIOS}
    model = speed.build_model(configuration, run.device)
    methods = speed.build_methods(model, keeps)
    for mode in speed.MODES[: 1 if run.small else None]:
        yield from speed.measure(methods, keeps, mode, 1 if run.small else 5)


# --- one process for each part ------------------------------------------------------


def measure(run: Run, part: str) -> Iterator[Row]:
    """The rows of one part, as they are measured."""
    kind, _, name = part.partition(":")
    whole = {"tests": tests, "equal": equal, "accounting": accounting, "ragged": ragged}
    if kind in whole:
        return whole[kind](run)
    return (in_memory if kind == "memory" else streamed)(run, name)


def run_part(options: Any) -> None:
    """Measure one part in this process, and write its rows one by one."""
    run = Run(options.device, options.small)
    name = "speed_gpu" if options.part == "ragged" else "gpu"
    rows, details = Rows(name, options.out), {"options": _settings(options)}
    for row in measure(run, options.part):
        told = machine(options.device) | details
        when = {"date": told["date"][:10], "device": told["device"]}
        rows.add([{"part": options.part} | when | row], told)


def run_all(options: Any) -> list[Row]:
    """Run each part that has not ended, while there is time; returns all rows."""
    ends = time.monotonic() + 60 * options.minutes
    chosen = options.parts.split(",") if options.parts else PARTS
    for part in chosen:
        left = ends - time.monotonic()
        done = Rows("gpu", options.out).has({"part": part, "case": "ended"})
        if done or left < 10:
            continue
        started = time.monotonic()
        outcome = _in_process(options, part, min(left, LIMITS.get(part, 300)))
        row = {"part": part, "case": "ended", "outcome": outcome}
        row |= {"seconds": time.monotonic() - started}
        details = machine(options.device) | {"options": _settings(options)}
        Rows("gpu", options.out).add([row], details)
        logger.info("%s: %s after %.0f s", part, outcome, row["seconds"])
    return Rows("gpu", options.out).rows


def _in_process(options: Any, part: str, limit: float) -> str:
    """How a part ended."""
    command = [sys.executable, __file__, "--part", part, "--out", options.out]
    command += ["--device", options.device, *(["--small"] if options.small else [])]
    with (options.out / "gpu.log").open("a") as log:
        try:
            subprocess.run(command, stdout=log, stderr=log, timeout=limit, check=True)
        except subprocess.TimeoutExpired:
            return f"stopped after {limit:.0f} s"
        except subprocess.CalledProcessError as error:
            return f"failed with {error.returncode}: see gpu.log"
    return "done"


def _settings(options: Any) -> Row:
    return {"device": options.device, "small": options.small}


def report(rows: list[Row]) -> str:
    """The scores of each model, with the targets for one H100 or H200."""
    table = pd.DataFrame(rows)
    scores = table[table["case"].astype(str).str.startswith("scores")]
    lines = [f"{'part':28}{'case':20}{'layers':>8}{'s':>9}{'GB':>8}  target"]
    for row in scores.to_dict("records"):
        seconds, gigabytes = TARGETS.get(row["part"], (None, None))
        targets = [f"<= {seconds} s"] if seconds else []
        targets += [f"<= {gigabytes} GB"] if gigabytes else []
        lines.append(
            f"{row['part']:28}{row['case']:20}"
            f"{row['n_layers']:>4.0f}/{row['of_layers']:<3.0f}"
            f"{row.get('seconds_all_layers', np.nan):9.1f}"
            f"{row.get('peak_bytes', np.nan) / 1e9:8.2f}  {', '.join(targets)}"
        )
    return "\n".join(lines)


def main() -> None:
    """Run the parts, and print the scores beside the targets."""
    parser = argparse.ArgumentParser(description="Measure what only a GPU can show.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=25)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="narrow, to try it out")
    parser.add_argument("--parts", help="some of them, with commas in between")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    options.out.mkdir(parents=True, exist_ok=True)
    if options.part:
        run_part(options)
    else:
        logger.info("%s", report(run_all(options)))


if __name__ == "__main__":
    main()
