"""Ranks: processes that measure disjoint windows and have one table."""

import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from processes import CONTEXT
from tiny_folder import D_VOCAB, write_model, write_text

from heapr_lab.errors import HeaprLabError, SpecError
from heapr_lab.importance.collect import collect_statistics
from heapr_lab.importance.table import ImportanceTable
from heapr_lab.models.loading import load_model
from heapr_lab.streaming.distributed import Ranks, joined
from heapr_lab.text.calibration import CalibrationSet
from heapr_lab.workbench import workbench
from heapr_lab.workbench.workbench import open_workbench

_SECONDS = 100


def windows(n: int) -> CalibrationSet:
    """Random windows."""
    generator = torch.Generator().manual_seed(0)
    return CalibrationSet.from_ids(
        torch.randint(0, D_VOCAB, (n, 16), generator=generator)
    )


def tables(
    folder: Path, n_windows: int, ranks: Ranks | None = None
) -> dict[str, ImportanceTable]:
    """The table of the model in `folder` in every case."""
    cases = {}
    for stream in (False, True):
        model, _ = load_model(
            folder / "moe", device="cpu", dtype="float64", stream=stream
        )
        cases[str(stream)] = collect_statistics(
            model, windows(n_windows), batch_size=2, ranks=ranks
        )
    return cases


# --- what the processes do ----------------------------------------------------------


def write_tables(ranks: Ranks, folder: Path) -> None:
    """Write the tables of this rank."""
    n_windows = int((folder / "n_windows").read_text())
    for name, table in tables(folder, n_windows, ranks).items():
        table.write(folder / f"{ranks.size}-{ranks.rank}-{name}.parquet")


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
    model, _ = load_model(folder / "moe", device="cpu")
    collect_statistics(model, windows(2 + ranks.rank), ranks=ranks)


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


def _be_rank(
    work: Callable[[Ranks, Path], None], folder: Path, rank: int, size: int, port: int
) -> None:
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


def run_ranks(
    work: Callable[[Ranks, Path], None], folder: Path, size: int
) -> list[int | None]:
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
        process.join(_SECONDS)
        process.kill()  # nothing, unless it hangs: then its exit code says so
        process.join()
    return [process.exitcode for process in processes]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model and a text."""
    folder = tmp_path_factory.mktemp("ranks")
    write_model(folder / "moe")
    write_text(folder / "text.txt")
    return folder


def errors(folder: Path) -> dict[int, str]:
    """What each rank has said, which is removed."""
    messages = {}
    for path in folder.glob("error-*.txt"):
        messages[int(path.stem.removeprefix("error-"))] = path.read_text()
        path.unlink()
    return messages


# --- tables ---------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "n_windows"), [(2, 5), (3, 2)])
def test_every_rank_has_the_table_of_one_process(
    size: int, n_windows: int, folder: Path
) -> None:
    """To rounding, also if a rank has no windows, streamed, and with drawn labels."""
    (folder / "n_windows").write_text(str(n_windows))
    assert run_ranks(write_tables, folder, size) == [0] * size
    for name, table in tables(folder, n_windows).items():
        for rank in (0, size - 1):
            again = ImportanceTable.read(folder / f"{size}-{rank}-{name}.parquet")
            for key in ("N", "spec", "spec_hash", "windows", "architecture"):
                assert again.metadata[key] == table.metadata[key]
            assert list(again.frame) == list(table.frame)
            for column in table.frame:
                np.testing.assert_allclose(
                    again.column(column),
                    table.column(column),
                    rtol=1e-12,
                    atol=1e-18 if column == "sum_hg" else 0,
                    err_msg=f"{name} {column}",
                )


def test_only_rank_0_uses_the_cache(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second time, nobody computes; the key is that of one process."""
    assert run_ranks(cache_table, folder, 2) == [0, 0]
    monkeypatch.setenv("HEAPR_CACHE_DIR", str(folder / "cache"))
    bench = open_workbench(str(folder / "moe"), profile="small")
    calibration = bench.test_windows(str(folder / "text.txt"))
    (path,) = (folder / "cache" / "importance").glob("*.parquet")
    written = path.stat().st_mtime_ns
    monkeypatch.setattr(workbench, "collect_statistics", lambda *_given: 1 / 0)
    assert bench.measure(calibration).metadata["N"] == calibration.n_predicted
    assert path.stat().st_mtime_ns == written
    assert not list(path.parent.glob("*.state"))


# --- failures -------------------------------------------------------------------------


def test_other_windows_are_refused(folder: Path) -> None:
    """All ranks refuse them, in place of a table of neither."""
    assert run_ranks(measure_others, folder, 2) == [2, 2]
    for message in errors(folder).values():
        assert "ranks 0 and 1 have different models or windows" in message


@pytest.mark.parametrize(
    ("work", "codes", "message"),
    [
        (fail_second, [2, 2, 2], "rank 1 has failed: this rank cannot go on"),
        (end_second, [2, -signal.SIGKILL, 2], "another rank has ended before"),
    ],
)
def test_a_rank_that_fails_ends_the_others(
    work: Callable[[Ranks, Path], None], codes: list[int], message: str, folder: Path
) -> None:
    """They say which one and why, if it was able to say so."""
    assert run_ranks(work, folder, 3) == codes
    messages = errors(folder)
    assert message in messages[0]
    assert "rank" in messages[2]
    assert messages.get(1, "this rank cannot go on") == "this rank cannot go on"


def test_a_cache_that_fails_ends_the_others(folder: Path) -> None:
    """They wait for rank 0 to say whether there is anything to compute."""
    assert run_ranks(fail_store, folder, 2) == [2, 2]
    assert errors(folder) == {
        0: "the cache is damaged",
        1: "rank 0 has failed: the cache is damaged",
    }


# --- one rank -------------------------------------------------------------------------


@pytest.mark.parametrize("n", [0, 1, 2, 7, 128])
@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_shares_are_disjoint_even_and_complete(n: int, size: int) -> None:
    """They are in the order of the ranks; the first ranks have one more."""
    shares = [list(Ranks(rank, size).share(n)) for rank in range(size)]
    assert [number for share in shares for number in share] == list(range(n))
    lengths = [len(share) for share in shares]
    assert lengths == sorted(lengths, reverse=True)
    assert max(lengths) - min(lengths) <= 1


def test_each_rank_has_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_states_of_ranks_have_names_of_their_own() -> None:
    """Ranks stop at different windows."""
    path = Path("cache") / "key.state"
    assert Ranks(1, 4).own_state(path) == Path("cache") / "key.1-of-4.state"


def test_one_process_has_no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if torchrun starts only one."""
    with joined() as ranks:
        assert ranks is None
    monkeypatch.setenv("WORLD_SIZE", "1")
    with joined() as ranks:
        assert ranks is None
