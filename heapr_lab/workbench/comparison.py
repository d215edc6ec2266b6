"""Compression methods side by side: fitted to the same windows, through the cache."""

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from heapr_lab import methods
from heapr_lab.evaluation.perplexity import evaluate_perplexity, exp_nll
from heapr_lab.methods.collectors import Measurements
from heapr_lab.methods.compression import Compression
from heapr_lab.methods.method import Method
from heapr_lab.models.identity import check_unchanged, weights_state
from heapr_lab.progress import Progress, progress_bar
from heapr_lab.pruning.options import exact_ratio
from heapr_lab.storage import cache
from heapr_lab.text.calibration import CalibrationSet
from heapr_lab.text.calibration_spec import Calibration
from heapr_lab.workbench.workbench import Workbench

METHODS_SCHEMA = 1
"""Increased whenever results change for the same input."""
DENSE = "dense"
"""The name of the model without compression in the table."""


@dataclass(frozen=True)
class Entry:
    """A method at one ratio."""

    method: Method
    ratio: float
    options: Mapping[str, Any]
    """The value of each of its options."""


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
    found = {name: methods.get(name) for name in dict.fromkeys([*names, *given])}
    exact = [float(exact_ratio(ratio, name="ratio")) for ratio in ratios]
    completed = {name: found[name].completed(given.get(name, {})) for name in found}
    return [
        Entry(found[name], ratio, completed[name])
        for name in dict.fromkeys(names)
        for ratio in dict.fromkeys(exact)
    ]


def compare_methods(
    bench: Workbench,
    wanted: Sequence[Entry],
    corpora: Sequence[str],
    *,
    calibration: Calibration | None = None,
    progress: Progress | None = None,
) -> pd.DataFrame:
    """Perplexity and size of the model, compressed in each of the ways.

    Results are cached one by one, so an interrupted comparison continues where it was.
    What several methods measure is measured once.

    Args:
        bench: the model, which is not changed.
        wanted: methods and ratios, of `entries`.
        corpora: corpora on whose test splits perplexity is measured.
        calibration: the text that methods are fitted to, by default that of the
            default corpus; its seed is also that of methods that draw numbers.
        progress: called with (results done, in all); by default a bar is shown.

    Returns:
        A row for each method, ratio and corpus, those of the dense model first, with
        `method`, `compresses`, `ratio`, `achieved_ratio` (both of the routed experts'
        parameters), `dataset`, `perplexity`, `nll` [nats per token], `parameters`,
        `bytes`, and `routed_flops` of a mean token.

    Raises:
        SpecError: a ratio is infeasible for a method.
        LayoutError: a method cannot treat the model's experts exactly.
    """
    asked = calibration or Calibration()
    windows = bench.calibration_set(asked)
    shared = Measurements(bench.model, windows, measure=bench.measure)
    rows = []
    total = (1 + len(wanted)) * len(corpora)
    with progress_bar("methods", "result", also=progress) as bar:
        for row in _rows(bench, wanted, corpora, shared=shared, seed=asked.seed):
            rows.append(row)
            bar(len(rows), total)
    return pd.DataFrame(rows)


def _rows(
    bench: Workbench,
    wanted: Sequence[Entry],
    corpora: Sequence[str],
    *,
    shared: Measurements,
    seed: int,
) -> Iterator[dict[str, Any]]:
    """The rows of the table, one after the other."""
    tests = {corpus: bench.test_windows(corpus) for corpus in corpora}
    whole = shared.architecture
    size = round(whole.n_parameters * whole.bytes_per_parameter)
    for corpus, windows in tests.items():
        dense = bench.perplexity(None, windows)
        yield {
            **_labels(DENSE, "", 0.0, corpus),
            "achieved_ratio": 0.0,
            "nll": dense.nll,
            "perplexity": dense.value,
            "parameters": whole.n_parameters,
            "bytes": size,
            "routed_flops": whole.routed_flops_per_token(),
        }
    for entry in wanted:
        fit = functools.cache(functools.partial(_fitted, entry, shared, seed))
        for corpus, windows in tests.items():
            found = _result(bench, entry, windows, shared=shared, seed=seed, fit=fit)
            labels = _labels(
                entry.method.name, entry.method.compresses, entry.ratio, corpus
            )
            yield labels | found | {"perplexity": exp_nll(found["nll"])}


def _labels(
    method: str, compresses: str, ratio: float, corpus: str
) -> dict[str, str | float]:
    return {
        "method": method,
        "compresses": compresses,
        "ratio": ratio,
        "dataset": corpus,
    }


def _fitted(entry: Entry, shared: Measurements, seed: int) -> Compression:
    label = f"{entry.method.name} at {entry.ratio:.0%}"
    with progress_bar(label, "step") as bar:
        return entry.method.fit(
            shared.model,
            shared.calibration,
            ratio=entry.ratio,
            seed=seed,
            shared=shared,
            progress=bar,
            **entry.options,
        )


def _result(
    bench: Workbench,
    entry: Entry,
    windows: CalibrationSet,
    *,
    shared: Measurements,
    seed: int,
    fit: Any,
) -> dict[str, Any]:
    """What is cached of one method at one ratio on one corpus."""
    key = {
        "schema": METHODS_SCHEMA,
        "model": bench.identity,
        "method": {"name": entry.method.name, "version": entry.method.version},
        "options": dict(entry.options),
        "ratio": entry.ratio,
        "seed": seed,
        "calibration": shared.calibration.fingerprint,
        "data": windows.fingerprint,
    }

    def compute() -> dict[str, Any]:
        state = weights_state(bench.model)
        made: Compression = fit()
        with made.apply(bench.model), progress_bar(windows.label, "window") as bar:
            result = evaluate_perplexity(bench.model, windows.ids, progress=bar)
        saved = made.savings(bench.model)
        check_unchanged(bench.model, state)
        return {
            "achieved_ratio": made.achieved_ratio,
            "nll": result.nll,
            "parameters": saved.parameters[1],
            "bytes": saved.bytes[1],
            "routed_flops": saved.routed_flops[1],
        }

    found: dict[str, Any] = cache.cached_json("methods", key, compute)
    return found
