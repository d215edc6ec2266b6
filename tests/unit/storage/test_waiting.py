"""Who asks for what another is computing or writing, waits or is refused."""

import logging
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from heapr_lab.errors import CacheError, SpecError
from heapr_lab.storage import cache as store
from heapr_lab.storage import files

pytestmark = pytest.mark.usefixtures("cache")


def answer(value: Any, key: dict[str, Any] | None = None) -> Any:
    """A result of kind `answers` for {"x": 1}."""
    return store.cached_json("answers", key or {"x": 1}, lambda: value)


def test_waiting_is_said_only_of_a_lock_that_is_held(caplog):
    """The one that waits reads what the other has made, and says what it waits for."""
    caplog.set_level(logging.INFO)
    path = store.cache_path("answers", {"x": 1}, extension="json")
    inside = threading.Event()

    def slow() -> int:
        inside.set()
        while "waiting for" not in caplog.text:
            pass
        return 1

    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(store.cached_json, "answers", {"x": 1}, slow)
        assert inside.wait(60)
        assert answer(2) == first.result() == 1
    message = f"waiting for {path}, which another is computing"
    assert [m for m in caplog.messages if "waiting" in m] == [message]
    caplog.clear()
    assert answer(3) == 1
    assert answer(3, {"x": 2}) == 3
    assert caplog.text == ""


def test_a_result_made_while_one_waited_is_that_of_its_key(monkeypatch):
    """The key is checked then, too."""
    path = store.cache_path("answers", {"x": 1}, extension="json")
    lock = store.lock(path)
    acquire = type(lock).acquire

    def made_meanwhile(self: Any, *args: Any, **options: Any) -> Any:
        files.write_json(path, 5)
        files.write_json(path.with_name(f"{path.name}.key.json"), {"x": 9})
        return acquire(self, *args, **options)

    monkeypatch.setattr(type(lock), "acquire", made_meanwhile)
    with pytest.raises(CacheError, match="was made for another key"):
        answer(1)


def test_the_key_is_written_before_the_result():
    """So that a result that is there always has its key; in a parquet file by default.

    The extension is that of the file which is written.
    """
    path = store.cache_path("answers", {"x": 1}, extension="parquet")

    def write(temporary: Path, value: int) -> None:
        assert files.read_json(path.with_name(f"{path.name}.key.json")) == {"x": 1}
        assert not path.exists()
        assert temporary.suffix == ".parquet"
        files.write_json(temporary, value)

    read = files.read_json
    done = store.cached("answers", {"x": 1}, lambda: 4, read=read, write=write)
    assert done == read(path) == 4


def test_the_right_to_write_is_held_beside_the_output(tmp_path):
    """In folders that are made for it; the file that stands for it goes afterwards.

    It passes on, also after a block that failed; other outputs are free meanwhile.
    """
    output = tmp_path / "deep" / "er" / "x.png"
    for _ in range(2):
        with store.writing(output), store.writing(output.with_name("y.png")):
            locks = {path.name for path in output.parent.iterdir()}
            assert locks == {".partial-x.png.lock", ".partial-y.png.lock"}
            with pytest.raises(SpecError, match="is being written by another"):
                store.writing(output).__enter__()
        with pytest.raises(KeyboardInterrupt), store.writing(output):
            raise KeyboardInterrupt
        assert list(output.parent.iterdir()) == []
        with store.writing(output):  # somebody tidies up
            output.with_name(".partial-x.png.lock").unlink()
        assert list(output.parent.iterdir()) == []


def test_where_nothing_can_be_written(tmp_path):
    """The folder is named, and why."""
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(SpecError, match=r"nothing can be written to .*file \((?!None)"),
        store.writing(tmp_path / "file" / "x.png"),
    ):
        pass


def test_after_a_failure_others_can_compute_at_once():
    """Nothing is held by a thread that has failed, while its error is looked at."""
    with pytest.raises(ZeroDivisionError) as failed:
        store.cached_json("answers", {"x": 1}, lambda: 1 // 0)
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(answer, 2).result(30) == 2
    assert failed.value.args


# --- folders ----------------------------------------------------------------------

MAKE = """
import sys, time
from pathlib import Path
from heapr_lab.storage.cache import cached_folder

def make(folder):
    with open(sys.argv[1], "a") as log:
        log.write("made\\n")
    (folder.parent / "download").write_text("large")
    time.sleep(0.5)
    (folder / "weights").write_text("whole")

print(cached_folder("models", {"x": 1}, make, name="tiny"))
"""


def test_a_folder_is_made_once_by_two_processes(cache, tmp_path):
    """The second waits; both have the same folder, and nothing else is left."""
    log = tmp_path / "log"
    command = [sys.executable, "-c", MAKE, str(log)]
    processes = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    outputs = {process.communicate(timeout=100)[0].strip() for process in processes}
    assert log.read_text() == "made\n"
    (place,) = map(Path, outputs)
    assert place.relative_to(cache).parts[0] == "models"
    assert place.name == "tiny"
    assert (place / "weights").read_text() == "whole"
    left = {path.name for path in place.parent.iterdir()}
    assert left == {"tiny", "tiny.key.json", "tiny.lock"}


def test_a_folder_that_fails_is_not_there(cache):
    """Nor is one of a process that was killed; what it left is deleted."""

    def fail(partial: Path) -> None:
        (partial / "weights").write_text("half")
        raise SpecError("no")

    with pytest.raises(SpecError, match=r"^no$"):
        store.cached_folder("models", {"x": 1}, fail, name="tiny")
    (home,) = (cache / "models").iterdir()
    assert {path.name for path in home.iterdir()} == {"tiny.key.json", "tiny.lock"}
    (home / ".partial-killed" / "tiny").mkdir(parents=True)
    target = store.cached_folder(
        "models", {"x": 1}, lambda partial: (partial / "a").touch(), name="tiny"
    )
    assert [path.name for path in target.iterdir()] == ["a"]
    assert not (home / ".partial-killed").exists()


def test_a_folder_of_another_key_is_refused():
    """It is refused as any cached result is."""
    target = store.cached_folder("models", {"x": 1}, Mock(), name="tiny")
    files.write_json(target.with_name("tiny.key.json"), {"x": 2})
    with pytest.raises(CacheError, match="was made for another key"):
        store.cached_folder("models", {"x": 1}, Mock(), name="tiny")
