"""Mutation testing: does a test fail for each small wrong change of a module?

    make mutants                                        all in modules.py
    make mutants MODULE=heapr_lab/storage/files.py      one of them
    python tests/mutation/run.py --survivors MODULE     only what survived last time

One pytest session collects the tests of a module. Each mutant is a fork of it in which
the code of the functions concerned is exchanged, and which runs the tests that reach
the changed lines, the quickest first, until one fails. Code that runs on import takes
longer: the tests are collected again with the changed module. What happened is written
beside this file, one list of survivors for each module; the reasons there are written
by hand and stay. Python code that tests start in processes of its own is not changed.
"""

import argparse
import contextlib
import gc
import importlib
import itertools
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:1] = [str(ROOT), str(ROOT / "tests")]

import conftest  # noqa: F401  the environment that tests run in
import pytest
from mutation.exchange import exchange, functions_in, imports_changed
from mutation.modules import MODULES, tests_of
from mutation.operators import Mutant, mutants
from mutation.record import Survivor, read, write

PRELOADED = (
    "accelerate.utils",
    "datasets",
    "hypothesis",
    "ipywidgets",
    "lm_eval",
    "matplotlib.pyplot",
    "pandas",
    "pyarrow.parquet",
    "safetensors.torch",
    "scipy.stats",
    "sympy",
    "tokenizers",
    "torch",
    "torch._dynamo",
    "transformers",
    "typer",
)
KILLED, SURVIVED, LATE, AGAIN = 1, 0, -1, 3
"""How a fork ends: AGAIN when the code of a function cannot be exchanged."""
BUDGET = 10.0
"""Seconds of tests for each mutant: what only slower tests notice, survives."""
FOREVER = 1e9
TIMES, EXTRA = 5, 5.0
"""A mutant is given TIMES the time of its tests, and EXTRA seconds."""


TERMINAL = os.dup(2)


@dataclass
class Baseline:
    """Of each test: which lines of the module it reaches, and how long it takes."""

    lines: dict[str, set[int]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)

    def order(self, lines: Sequence[int]) -> list[str]:
        """The tests that reach any of `lines`, the quickest first."""
        reached = [test for test, own in self.lines.items() if own & set(lines)]
        return self.quickest(reached)

    def quickest(self, tests: Sequence[str]) -> list[str]:
        """Tests by time, up to BUDGET; where it is alike they stay with their file."""
        ordered = sorted(
            tests, key=lambda test: (round(self.seconds[test], 1), test.split("::")[0])
        )
        ends = itertools.accumulate(self.seconds[test] for test in ordered)
        return [t for t, end in zip(ordered, ends, strict=True) if end < BUDGET]

    def limit(self, tests: Sequence[str]) -> float:
        """Seconds after which these tests are taken to hang."""
        return EXTRA + TIMES * sum(self.seconds[test] for test in tests)


def tell(line: str) -> None:
    """A line about how far it is, also from a fork."""
    os.write(TERMINAL, f"{line}\n".encode())


# --- processes ------------------------------------------------------------------


def in_fork(work: Callable[[], int | None], limit: float) -> int:
    """What `work` returns in a process of its own, or LATE."""
    child = os.fork()
    if child == 0:
        if limit < FOREVER:
            os.setsid()
        silence = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silence, 1)
        os.dup2(silence, 2)
        try:
            status = work() or SURVIVED
        except BaseException:
            status = KILLED
        os._exit(status)
    status = _wait(child, limit)
    if limit < FOREVER:
        _end_group(child)
    return status


def _wait(child: int, limit: float) -> int:
    """The exit status of a child, which is ended after `limit` seconds."""
    end = time.monotonic() + limit
    pause = 0.002
    while time.monotonic() < end:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            ended = os.WIFEXITED(status)
            return os.WEXITSTATUS(status) if ended else KILLED
        time.sleep(pause)
        pause = min(0.1, pause * 1.5)
    _end_group(child)
    os.waitpid(child, 0)
    return LATE


def _end_group(child: int) -> None:
    """End what a child has left running."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)


# --- sessions of pytest ---------------------------------------------------------


class Watch:
    """Notes which lines of a file each test, and each fixture it asks for, reaches."""

    def __init__(self, path: Path) -> None:
        self.file = str(path)
        self.now: set[int] = set()
        self.fixtures: dict[int, set[int]] = {}
        self.baseline = Baseline()

    def trace(self, frame: FrameType, *_: object) -> Any:
        return self.line if frame.f_code.co_filename == self.file else None

    def line(self, frame: FrameType, *_: object) -> Any:
        self.now.add(frame.f_lineno)
        return self.line

    def watched(self, work: Callable[[], object]) -> set[int]:
        """The lines that `work` reaches in this process."""
        outer, self.now = self.now, set()
        threading.settrace(self.trace)
        sys.settrace(self.trace)
        try:
            work()
        finally:
            sys.settrace(None)
            threading.settrace(None)
        reached, self.now = self.now, outer | self.now
        return reached

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Iterator[None]:
        outer, self.now = self.now, set()
        try:
            return (yield)
        finally:
            self.fixtures[id(fixturedef)] = self.now
            self.now = outer | self.now

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.baseline.failed.append(report.nodeid)

    def run(self, item: pytest.Item, following: pytest.Item | None) -> None:
        """Run one test, and note what it reached and how long it took."""
        start = time.monotonic()
        lines = self.watched(lambda: run_item(item, following))
        self.baseline.seconds[item.nodeid] = time.monotonic() - start
        asked = item._fixtureinfo.name2fixturedefs.values()
        for fixture in (one for definitions in asked for one in definitions):
            lines |= self.fixtures.get(id(fixture), set())
        self.baseline.lines[item.nodeid] = lines


def run_item(item: pytest.Item, following: pytest.Item | None) -> None:
    """Run one test, its fixtures too."""
    item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)


class Stop:
    """Ends the process at the first test that fails."""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            os._exit(KILLED)


@dataclass
class Loop:
    """Runs `work` in place of the tests that pytest has collected."""

    work: Callable[[pytest.Session], None]

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        if session.testsfailed:
            os._exit(KILLED)
        self.work(session)
        return True


def collect(tests: Sequence[str], work: Callable[[pytest.Session], None]) -> int:
    """A session of pytest with these tests, in which `work` takes the place of runs."""
    base = Path(tempfile.gettempdir()) / f"heapr_lab-mutants-{os.getpid()}"
    options = ["-q", "-s", "-p", "no:cacheprovider", "-p", "no:randomly"]
    options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
    options += [
        f"--rootdir={ROOT}",
        f"--basetemp={base}",
        "-o",
        "faulthandler_timeout=0",
    ]
    return int(pytest.main([*options, *tests], plugins=[Loop(work)]))


def run_until_one_fails(session: pytest.Session, tests: Sequence[str]) -> None:
    """Run the tests of these names in this order."""
    session.config.pluginmanager.register(Stop())
    items = {item.nodeid: item for item in session.items}
    chosen = [items[test] for test in tests]
    for item, following in zip(chosen, [*chosen[1:], None], strict=True):
        run_item(item, following)


def watch(session: pytest.Session, path: Path, into: Path) -> None:
    """Run all tests once, unchanged, and leave the Baseline in a file."""
    observer = Watch(path)
    session.config.pluginmanager.register(observer)
    following = [*session.items[1:], None]
    for item, after in zip(session.items, following, strict=True):
        observer.run(item, after)
    into.write_bytes(pickle.dumps(observer.baseline))


# --- mutants --------------------------------------------------------------------


@dataclass
class Trial:
    """The mutants of one module, and what has become of them."""

    path: Path
    asked: set[tuple[str, str, str]] | None = None

    def __post_init__(self) -> None:
        self.source = self.path.read_text(encoding="utf-8")
        self.tests = tests_of(self.path)
        self.mutants = [
            mutant
            for mutant in mutants(self.source)
            if self.asked is None or mutant.key in self.asked
        ]

    def results(self) -> list[int]:
        """What became of each mutant."""
        with tempfile.TemporaryDirectory() as folder:
            kept = Path(folder) / "kept"
            in_fork(
                lambda: collect(self.tests, lambda s: self._quick(s, kept)), FOREVER
            )
            if not kept.exists():
                raise SystemExit(f"the tests of {self.path} could not be collected")
            baseline, results = pickle.loads(kept.read_bytes())
        if baseline.failed:
            raise SystemExit(f"fail as it is: {', '.join(baseline.failed)}")
        return [
            self._slow(mutant, baseline) if result == AGAIN else result
            for mutant, result in zip(self.mutants, results, strict=True)
        ]

    def _quick(self, session: pytest.Session, kept: Path) -> None:
        """All mutants that need no new import, in forks of this session."""
        at_first = kept.with_name("baseline")
        in_fork(lambda: watch(session, self.path, at_first), FOREVER)
        baseline = pickle.loads(at_first.read_bytes())
        self.functions = functions_in(self.path)
        results = []
        for mutant in self.mutants:
            start = time.monotonic()
            results.append(self._one(session, mutant, baseline))
            tell(f"{mutant.lines[0]} {results[-1]} {time.monotonic() - start:.1f} s")
        kept.write_bytes(pickle.dumps((baseline, results)))

    def _one(self, session: pytest.Session, mutant: Mutant, baseline: Baseline) -> int:
        if not mutant.deferred:
            return AGAIN
        tests = baseline.order(mutant.lines)

        def run() -> int:
            if not exchange(self.functions, self._changed(mutant)):
                return AGAIN
            run_until_one_fails(session, tests)
            return SURVIVED

        return in_fork(run, baseline.limit(tests))

    def _slow(self, mutant: Mutant, baseline: Baseline) -> int:
        """A mutant for which the tests are collected again."""
        tests = baseline.order(mutant.lines) if mutant.deferred else []
        tests = tests or baseline.quickest(list(baseline.seconds))

        def run() -> int:
            imports_changed(self._changed(mutant))
            return min(
                collect(self.tests, lambda s: run_until_one_fails(s, tests)), KILLED
            )

        return in_fork(run, 60 + baseline.limit(tests))

    def _changed(self, mutant: Mutant) -> CodeType:
        return compile(mutant.tree(self.source), str(self.path), "exec")


def trial(path: Path, only_survivors: bool) -> None:
    """Try the mutants of one module, and write down which survive."""
    start = time.monotonic()
    earlier = read(path)
    asked = {survivor.key for survivor in earlier.survivors} if only_survivors else None
    run = Trial(path, asked)
    results = run.results()
    reasons = {survivor.key: survivor.reason for survivor in earlier.survivors}
    survivors = [
        Survivor(*mutant.key, reasons.get(mutant.key, ""))
        for mutant, result in zip(run.mutants, results, strict=True)
        if result == SURVIVED
    ]
    total = len(mutants(run.source))
    late = results.count(LATE) + (earlier.late if only_survivors else 0)
    print(write(path, total, late, survivors), f"{time.monotonic() - start:.0f} s")
    for mutant, result in zip(run.mutants, results, strict=True):
        if result == SURVIVED and not reasons.get(mutant.key):
            print(f"  {mutant.lines[0]}: {mutant.before}  →  {mutant.after}")


def main() -> None:
    """Try the modules that were asked for."""
    parser = argparse.ArgumentParser()
    parser.add_argument("modules", nargs="*", default=MODULES)
    parser.add_argument("--survivors", action="store_true")
    asked = parser.parse_args()
    for name in PRELOADED:
        importlib.import_module(name)
    gc.freeze()
    for pattern in asked.modules:
        for path in sorted(ROOT.glob(pattern)):
            if path.stem != "__init__":
                trial(path, asked.survivors)


if __name__ == "__main__":
    main()
