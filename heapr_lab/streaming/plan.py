"""What the scores of a model cost on a machine, from its configuration alone.

No weight is read. The model is built without weights, its memory is counted by
`footprint`, its operations by `Architecture`, and time is operations, new bytes of
activations and bytes read, each over what the device gives.
"""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from heapr_lab.errors import SpecError, whole_number
from heapr_lab.importance.collect import TOKENS_PER_BATCH
from heapr_lab.models.dtypes import check_dtype
from heapr_lab.models.families import refuse_to_stream
from heapr_lab.models.folders import skeleton_of
from heapr_lab.models.footprint import (
    IN_MEMORY,
    PROCESS,
    STREAMED,
    Sizes,
    Work,
    activation_bytes,
    device_parts,
    sizes_of,
)
from heapr_lab.models.likelihood import (
    LOGITS_AT_ONCE,
    TOKENS_AT_LEAST,
    input_device,
)
from heapr_lab.models.loading import config_of
from heapr_lab.models.memory import gigabytes, size_of, why_streamed
from heapr_lab.progress import duration
from heapr_lab.repr_html import card_html
from heapr_lab.streaming.devices import (
    THIS,
    Device,
    find_device,
    kind_of,
    measured,
)
from heapr_lab.streaming.stream import stream_of
from heapr_lab.streaming.streamed_pass import EXTRA_STATES

INFEASIBLE = "infeasible"
LONG_SECONDS = 600.0
"""Measuring that takes longer is announced with its plan, and asked for in the panel.
"""
_SLOWEST = 1e10
"""Operations per second that every device gives."""
_ATOM_BYTES = 36
"""Of a row of an importance table as parquet; 32 to 41 were measured, 36.2 of 262,144
rows."""
_INDEX_BYTES = 4
"""Of the number of an expert that a token is routed to."""
_STORED = {"fp8": 1.0, "fbgemm_fp8": 1.0, "mxfp4": 17 / 32}
"""Bytes of a quantised parameter on disk; with mxfp4, a scale for each 32."""
_ACTIVATIONS, _WEIGHTS = 3.0, 6.0
"""How often a pass goes over what it keeps, and over the weights, besides products.

Weights are converted when they are opened, hashed, and their norms taken. Fitted to the
runs of benchmarks/growth.py with other tokens and experts; those with other layers and
d_model were kept aside.
"""
_READS = 3
"""How often a streamed pass reads each layer: for the key of the table, and twice."""


@dataclass(frozen=True, repr=False)
class Plan:
    """How the scores of a model can be computed on a machine, and what they cost.

    `str` gives it as lines, `to_dict` as plain data.
    """

    model: str
    engine: str
    """in memory, streamed or infeasible."""
    why: str
    n_layers: int
    """Decoder layers."""
    n_moe_layers: int
    n_experts: int
    """Routed experts of all layers."""
    n_atoms: int
    n_parameters: int
    table_bytes: int
    """The importance table as a parquet file."""
    checkpoint_bytes: int
    weight_bytes: Mapping[str, int]
    """In memory, by type."""
    dtype: str
    n_tokens: int
    """Tokens of the calibration windows; perplexity is planned for as many."""
    batch_tokens: Mapping[str, int]
    """By engine, as are the next two."""
    device_bytes: Mapping[str, Mapping[str, int]]
    """Memory on the device, by what it is for."""
    host_bytes: int
    """What a streamed pass keeps in host memory."""
    file_bytes: int
    """What it keeps in files, because the host has no room."""
    device_memory: int
    host_memory: int
    flops: Mapping[str, float]
    """Of the scores and of a perplexity."""
    read_bytes: Mapping[str, int]
    seconds: Mapping[str, float]
    """Estimates; empty if the plan is infeasible."""
    device: str
    device_source: str

    @property
    def device_peak(self) -> int:
        """Memory that the device needs: of the engine, or of a streamed pass."""
        engine = self.engine if self.engine in self.device_bytes else STREAMED
        return sum(self.device_bytes[engine].values())

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data."""
        return dataclasses.asdict(self) | {"device_peak": self.device_peak}

    def brief(self) -> dict[str, str]:
        """What matters before a long run."""
        facts = self._facts()
        return {name: facts[name] for name in _BRIEF if name in facts}

    def __repr__(self) -> str:
        return f"Plan({self.model}: {self.engine}, {self.n_parameters:,} parameters)"

    def __str__(self) -> str:
        return "\n".join(f"{k:<22} {v}" for k, v in self._facts().items())

    def _repr_html_(self) -> str:
        return card_html(f"Plan for {self.model}", self._facts())

    def _facts(self) -> dict[str, str]:
        weights = (f"{kind} {gigabytes(n)}" for kind, n in self.weight_bytes.items())
        facts = {
            "model": f"{self.model}, {self.n_parameters / 1e9:,.1f} B parameters",
            "MoE layers": f"{self.n_moe_layers} of {self.n_layers}, with "
            f"{self.n_experts:,} experts of {self.n_atoms:,} atoms in all",
            "importance table": gigabytes(self.table_bytes),
            "weights": f"{', '.join(weights)}; checkpoint "
            f"{gigabytes(self.checkpoint_bytes)}",
            "tokens": f"{self.n_tokens:,}",
            "engine": f"{self.engine}: {self.why}",
        }
        for engine, parts in self.device_bytes.items():
            named = (f"{part} {gigabytes(n)}" for part, n in parts.items() if n)
            facts[f"device, {engine}"] = (
                f"{gigabytes(sum(parts.values()))} ({', '.join(named)}) with batches "
                f"of {self.batch_tokens[engine]:,} tokens"
            )
        facts["host, streamed"] = (
            f"{gigabytes(self.host_bytes)} of states between layers"
            + (
                f", and {gigabytes(self.file_bytes)} in files"
                if self.file_bytes
                else ""
            )
        )
        for name, count in self.flops.items():
            facts[name] = f"{count:.3g} FLOPs, {gigabytes(self.read_bytes[name])} read"
            if name in self.seconds:
                facts[name] += f", about {duration(self.seconds[name])}"
        return facts | {"device": f"{self.device}: {self.device_source}"}


_BRIEF = ("engine", "host, streamed", "scores", "device")


def plan(
    model: str | Path,
    *,
    n_sequences: int = 128,
    seq_len: int = 2048,
    device: str | Device = THIS,
    device_memory: int | str | None = None,
    host_memory: int | str | None = None,
    dtype: str = "auto",
    stream: bool | str = "auto",
) -> Plan:
    """What the scores and a perplexity of `model` need and cost.

    Args:
        model: as `load_model` takes it, or a config.json. Only the
            configuration is read.
        n_sequences: calibration windows.
        seq_len: tokens of each.
        device: `this`, which is measured in two seconds, a GPU by name, such as
            `h100`, with stated numbers, or one that was measured before.
        device_memory: its memory, in bytes or with a unit ("24GB"); by default what is
            free here, or what the named GPU has.
        host_memory: memory for the layer inputs of a streamed pass; by default what is
            free here. Without a GPU the two memories are one. What is free includes
            what this process holds already.
        dtype: of the weights in memory; `auto` is the checkpoint's own on a GPU and
            float32 on the CPU.
        stream: whether to stream; `auto` does where `load_model` does.

    Raises:
        SpecError: there is no such model, device, type or size, or the weights are in
            a format that cannot be measured.
        LayoutError: the model has no routed experts that can be measured, or cannot be
            streamed.
    """
    if stream not in (True, False, "auto"):
        raise SpecError(f"stream is {stream!r}, expected True, False or 'auto'")
    asked = whole_number(n_sequences, name="n_sequences")
    length = whole_number(seq_len, name="seq_len", least=2)
    room = None if device_memory is None else size_of(device_memory)
    host = None if host_memory is None else size_of(host_memory)
    check_dtype(dtype)
    config = _config_of(model)
    stored = _stored_bytes(config)
    skeleton: Any = skeleton_of(config)
    sizes = sizes_of(skeleton)
    own = getattr(config, "dtype", None) or torch.float32
    on = kind_of(device)
    kind = getattr(torch, dtype, own if on == "cuda" else torch.float32)
    placed = find_device(device, kind)
    if host is None:
        held = PROCESS[on] if on == "cpu" else 0
        host = int(psutil.virtual_memory().available + held)
    if room is None:
        room = host if on == "cpu" else int(placed.memory)
    work = Work(asked, length, 0, kind.itemsize, on)
    if stream == "auto":
        free = room - PROCESS[on]
        stream = why_streamed(config, sizes, work, free) is not None
    if stream:
        refuse_to_stream(config, type(skeleton).__name__)
    return _planned(
        Limits(room, host),
        sizes,
        work,
        placed,
        bool(stream),
        name=str(model),
        dtype=str(kind).removeprefix("torch."),
        stored=stored or own.itemsize,
    )


def plan_if_long(model: Any, *, n_sequences: int, seq_len: int) -> Plan | None:
    """The plan of a loaded model's scores if they take more than ten minutes here.

    Args:
        model: any model that scores are collected of.
        n_sequences: calibration windows.
        seq_len: tokens of each.

    Raises:
        LayoutError: the model has no routed experts that can be measured.
    """
    sizes, on = sizes_of(model), input_device(model)
    work = Work(n_sequences, seq_len, 0, model.dtype.itemsize, on.type)
    engine = IN_MEMORY if stream_of(model) is None else STREAMED
    if _flops(sizes, work, engine)["scores"] < LONG_SECONDS * _SLOWEST:
        return None
    device = measured(on, model.dtype)
    loaded = sum(p.nbytes for p in model.parameters() if not p.is_meta)
    room = int(device.memory) + loaded
    host = room if on.type == "cpu" else int(psutil.virtual_memory().available)
    stored = getattr(model.config, "dtype", None) or model.dtype
    found = _planned(
        Limits(room, host),
        sizes,
        work,
        device,
        engine == STREAMED,
        name=str(getattr(model.config, "_name_or_path", "")) or type(model).__name__,
        dtype=str(model.dtype).removeprefix("torch."),
        stored=stored.itemsize,
    )
    return found if found.seconds.get("scores", math.inf) > LONG_SECONDS else None


@dataclass(frozen=True)
class Limits:
    """Bytes that there are."""

    device: int
    host: int


def _planned(
    limits: Limits,
    sizes: Sizes,
    work: Work,
    device: Device,
    stream: bool,
    *,
    name: str,
    dtype: str,
    stored: float,
) -> Plan:
    works = {engine: _fitted(sizes, work, engine, limits) for engine in _ENGINES}
    parts = {e: _whole(device_parts(sizes, own, e)) for e, own in works.items()}
    kept = round(_host_bytes(sizes, work))
    on_disk = _beyond(limits, work, parts[STREAMED], kept)
    engine, why = _engine(limits, parts, stream)
    read = _read_bytes(sizes, engine, stored, on_disk)
    flops = _flops(sizes, work, engine)
    written = _written_bytes(sizes, work, engine)
    shapes = sizes.architecture.layers.values()
    n_parameters = sizes.architecture.n_parameters
    return Plan(
        model=name,
        engine=engine,
        why=why,
        n_layers=len(sizes.layers),
        n_moe_layers=len(shapes),
        n_experts=sum(shape.n_experts for shape in shapes),
        n_atoms=sizes.n_atoms,
        n_parameters=n_parameters,
        table_bytes=_ATOM_BYTES * sizes.n_atoms,
        checkpoint_bytes=round(stored * n_parameters),
        weight_bytes={"bfloat16": 2 * n_parameters, "float32": 4 * n_parameters},
        dtype=dtype,
        n_tokens=work.n_tokens,
        batch_tokens={e: own.batch_tokens for e, own in works.items()},
        device_bytes=parts,
        host_bytes=kept - on_disk,
        file_bytes=on_disk,
        device_memory=limits.device,
        host_memory=limits.host,
        flops=flops,
        read_bytes=read,
        seconds=_seconds(flops, written, read, device) if engine != INFEASIBLE else {},
        device=device.name,
        device_source=device.source,
    )


_ENGINES = (IN_MEMORY, STREAMED)


def _fitted(sizes: Sizes, work: Work, engine: str, limits: Limits) -> Work:
    """`work` in batches that begin as the pass does and are halved until they fit."""
    windows = max(1, min(work.n_windows, TOKENS_PER_BATCH[work.kind] // work.seq_len))
    while True:
        own = dataclasses.replace(work, batch_tokens=windows * work.seq_len)
        needed = sum(device_parts(sizes, own, engine).values())
        if needed <= limits.device or windows == 1:
            return own
        windows //= 2


def _whole(parts: Mapping[str, float]) -> dict[str, int]:
    return {name: round(n_bytes) for name, n_bytes in parts.items()}


def _beyond(limits: Limits, work: Work, parts: Mapping[str, int], kept: int) -> int:
    """Bytes of layer inputs for which the host has no room.

    On a CPU the weights and activations are in the same memory.
    """
    taken = sum(parts.values()) if work.kind == "cpu" else 0
    return max(0, kept - max(0, limits.host - taken))


def _engine(
    limits: Limits, parts: Mapping[str, Mapping[str, int]], stream: bool
) -> tuple[str, str]:
    """The engine, and why it is this one."""
    needed = {engine: sum(own.values()) for engine, own in parts.items()}
    room = f"the device has {gigabytes(limits.device)}"
    whole, streamed = (gigabytes(needed[engine]) for engine in _ENGINES)
    asked = STREAMED if stream else IN_MEMORY
    if needed[asked] > limits.device:
        short = gigabytes(needed[asked] - limits.device)
        fits = needed[STREAMED] <= limits.device
        remedy = "; open it with stream=True (--stream)" if fits else ""
        return INFEASIBLE, (
            f"{asked} needs {gigabytes(needed[asked])} and {room}: {short} are missing"
            f"{remedy}"
        )
    if not stream:
        return IN_MEMORY, f"all layers need {whole}, {room}"
    return STREAMED, f"all layers need {whole}, one at a time {streamed}, and {room}"


def _host_bytes(sizes: Sizes, work: Work) -> float:
    """Of a streamed pass: the states between layers, and the experts of every token."""
    inputs = (
        (len(sizes.layers) + EXTRA_STATES) * sizes.architecture.d_model * work.itemsize
    )
    shapes = sizes.architecture.layers.values()
    choices = sum(shape.top_k for shape in shapes) * _INDEX_BYTES
    return float(work.n_tokens * (inputs + choices))


def _flops(sizes: Sizes, work: Work, engine: str) -> dict[str, float]:
    """Operations: a backward pass without weight gradients costs a forward pass.

    A streamed pass runs the layers forward once more, and each pass the head, whose
    logits are not kept.
    """
    each = sizes.architecture.flops_per_token(seq_len=work.seq_len)
    forward, head = work.n_tokens * each, work.n_tokens * 2.0 * sizes.head_weights
    scores = 2 * forward + head if engine == IN_MEMORY else 3 * forward
    return {"scores": scores, "perplexity": forward}


def _read_bytes(
    sizes: Sizes, engine: str, stored: float, on_disk: int
) -> dict[str, int]:
    """Bytes read from disk; what goes to a file is written and read again."""
    whole = stored * sizes.architecture.n_parameters
    if engine == IN_MEMORY:
        return {"scores": round(whole), "perplexity": 0}
    layers = stored * sum(sizes.layers)
    scores = whole + (_READS - 1) * layers + 2 * on_disk
    return {"scores": round(scores), "perplexity": round(whole)}


def _written_bytes(sizes: Sizes, work: Work, engine: str) -> dict[str, float]:
    """Bytes written besides products: activations, and weights that are converted.

    The head is read for every few tokens, three times as fast as others are written.
    """
    all_tokens = dataclasses.replace(work, batch_tokens=work.n_tokens)
    kept = _ACTIVATIONS * activation_bytes(sizes, all_tokens, streamed=False)
    weights = float(sizes.architecture.n_parameters * work.itemsize)
    head = _head_reads(sizes, work) / 3
    if engine == IN_MEMORY:
        scores = kept + _WEIGHTS * weights
        return {"scores": scores + 3 * head, "perplexity": kept / 2 + head}
    scores = 1.5 * kept + (_WEIGHTS + _READS) * weights
    return {"scores": scores + 3 * head, "perplexity": kept / 2 + weights + head}


def _head_reads(sizes: Sizes, work: Work) -> float:
    """Bytes of the head that are read while the logits of all tokens are computed."""
    d_vocab = sizes.head_weights / sizes.architecture.d_model
    chunk = max(TOKENS_AT_LEAST, LOGITS_AT_ONCE[work.kind] // d_vocab)
    return work.n_tokens / chunk * sizes.head_weights * work.itemsize


def _seconds(
    flops: Mapping[str, float],
    written: Mapping[str, float],
    read: Mapping[str, int],
    device: Device,
) -> dict[str, float]:
    """Estimates; the device waits for what is read."""
    return {
        name: count / device.flops
        + written[name] / device.fresh
        + read[name] / device.disk
        for name, count in flops.items()
    }


def _config_of(model: str | Path) -> Any:
    path = Path(model)
    return config_of(path.parent if path.name == "config.json" else model)


def _stored_bytes(config: Any) -> float | None:
    """Bytes of a quantised parameter on disk; None if it is not quantised.

    Raises:
        SpecError: it is in a format that cannot be measured.
    """
    settings = getattr(config, "quantization_config", None)
    if settings is None:
        return None
    found = settings if isinstance(settings, dict) else settings.to_dict()
    method = found.get("quant_method")
    if method not in _STORED:
        raise SpecError(
            f"the weights are in the format {method!r}, which cannot be measured: take "
            "the checkpoint that is not quantised"
        )
    return _STORED[method]
