"""How the cost of scores grows with tokens, layers, experts and d_model.

    OMP_NUM_THREADS=1 python benchmarks/growth.py [--folder DIR]

Random checkpoints in bfloat16 are scored in float32 on the CPU, with all layers in
memory and a layer at a time: one shape, and others that differ from it in one size.
Each measurement is a process of its own with one thread, whose seconds begin before the
model is opened and end with the table, less those in which other processes had the
processor; the checkpoint is on disk, not in the system's cache. Peak memory is that of
the process (`VmHWM`).

Beside them are two predictions:

- what `plan` says of seconds and memory of a device whose rates are the medians of what
  `measured` found before each shape, with nothing known of any pass;
- the same seconds (of operations, bytes written and bytes read), times the factor by
  which the first shape took longer, run the same way.

With nothing left to measure only the predictions are computed anew.
"""

import argparse
import dataclasses
import json
import logging
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.machine import RESULTS, Rows, machine, write_results
from benchmarks.streaming import (
    Shape,
    config_of,
    highest_resident,
    in_own_process,
    opened,
    write_checkpoint,
)
from heapr_lab.importance.collect import collect_statistics
from heapr_lab.models.footprint import IN_MEMORY, STREAMED
from heapr_lab.streaming.devices import Device, measured
from heapr_lab.streaming.plan import Plan, plan
from heapr_lab.streaming.stream import stream_of
from heapr_lab.text.calibration import CalibrationSet

logger = logging.getLogger("growth")

Row = dict[str, Any]

HEAD_DIM = 64
RATES = ("flops", "fresh", "disk")
DETAILS = {"n_threads": 1, "dtype": "float32", "stored": "bfloat16"}
D_INTER, TOP_K, D_VOCAB, SEQ_LEN = 256, 4, 8192, 256
N_REPEATS = 2
"""Measurements of the first shape, of which medians are taken."""
BASE = {"tokens": 2048, "layers": 4, "experts": 32, "d_model": 512}
VALUES = {
    "tokens": (512, 8192, 1024, 4096),
    "layers": (2, 16, 8),
    "experts": (8, 128, 16, 64),
    "d_model": (256, 1024, 2048),
}
WARM = {"tokens": 512, "layers": 1, "experts": 8, "d_model": 128}
"""What runs first in each process, so that everything is imported."""


def shape_of(sizes: dict[str, int]) -> Shape:
    """A Qwen2-MoE of these sizes; its shared experts are two routed ones."""
    return Shape(
        n_layers=sizes["layers"],
        d_model=sizes["d_model"],
        n_experts=sizes["experts"],
        d_inter=D_INTER,
        top_k=TOP_K,
        d_shared=2 * D_INTER,
        d_vocab=D_VOCAB,
        n_windows=sizes["tokens"] // SEQ_LEN,
        seq_len=SEQ_LEN,
        n_heads=sizes["d_model"] // HEAD_DIM,
    )


def points(small: bool) -> Iterator[Row]:
    """What is measured: the size that is varied, the repeat, and all sizes."""
    for repeat in range(N_REPEATS):
        yield {"varied": "none", "repeat": repeat, **BASE}
    for turn in range(1 if small else 4):  # the smallest and the largest first
        for varied, values in VALUES.items():
            for value in values[turn : turn + 1]:
                yield {"varied": varied, "repeat": 0, **BASE, varied: value}


# --- measured in a process of its own -----------------------------------------------


def measure(folder: Path, sizes: dict[str, int], way: str) -> Row:
    """Seconds and bytes of the scores of a checkpoint, from opening it."""
    os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"  # transformers' reading threads
    _scored(folder / "warm", WARM, way)
    forget(folder / "dense")
    return _scored(folder / "dense", sizes, way)


def _scored(folder: Path, sizes: dict[str, int], way: str) -> Row:
    shape = shape_of(sizes)
    started, waited = clock(), seconds_waited()
    model = opened(folder, way, host_memory=None)
    collect_statistics(model, CalibrationSet.from_ids(shape.ids()))
    row = {"seconds": clock() - started, "waited": seconds_waited() - waited}
    stream = stream_of(model)
    if stream is None:
        files = folder.glob("*.safetensors")
        row["read_bytes"] = sum(file.stat().st_size for file in files)
    else:
        row["read_bytes"] = stream.n_bytes_read
    return row | {"peak_bytes": highest_resident()}


def clock() -> float:
    """Seconds, without those in which other threads had the processor."""
    while True:
        waited, now = seconds_waited(), time.perf_counter()
        if waited == seconds_waited():  # else it waited while the two were read
            return now - waited


def seconds_waited() -> float:
    """For how long this thread could have run, but others had the processor."""
    return int(Path("/proc/self/schedstat").read_text().split()[1]) / 1e9


def forget(folder: Path) -> None:
    """Have the system drop the files of a folder from its cache."""
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


# --- predicted ----------------------------------------------------------------------


def planned(row: Row, device: Device, folder: Path) -> Plan:
    """The plan of the checkpoint that a row is of."""
    shape = shape_of(row)
    (folder / "config.json").write_text(json.dumps(config_of(shape)))
    return plan(
        folder,
        n_sequences=shape.n_windows,
        seq_len=shape.seq_len,
        device=device,
        stream=row["way"] == STREAMED,
    )


def typical(rows: list[Row]) -> Device:
    """This machine with the median of each rate that was measured."""
    median = {name: statistics.median(row[name] for row in rows) for name in RATES}
    memory = float(psutil.virtual_memory().total)
    source = "medians of several measurements in float32"
    return Device("this processor", "cpu", memory, source=source, **median)


def predicted(rows: list[Row], device: Device) -> list[Row]:
    """The rows with both predictions, and what was measured over each of them."""
    with tempfile.TemporaryDirectory() as made:
        plans = [planned(row, device, Path(made)) for row in rows]
    pairs = list(zip(rows, plans, strict=True))
    reached = factors([pair for pair in pairs if pair[0]["varied"] == "none"])
    return [row | _beside(row, own, reached) for row, own in pairs]


def factors(pairs: list[tuple[Row, Plan]]) -> dict[str, float]:
    """By way of running, the seconds that shapes took, over those of their plans."""
    found: dict[str, list[float]] = {IN_MEMORY: [], STREAMED: []}
    for row, own in pairs:
        found[row["way"]].append(row["seconds"] / own.seconds["scores"])
    return {way: statistics.median(ratios) for way, ratios in found.items()}


def _beside(row: Row, own: Plan, reached: dict[str, float]) -> Row:
    seconds = own.seconds["scores"] * reached[row["way"]]
    kept = own.host_bytes if own.engine == STREAMED else 0
    n_bytes = own.device_peak + kept
    return {
        "pass_flops": own.flops["scores"],
        "planned_read_bytes": own.read_bytes["scores"],
        "predicted_seconds": seconds,
        "seconds_ratio": row["seconds"] / seconds,
        "plan_seconds": own.seconds["scores"],
        "plan_seconds_ratio": row["seconds"] / own.seconds["scores"],
        "plan_bytes": n_bytes,
        "bytes_ratio": row["peak_bytes"] / n_bytes,
    }


def main() -> None:
    """Measure the rows that are not there yet, then predict all of them."""
    parser = argparse.ArgumentParser(description="Measure how the cost grows.")
    parser.add_argument("--folder", type=Path, help="for the checkpoints")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--small", action="store_true", help="some, to try it out")
    parser.add_argument("--only", nargs=3, help="FOLDER SIZES WAY: print one row")
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    if options.only:
        folder, sizes, way = options.only
        found = measure(Path(folder), json.loads(sizes), way)
        sys.stdout.write(json.dumps(found) + "\n")
        return
    rows = Rows("growth", options.out)
    for point in points(options.small):
        measure_point(point, rows, options.folder)
    device = typical(rows.rows)
    details = machine() | DETAILS | {"rates": dataclasses.asdict(device)}
    write_results("growth", predicted(rows.rows, device), details, options.out)


def measure_point(point: Row, rows: Rows, parent: Path | None) -> None:
    """Measure both ways of running a shape, unless they were, and write them."""
    missing = [w for w in (IN_MEMORY, STREAMED) if not rows.has({**point, "way": w})]
    if not missing:
        return
    found = measured(torch.device("cpu"), clock=clock)
    rates = {name: getattr(found, name) for name in RATES}
    with tempfile.TemporaryDirectory(dir=parent) as made:
        for name, sizes in {"warm": WARM, "dense": point}.items():
            (Path(made) / name).mkdir()
            write_checkpoint(shape_of(sizes), Path(made) / name)
        for way in missing:
            sizes = {name: point[name] for name in BASE}
            own = in_own_process(__file__, made, json.dumps(sizes), way)
            rows.add([{"way": way, **point, **own, **rates}], DETAILS)
            logger.info("%s: %s", point | {"way": way}, own)


if __name__ == "__main__":
    main()
