"""Measured and predicted speed of dense, masked and sliced models.

    python benchmarks/speed.py [--device cuda] [--dtype bfloat16] [--only MODE]
        [--n-threads 1] [--n-repeats 5] [--quick]

A random qwen3_moe model (without shared experts) and random masks, in which the number
of pruned atoms differs between experts by a factor of up to three; every method gets
the same tokens:

- `dense_grouped_mm`, `dense_eager`: transformers' implementations. The faster of the
  two is the dense model that speedups refer to.
- `masked`: `masking`, which computes everything, so that no speedup is expected.
- `sliced`: `prune`.

Prefill is one forward without a cache, with logits of the last token of each sequence;
decode is greedy, with a KV cache, without the forward pass over the prompt. Methods
take turns in one process. Tokens per second are the median over rounds, and so is the
speedup, which is computed within each round.

Predictions use the observed routing: the number of tokens routed to each expert of the
dense and of the sliced model, and in decode the experts that each step needs.

- prefill: FLOPs of the whole model, dense / sliced, with the head once per sequence.
- decode: bytes of the weights that a step reads, dense / sliced: every expert that any
  sequence of the batch needs, and all other matrices except the embedding. The KV
  cache, which is the same for both, is ignored, so that predictions are slightly high.
"""

import argparse
import contextlib
import dataclasses
import logging
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.latency import in_turns, seconds_of
from benchmarks.machine import RESULTS, machine, write_results
from benchmarks.shapes import Shape, random_ids, random_model
from heapr_lab import KeepMask, masking, prune
from heapr_lab.models.architecture import Architecture
from heapr_lab.models.experts import describe, find_experts

logger = logging.getLogger("speed")

RATIOS = (0.0, 0.2, 0.4, 0.6)
DENSE = ("grouped_mm", "eager")
"""Transformers' implementations that the dense model is measured with."""
SLICED = "sliced"
"""The method that computes what is kept alone."""
MULTIPLE = 8
"""The number that widths are multiples of, as kernels need in bfloat16."""


@dataclass(frozen=True)
class Configuration:
    """A random model."""

    d_model: int = 1024
    d_inter: int = 1408
    n_experts: int = 16
    n_layers: int = 2
    top_k: int = 4
    d_vocab: int = 4096


SHAPES = {
    "DeepSeekMoE-16B": Configuration(2048, 1408, n_experts=64, top_k=6),
    "Qwen3-30B-A3B": Configuration(2048, 768, n_experts=128, top_k=8),
    "gpt-oss-120B": Configuration(2880, 2880, n_experts=128, n_layers=1),
}
"""Layers with the sizes of published models, for a GPU."""
QUICK = Configuration(d_model=64, d_inter=88, d_vocab=256)


@dataclass(frozen=True)
class Mode:
    """A prefill, or `n_steps` steps of decoding after the prompt."""

    name: str
    batch_size: int
    prompt_len: int
    n_steps: int = 0

    @property
    def n_tokens(self) -> int:
        """Number of tokens processed in the measured time."""
        return self.batch_size * (self.n_steps or self.prompt_len)


MODES = (
    Mode("prefill", 4, 512),
    Mode("decode_batch_1", 1, 128, n_steps=16),
    Mode("decode_batch_8", 8, 128, n_steps=16),
)


@dataclass(frozen=True)
class Method:
    """A model, and the context that it runs in."""

    ratio: float
    name: str
    model: Any
    keep: KeepMask | None = None
    implementation: str | None = None

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Mask the model or switch how its experts run, if the method does."""
        with contextlib.ExitStack() as stack:
            if self.implementation:
                previous = self.model.config._experts_implementation
                self.model.set_experts_implementation(self.implementation)
                stack.callback(self.model.set_experts_implementation, previous)
            if self.keep is not None:
                stack.enter_context(masking(self.model, self.keep))
            yield


def build_model(
    configuration: Configuration, device: str, dtype: torch.dtype | None = None
) -> Any:
    """A model of random weights in eval mode: float32 on a CPU, bfloat16 elsewhere."""
    c = configuration
    heads, sizes = c.d_model // 64, (c.n_experts, c.top_k, c.d_inter, c.d_vocab)
    shape = Shape("qwen3_moe", c.n_layers, c.d_model, heads, heads, *sizes, head_dim=64)
    dtype = dtype or (torch.float32 if device == "cpu" else torch.bfloat16)
    config = shape.config(c.n_layers)
    return random_model(config, dtype=dtype, device=device)


def ragged_mask(configuration: Configuration, ratio: float) -> KeepMask:
    """A random mask that prunes about ½ to 1½ times `ratio` of each expert.

    Widths are multiples of `MULTIPLE`.

    Raises:
        ValueError: `ratio` would prune more atoms than some expert has.
    """
    if not 0 <= ratio <= 2 / 3:
        raise ValueError(f"expected a ratio in [0, 2/3], got {ratio}")
    c, generator = configuration, np.random.default_rng(round(100 * ratio))
    arrays = {}
    for layer in range(c.n_layers):
        removed = ratio * c.d_inter * np.linspace(0.5, 1.5, c.n_experts)
        ends = np.cumsum(generator.permutation(removed)) / MULTIPLE
        ends = MULTIPLE * np.round(ends).astype(int)
        keep = np.ones((c.n_experts, c.d_inter), bool)
        for row, count in zip(keep, np.diff(ends, prepend=0), strict=True):
            row[generator.choice(c.d_inter, count, replace=False)] = False
        arrays[layer] = keep
    return KeepMask.from_arrays(arrays)


def build_methods(model: Any, keeps: dict[float, KeepMask]) -> list[Method]:
    """All methods, dense ones first; sliced models are copies."""
    dense = [Method(0.0, f"dense_{n}", model, implementation=n) for n in DENSE]
    masked = [Method(r, "masked", model, keep) for r, keep in keeps.items()]
    sliced = [Method(r, SLICED, prune(model, keep)) for r, keep in keeps.items()]
    return dense + masked + sliced


# --- what is measured ---------------------------------------------------------------


def measure_seconds(
    methods: list[Method], mode: Mode, prompt: torch.Tensor, n_repeats: int
) -> list[list[float]]:
    """Seconds of every round of each method, taking turns."""

    def run(method: Method) -> float:
        with method.running():
            return seconds_of(method.model, prompt, n_steps=mode.n_steps)

    return in_turns([partial(run, method) for method in methods], n_rounds=n_repeats)


def storage_bytes(model: Any) -> int:
    """Bytes of the weights in memory; a storage shared by views counts once."""
    storages = {p.untyped_storage().data_ptr(): p for p in model.parameters()}
    return sum(p.untyped_storage().nbytes() for p in storages.values())


# --- what is predicted --------------------------------------------------------------


def routing(
    model: Any, names: dict[int, str], mode: Mode, prompt: torch.Tensor
) -> pd.DataFrame:
    """Routed rows of every expert, a row for each call of each layer's experts.

    Returns:
        Columns layer, call, expert, tokens, of the calls that are measured.
    """
    calls: dict[int, list[torch.Tensor]] = {layer: [] for layer in names}

    @contextlib.contextmanager
    def watched() -> Iterator[None]:
        handles = [
            model.get_submodule(name).register_forward_pre_hook(
                lambda _module, args, layer=layer: calls[layer].append(args[1].cpu())
            )
            for layer, name in names.items()
        ]
        yield
        for handle in handles:
            handle.remove()

    seconds_of(model, prompt, n_steps=mode.n_steps, watched=watched)
    return routed_rows(calls, model.config.get_text_config().num_experts)


def routed_rows(routed: dict[int, list[torch.Tensor]], n_experts: int) -> pd.DataFrame:
    """The table of `routing` from the experts (tokens, top_k) of every call."""
    rows = []
    for layer, calls in routed.items():
        for call, index in enumerate(calls):
            tokens = torch.bincount(index.flatten(), minlength=n_experts).tolist()
            rows += [(layer, call, expert, n) for expert, n in enumerate(tokens)]
    return pd.DataFrame(rows, columns=["layer", "call", "expert", "tokens"])


def prefill_flops(
    shape: Architecture, keep: KeepMask, routed: pd.DataFrame, mode: Mode, d_vocab: int
) -> float:
    """Operations of all tokens; only the last of each sequence uses the head."""
    tokens = routed.groupby(["layer", "expert"], as_index=False)["tokens"].sum()
    head = 2 * d_vocab * shape.d_model
    each = shape.flops_per_token(keep, tokens, seq_len=mode.prompt_len) - head
    return mode.batch_size * (mode.prompt_len * each + head)


def decode_bytes(shape: Architecture, keep: KeepMask, routed: pd.DataFrame) -> float:
    """Mean bytes of weights that a step reads."""
    n_steps = routed["call"].nunique()
    n_read = 0.0
    for (layer, expert), rows in routed.groupby(["layer", "expert"]):
        width = int(keep.by_layer(layer)[expert].sum())
        of_atom = shape.layers[layer].atom_parameters
        n_read += int((rows["tokens"] > 0).sum()) * width * of_atom
    per_step: float = shape.other_weights_per_token + n_read / n_steps
    return per_step * shape.bytes_per_parameter


def predicted_speedups(
    methods: list[Method],
    keeps: dict[float, KeepMask],
    mode: Mode,
    prompt: torch.Tensor,
) -> list[float]:
    """The speedup of each method predicted from FLOPs (prefill) or bytes (decode)."""
    model = methods[0].model
    shape, names = describe(model), {x.layer: x.name for x in find_experts(model)}

    def cost(method: Method, keep: KeepMask) -> float:
        routed = routing(method.model, names, mode, prompt)
        if mode.n_steps:
            return decode_bytes(shape, keep, routed)
        return prefill_flops(shape, keep, routed, mode, model.config.vocab_size)

    dense = cost(methods[0], keeps[0.0])
    return [
        dense / cost(m, keeps[m.ratio]) if m.name == SLICED else 1.0 for m in methods
    ]


# --- the table ----------------------------------------------------------------------


def measure(
    methods: list[Method], keeps: dict[float, KeepMask], mode: Mode, n_repeats: int
) -> list[dict[str, Any]]:
    """The rows of one mode."""
    model = methods[0].model
    shape, d_vocab = describe(model), model.config.vocab_size
    prompt = random_ids(d_vocab, mode.batch_size, mode.prompt_len).to(model.device)
    predicted = predicted_speedups(methods, keeps, mode, prompt)
    seconds = measure_seconds(methods, mode, prompt, n_repeats)
    dense = min(seconds[: len(DENSE)], key=statistics.median)
    rows = []
    for method, times, promised in zip(methods, seconds, predicted, strict=True):
        speedup = statistics.median(
            base / mine for base, mine in zip(dense, times, strict=True)
        )
        keep = keeps[method.ratio] if method.name == SLICED else None
        rows.append(
            {
                "mode": mode.name,
                "ratio": method.ratio,
                "method": method.name,
                "tokens_per_second": round(mode.n_tokens / statistics.median(times), 2),
                "speedup_over_dense": round(speedup, 3),
                "predicted_speedup": round(promised, 3),
                "share_of_predicted": round(speedup / promised, 3),
                "parameter_bytes": storage_bytes(method.model),
                "predicted_bytes": round(
                    shape.parameters(keep) * shape.bytes_per_parameter
                ),
                "fastest_tokens_per_second": round(mode.n_tokens / min(times), 2),
            }
        )
        logger.info(
            "%(mode)s %(method)s %(ratio)s: %(tokens_per_second)s tokens/s, "
            "%(speedup_over_dense)s x dense, predicted %(predicted_speedup)s x",
            rows[-1],
        )
    return rows


def main() -> None:
    """Measure every mode and write the table."""
    parser = argparse.ArgumentParser(description="Measure the speed of pruned models.")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--n-threads", type=int, default=1)
    parser.add_argument("--n-repeats", type=int, default=5)
    parser.add_argument(
        "--quick", action="store_true", help="tiny sizes, to try it out"
    )
    parser.add_argument("--only", help="one mode, by its name")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(options.n_threads)
    configuration = QUICK if options.quick else Configuration()
    modes = [m for m in MODES if options.only in {None, m.name}]
    dtype = getattr(torch, options.dtype) if options.dtype else None
    model = build_model(configuration, options.device, dtype)
    details = machine(options.device) | {
        "n_threads": options.n_threads,
        "n_repeats": options.n_repeats,
        "dtype": str(model.dtype).removeprefix("torch."),
        "configuration": dataclasses.asdict(configuration),
        "modes": [dataclasses.asdict(mode) for mode in modes],
    }
    started = time.perf_counter()
    keeps = {ratio: ragged_mask(configuration, ratio) for ratio in RATIOS}
    methods = build_methods(model, keeps)
    rows = []
    for mode in modes:
        rows += measure(methods, keeps, mode, options.n_repeats)
    details["seconds"] = round(time.perf_counter() - started, 1)
    write_results("speed", rows, details, options.out)


if __name__ == "__main__":
    main()
