"""Grids of runs: one row for each task, whoever runs it and how often they die."""

import functools
import os
import signal
from collections.abc import Callable
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from processes import CONTEXT
from tiny_folder import write_model, write_text

from heapr_lab.errors import HeaprLabError, SpecError
from heapr_lab.evaluation.perplexity import evaluate_perplexity
from heapr_lab.experiments import grid
from heapr_lab.experiments.grid import Grid, read_grid
from heapr_lab.pruning.surgery import prune
from heapr_lab.refinement.compress import compress
from heapr_lab.text.calibration_spec import Calibration
from heapr_lab.workbench import workbench
from heapr_lab.workbench.settings import Setting
from heapr_lab.workbench.workbench import open_workbench

MEASURED = ["perplexity", "dense_perplexity", "n_tokens", "achieved_ratio", "chosen"]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two tiny models, a text, and one with too few windows."""
    root = tmp_path_factory.mktemp("grid")
    for seed, name in enumerate(("a", "b")):
        write_model(root / name, seed=seed)
    write_text(root / "text.txt")
    (root / "short.txt").write_text("Fewer tokens than eight windows have.")
    return root


@pytest.fixture
def small(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Grid:
    """Eight tasks, four of which share their statistics; the cache is empty."""
    monkeypatch.setenv("HEAPR_CACHE_DIR", str(tmp_path / "cache"))
    return Grid(
        tmp_path / "rows",
        models=[str(root / "a")],
        methods=["paper"],
        ratios=[0.125, 0.25, 0.375, 0.5],
        corpora=[str(root / "text.txt")],
        seeds=[0, 1],
        profile="small",
        seq_len=32,
    )


# --- what workers do ------------------------------------------------------------------


def note(folder: Path) -> None:
    """In a new worker: write down each pass that begins."""
    os.environ["HEAPR_CACHE_DIR"] = str(folder / "cache")
    collect = workbench.collect_statistics

    def noted(model: Any, windows: Any, **options: Any) -> Any:
        (folder / f"{windows.fingerprint}-{os.getpid()}.pass").touch()
        return collect(model, windows, **options)

    workbench.collect_statistics = noted


def end_once(folder: Path) -> None:
    """In a new worker: the first of all passes ends it, as for lack of memory."""
    os.environ["HEAPR_CACHE_DIR"] = str(folder / "cache")
    collect = workbench.collect_statistics

    def ending(*given: Any, **options: Any) -> Any:
        end_first(folder)
        return collect(*given, **options)

    workbench.collect_statistics = ending


def end_first(folder: Path) -> None:
    """End this process if no other has ended here."""
    try:
        (folder / "ended").touch(exist_ok=False)
    except FileExistsError:
        return
    os.kill(os.getpid(), signal.SIGKILL)


def pool(begin: Callable[[Path], None], folder: Path) -> Executor:
    """Two worker processes that begin with `begin`."""
    return ProcessPoolExecutor(2, CONTEXT, initializer=begin, initargs=(folder,))


# --- rows -----------------------------------------------------------------------------


def test_rows_are_what_the_methods_give(small: Grid, root: Path) -> None:
    """HEAPr as published on the cached table; `compress`, with its new weights."""
    tasks = replace(small, methods=["paper", "best"], ratios=[0.25], seeds=[1])
    frame = grid.run(tasks)
    assert list(frame["method"]) == ["paper", "best"]
    bench = open_workbench(str(root / "a"), profile="small", seq_len=32)
    text = str(root / "text.txt")
    windows = bench.test_windows(text)
    paper = bench.keep(Setting(0.25, text, seed=1))
    calibration = bench.calibration_set(Calibration(text, seed=1, own_text=0.25))
    best = compress(bench.model, calibration, ratio=0.25)
    expected = [
        evaluate_perplexity(model, windows.ids).value
        for model in (prune(bench.model, paper), best)
    ]
    assert frame["perplexity"].tolist() == pytest.approx(expected, rel=1e-6)
    dense = evaluate_perplexity(bench.model, windows.ids)
    assert frame["dense_perplexity"].tolist() == pytest.approx([dense.value] * 2)
    assert set(frame["n_tokens"]) == {dense.n_tokens}
    assert frame["achieved_ratio"].tolist() == [0.25, 0.25]
    report = best.heapr_report  # type: ignore[union-attr]
    assert frame["chosen"][1] == report.loc[report["chosen"], "candidate"].iloc[0]


def test_a_row_that_exists_is_not_made_again(
    small: Grid, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is the model loaded."""
    first = grid.run(small)
    monkeypatch.setattr(grid, "_bench_of", lambda *_given: 1 / 0)
    pd.testing.assert_frame_equal(grid.run(small), first)
    small.tasks[3].path(small.folder).unlink()
    with pytest.raises(ZeroDivisionError):
        grid.run(small)


def test_tasks_are_numbered_in_one_order(small: Grid) -> None:
    """Those that share statistics, and then the loaded model, stand together."""
    tasks = replace(small, models=["x", "y"], methods=["paper", "best"]).tasks
    assert len({task.path(small.folder) for task in tasks}) == len(tasks) == 32
    key = [(task.model, task.corpus, task.seed) for task in tasks]
    assert key == sorted(key)
    assert [task.ratio for task in tasks[:4]] == list(small.ratios)


# --- workers --------------------------------------------------------------------------


def test_two_workers_compute_nothing_twice(small: Grid, tmp_path: Path) -> None:
    """One of them waits while the other measures what both need."""
    with pool(note, tmp_path) as executor:
        frame = grid.run(small, executor=executor)
    passes = [path.name.split("-")[0] for path in tmp_path.glob("*.pass")]
    assert len(passes) == len(set(passes)) == 2
    alone = grid.run(replace(small, folder=tmp_path / "again"))
    pd.testing.assert_frame_equal(
        frame.drop(columns="seconds"), alone.drop(columns="seconds")
    )


def test_the_task_of_a_killed_worker_runs_again(small: Grid, tmp_path: Path) -> None:
    """On a new pool, if there is a function that makes one."""
    made = []

    def make() -> Executor:
        made.append(pool(end_once, tmp_path))
        return made[-1]

    frame = grid.run(small, executor=make)
    assert len(made) == 2
    assert (tmp_path / "ended").exists()
    assert not small.missing()
    alone = grid.run(replace(small, folder=tmp_path / "again"))
    pd.testing.assert_frame_equal(frame[MEASURED], alone[MEASURED])


def test_a_broken_pool_says_what_is_left(small: Grid, tmp_path: Path) -> None:
    """Rows are kept, and a second run makes the others."""
    grid.run_task(small.tasks[0], small.folder)
    kept = small.tasks[0].path(small.folder).stat().st_mtime_ns
    with (
        pool(end_once, tmp_path) as executor,
        pytest.raises(HeaprLabError, match=r"a worker was killed.* of 8 tasks"),
    ):
        grid.run(replace(small, seeds=[0, 2]), executor=executor)
    with pool(end_once, tmp_path) as executor:
        assert len(grid.run(small, executor=executor)) == 8
    assert small.tasks[0].path(small.folder).stat().st_mtime_ns == kept


@pytest.mark.parametrize("make", [None, functools.partial(pool, note)])
def test_tasks_that_fail_are_named(
    make: Callable[[Path], Executor] | None, small: Grid, root: Path, tmp_path: Path
) -> None:
    """In a pool, the others run all the same."""
    failing = replace(
        small, corpora=[str(root / "short.txt"), *small.corpora], seeds=[0]
    )
    executor = None if make is None else make(tmp_path)
    with pytest.raises(HeaprLabError, match="windows of 32 tokens, 8 were") as error:
        grid.run(failing, executor=executor)
    if executor is not None:
        executor.shutdown()
        assert "4 of 8 tasks failed, first task 0 (" in str(error.value)
        assert list(failing.missing()) == [0, 1, 2, 3]


# --- merging --------------------------------------------------------------------------


def test_rows_of_a_changed_model_are_refused(
    small: Grid, root: Path, tmp_path: Path
) -> None:
    """A model of the same name that has other weights."""
    path = tmp_path / "moe"
    path.symlink_to(root / "a")
    tasks = replace(small, models=[str(path)], seeds=[0], ratios=[0.25, 0.5])
    grid.run_task(tasks.tasks[0], tasks.folder)
    path.unlink()
    path.symlink_to(root / "b")
    grid._opened.cache_clear()
    grid.run_task(tasks.tasks[1], tasks.folder)
    with pytest.raises(SpecError, match="2 different weights"):
        grid.merged(tasks)


def test_there_is_nothing_to_merge(small: Grid) -> None:
    """Before the first task."""
    with pytest.raises(SpecError, match="run the tasks first"):
        grid.merged(small)


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_merged_rows_are_those_of_the_tasks(
    small: Grid, tmp_path: Path, suffix: str
) -> None:
    """In a table of either kind."""
    tasks = replace(small, seeds=[0])
    frame = grid.run(tasks)
    path = tmp_path / f"table.{suffix}"
    assert grid.write_merged(tasks, path) == 4
    read = pd.read_csv if suffix == "csv" else pd.read_parquet
    pd.testing.assert_frame_equal(read(path)[MEASURED[:4]], frame[MEASURED[:4]])


# --- specifications -------------------------------------------------------------------

GOOD = {
    "models": '["a"]',
    "methods": '["paper"]',
    "ratios": "[0.25]",
    "corpora": '["text.txt"]',
}


def spec(path: Path, changed: dict[str, str | None]) -> Path:
    """A file of `GOOD` with changes."""
    items = (GOOD | changed).items()
    path.write_text("\n".join(f"{k} = {v}" for k, v in items if v is not None))
    return path


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"method": '["paper"]'}, "unknown keys: method; missing: none"),
        ({"ratios": None, "seeds": "[0]"}, "unknown keys: none; missing: ratios"),
        ({"folder": '"x"'}, "unknown keys: folder"),
        ({"methods": '["papier"]'}, "method 'papier': expected one of best, paper"),
        ({"ratios": "[0.25, 25]"}, "ratio"),
        ({"ratios": "0.25"}, "ratios is 0.25, expected a list"),
        ({"ratios": "[]"}, r"ratios is \[\], expected a list"),
        ({"ratios": "[0.25, 0.25]"}, "expected a list of different values"),
        ({"seeds": "[0.5]"}, "seed is 0.5"),
        ({"models": "[3]"}, "models has 3, expected names"),
        ({"profile": '"big"'}, "profile is 'big', expected one of"),
        ({"seq_len": "1"}, "seq_len must be a whole number from 2"),
        ({"n_sequences": "0"}, "n_sequences must be a whole number from 1"),
        ({"dtype": '"int8"'}, "dtype is 'int8'"),
        ({"corpora": '["0.5*ptb + 0.5*c4"]'}, "give test_corpus"),
        ({"corpora": "[,]"}, "cannot be read as TOML"),
    ],
)
def test_a_wrong_specification_is_refused(
    changed: dict[str, str | None], said: str, tmp_path: Path
) -> None:
    """By the name of its file, and of what is wrong."""
    with pytest.raises(SpecError, match=said) as error:
        read_grid(spec(tmp_path / "spec.toml", changed))
    assert str(tmp_path / "spec.toml") in str(error.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    """Is named."""
    with pytest.raises(SpecError, match=r"nothing\.toml cannot be read"):
        read_grid(tmp_path / "nothing.toml")


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"models": ["./nothing"]}, "nothing"),
        ({"corpora": ["wikitext3"]}, "corpus 'wikitext3' is unknown"),
        ({"test_corpus": "wikitext3"}, "corpus 'wikitext3' is unknown"),
    ],
)
def test_what_is_not_there_is_named_before_anything_runs(
    changed: dict[str, Any], said: str, small: Grid, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Models and corpora."""
    monkeypatch.setattr(grid, "run_task", lambda *_given, **_options: 1 / 0)
    with pytest.raises(HeaprLabError, match=said):
        grid.run(replace(small, **changed))


def test_there_is_no_such_task(small: Grid) -> None:
    """Tasks count from 0."""
    assert small.task(7).ratio == 0.5
    for number in (8, -1):
        with pytest.raises(SpecError, match="expected 0 to 7"):
            small.task(number)
