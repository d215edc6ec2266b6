"""What is kept of a streamed model, against a dict that keeps everything."""

import contextlib
import itertools
import multiprocessing
import random
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from heapr_lab.errors import CacheError
from heapr_lab.streaming import sweep_store
from heapr_lab.streaming.sweep_store import Group, SweepStore, budget_of, opened

KEY = {"pass": "first", "batch_size": 2}


def group(value: float, n: int = 4) -> Group:
    """One tensor of n numbers."""
    return {"x": torch.full((n,), value, dtype=torch.float64)}


def files(folder: Path) -> set[str]:
    """Names of the groups in files."""
    return {path.stem for path in folder.glob("*.safetensors")}


@pytest.mark.parametrize("durable", [False, True])
@pytest.mark.parametrize("budget", [0, 31, 32, 100, 10_000])
def test_any_order_of_calls(budget, durable, tmp_path):
    """The last of each name is found, in every section; memory is within the budget."""
    store, kept = SweepStore(tmp_path, budget=budget, durable=durable), {}
    drawn, section = random.Random(budget), "a"
    for step in range(100):
        name = f"{drawn.choice(['in', 'out'])}-{drawn.randrange(12)}-"
        match drawn.randrange(5):
            case 0:
                section = drawn.choice(["a", "b"])
            case 1:
                store.begin(section)
                store.drop(name)
                start = f"{section}-{name}"
                kept = {k: v for k, v in kept.items() if not k.startswith(start)}
            case _:
                store.begin(section)
                stem = f"{section}-{name}0"
                tensors = group(step, drawn.choice([2, 4, 6]))
                store.put(f"{name}0", tensors)
                kept[stem] = tensors
                fits = stem in store._memory
                assert fits or tensors["x"].nbytes > store._room
                if durable or not fits:
                    assert stem in files(tmp_path)
        held = sum(tensors["x"].nbytes for tensors in store._memory.values())
        assert held <= budget
        assert store._room == budget - held
    assert kept
    for part, kind, number in itertools.product("ab", ("in", "out"), range(12)):
        store.begin(part)
        name = f"{kind}-{number}-0"
        assert (name in store) == (f"{part}-{name}" in kept)
        if name in store:
            assert torch.equal(store.get(name)["x"], kept[f"{part}-{name}"]["x"])
    assert files(tmp_path) <= kept.keys()
    assert not durable or files(tmp_path) == kept.keys()


def test_a_view_is_kept_as_it_is_seen(tmp_path):
    """Transposed, and with a gradient: the values, in memory and in a file."""
    view = torch.arange(6.0).reshape(2, 3).requires_grad_().T
    for budget in (0, 100):
        store = SweepStore(tmp_path, budget=budget, durable=False)
        store.put("a", {"x": view})
        stored = store.get("a")["x"]
        assert torch.equal(stored, view)
        assert not stored.requires_grad


def test_the_budget_is_half_of_what_is_free(monkeypatch):
    """It is, unless one is given, which may be nothing."""
    stream: Any = SimpleNamespace()
    free = SimpleNamespace(available=1001)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: free)
    budgets = []
    for stream.host_memory in (None, 0, 7):
        budgets.append(budget_of(stream))
    assert budgets == [500, 0, 7]


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(path.read_bytes()[:-1] + b"\x7f"),
        lambda path: path.write_bytes(path.read_bytes().replace(b'"x":', b'"y":')),
        lambda path: shutil.copy(path.with_name("-b.safetensors"), path),
        lambda path: path.write_bytes(b""),
        Path.unlink,
    ],
    ids=["a bit", "a name", "another file", "nothing left", "missing"],
)
def test_a_damaged_file_is_refused(damage, tmp_path):
    """It is named, with what to do; two files that were exchanged are damaged, too."""
    store = SweepStore(tmp_path, budget=0, durable=False)
    tensors = {"x": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3)}
    for name in ("a", "b"):
        store.put(name, tensors)
        assert torch.equal(store.get(name)["x"], tensors["x"])
    damage(tmp_path / "-a.safetensors")
    with pytest.raises(
        CacheError, match=rf"-a\.safetensors .*: delete {tmp_path}, and"
    ):
        store.get("a")
    assert torch.equal(store.get("b")["x"], tensors["x"])


# --- a pass that goes on -------------------------------------------------------------


def killed(state: Path, key: dict[str, Any], name: str, number: float) -> None:
    """A pass that ends after it has kept one group."""
    passed = opened(state, key, budget=320)
    with contextlib.suppress(KeyboardInterrupt), passed as store:
        store.put(name, group(number))
        raise KeyboardInterrupt


def test_an_interrupted_pass_finds_what_it_kept(tmp_path):
    """It is in files, whatever the budget, without those that were being written."""
    state = tmp_path / "pass.sweeps"
    killed(state, KEY, "a", 1.0)
    (state / ".partial-1-x.safetensors").write_bytes(b"x")
    killed(state, KEY, "b", 2.0)
    with opened(state, KEY, budget=0) as store:
        for name, number in (("a", 1.0), ("b", 2.0)):
            assert torch.equal(store.get(name)["x"], group(number)["x"])
        assert not list(state.glob(".partial-*"))
        assert "c" not in store
    assert not state.exists()


def test_another_batch_size_begins_again(tmp_path):
    """What was kept is of other batches."""
    state = tmp_path / "pass.sweeps"
    killed(state, KEY, "a", 1.0)
    killed(state, KEY | {"batch_size": 3}, "b", 2.0)
    with opened(state, KEY | {"batch_size": 3}, budget=0) as store:
        assert "a" not in store
        assert "b" in store


@pytest.mark.parametrize(
    "text", ["[]", "null", "7", '{"pass": []}', "{", '{"pass": "second"}']
)
def test_another_or_a_damaged_key_is_refused(text, tmp_path):
    """Nothing of the folder is taken, or removed."""
    state = tmp_path / "pass.sweeps"
    killed(state, KEY, "a", 1.0)
    (state / "key.json").write_text(text)
    message = "the state of another pass" if "second" in text else r"pass\.sweeps"
    with pytest.raises(CacheError, match=message):
        killed(state, KEY, "b", 2.0)
    assert files(state) == {"-a"}


def test_temporary_files_are_removed(cache):
    """They go with the store, and when a pass ends or is interrupted."""
    store = sweep_store.temporary(0)
    store.put("a", group(1.0))
    assert files(store.folder) == {"-a"}
    del store
    assert not list((cache / "sweeps").iterdir())
    with contextlib.suppress(KeyboardInterrupt), opened(None, KEY, budget=0) as second:
        second.put("a", group(1.0))
        raise KeyboardInterrupt
    assert not second.folder.exists()


def _with_a_store(here: Any) -> None:
    """A process that has a temporary store until it is killed."""
    store = sweep_store.temporary(0)
    store.put("a", group(1.0))
    here.send(store.folder)
    here.recv()


@pytest.mark.usefixtures("cache")
def test_files_of_killed_processes_are_removed():
    """The next store removes them, but not those of processes that run."""
    fork = multiprocessing.get_context("fork")
    folders, processes = [], []
    for _ in range(2):
        there, here = fork.Pipe()
        processes.append(fork.Process(target=_with_a_store, args=(here,), daemon=True))
        processes[-1].start()
        folders.append(there.recv())
    processes[0].kill()
    processes[0].join()
    assert [files(folder) for folder in folders] == [{"-a"}, {"-a"}]
    store = sweep_store.temporary(0)
    assert not folders[0].exists()
    assert files(folders[1]) == {"-a"}
    assert store.folder.exists()
    processes[1].kill()
    processes[1].join()
