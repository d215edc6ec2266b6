"""Ranks: processes that measure disjoint windows and have one table."""

import os
import signal
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from families import tiny_windows
from processes import CONTEXT
from tiny_folder import opened

from heapr_lab.errors import HeaprLabError, SpecError
from heapr_lab.importance.collect import collect_statistics
from heapr_lab.importance.table import ImportanceTable
from heapr_lab.streaming.distributed import Ranks, joined
from heapr_lab.workbench import workbench
from heapr_lab.workbench.workbench import open_workbench

Work = Callable[[Ranks, Path], None]


def tables(
    folder: Path, n_windows: int, ranks: Ranks | None = None
) -> list[ImportanceTable]:
    """The tables of the model in `folder`, in memory and streamed."""
    windows = tiny_windows(n_sequences=n_windows)
    models = (opened(folder / "moe", stream=way) for way in (False, True))
    return [
        collect_statistics(net, windows, batch_size=2, ranks=ranks) for net in models
    ]


# --- what the processes do ----------------------------------------------------------


def write_tables(ranks: Ranks, folder: Path, *, n_windows: int) -> None:
    """Write the tables of this rank."""
    for number, table in enumerate(tables(folder, n_windows, ranks)):
        table.write(folder / f"{ranks.size}-{ranks.rank}-{number}.parquet")


def cache_table(ranks: Ranks, folder: Path) -> None:
    """Measure twice through the cache."""
    os.environ["HEAPR_CACHE_DIR"] = str(folder / "cache")
    bench = open_workbench(str(folder / "moe"), profile="small")
    calibration = bench.test_windows(str(folder / "text.txt"))
    answers = [bench.measure_on(ranks, calibration) for _ in range(2)]
    assert [table is None for table in answers] == [ranks.rank > 0] * 2
    assert os.environ.get("HEAPR_LAB_PROGRESS") == "0"


def measure_others(ranks: Ranks, folder: Path) -> None:
    """Measure other windows than the other ranks."""
    model = opened(folder / "moe", stream=False)
    windows = tiny_windows(n_sequences=2 + ranks.rank)
    collect_statistics(model, windows, ranks=ranks)


def fail_second(ranks: Ranks, _folder: Path) -> None:
    """Fail, where the others wait for this rank."""
    if ranks.rank == 1:
        raise SpecError("this rank cannot go on")
    ranks.check_same("")


def end_second(ranks: Ranks, _folder: Path) -> None:
    """Be ended from outside, as for lack of memory."""
    if ranks.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    ranks.check_same("")


def fail_store(ranks: Ranks, _folder: Path) -> None:
    """Fail on rank 0, before the others know whether they have to compute."""

    def store(_compute: Callable[[], Any]) -> Any:
        raise SpecError("the cache is damaged")

    ranks.stored(store, lambda: None)


def _be_rank(work: Work, folder: Path, rank: int, size: int, port: int) -> None:
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    try:
        with joined() as ranks:
            assert ranks is not None
            work(ranks, folder)
    except HeaprLabError as error:
        (folder / f"error-{rank}.txt").write_text(str(error))
        raise SystemExit(2) from error


def run_ranks(work: Work, folder: Path, size: int) -> list[int | None]:
    """Run `work` in `size` processes; returns their exit codes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = [
        CONTEXT.Process(target=_be_rank, args=(work, folder, rank, size, port))
        for rank in range(size)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=100)
        process.kill()  # nothing, unless it hangs: then its exit code says so
        process.join()
    return [process.exitcode for process in processes]


# --- tables ---------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "n_windows"), [(2, 5), (3, 2)])
def test_every_rank_has_the_table_of_one_process(size, n_windows, root):
    """To rounding, also if a rank has no windows, and streamed."""
    assert (
        run_ranks(partial(write_tables, n_windows=n_windows), root, size) == [0] * size
    )
    for number, table in enumerate(tables(root, n_windows)):
        for rank in (0, size - 1):
            again = ImportanceTable.read(root / f"{size}-{rank}-{number}.parquet")
            for key in ("N", "spec", "spec_hash", "architecture"):
                assert again.metadata[key] == table.metadata[key]
            pd.testing.assert_frame_equal(
                again.frame, table.frame, rtol=1e-12, atol=1e-18
            )


def test_only_rank_0_uses_the_cache(root, monkeypatch):
    """The second time, nobody computes; the key is that of one process."""
    assert run_ranks(cache_table, root, 2) == [0, 0]
    monkeypatch.setenv("HEAPR_CACHE_DIR", str(root / "cache"))
    bench = open_workbench(str(root / "moe"), profile="small")
    calibration = bench.test_windows(str(root / "text.txt"))
    (path,) = (root / "cache" / "importance").glob("*.parquet")
    written = path.stat().st_mtime_ns
    monkeypatch.setattr(workbench, "collect_statistics", lambda *_given: 1 / 0)
    assert bench.measure(calibration).metadata["N"] == calibration.n_predicted
    assert path.stat().st_mtime_ns == written
    assert not list(path.parent.glob("*.state"))


# --- failures -------------------------------------------------------------------------


FAILED = "rank 1 has failed: this rank cannot go on"
ENDED = "another rank has ended before"
OTHERS = "ranks 0 and 1 have different models or windows"


@pytest.mark.parametrize(
    ("work", "codes", "messages"),
    [
        (fail_second, [2, 2, 2], [FAILED, "this rank cannot go on", "rank"]),
        (end_second, [2, -signal.SIGKILL, 2], [ENDED, "", "rank"]),
        (measure_others, [2, 2], [OTHERS, OTHERS]),
        (fail_store, [2, 2], ["the cache is damaged", "rank 0 has failed: the cache"]),
    ],
)
def test_a_rank_that_fails_ends_the_others(work, codes, messages, root):
    """They say which one and why, if it was able to say so.

    So where ranks have other windows, and where they wait for rank 0 to say whether
    there is anything to compute.
    """
    assert run_ranks(work, root, len(codes)) == codes
    for rank, code in enumerate(codes):
        if code == 2:
            assert messages[rank] in (root / f"error-{rank}.txt").read_text()


# --- one rank -------------------------------------------------------------------------


@pytest.mark.parametrize("n", [0, 1, 2, 7, 128])
@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_shares_are_disjoint_even_and_complete(n, size):
    """They are in the order of the ranks; the first ranks have one more."""
    shares = [list(Ranks(rank, size).share(n)) for rank in range(size)]
    assert [number for share in shares for number in share] == list(range(n))
    lengths = [len(share) for share in shares]
    assert lengths == sorted(lengths, reverse=True)
    assert max(lengths) - min(lengths) <= 1


def test_each_rank_has_a_gpu(monkeypatch):
    """Each has its own, if there are GPUs and no device is given."""
    ranks = Ranks(5, 6, local_rank=1)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert ranks.device("auto") == "auto"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert ranks.device("auto") == "cuda:1"
    assert ranks.device("cpu") == "cpu"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(SpecError, match="--nproc-per-node 1"):
        ranks.device("auto")


def test_states_of_ranks_have_names_of_their_own():
    """Ranks stop at different windows."""
    path = Path("cache") / "key.state"
    assert Ranks(1, 4).own_state(path) == Path("cache") / "key.1-of-4.state"


def test_one_process_has_no_ranks(monkeypatch):
    """Also if torchrun starts only one."""
    with joined() as ranks:
        assert ranks is None
    monkeypatch.setenv("WORLD_SIZE", "1")
    with joined() as ranks:
        assert ranks is None
