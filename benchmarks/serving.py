"""Measured and predicted throughput of vLLM, dense and pruned.

    make engines
    OMP_NUM_THREADS=1 .engines/bin/python benchmarks/serving.py [--dtype bfloat16]

The random qwen3_moe model of `benchmarks/speed.py`, with wider experts, under masks of
every structure: one width (`uniform`), one for each layer (`per_layer`) and one for
each expert (`ragged`), of which the last two remove from ½ to 1½ times the ratio. All
structures keep the same number of atoms, and `uniform` and `per_layer` have widths in
multiples of 32, to which vLLM's CPU kernels pad. Each model is saved, and loaded by an
engine of its own, eager, without a prefix cache; all are in one process and take turns.

A batch of prompts comes at once. Prefill ends with the first token of every sequence,
which one step gives; decode is the steps after it. Tokens per second are the median
over rounds, and so is the speedup, which is computed within each round.

Predictions are those of `benchmarks/speed.py`: FLOPs of the whole model, and bytes of
the weights that a step reads, dense / pruned, both of the experts that the engines
chose. `share_of_predicted` is of FLOPs in prefill, of bytes in decode.
"""

import argparse
import dataclasses
import gc
import os
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.latency import in_turns
from benchmarks.machine import RESULTS, machine, write_results
from benchmarks.shapes import random_ids
from benchmarks.speed import (
    QUICK,
    Configuration,
    Mode,
    build_model,
    decode_bytes,
    prefill_flops,
    ragged_mask,
    routed_rows,
)
from heapr_lab import KeepMask, prune
from heapr_lab.checkpoints.save import save_pruned
from heapr_lab.errors import SpecError
from heapr_lab.models.architecture import Architecture
from heapr_lab.models.experts import describe

NAMES = {"float32": "serving", "bfloat16": "serving_bfloat16"}
"""The table of each dtype."""
STRUCTURES = ("uniform", "per_layer", "ragged")
RATIOS = (0.2, 0.4, 0.6)
SIZES = Configuration(d_inter=1920)
QUICK_SIZES = dataclasses.replace(QUICK, d_inter=320)
KV_BYTES = 2**28
ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
"""The engine in this process, on as many threads as torch has."""


@dataclass(frozen=True)
class Load:
    """A batch of prompts, and the steps of decoding after its first tokens."""

    batch_size: int
    prompt_len: int
    n_steps: int

    def prompts(self, d_vocab: int) -> list[list[int]]:
        """Random token ids."""
        ids = random_ids(d_vocab, self.batch_size, self.prompt_len)
        prompts: list[list[int]] = ids.tolist()
        return prompts

    def n_tokens(self, phase: str) -> int:
        """Number of tokens processed in the time of a phase."""
        return self.batch_size * (
            self.prompt_len if phase == "prefill" else self.n_steps
        )


LOADS = (Load(1, 128, 16), Load(8, 128, 16), Load(64, 32, 8))
PHASES = ("prefill", "decode")


@dataclass(frozen=True)
class Served:
    """A model in an engine of its own."""

    structure: str
    ratio: float
    keep: KeepMask
    engine: Any

    def facts(self) -> dict[str, Any]:
        """Its columns of the table; the class is vLLM's own, or one of ours."""
        return {
            "structure": self.structure,
            "ratio": self.ratio,
            "experts_by": " and ".join(self.engine.apply_model(_methods)[0]),
        }


@dataclass(frozen=True)
class Measured:
    """What a model took for a batch, and what it was predicted to take."""

    model: Served
    seconds: list[tuple[float, float]]
    """The seconds of each round, of prefill and decode."""
    costs: dict[tuple[str, str], float]

    def of_phase(self, phase: str) -> list[float]:
        """The seconds of every round of one phase."""
        return [times[PHASES.index(phase)] for times in self.seconds]


# --- models -------------------------------------------------------------------------


def mask_of(sizes: Configuration, structure: str, ratio: float) -> KeepMask:
    """A mask of `structure` that removes `ratio` of the atoms.

    Layers of `per_layer` remove from ½ to 1½ times the ratio.
    """
    if structure == "ragged":
        return ragged_mask(sizes, ratio)
    arrays = {}
    factors = np.linspace(0.5, 1.5, sizes.n_layers)
    for layer, factor in enumerate(factors):
        removed = ratio * (factor if structure == "per_layer" else 1)
        width = round(sizes.d_inter * (1 - removed))
        arrays[layer] = np.tile(np.arange(sizes.d_inter) < width, (sizes.n_experts, 1))
    return KeepMask(arrays, {"structure": structure})


def engine_of(model: Any, keep: KeepMask | None, loads: tuple[Load, ...]) -> Any:
    """An engine with the model after pruning; its checkpoint is deleted again."""
    from vllm import LLM  # after ENVIRONMENT is set

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if keep is None:
            model.save_pretrained(folder)
        else:
            save_pruned(prune(model, keep), folder)
        return LLM(
            model=str(folder),
            dtype=str(model.dtype).removeprefix("torch."),
            max_model_len=max(load.prompt_len + load.n_steps + 1 for load in loads),
            max_num_seqs=max(load.batch_size for load in loads),
            max_num_batched_tokens=max(x.batch_size * x.prompt_len for x in loads),
            kv_cache_memory_bytes=KV_BYTES,
            enable_prefix_caching=False,
            enforce_eager=True,
            skip_tokenizer_init=True,
        )


def serve(
    sizes: Configuration, loads: tuple[Load, ...], dtype: torch.dtype
) -> tuple[Architecture, list[Served]]:
    """All engines, the dense one first, and the sizes of the dense model."""
    model = build_model(sizes, "cpu", dtype)
    whole = mask_of(sizes, "uniform", 0.0)
    models = [Served("dense", 0.0, whole, engine_of(model, None, loads))]
    for structure in STRUCTURES:
        for ratio in RATIOS:
            keep = mask_of(sizes, structure, ratio)
            models.append(Served(structure, ratio, keep, engine_of(model, keep, loads)))
            gc.collect()
    return describe(model), models


def _methods(model: Any) -> list[str]:
    """The classes that run the experts of a model of vLLM."""
    experts = [m for m in model.modules() if hasattr(m, "w2_weight")]
    return sorted({type(m.quant_method).__name__ for m in experts})


# --- what is measured ---------------------------------------------------------------


def seconds_of(
    engine: Any, prompts: list[list[int]], n_steps: int
) -> tuple[float, float]:
    """Seconds of the prefill, and of the steps after it.

    Raises:
        SpecError: the engine does not do the whole batch in each step.
    """
    from vllm import SamplingParams

    core, n_tokens = engine.llm_engine, n_steps + 1
    settings = SamplingParams(
        temperature=0, max_tokens=n_tokens, detokenize=False, ignore_eos=True
    )
    times, batches = [time.perf_counter()], []
    for number, ids in enumerate(prompts):
        core.add_request(str(number), {"prompt_token_ids": ids}, settings)
    while core.has_unfinished_requests():
        batches.append(len(core.step()))
        times.append(time.perf_counter())
    if batches != [len(prompts)] * n_tokens:
        raise SpecError(
            f"the steps of the engine had {batches} sequences, expected "
            f"{len(prompts)} in each of {n_tokens}: raise the limits of `engine_of`"
        )
    return times[1] - times[0], times[-1] - times[1]


def routing(
    engine: Any, prompts: list[list[int]], n_steps: int, n_experts: int
) -> pd.DataFrame:
    """The tokens of every expert that the engine chose, as in `benchmarks/speed.py`.

    Call 0 is the prefill.
    """
    by_layer: dict[int, list[torch.Tensor]] = {}

    def watch(model: Any, *, on: bool) -> None:
        for module in model.modules():
            if hasattr(module, "layer_id") and hasattr(module, "router"):
                calls = by_layer.setdefault(module.layer_id, [])
                module.router.set_capture_fn(partial(_note, calls) if on else None)

    engine.apply_model(partial(watch, on=True))
    seconds_of(engine, prompts, n_steps)
    engine.apply_model(partial(watch, on=False))
    return routed_rows(by_layer, n_experts)


def _note(calls: list[torch.Tensor], ids: torch.Tensor) -> None:
    calls.append(ids.long().cpu().clone())


# --- what is predicted --------------------------------------------------------------


def costs(
    shape: Architecture, keep: KeepMask, routed: pd.DataFrame, load: Load, d_vocab: int
) -> dict[tuple[str, str], float]:
    """FLOPs and bytes of each phase, by (phase, "flops" or "bytes")."""
    first = routed["call"].eq(0)
    mode = Mode("prefill", load.batch_size, load.prompt_len)
    tokens = routed[~first].groupby(["layer", "expert"], as_index=False)["tokens"].sum()
    context = load.prompt_len + load.n_steps // 2
    return {
        ("prefill", "flops"): prefill_flops(shape, keep, routed[first], mode, d_vocab),
        ("decode", "flops"): shape.flops_per_token(keep, tokens, seq_len=context),
        ("prefill", "bytes"): decode_bytes(shape, keep, routed[first]),
        ("decode", "bytes"): decode_bytes(shape, keep, routed[~first]),
    }


# --- the table ----------------------------------------------------------------------


def measure(
    shape: Architecture,
    models: list[Served],
    load: Load,
    sizes: Configuration,
    n_repeats: int,
) -> list[dict[str, Any]]:
    """The rows of one batch: of prefill, then of decode."""
    prompts = load.prompts(sizes.d_vocab)
    promised = []
    for model in models:
        routed = routing(model.engine, prompts, load.n_steps, sizes.n_experts)
        promised.append(costs(shape, model.keep, routed, load, sizes.d_vocab))
    runs = [partial(seconds_of, m.engine, prompts, load.n_steps) for m in models]
    cases = list(map(Measured, models, in_turns(runs, n_rounds=n_repeats), promised))
    return [row_of(case, cases[0], load, phase) for phase in PHASES for case in cases]


def row_of(case: Measured, dense: Measured, load: Load, phase: str) -> dict[str, Any]:
    """One row: the speed of a model in one phase, and what was predicted of it."""
    seconds, base = case.of_phase(phase), dense.of_phase(phase)
    speedups = [before / after for before, after in zip(base, seconds, strict=True)]
    middle = statistics.median(speedups)
    by_flops, by_bytes = (
        dense.costs[phase, kind] / case.costs[phase, kind]
        for kind in ("flops", "bytes")
    )
    n_tokens = load.n_tokens(phase)
    return {
        "mode": f"{phase}_batch_{load.batch_size}",
        **case.model.facts(),
        "tokens_per_second": round(n_tokens / statistics.median(seconds), 2),
        "speedup_over_dense": round(middle, 3),
        "lowest_speedup": round(min(speedups), 3),
        "highest_speedup": round(max(speedups), 3),
        "predicted_by_flops": round(by_flops, 3),
        "predicted_by_bytes": round(by_bytes, 3),
        "share_of_predicted": round(
            middle / (by_flops if phase == "prefill" else by_bytes), 3
        ),
        "fastest_tokens_per_second": round(n_tokens / min(seconds), 2),
    }


def main() -> None:
    """Measure every batch and write the table."""
    parser = argparse.ArgumentParser(description="Measure vLLM with pruned models.")
    parser.add_argument("--n-repeats", type=int, default=5)
    parser.add_argument("--dtype", choices=NAMES, default="float32")
    parser.add_argument(
        "--quick", action="store_true", help="tiny sizes, to try it out"
    )
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    os.environ |= ENVIRONMENT
    sizes = QUICK_SIZES if options.quick else SIZES
    details = machine() | {
        "n_threads": torch.get_num_threads(),
        "n_repeats": options.n_repeats,
        "dtype": options.dtype,
        "configuration": dataclasses.asdict(sizes),
        "loads": [dataclasses.asdict(load) for load in LOADS],
    }
    details["versions"]["vllm"] = version("vllm-cpu")
    started = time.perf_counter()
    shape, models = serve(sizes, LOADS, getattr(torch, options.dtype))
    ready, worked, rows = time.perf_counter(), time.process_time(), []
    for load in LOADS:
        rows += measure(shape, models, load, sizes, options.n_repeats)
    ended = time.perf_counter()
    # Less than the number of threads where other work took the processor.
    busy = (time.process_time() - worked) / (ended - ready)
    details["processor_seconds_per_second"] = round(busy, 3)
    details["seconds"] = round(ended - started, 1)
    write_results(NAMES[options.dtype], rows, details, options.out)


if __name__ == "__main__":
    main()
