"""How fast devices compute and read: stated by their makers, or measured here."""

import functools
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from heapr_lab.errors import SpecError
from heapr_lab.models.footprint import PROCESS

THIS = "this"
"""Name of the present machine, which is measured."""

_REACHED = 0.4
"""Share of a stated peak that is assumed to be reached; an assumption."""
_DISK = 3e9
"""Bytes per second that an NVMe drive is assumed to give with stated devices."""
_ROWS, _INNER, _OUTER, _N_EXPERTS = 256, 1024, 1024, 16
_COPY_BYTES, _FILE_BYTES = 2**28, 2**28
_SECONDS = 0.5
_Clock = Callable[[], float]


@dataclass(frozen=True)
class Device:
    """What the time of a run depends on."""

    name: str
    kind: str
    """cpu or cuda."""
    memory: float
    """Bytes: of a measured device, what is free and what the process holds."""
    flops: float
    """Operations per second in products of matrices, as far as they are reached."""
    fresh: float
    """Bytes per second written to new tensors by operations on each element."""
    disk: float
    """Bytes per second read from files."""
    source: str


def _stated(name: str, memory: float, tera: float, bandwidth: float, by: str) -> Device:
    source = f"stated by {by}, {_REACHED:.0%} of its peak assumed, not measured"
    # An element that is written is read twice before.
    return Device(
        name, "cuda", memory, _REACHED * tera * 1e12, bandwidth / 3, _DISK, source
    )


_DEVICES = {
    device.name: device
    for device in (
        _stated("rtx4090", 24e9, 165.2, 1.008e12, "NVIDIA, Ada architecture (2022)"),
        _stated("l40s", 48e9, 362, 0.864e12, "NVIDIA, L40S data sheet (2023)"),
        _stated("a100-40", 40e9, 312, 1.555e12, "NVIDIA, A100 data sheet (2021)"),
        _stated("a100", 80e9, 312, 2.039e12, "NVIDIA, A100 data sheet (2021)"),
        _stated("h100", 80e9, 989.4, 3.35e12, "NVIDIA, H100 data sheet (2022)"),
        _stated("h200", 141e9, 989.4, 4.8e12, "NVIDIA, H200 data sheet (2023)"),
    )
}
"""GPUs with their dense bfloat16 peaks, by name."""


def find_device(name: str | Device, dtype: torch.dtype | None = None) -> Device:
    """The device of that name; `this` is measured, in about two seconds.

    Args:
        name: `this`, one in the table, or a device, which is returned.
        dtype: in which `this` is measured; by default float32 on a CPU, else bfloat16.

    Raises:
        SpecError: there is no such device.
    """
    if isinstance(name, Device):
        return name
    if name == THIS:
        return measured(torch.device(kind_of(THIS)), dtype)
    if name not in _DEVICES:
        raise SpecError(
            f"device is {name!r}, expected {THIS} (measured) or one of "
            f"{', '.join(_DEVICES)}"
        )
    return _DEVICES[name]


def kind_of(name: str | Device) -> str:
    """`cpu` or `cuda`, without a measurement.

    Raises:
        SpecError: there is no such device.
    """
    if name == THIS:
        return "cuda" if torch.cuda.is_available() else "cpu"
    return find_device(name).kind


def measured(
    on: torch.device,
    dtype: torch.dtype | None = None,
    *,
    clock: _Clock = time.perf_counter,
) -> Device:
    """A device of the present machine, in `dtype`, timed by `clock` in seconds.

    A process measures it once; the free memory is of now.
    """
    dtype = dtype or (torch.float32 if on.type == "cpu" else torch.bfloat16)
    if on.type == "cuda":
        free, name = torch.cuda.mem_get_info(on)[0], torch.cuda.get_device_name(on)
    else:
        free, name = psutil.virtual_memory().available, "this processor"
    flops, fresh, disk = _rates(on, dtype, clock)
    return Device(
        name=name,
        kind=on.type,
        memory=free + PROCESS[on.type],
        flops=flops,
        fresh=fresh,
        disk=disk,
        source=f"measured in {str(dtype).removeprefix('torch.')}",
    )


@functools.cache
def _rates(
    on: torch.device, dtype: torch.dtype, clock: _Clock
) -> tuple[float, float, float]:
    """The rates of a `Device`: flops, fresh and disk."""
    return (
        _product_flops(on, dtype, clock),
        _fresh_bytes(on, clock),
        _disk_bytes(clock),
    )


def _product_flops(on: torch.device, dtype: torch.dtype, clock: _Clock) -> float:
    """Operations per second in products like those of experts, there and back.

    Each has rows and weights of its own, which no cache holds from the one before.
    """
    scale = 1 if on.type == "cpu" else 8

    def random(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(scale * rows, scale * columns, dtype=dtype, device=on)

    experts = [
        (random(_ROWS, _INNER), random(_OUTER, _INNER)) for _ in range(_N_EXPERTS)
    ]
    seconds = _typical(lambda: [(x @ w.T) @ w for x, w in experts], on, clock)
    return _N_EXPERTS * 4 * scale**3 * _ROWS * _INNER * _OUTER / seconds


def _fresh_bytes(on: torch.device, clock: _Clock) -> float:
    """Bytes per second of products of elements, written to new memory."""
    x = torch.ones(_COPY_BYTES // 4, device=on)
    return _COPY_BYTES / _typical(lambda: x * x, on, clock)


def _disk_bytes(clock: _Clock) -> float:
    """Bytes per second read from a new file, which the system is told to forget."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "read"
        path.write_bytes(os.urandom(2**20) * (_FILE_BYTES // 2**20))
        with path.open("rb", buffering=0) as file:
            os.fsync(file.fileno())
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            started = clock()
            while file.read(2**24):
                pass
            return _FILE_BYTES / (clock() - started)


def _typical(work: Callable[[], object], on: torch.device, clock: _Clock) -> float:
    """Seconds of the median of the calls that half a second has room for."""
    ends, times = clock() + _SECONDS, list[float]()
    while not times or clock() < ends:
        started = clock()
        work()
        if on.type == "cuda":
            torch.cuda.synchronize()
        times.append(clock() - started)
    return statistics.median(times)
