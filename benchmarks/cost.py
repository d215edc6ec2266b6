"""What the statistics cost: seconds, peak memory and bytes of state.

    python benchmarks/cost.py [--device cuda] [--n-repeats 3] [--only 128]

Each configuration is a random model of the given widths; every method gets the same
token ids in the same batches:

- `plain`: forward and backward to the embedding's output, with transformers' default
  experts implementation and no statistics.
- `plain_eager`: the same with transformers' loop over experts.
- `one_pass`: `collect_statistics`, including its table.
- `two_stage`: the paper's Algorithm 1 (`two_stage.py`), including its scores.
- `published`: the same with all the work of the authors' code, as `two_stage.py` says.

Seconds are the median over rounds in which all methods take turns in one process. Peak
memory is what a pass adds to the loaded model, measured once per method in a separate
process. The work of `one_pass` and `two_stage` that is done once per model (squared
norms of the weights; quadratic forms of W_down in G) is included in their seconds, of
which it is a larger part than with a calibration set of the usual size. FLOPs are those
of forward and backward without statistics.
"""

import argparse
import contextlib
import ctypes
import dataclasses
import gc
import logging
import multiprocessing
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.machine import RESULTS, machine, write_results
from benchmarks.shapes import Shape, random_ids, random_model
from benchmarks.two_stage import running, two_stage_scores
from heapr_lab.importance.collect import collect_statistics
from heapr_lab.models.experts import find_experts
from heapr_lab.models.likelihood import token_nll
from heapr_lab.models.moments import LayerMoments
from heapr_lab.text.calibration import CalibrationSet

logger = logging.getLogger("cost")


@dataclass(frozen=True)
class Configuration:
    """A random model and the number of tokens it processes."""

    family: str
    d_model: int
    d_inter: int
    n_experts: int
    n_layers: int
    n_tokens: int
    """The tokens of all batches together."""
    batch_tokens: int
    top_k: int = 4
    d_vocab: int = 4096
    seq_len: int = 256

    @property
    def name(self) -> str:
        """Width of the model × atoms × experts."""
        return f"{self.d_model} × {self.d_inter} × {self.n_experts}"

    @property
    def batch_size(self) -> int:
        """Windows per pass."""
        return self.batch_tokens // self.seq_len


CONFIGURATIONS = (
    Configuration("qwen2_moe", 128, 96, 16, 8, 8192, 4096),
    # 16 and 8 windows of 512 tokens, of which the authors' code takes 8 at a time.
    Configuration("qwen3_moe", 512, 256, 32, 2, 8192, 4096, seq_len=512),
    Configuration("qwen3_moe", 1024, 512, 32, 2, 4096, 4096, seq_len=512),
    Configuration("qwen2_moe", 2048, 1408, 8, 1, 8192, 512, top_k=2),
)


def build_model(configuration: Configuration, device: str) -> Any:
    """A model of random float32 weights, in eval mode and without weight gradients."""
    c = configuration
    heads, head_dim = max(2, c.d_model // 128), min(64, c.d_model // 2)
    sizes = c.n_experts, c.top_k, c.d_inter, c.d_vocab, c.d_inter
    shape = Shape(
        c.family, c.n_layers, c.d_model, heads, heads, *sizes, head_dim=head_dim
    )
    config = shape.config(c.n_layers)
    return random_model(config, dtype=torch.float32, device="cpu").to(device)


def calibration_set(configuration: Configuration) -> CalibrationSet:
    """The same random ids for every method."""
    c = configuration
    ids = random_ids(c.d_vocab, c.n_tokens // c.seq_len, c.seq_len)
    return CalibrationSet.from_ids(ids)


def run_plain(
    model: Any, calibration: CalibrationSet, batch_size: int, *, implementation: str
) -> None:
    """Forward and backward to the embedding's output, without statistics."""
    with running(model, implementation):
        for ids in calibration.ids.to(model.device).split(batch_size):
            token_nll(model, ids).sum().backward()


def method_calls(model: Any, configuration: Configuration) -> dict[str, Callable]:
    """Each method as a call without arguments that returns its bytes of state."""
    calibration, size = calibration_set(configuration), configuration.batch_size
    default = model.config._experts_implementation

    def plain(implementation: str) -> int:
        run_plain(model, calibration, size, implementation=implementation)
        return 0

    def one_pass() -> int:
        collect_statistics(model, calibration, batch_size=size)
        return one_pass_state_bytes(model)

    def two_stages(*, as_published: bool) -> int:
        return two_stage_scores(
            model, calibration, batch_size=size, as_published=as_published
        ).state_bytes

    return {
        "plain": lambda: plain(default),
        "plain_eager": lambda: plain("eager"),
        "one_pass": one_pass,
        "two_stage": lambda: two_stages(as_published=False),
        "published": lambda: two_stages(as_published=True),
    }


METHODS = ("plain", "plain_eager", "one_pass", "two_stage", "published")


def one_pass_state_bytes(model: Any) -> int:
    """Bytes of the sums that are kept between batches."""
    total = 0
    for layer in find_experts(model):
        moments = LayerMoments(layer.n_experts, layer.d_inter, layer.down.device)
        sums = moments.named
        total += sum(t.numel() * t.element_size() for t in sums.values())
    return total


def measure_times(
    configuration: Configuration, device: str, n_threads: int, n_repeats: int
) -> dict[str, dict[str, Any]]:
    """Seconds of every round and bytes of state of each method, taking turns."""
    torch.set_num_threads(n_threads)
    model = build_model(configuration, device)
    calls = method_calls(model, configuration)
    warm = dataclasses.replace(configuration, n_tokens=2 * configuration.seq_len)
    for call in method_calls(model, warm).values():
        call()
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    state = {}
    for turn in range(n_repeats):
        # Another method goes first in each round.
        first = turn % len(METHODS)
        for name in [*METHODS[first:], *METHODS[:first]]:
            started = time.perf_counter()
            state[name] = calls[name]()
            if device != "cpu":
                torch.cuda.synchronize()
            seconds[name].append(time.perf_counter() - started)
    return {
        name: {"rounds": seconds[name], "state_bytes": state[name]} for name in calls
    }


def measure_peak(
    configuration: Configuration, method: str, device: str, n_threads: int
) -> int:
    """Bytes that a pass of one method needs in addition to the loaded model."""
    torch.set_num_threads(n_threads)
    model = build_model(configuration, device)
    warm = dataclasses.replace(configuration, n_tokens=2 * configuration.seq_len)
    method_calls(model, warm)[method]()
    call = method_calls(model, configuration)[method]
    with highest_memory(device) as peak:
        call()
    return peak[0]


@contextlib.contextmanager
def highest_memory(device: str) -> Iterator[list[int]]:
    """Yield a list whose entry, at the end, is the highest increase of memory.

    On a CPU it is the resident memory, sampled every millisecond.
    """
    gc.collect()
    peak = [0]
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        yield peak
        peak[0] = torch.cuda.max_memory_allocated() - before
        return
    if sys.platform == "linux":  # return freed memory, so that its reuse is counted
        ctypes.CDLL(None).malloc_trim(0)
    process, over = psutil.Process(), threading.Event()
    before = process.memory_info().rss

    def watch() -> None:
        while not over.wait(0.001):
            peak[0] = max(peak[0], process.memory_info().rss - before)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield peak
    finally:
        over.set()
        watcher.join()


def measure(configuration: Configuration, options: Any) -> list[dict[str, Any]]:
    """The rows of one configuration."""
    c, device, threads = configuration, options.device, options.n_threads
    times = _in_process(measure_times, c, device, threads, options.n_repeats)
    rows = []
    for method in METHODS:
        peak = _in_process(measure_peak, c, method, device, threads)
        rounds, floor = times[method]["rounds"], times["plain"]["rounds"]
        seconds = statistics.median(rounds)
        ratios = [spent / plain for spent, plain in zip(rounds, floor, strict=True)]
        rows.append(
            {
                "method": method,
                "model": c.name,
                "d_model": c.d_model,
                "d_inter": c.d_inter,
                "n_experts": c.n_experts,
                "seconds": round(seconds, 4),
                "peak_bytes": peak,
                "state_bytes": times[method]["state_bytes"],
                "times_plain": round(statistics.median(ratios), 3),
                "n_layers": c.n_layers,
                "top_k": c.top_k,
                "n_tokens": c.n_tokens,
            }
        )
        logger.info("%(model)s %(method)s: %(seconds)s s, %(times_plain)s x", rows[-1])
    return rows


def _in_process(call: Callable, *args: Any) -> Any:
    """The result of `call` in a separate process, which starts with torch loaded."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__spec__.name if __spec__ else "__main__"])
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(call, *args).result()


def main() -> None:
    """Measure every configuration and write the table."""
    parser = argparse.ArgumentParser(description="Measure what the statistics cost.")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--n-threads", type=int, default=2)
    parser.add_argument("--n-repeats", type=int, default=3)
    parser.add_argument("--only", type=int, help="one configuration, by its d_model")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    chosen = [c for c in CONFIGURATIONS if options.only in {None, c.d_model}]
    details = machine(options.device) | {
        "n_threads": options.n_threads,
        "n_repeats": options.n_repeats,
        "dtype": "float32",
    }
    started = time.perf_counter()
    rows = [row for c in chosen for row in measure(c, options)]
    details["configurations"] = [dataclasses.asdict(c) for c in chosen]
    details["seconds"] = round(time.perf_counter() - started, 1)
    write_results("cost", rows, details, options.out)


if __name__ == "__main__":
    main()
