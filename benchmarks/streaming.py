"""A checkpoint larger than the memory for it is scored, pruned and evaluated.

    python benchmarks/streaming.py [--shapes 0.9B,16B] [--folder DIR]

A random checkpoint of a real shape is written to disk in bfloat16, as the hub has it (a
tensor for each matrix of an expert, a shard for each layer, of which all but the first
are alike). Then each way of running
it, in a process of its own with float32 weights on the CPU, measures the scores, the
perplexity and that of a mask, slices the checkpoint's files and loads the result, whose
perplexity has to be the mask's: all layers in memory, or one part at a time from disk.
Peak memory is that of the process (`VmHWM`), mapped pages included; states between the
sweeps may take 200 MB of it. The 16B shape (DeepSeekMoE-16B's, 33 GB) is measured
streamed alone, and on fewer tokens.
"""

import argparse
import contextlib
import dataclasses
import gc
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.machine import Rows, machine
from benchmarks.shapes import SHAPES, Shape, random_ids, write_checkpoint
from heapr_lab.checkpoints.save import prune_folder
from heapr_lab.evaluation.perplexity import evaluate_perplexity
from heapr_lab.importance.collect import collect_statistics
from heapr_lab.models.folders import read_weights
from heapr_lab.models.identity import model_identity
from heapr_lab.pruning.masks import KeepMask
from heapr_lab.pruning.selection import select
from heapr_lab.pruning.surgery import masking
from heapr_lab.streaming.opening import open_streamed
from heapr_lab.streaming.stream import stream_of
from heapr_lab.text.calibration import CalibrationSet


@dataclass(frozen=True)
class Case:
    """A checkpoint, the tokens it is run on, and how."""

    shape: Shape
    n_windows: int
    seq_len: int
    ways: tuple[str, ...] = ("in memory", "streamed")

    @property
    def n_tokens(self) -> int:
        """Tokens of all windows."""
        return self.n_windows * self.seq_len

    def ids(self) -> torch.Tensor:
        """Random tokens, the same for each way."""
        return random_ids(self.shape.d_vocab, self.n_windows, self.seq_len)


_LARGE = dataclasses.replace(SHAPES["DeepSeekMoE-16B"], d_dense=0)
CASES = {
    "0.9B": Case(
        Shape("qwen2_moe", 8, 1024, 16, 16, 64, 8, 512, 32000, 512, head_dim=64), 8, 512
    ),
    "16B": Case(_LARGE, 4, 128, ("streamed",)),
}
HOST_MEMORY = 200_000_000


def opened(folder: Path, way: str, host_memory: int | None = HOST_MEMORY) -> Any:
    """The model in a folder, in float32."""
    if way == "in memory":
        return read_weights(str(folder), dtype=torch.float32).eval()
    model = open_streamed(folder, dtype=torch.float32, device=torch.device("cpu"))
    stream = stream_of(model)
    assert stream is not None
    stream.host_memory = host_memory
    return model


def measure(folder: Path, case: Case, way: str) -> dict[str, Any]:
    """Seconds and bytes of one way of running the checkpoint, in this process."""
    row: dict[str, Any] = {}
    ids = case.ids()
    keep = _dense(folder, ids, way, row)
    gc.collect()  # a streamed model and its hooks refer to each other
    with tempfile.TemporaryDirectory(dir=folder.parent) as path:
        small = Path(path) / "pruned"
        with _timed(row, "pruning"):
            prune_folder(folder, keep, small)
        files = small.glob("*.safetensors")
        row["pruned_bytes"] = sum(file.stat().st_size for file in files)
        model = opened(small, way)
        with _timed(row, "pruned loss"):
            row["pruned nll"] = evaluate_perplexity(model, ids).nll
    return row | {"peak_bytes": highest_resident()}


def highest_resident() -> int:
    """Bytes that this process has held at most."""
    status = Path("/proc/self/status").read_text()
    (peak,) = [line for line in status.splitlines() if line.startswith("VmHWM")]
    return 1024 * int(peak.split()[1])


def _dense(folder: Path, ids: torch.Tensor, way: str, row: dict[str, Any]) -> KeepMask:
    """Measure what needs the whole model; returns the mask of 40 % of the atoms."""
    with _timed(row, "load"):
        model = opened(folder, way)
    with _timed(row, "identity"):  # the hash of the weights in a table's key
        model_identity(model)
    stream = stream_of(model)
    with _timed(row, "scores"):
        begun = stream.seconds_reading if stream is not None else 0.0
        table = collect_statistics(model, CalibrationSet.from_ids(ids))
        row["reading"] = stream.seconds_reading - begun if stream is not None else None
    with _timed(row, "loss"):
        row["nll"] = evaluate_perplexity(model, ids).nll
    keep = select(table, ratio=0.4)
    with _timed(row, "masked loss"), masking(model, keep):
        row["masked nll"] = evaluate_perplexity(model, ids).nll
    row["bytes_read"] = None if stream is None else stream.n_bytes_read
    return keep


def in_own_process(script: str, *only: str) -> dict[str, Any]:
    """The row that `script --only ...` prints."""
    command = [sys.executable, script, "--only", *only]
    done = subprocess.run(command, check=True, capture_output=True)
    row: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return row


@contextlib.contextmanager
def _timed(row: dict[str, Any], name: str) -> Iterator[None]:
    started = time.perf_counter()
    yield
    row[name] = time.perf_counter() - started


def main() -> None:
    """Measure the rows that are not there yet, and write them after each."""
    parser = argparse.ArgumentParser(description="Measure streamed checkpoints.")
    parser.add_argument("--shapes", default="0.9B")
    parser.add_argument("--folder", type=Path, help="for the checkpoints")
    parser.add_argument("--only", nargs=3, help="FOLDER SHAPE WAY: print one row")
    options = parser.parse_args()
    if options.only:
        folder, name, way = options.only
        row = measure(Path(folder), CASES[name], way)
        sys.stdout.write(json.dumps(row) + "\n")
        return
    rows = Rows("streaming")
    details = machine("cpu") | {"n_threads": torch.get_num_threads()}
    for name in options.shapes.split(","):
        case = CASES[name]
        keys = [{"model": name, "way": way} for way in case.ways]
        missing = [key for key in keys if not rows.has(key)]
        if not missing:
            continue
        with tempfile.TemporaryDirectory(dir=options.folder) as path:
            folder = Path(path) / "dense"
            folder.mkdir()
            shape, dtype = case.shape, torch.bfloat16
            n_bytes = write_checkpoint(
                shape, shape.n_layers, folder, dtype=dtype, device="cpu"
            )
            for key in missing:
                row = in_own_process(__file__, str(folder), name, key["way"])
                size = {"checkpoint_bytes": n_bytes, "tokens": case.n_tokens}
                rows.add([key | size | row], details)


if __name__ == "__main__":
    main()
