"""Grids of runs: each model, method, ratio, corpus and seed gives one row of results.

A task is one combination. Its row is a file named by the hash of the task, in a folder
that all workers share, as they share the cache: a task whose row exists is not run
again, and tasks that need the same statistics at the same time wait for the one that
computes them. So it does not matter which worker runs a task, or how often one dies.
"""

import dataclasses
import functools
import itertools
import time
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import BrokenExecutor, Executor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from heapr_lab.errors import HeaprLabError, SpecError, whole_number
from heapr_lab.evaluation.perplexity import evaluate_perplexity
from heapr_lab.models.loading import check_dtype, config_of
from heapr_lab.progress import Progress, progress_bar
from heapr_lab.pruning.options import Selection
from heapr_lab.pruning.surgery import masking
from heapr_lab.storage import cache, files
from heapr_lab.storage.hashing import digest
from heapr_lab.text.calibration import CalibrationSet, corpora_of
from heapr_lab.text.calibration_spec import DEFAULT_CORPUS, Calibration, check_seed
from heapr_lab.text.corpora import load_corpus
from heapr_lab.workbench.export import Chosen, choose
from heapr_lab.workbench.presets import Method, find_method
from heapr_lab.workbench.settings import Setting, profile_of
from heapr_lab.workbench.workbench import Workbench, open_workbench

_KIND = "grid row"
_NAMED = 5
"""Tasks that an error names."""
_ATTEMPTS = 5
"""Executors that are made, one after the other, if workers die."""


@dataclass(frozen=True)
class Task:
    """One run: a model pruned by a method at a ratio, and its perplexity."""

    model: str
    method: str
    ratio: float
    corpus: str
    """What atoms are measured on, and weights fitted to."""
    seed: int
    """Seed of the draw of calibration windows."""
    test_corpus: str
    """On whose test split perplexity is measured."""
    profile: str | None
    n_sequences: int | None
    seq_len: int | None
    dtype: str

    def __str__(self) -> str:
        return (
            f"{self.model}, {self.method}, ratio {self.ratio:g}, {self.corpus}, "
            f"seed {self.seed}"
        )

    def path(self, folder: Path) -> Path:
        """The file of its row."""
        return folder / f"{digest(asdict(self))[:16]}.parquet"


@dataclass(frozen=True)
class Grid:
    """Every combination of models, methods, ratios, corpora and seeds.

    Raises:
        SpecError: a value is invalid.
    """

    folder: Path
    """Where the rows are; each task has a file in it."""
    models: Sequence[str]
    """As `load_model` takes them."""
    methods: Sequence[str]
    """Names in `presets.METHODS`."""
    ratios: Sequence[float]
    """Shares to prune."""
    corpora: Sequence[str]
    """What atoms are measured on: corpora, files, or mixtures of them."""
    seeds: Sequence[int] = (0,)
    """Seeds of the draws of calibration windows."""
    test_corpus: str | None = None
    """On whose test split perplexity is measured; by default on that of the corpus."""
    profile: str | None = None
    """As in `open_workbench`."""
    n_sequences: int | None = None
    """Calibration windows; None takes the profile's number."""
    seq_len: int | None = None
    """Tokens of a window; None takes the profile's number."""
    dtype: str = "auto"
    """As in `load_model`."""

    def __post_init__(self) -> None:
        for name in ("models", "methods", "ratios", "corpora", "seeds"):
            _check_list(name, getattr(self, name))
        for method in self.methods:
            find_method(method)
        for ratio in self.ratios:
            Selection(ratio)
        for seed in self.seeds:
            check_seed(seed)
        for name, least in (("n_sequences", 1), ("seq_len", 2)):
            if getattr(self, name) is not None:
                whole_number(getattr(self, name), name=name, least=least)
        profile_of(str(self.models[0]), self.profile)
        check_dtype(self.dtype)
        mixtures = [name for name in self.corpora if len(corpora_of(name)) > 1]
        if mixtures and self.test_corpus is None:
            raise SpecError(
                f"{mixtures[0]!r} is a mixture, which has no test split: give "
                "test_corpus"
            )

    @functools.cached_property
    def tasks(self) -> tuple[Task, ...]:
        """All tasks; those of one model and corpus, which share work, in a row."""
        return tuple(
            Task(
                model=model,
                method=method,
                ratio=float(ratio),
                corpus=corpus,
                seed=seed,
                test_corpus=self.test_corpus or corpus,
                profile=self.profile,
                n_sequences=self.n_sequences,
                seq_len=self.seq_len,
                dtype=self.dtype,
            )
            for model, corpus, seed, method, ratio in itertools.product(
                self.models, self.corpora, self.seeds, self.methods, self.ratios
            )
        )

    def task(self, number: int) -> Task:
        """One of the tasks.

        Raises:
            SpecError: there is none of that number.
        """
        if not 0 <= number < len(self.tasks):
            raise SpecError(
                f"there is no task {number}: expected 0 to {len(self.tasks) - 1}"
            )
        return self.tasks[number]

    def missing(self) -> dict[int, Task]:
        """The tasks without a row, by their number."""
        tasks = enumerate(self.tasks)
        return {n: task for n, task in tasks if not task.path(self.folder).exists()}

    def check(self) -> None:
        """Check that all models and corpora are available, before anything is run.

        Raises:
            SpecError: a model is not available, or a mixture cannot be read.
            CorpusError: a corpus is unknown or not available.
        """
        for model in self.models:
            config_of(model)
        tests = {task.test_corpus for task in self.tasks}
        for split, names in (("train", self.corpora), ("test", sorted(tests))):
            for corpus in itertools.chain.from_iterable(map(corpora_of, names)):
                if corpus != DEFAULT_CORPUS:  # always there, and slow the first time
                    load_corpus(corpus, split=split)


def _check_list(name: str, values: Any) -> None:
    """Check that `values` is a list of different values.

    Raises:
        SpecError: it is not.
    """
    several = isinstance(values, list | tuple) and len(values) > 0
    if not several or len(set(map(repr, values))) < len(values):
        raise SpecError(f"{name} is {values!r}, expected a list of different values")
    if name in {"models", "methods", "corpora"}:
        other = [value for value in values if not isinstance(value, str)]
        if other:
            raise SpecError(f"{name} has {other[0]!r}, expected names")


def read_grid(path: Path | str) -> Grid:
    """The grid in a TOML file; its rows are in the folder NAME_rows beside it.

    Raises:
        SpecError: the file cannot be read, or a key or value is invalid.

    Example:
        A file with every key that is needed::

            models = ["lab"]
            methods = ["paper", "best"]
            ratios = [0.2, 0.4]
            corpora = ["pydocs"]
    """
    path = Path(path)
    try:
        plain = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SpecError(f"{path} cannot be read as TOML: {error}") from error
    try:
        return Grid(path.with_name(f"{path.stem}_rows"), **_known(plain))
    except SpecError as error:
        raise SpecError(f"{path}: {error}") from error


def _known(plain: Mapping[str, Any]) -> Mapping[str, Any]:
    """`plain`, if its keys are those of a grid.

    Raises:
        SpecError: a key is unknown or missing.
    """
    keys = {field.name: field for field in dataclasses.fields(Grid)[1:]}
    needed = [k for k, f in keys.items() if f.default is dataclasses.MISSING]
    unknown, missing = (
        sorted(plain.keys() - keys),
        [k for k in needed if k not in plain],
    )
    if unknown or missing:
        raise SpecError(
            f"unknown keys: {', '.join(unknown) or 'none'}; missing: "
            f"{', '.join(missing) or 'none'}; expected {', '.join(needed)} and, if "
            f"wanted, {', '.join(k for k in keys if k not in needed)}"
        )
    return plain


# --- one task ---------------------------------------------------------------------


def run_task(task: Task, folder: Path, *, device: str = "auto") -> None:
    """Write the row of `task` to `folder`, unless it is there.

    If another process is about to write it, this one waits, and runs the task if the
    other has died.
    """
    path = task.path(folder)
    if path.exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    with cache.lock(path):
        if not path.exists():
            row = _row(task, _bench_of(task, device))
            files.write_frame(path, pd.DataFrame([row]), {"kind": _KIND})


def _bench_of(task: Task, device: str) -> Workbench:
    return _opened(task.model, task.profile, task.seq_len, device, task.dtype)


@functools.lru_cache(maxsize=1)
def _opened(
    model: str, profile: str | None, seq_len: int | None, device: str, dtype: str
) -> Workbench:
    """The workbench of the tasks of one model, which a worker opens once."""
    return open_workbench(
        model, profile=profile, seq_len=seq_len, device=device, dtype=dtype
    )


def _row(task: Task, bench: Workbench) -> dict[str, Any]:
    """The row of a task."""
    started = time.perf_counter()
    made = _made(task, bench)
    windows = bench.test_windows(task.test_corpus)
    dense = bench.perplexity(None, windows)
    pruned = _perplexity(made, bench, windows)
    chosen = None
    if made.candidates is not None:
        best = made.candidates.loc[made.candidates["chosen"], "candidate"]
        chosen = best.iloc[0]
    return {
        **asdict(task),
        "perplexity": pruned,
        "dense_perplexity": dense.value,
        "n_tokens": dense.n_tokens,
        "achieved_ratio": made.keep.achieved_ratio,
        "chosen": chosen,
        "weights": bench.identity["weights"],
        "seconds": round(time.perf_counter() - started, 2),
    }


def _made(task: Task, bench: Workbench) -> Chosen:
    """The atoms that the method of `task` keeps, and its compensation."""
    method = find_method(task.method)
    setting = _setting(task, method)
    if method.weights == "compress":
        portfolio = bench.portfolio(setting.calibration)
        table = portfolio.table("heapr", windows="all")
    else:
        table = bench.table_of(setting)
    return choose(
        bench, table, setting, weights=method.weights, report=lambda *_part: None
    )


def _setting(task: Task, method: Method) -> Setting:
    own = method.own_text if method.weights == "compress" else 0.0
    return Setting(
        Selection(task.ratio, estimator=method.estimator),
        Calibration(task.corpus, task.n_sequences, seed=task.seed, own_text=own),
    )


def _perplexity(made: Chosen, bench: Workbench, windows: CalibrationSet) -> float:
    if made.compensation is None:
        return bench.perplexity(made.keep, windows).value
    with masking(bench.model, made.keep, made.compensation.downs):
        return evaluate_perplexity(bench.model, windows.ids).value


# --- all tasks --------------------------------------------------------------------


def run(
    spec: Grid | Path | str,
    *,
    executor: Executor | Callable[[], Executor] | None = None,
    device: str = "auto",
    progress: Progress | None = None,
) -> pd.DataFrame:
    """Run all tasks that have no row; returns the rows of all.

    Args:
        spec: the grid, or its TOML file.
        executor: where the tasks run, any of `concurrent.futures` or alike; or a
            function that makes one, such as `lambda: ProcessPoolExecutor(2)`, called
            again if one of its workers is killed. By default they run in this process.
        device: as `load_model`.
        progress: called with (tasks done, tasks in all); by default a bar is shown.

    Raises:
        SpecError: a value of the grid is invalid, or a model is not available.
        CorpusError: a corpus is not available.
        HeaprLabError: tasks failed, or lost their worker; they are named, and the rows
            of the others are kept.
    """
    grid = spec if isinstance(spec, Grid) else read_grid(spec)
    grid.check()
    with progress_bar("grid", "task", also=progress) as bar:
        if executor is None:
            for task in grid.missing().values():
                run_task(task, grid.folder, device=device)
                bar(len(grid.tasks) - len(grid.missing()), len(grid.tasks))
        elif isinstance(executor, Executor):
            _run_on(executor, grid, device, bar)
        else:
            _run_on_new(executor, grid, device, bar)
    return merged(grid)


def _run_on_new(
    make: Callable[[], Executor], grid: Grid, device: str, progress: Progress
) -> None:
    """Run the missing tasks on executors that replace those whose workers die.

    Raises:
        HeaprLabError: tasks failed.
        _WorkerDiedError: workers of the last executor were killed, too.
    """
    for left in reversed(range(_ATTEMPTS)):
        with make() as executor:
            try:
                _run_on(executor, grid, device, progress)
            except _WorkerDiedError:
                if not left:
                    raise
            else:
                return


class _WorkerDiedError(HeaprLabError):
    """An executor is broken, because one of its workers was killed."""


def _run_on(executor: Executor, grid: Grid, device: str, progress: Progress) -> None:
    """Run the missing tasks; all of them, also if some fail.

    Raises:
        HeaprLabError: tasks failed (they are named).
        _WorkerDiedError: a worker was killed.
    """
    missing = grid.missing()
    futures = {
        executor.submit(run_task, task, grid.folder, device=device): number
        for number, task in missing.items()
    }
    failed: dict[int, BaseException] = {}
    done = len(grid.tasks) - len(missing)
    for future in as_completed(futures):
        error = future.exception()
        if error is None:
            done += 1
            progress(done, len(grid.tasks))
        else:
            failed[futures[future]] = error
    if any(isinstance(error, BrokenExecutor) for error in failed.values()):
        raise _WorkerDiedError(
            f"a worker was killed, most likely for lack of memory: {len(failed)} of "
            f"{len(grid.tasks)} tasks have no row; run the grid again on a new "
            "executor, with fewer workers: rows and measurements are kept"
        )
    if failed:
        number = min(failed)
        raise HeaprLabError(
            f"{len(failed)} of {len(grid.tasks)} tasks failed, first task {number} "
            f"({grid.tasks[number]}): {failed[number]}"
        ) from failed[number]


def merged(grid: Grid) -> pd.DataFrame:
    """The rows that exist, in the order of the tasks.

    Raises:
        CacheError: a file is damaged.
        SpecError: there is no row, or rows of one model are of different weights.
    """
    paths = [task.path(grid.folder) for task in grid.tasks]
    rows = [files.read_frame(path)[0] for path in paths if path.exists()]
    if not rows:
        raise SpecError(f"there is no row in {grid.folder} yet: run the tasks first")
    frame = pd.concat(rows, ignore_index=True)
    versions = frame.groupby("model")["weights"].nunique()
    changed = versions[versions > 1].index
    if len(changed):
        raise SpecError(
            f"the rows of {changed[0]!r} are of {versions[changed[0]]} different "
            "weights: it has changed, or devices take another dtype; delete "
            f"{grid.folder}, give dtype, and run the grid again"
        )
    return frame


def write_merged(grid: Grid, path: Path) -> int:
    """Write the rows that exist to a CSV or parquet file; returns how many there are.

    Raises:
        CacheError: a row is damaged.
        SpecError: as `merged`.
    """
    frame = merged(grid)
    if path.suffix == ".parquet":
        files.write_frame(path, frame, {"kind": "grid"})
    else:
        with files.replacing(path) as temporary:
            frame.to_csv(temporary, index=False)
    return len(frame)


def named(tasks: Iterable[tuple[int, Task]]) -> str:
    """Tasks as text, the first few of them.

    Example:
        >>> named([(3, "a task"), (5, "another")])
        'task 3 (a task), task 5 (another)'
    """
    texts = [f"task {number} ({task})" for number, task in tasks]
    more = [f"and {len(texts) - _NAMED} more"] if len(texts) > _NAMED else []
    return ", ".join(texts[:_NAMED] + more)
