"""Compression methods side by side: fitted to the same windows, through the cache."""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from heapr_lab import methods
from heapr_lab.errors import HeaprLabError, LayoutError, SpecError
from heapr_lab.evaluation.perplexity import evaluate_perplexity, exp_nll
from heapr_lab.methods.collectors import Measurements
from heapr_lab.methods.compression import Compression
from heapr_lab.methods.method import Method
from heapr_lab.models.identity import check_unchanged, weights_state
from heapr_lab.progress import Progress, StartPart, no_parts, progress_bar
from heapr_lab.pruning.options import exact_ratio
from heapr_lab.storage import cache
from heapr_lab.text.calibration import CalibrationSet
from heapr_lab.text.calibration_spec import Calibration
from heapr_lab.workbench.workbench import Workbench

METHODS_SCHEMA = 1
"""Increased whenever results change for the same input."""
DENSE = "dense"
"""The name of the model without compression in the table."""
SIZES = ("parameters", "bytes", "routed_flops")
"""The sizes in the table, of those before and after in `Savings`."""


@dataclass(frozen=True)
class Entry:
    """A method at one ratio."""

    method: Method
    ratio: float
    options: Mapping[str, Any]
    """The value of each of its options."""

    @property
    def label(self) -> str:
        """One line for people, such as `reap at 25%`."""
        return f"{self.method.name} at {100 * self.ratio:.4g}%"


def entries(
    names: Iterable[str],
    ratios: Iterable[float],
    options: Mapping[str, Mapping[str, Any]] | None = None,
) -> list[Entry]:
    """Each method at each ratio.

    Args:
        names: names of methods, each once.
        ratios: shares of the routed experts' parameters to remove.
        options: by name of a method, options in place of its defaults.

    Raises:
        SpecError: a method or an option is unknown, or a value is invalid.
    """
    given = options or {}
    chosen = {name: methods.get(name) for name in dict.fromkeys([*names, *given])}
    exact = [float(exact_ratio(ratio, name="ratio")) for ratio in ratios]
    completed = {name: chosen[name].completed(given.get(name, {})) for name in chosen}
    return [
        Entry(chosen[name], ratio, completed[name])
        for name in dict.fromkeys(names)
        for ratio in dict.fromkeys(exact)
    ]


def compare_methods(
    bench: Workbench,
    wanted: Sequence[Entry],
    corpora: Sequence[str],
    *,
    tasks: Sequence[str] = (),
    limit: int | None = None,
    calibration: Calibration | None = None,
    progress: Progress | None = None,
    part: StartPart = no_parts,
    refused: Callable[[Entry, HeaprLabError], None] | None = None,
) -> pd.DataFrame:
    """Perplexity, accuracy and size of the model, compressed in each of the ways.

    Results are cached one by one, so an interrupted comparison continues where it was.
    What several methods measure is measured once.

    Args:
        bench: the model, which is not changed.
        wanted: methods and ratios, of `entries`.
        corpora: corpora on whose test splits perplexity is measured.
        tasks: tasks whose accuracy is measured, as in `Workbench.task_results`.
        limit: so many items of each task, as there.
        calibration: the text that methods are fitted to, by default that of the
            default corpus; its seed is also that of methods that draw numbers.
        progress: called with (results done, in all); by default a bar is shown.
        part: takes the progress of each fit and each measurement, beside its bar.
        refused: called with a method and ratio that cannot be fitted, and why; by
            default that ends the comparison.

    Returns:
        A row for each method, ratio, corpus and task, those of the dense model first,
        with `method`, `compresses`, `ratio`, `achieved_ratio` (both of the routed
        experts' parameters), `dataset`, `perplexity`, `nll` [nats per token],
        `parameters`, `bytes`, and `routed_flops` of a mean token. Rows of tasks have,
        in place of perplexity, a column for each metric of the harness, such as `acc`
        and `acc_norm`, its standard error, `acc_stderr`, and `n_items`.

    Raises:
        SpecError: a ratio is infeasible for a method.
        LayoutError: a method cannot treat the model's experts exactly.
    """
    spec = calibration or Calibration()
    windows = bench.calibration_set(spec)
    shared = Measurements(bench.model, windows, measure=bench.measure)
    shared.expect(c for entry in wanted for c in entry.method.collectors)
    tests = {corpus: bench.test_windows(corpus) for corpus in corpora}
    data: dict[str, Any] = {corpus: test.fingerprint for corpus, test in tests.items()}
    data |= {task: bench.task_key(task, limit) for task in tasks}
    run = _Run(bench, shared, spec.seed, tests, data, limit, part)
    rows = []
    total = (1 + len(wanted)) * len(data)
    with progress_bar("methods", "result", also=progress) as bar:
        for row in run.rows(wanted, refused):
            rows.append(row)
            bar(len(rows), total)
    return pd.DataFrame(rows)


@dataclass(frozen=True, eq=False)
class _Run:
    """What all results of a comparison have in common."""

    bench: Workbench
    shared: Measurements
    seed: int
    tests: Mapping[str, CalibrationSet]
    """The windows of each corpus."""
    data: Mapping[str, Any]
    """What determines the results on each corpus and each task, by name."""
    limit: int | None
    part: StartPart

    def rows(
        self,
        wanted: Sequence[Entry],
        refused: Callable[[Entry, HeaprLabError], None] | None,
    ) -> Iterator[dict[str, Any]]:
        """The rows of the table, one after the other.

        Raises:
            SpecError: a ratio is infeasible for a method, and nobody asks which.
            LayoutError: likewise, a method cannot treat the model's experts exactly.
        """
        for dataset in self.data:
            yield _row(DENSE, "", 0.0, dataset, self._dense(dataset))
        for entry in wanted:
            fit = functools.cache(functools.partial(self._fitted, entry))
            try:
                for dataset in self.data:
                    labels = entry.method.name, entry.method.compresses, entry.ratio
                    yield _row(*labels, dataset, self._cached(entry, dataset, fit))
            except (SpecError, LayoutError) as error:
                if refused is None:
                    raise
                refused(entry, error)

    def _dense(self, dataset: str) -> dict[str, Any]:
        """The same of the dense model, by the workbench's own cache."""
        whole, bench = self.shared.architecture, self.bench
        part: Any = {"progress": self.part(f"{DENSE} on {dataset}", "step")}
        result: dict[str, Any] = {"achieved_ratio": 0.0}
        if dataset in self.tests:
            result["nll"] = bench.perplexity(None, self.tests[dataset], **part).nll
        else:
            options = {"limit": self.limit, **part}
            result["metrics"] = bench.task_results(None, dataset, **options)
        n_bytes = round(whole.n_parameters * whole.bytes_per_parameter)
        sizes = whole.n_parameters, n_bytes, whole.routed_flops_per_token()
        return result | dict(zip(SIZES, sizes, strict=True))

    def _measured(self, dataset: str, also: Progress) -> dict[str, Any]:
        """The loss or the metrics of the model as it is."""
        if dataset not in self.tests:
            rows = self.bench.run_task(dataset, limit=self.limit, progress=also)
            return {"metrics": rows}
        windows, model = self.tests[dataset], self.bench.model
        with progress_bar(windows.label, "window", also=also) as bar:
            return {"nll": evaluate_perplexity(model, windows.ids, progress=bar).nll}

    def _cached(
        self, entry: Entry, dataset: str, fit: Callable[[], Compression]
    ) -> dict[str, Any]:
        """What is measured of one method at one ratio, and its sizes."""
        model, method = self.bench.model, entry.method
        key = {
            "schema": METHODS_SCHEMA,
            "model": self.bench.identity,
            "method": {"name": method.name, "version": method.version},
            "options": dict(entry.options),
            "ratio": entry.ratio,
            "seed": self.seed,
            "calibration": self.shared.calibration.fingerprint,
            "data": self.data[dataset],
        }

        def compute() -> dict[str, Any]:
            state, compression = weights_state(model), fit()
            also = self.part(f"{entry.label} on {dataset}", "step")
            with compression.apply(model):
                measured = self._measured(dataset, also)
            saved = compression.savings(model)
            check_unchanged(model, state)
            sizes = {name: getattr(saved, name)[1] for name in SIZES}
            return {"achieved_ratio": compression.achieved_ratio, **measured, **sizes}

        row: dict[str, Any] = cache.cached_json("methods", key, compute)
        return row

    def _fitted(self, entry: Entry) -> Compression:
        also = self.part(entry.label, "step")
        with progress_bar(entry.label, "step", also=also) as bar:
            return entry.method.fit(
                self.shared.model,
                self.shared.calibration,
                ratio=entry.ratio,
                seed=self.seed,
                shared=self.shared,
                progress=bar,
                **entry.options,
            )


def _row(
    method: str, compresses: str, ratio: float, dataset: str, result: dict[str, Any]
) -> dict[str, Any]:
    """A row of the table.

    Raises:
        SpecError: the metrics are those of a group of several tasks.
    """
    row = {
        "method": method,
        "compresses": compresses,
        "ratio": ratio,
        "dataset": dataset,
        "achieved_ratio": result["achieved_ratio"],
    }
    if "nll" in result:
        row |= {"nll": result["nll"], "perplexity": exp_nll(result["nll"])}
    row |= {name: result[name] for name in SIZES}
    metrics = result.get("metrics")
    return row | (_metrics(dataset, metrics) if metrics else {})


def _metrics(task: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The columns of a task: its metrics, their standard errors, its items.

    Raises:
        SpecError: it is a group of several tasks.
    """
    columns: dict[str, Any] = {"n_items": rows[0]["n"]}
    for row in rows:
        if row["metric"] in columns:
            raise SpecError(
                f"{task} is a group with several values of {row['metric']}, expected "
                "a single task: name its tasks one by one"
            )
        columns[row["metric"]] = row["value"]
        columns[f"{row['metric']}_stderr"] = row["stderr"]
    return columns
