"""A streamed pass in little memory, on little disk, and after it was killed."""

import random
import shutil
import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from families import tiny_ids, tiny_model
from heard import Heard
from oracles.streamed import free_on_disk, same_tables, stream, written
from processes import CONTEXT
from tiny_folder import opened

from heapr_lab.errors import CacheError, HeaprLabError, SpecError
from heapr_lab.importance.collect import collect_statistics
from heapr_lab.importance.table import ImportanceTable
from heapr_lab.streaming import sweep_store, two_sweeps
from heapr_lab.streaming.sweep_store import SweepStore
from heapr_lab.streaming.two_sweeps import fitting_windows
from heapr_lab.text.calibration import CalibrationSet

WINDOWS = CalibrationSet.from_ids(tiny_ids(n_sequences=7, seq_len=16))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A DeepSeek-V3, whose first layer is dense."""
    return written(tmp_path_factory.mktemp("model"), "deepseek_v3")


# --- memory -----------------------------------------------------------------------


@pytest.mark.parametrize("host_memory", [0, 5000, "1GB"])
def test_states_beyond_the_budget_are_in_files(host_memory, folder, monkeypatch, cache):
    """The table of the model in memory, within the budget; nothing is left behind."""
    save, put = Mock(wraps=sweep_store.save_file), SweepStore.put

    def noted(store: SweepStore, name: str, group: Any) -> None:
        put(store, name, group)
        held = [t.nbytes for each in store._memory.values() for t in each.values()]
        assert sum(held) <= (1e9 if host_memory == "1GB" else host_memory)

    monkeypatch.setattr(sweep_store, "save_file", save)
    monkeypatch.setattr(SweepStore, "put", noted)
    model = opened(folder, stream=True, host_memory=host_memory)
    table, expected = (
        collect_statistics(net, WINDOWS, batch_size=2)
        for net in (model, opened(folder, stream=False))
    )
    same_tables(table, expected)
    assert save.called == (host_memory != "1GB")
    assert not list((cache / "sweeps").iterdir())


def test_windows_go_in_parts_where_the_disk_is_small(folder, monkeypatch):
    """Parts of two, four and seven windows give the same table."""
    model = opened(folder, stream=True, host_memory=0)
    whole = collect_statistics(model, WINDOWS, batch_size=2)
    n_bytes = 16 * 16 * 8 * (3 + 3)  # tokens, d_model, float64, layers and the others
    reads = []
    for fit in (2, 5, 100):
        free_on_disk(monkeypatch, int(fit * n_bytes / 0.9) + 2)
        before = stream(model).n_bytes_read
        table = collect_statistics(model, WINDOWS, batch_size=2)
        reads.append(stream(model).n_bytes_read - before)
        same_tables(table, whole)
    assert reads[0] > reads[1] > reads[2]


def test_how_many_windows_fit(tmp_path, monkeypatch):
    """Whole batches if one fits, memory and disk together; none is an error."""
    free_on_disk(monkeypatch, 1000)

    def fit(n_bytes: int, budget: int = 0, *, durable: bool = False) -> int:
        store = SweepStore(tmp_path, budget=budget, durable=durable)
        return fitting_windows(10, n_bytes=n_bytes, batch_size=4, store=store)

    assert [fit(90), fit(91), fit(112), fit(113), fit(300)] == [10, 8, 8, 4, 3]
    assert fit(300, budget=300) == 4
    assert fit(300, budget=300, durable=True) == 3  # all of it is in files
    assert fit(900) == 1
    with pytest.raises(SpecError, match=r"need 9\.01e-07 GB.*seq_len"):
        fit(901)


def test_a_full_disk_is_named(folder, monkeypatch, tmp_path):
    """What was finished before is used by the next call."""
    model, state = opened(folder, stream=True), tmp_path / "pass.state"
    save = sweep_store.save_file

    def full(group: Any, path: Path, **options: Any) -> None:
        if "out-2-0" in path.name:
            raise OSError(28, "No space left on device")
        save(group, path, **options)

    with monkeypatch.context() as patch:
        patch.setattr(sweep_store, "save_file", full)
        with pytest.raises(HeaprLabError, match=r"No space left.*HEAPR_CACHE_DIR"):
            collect_statistics(model, WINDOWS, batch_size=2, state=state)
    fill = Mock(wraps=stream(model).fill)
    monkeypatch.setattr(stream(model), "fill", fill)
    collect_statistics(model, WINDOWS, batch_size=2, state=state)
    first = [call.args[0] for call in fill.mock_calls if call.args[0] >= 0]
    assert first[0] == 2  # layers 0 and 1 are not run again in the first sweep
    assert not list(tmp_path.iterdir())


# --- after an interruption ----------------------------------------------------------


def measure(folder: Path, state: Path, out: Path, steps: Connection) -> None:
    """What is killed: a pass in parts that says when it has done a step."""
    two_sweeps.fitting_windows = lambda *_, **__: 2
    table = collect_statistics(
        opened(folder, stream=True), WINDOWS, batch_size=2, state=state,
        progress=lambda *done: steps.send(done),
    )  # fmt: skip
    table.write(out)


def started(*args: Any) -> tuple[Any, Connection]:
    """A pass in a process of its own, and its steps."""
    steps, sent = CONTEXT.Pipe(duplex=False)
    process = CONTEXT.Process(target=measure, args=(*args, sent))
    process.start()
    sent.close()
    return process, steps


def test_a_killed_pass_resumes_to_the_same_bits(folder, tmp_path, monkeypatch):
    """Killed at random moments, each time further on, and then left alone."""
    out, state = tmp_path / "table.parquet", tmp_path / "pass.state"
    monkeypatch.setattr(two_sweeps, "fitting_windows", lambda *_, **__: 2)
    model = opened(folder, stream=True)
    whole = collect_statistics(model, WINDOWS, batch_size=2)
    chosen = random.Random(2)
    for n_steps in (4, 14):
        process, steps = started(folder, state, out)
        for _ in range(n_steps):
            steps.recv()
        time.sleep(chosen.random() * 0.02)
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL
    assert not out.exists()
    assert (tmp_path / "pass.sweeps").is_dir()
    process, _steps = started(folder, state, out)
    process.join()
    assert process.exitcode == 0
    table = ImportanceTable.read(out)
    assert table.metadata["spec_hash"] == whole.metadata["spec_hash"]
    assert table.frame.equals(whole.frame)
    assert not (tmp_path / "pass.sweeps").exists()


def interrupted(model: Any, state: Path, at: int, **options: Any) -> None:
    """A pass that ends after so many steps."""
    stop = Mock(side_effect=[*[None] * (at - 1), KeyboardInterrupt])
    with pytest.raises(KeyboardInterrupt):
        collect_statistics(model, WINDOWS, state=state, progress=stop, **options)


@pytest.mark.parametrize(
    ("family", "batch_size", "steps"),
    [
        ("deepseek_v3", 4, range(1, 13)),  # three layers, two batches, two sweeps
        ("glm_moe_dsa", 2, (6, 15)),  # in the sweep forward, and in the one back
        ("deepseek_v4", 2, (6, 15)),
    ],
)
def test_every_step_can_be_the_last(family, batch_size, steps, tmp_path):
    """What is of a batch, too: tokens handed on, and the ids that a layer routes by."""
    model = opened(written(tmp_path / family, family), stream=True)
    whole = collect_statistics(model, WINDOWS, batch_size=batch_size)
    for at in steps:
        state = tmp_path / f"{at}.state"
        interrupted(model, state, at, batch_size=batch_size)
        table = collect_statistics(model, WINDOWS, batch_size=batch_size, state=state)
        assert table.frame.equals(whole.frame), at


def test_a_checkpoint_that_changed_is_another_pass(folder, tmp_path):
    """What was measured on the old weights is not continued."""
    copy, state = tmp_path / "copy", tmp_path / "pass.state"
    shutil.copytree(folder, copy)
    interrupted(opened(copy, stream=True), state, 20, batch_size=2)
    tiny_model("deepseek_v3", seed=1).save_pretrained(copy, max_shard_size="5KB")
    with pytest.raises(CacheError, match="another pass"):
        collect_statistics(
            opened(copy, stream=True), WINDOWS, batch_size=2, state=state
        )


def test_progress_names_sweep_and_layer(folder, monkeypatch):
    """It says what was read, too, beside a bar that only goes up."""
    notes: list[str] = []
    monkeypatch.setattr(two_sweeps, "noted", lambda _, text: notes.append(text))
    done = Heard()
    model = opened(folder, stream=True)
    collect_statistics(model, WINDOWS, batch_size=2, progress=done)
    assert notes[0].startswith("sweep 1 of 2, layer 1 of 3, 0.0 GB read")
    assert notes[-1].startswith("sweep 2 of 2, layer 1 of 3")
    assert len(notes) == 24
    assert done == sorted(done)
    assert done[-1] == (7, 7)
