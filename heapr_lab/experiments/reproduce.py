"""Every figure and table of the paper, on any model, from one call.

Score, prune at 10 to 90 %, evaluate, draw, execute the notebooks. Each step is cached,
so that an interrupted run resumes where it stopped and a second run only draws.
Committed files are rewritten only with `publish`.
"""

import functools
import gc
import itertools
import operator
import time
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pandas as pd

from heapr_lab import figures, hub
from heapr_lab.errors import SpecError
from heapr_lab.experiments import claims, paper
from heapr_lab.experiments.intervals import kept_of_boundary
from heapr_lab.experiments.workers import Step, default_workers, run_steps, workers
from heapr_lab.figures.files import draw_files, write_table
from heapr_lab.models.memory import return_freed
from heapr_lab.models.named import LAB
from heapr_lab.progress import progress_bar
from heapr_lab.storage import cache, files, paths
from heapr_lab.storage.hashing import digest
from heapr_lab.text import pydocs
from heapr_lab.text.calibration_spec import DEFAULT_CORPUS, Calibration
from heapr_lab.workbench.workbench import Workbench, open_workbench


def reproduce(
    name_or_path: str = LAB,
    *,
    profile: str | None = None,
    device: str = "auto",
    dtype: str = "auto",
    publish: bool = False,
    n_workers: int | None = 1,
) -> list[str]:
    """Make every figure and table for a model, and execute the notebooks.

    Args:
        name_or_path: as `load_model`.
        profile: how much text to use; a name in `settings.PROFILES`.
        device: as `load_model`.
        dtype: as `load_model`.
        publish: rewrite the committed files: the figures in `figures/`, and the
            notebooks in place. Otherwise all are written to a folder of this model and
            profile in `figures/`.
        n_workers: number of processes; None takes one for each core if the model is
            small and on the CPU, else one. With more than one, a script needs
            `if __name__ == "__main__"`.

    Returns:
        What was made and found, as lines of text for the user.

    Raises:
        HeaprLabError: something is not available or cannot be measured, or notebooks
            failed (after all of them were run); finished steps stay in the cache.
    """
    started = time.perf_counter()
    _check_publish(publish, name_or_path, profile)
    hub.is_reachable()  # once, for this process and those to come
    open_bench = functools.partial(
        open_workbench, name_or_path, profile=profile, device=device, dtype=dtype
    )
    bench = open_bench()
    folder = _folder_of(bench, name_or_path, publish=publish)
    n_processes = n_workers or default_workers(bench)
    with workers(n_processes, open_bench) as executor:
        _harvest(bench, executor)
        corpora, skipped = paper.test_corpora()
        evidence = run_experiments(bench, corpora, executor)
        verdicts = claims.claims(evidence)
        drawn = draw_all(bench, evidence, verdicts, folder, executor)
    path = Path(name_or_path)
    model = str(path.resolve()) if path.is_dir() else name_or_path
    execution: dict[str, Any] = {
        "parameters": {"MODEL": model, "PROFILE": bench.profile.name},
        "inputs": _inputs(bench, drawn),
        "output": None if publish else folder / "notebooks",
        "n_processes": n_processes,
    }
    del bench
    gc.collect()
    return_freed()  # what held the model, before each kernel holds its own
    executed = _execute_notebooks(**execution)
    counts = verdicts["verdict"].value_counts(sort=False)
    told = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    seconds = time.perf_counter() - started
    return [
        f"made {len(drawn)} files and {len(executed)} notebooks in {seconds:.0f} s",
        *(f"skipped {name}: {why}" for name, why in skipped.items()),
        f"claims of the paper here: {told} (0_claims_table.md)",
        f"figures and tables: {folder}",
    ]


def _check_publish(publish: bool, name_or_path: str, profile: str | None) -> None:
    """Make sure that committed files are only rewritten for the lab model.

    Raises:
        SpecError: `publish` is combined with another model or profile.
    """
    if publish and (name_or_path != LAB or profile not in (None, LAB)):
        raise SpecError(
            f"publish with model {name_or_path!r} and profile {profile!r}: expected "
            "the lab model and its own profile, which the committed files are of. Omit "
            "publish or the other options"
        )


def _harvest(bench: Workbench, executor: Executor | None) -> None:
    """Read the docstrings of every package, which all pydocs corpora need."""
    steps = [functools.partial(_keep_docs, name) for name in pydocs.not_harvested()]
    with progress_bar("reading docstrings", "package") as show:
        run_steps(steps, bench, executor, progress=show)


def _keep_docs(package: str, _bench: Workbench) -> None:
    """Have the docstrings of a package in the cache, and not sent between processes."""
    pydocs.harvested(package)


def _alone(function: Callable[[], Any], _bench: Workbench) -> Any:
    """A step that needs no workbench."""
    return function()


def run_experiments(
    bench: Workbench, corpora: list[str], executor: Executor | None = None
) -> claims.Evidence:
    """Everything that the figures need, measured or cached, with one progress bar.

    Args:
        bench: the model.
        corpora: where perplexity is measured.
        executor: from `workers.workers`; None runs everything in this process.
    """
    groups: dict[str, list[Step]] = {
        # Long steps first, so that no process waits for them at the end; and what no
        # other process measures meanwhile, so that none waits for it now.
        "ahead": [
            *(
                operator.methodcaller("importance", Calibration(seed=seed))
                for seed in range(bench.profile.n_seeds)
            ),
            _mix,
        ],
        "draws": [
            functools.partial(paper.calibration_results, draws=[draw])
            for draw in paper.calibration_draws(bench)
        ],
        "bins": [paper.bin_results],
        "results": [
            operator.methodcaller("evaluate", setting, corpora)
            for setting in (None, *paper.all_settings())
        ],
        "windows": [  # last, when most of their states are measured
            functools.partial(paper.window_losses, corpora=[corpus])
            for corpus in corpora
        ],
    }
    steps = list(itertools.chain.from_iterable(groups.values()))
    with progress_bar("experiments", "step") as show:
        outcomes = iter(run_steps(steps, bench, executor, progress=show))
    frames = {name: [next(outcomes) for _ in group] for name, group in groups.items()}
    results, windows, draws = (
        pd.concat(frames[name], ignore_index=True)
        for name in ("results", "windows", "draws")
    )
    savings = paper.savings(bench, paper.all_settings())
    return claims.Evidence(
        calibrated_on=DEFAULT_CORPUS,
        results=results,
        windows=windows,
        kept=kept_of_boundary(figures.boundary_data(results, savings)),
        savings=savings,
        bins=figures.bins_data(*frames["bins"]),
        shares=paper.layer_shares(bench),
        # Each draw includes the rows of the dense model.
        draws=draws.drop_duplicates(ignore_index=True),
    )


def _mix(bench: Workbench) -> None:
    """Compute the statistics of the mixture, which two notebooks need at a time."""
    mixture = paper.mixture_of(paper.calibration_pair(bench))
    bench.importance(Calibration(mixture))


def draw_all(
    bench: Workbench,
    evidence: claims.Evidence,
    verdicts: pd.DataFrame,
    folder: Path,
    executor: Executor | None = None,
) -> list[Path]:
    """Write every figure (png, pdf), table (csv, md) and its data (csv).

    Args:
        bench: the model.
        evidence: results of all experiments.
        verdicts: from `claims.claims`.
        folder: where the files are written.
        executor: draws figures in parallel; None draws them one by one here.

    Returns:
        All written paths.
    """
    made_on = _made_on(bench)
    draw = functools.partial(draw_files, provenance=made_on)
    draws = (
        functools.partial(draw, data, figure, folder / name, table_of=table)
        for name, figure, data, table in _drawings(bench, evidence)
    )
    steps = [functools.partial(_alone, one) for one in draws]
    with progress_bar("figures", "figure") as show:
        drawn = run_steps(steps, bench, executor, progress=show)
    written = [path for paths_of_one in drawn for path in paths_of_one]
    written += write_table(verdicts, folder / "0_claims_table")
    summary = figures.summary_table(evidence.results, evidence.savings)
    written += write_table(summary, folder / "0_summary_table")
    return sorted(written)


def _drawings(bench: Workbench, evidence: claims.Evidence) -> list[tuple[Any, ...]]:
    """The paper's figures: name, what draws it, its data, what makes its table."""
    results, savings = evidence.results, evidence.savings
    compared = (0.0, *paper.METHOD_RATIOS)  # the same for every curve of a figure
    common, saved = (
        frame[frame["ratio"].isin(compared)] for frame in (results, savings)
    )
    layers = figures.layer_ratios_data(paper.layer_masks(bench))
    ratio = paper.CALIBRATION_RATIO
    sizes = figures.calibration_size_data(evidence.draws, ratio=ratio)
    boundary = figures.boundary_data(results, savings)
    grain = figures.granularity_data(common, saved)
    scope, main = figures.scope_data(common), figures.main_data(common)
    return [
        ("1_layer_ratios", figures.figure_layer_ratios, layers, None),
        ("2_bins", figures.figure_bins, evidence.bins, None),
        ("3_calibration_size", figures.figure_calibration_size, sizes, None),
        ("4_boundary", figures.figure_boundary, boundary, None),
        ("5_granularity", figures.figure_granularity, grain, None),
        ("6_scope", figures.figure_scope, scope, None),
        ("8_methods", figures.figure_main, main, figures.main_table),
    ]


def _made_on(bench: Workbench) -> dict[str, Any]:
    """The provenance of what was measured on a workbench."""
    table = bench.importance().metadata
    calibration = table["provenance"]["calibration"]
    drawn = ("corpus", "split", "n_sequences", "seq_len", "seed")
    # Only the name of a folder: its location differs from machine to machine.
    name = Path(bench.name).name if Path(bench.name).is_dir() else bench.name
    return {
        "model": {"name": name, **bench.identity},
        "profile": asdict(bench.profile),
        "calibration": {name: calibration[name] for name in drawn},
        "importance": table["spec_hash"],
    }


def _folder_of(bench: Workbench, name_or_path: str, *, publish: bool) -> Path:
    """`figures/` if its files are to be committed, else a subfolder for this model."""
    if publish:
        return paths.figures_dir()
    name, path = name_or_path.replace("/", "-"), Path(name_or_path)
    if path.is_dir():  # two folders may have the same name
        name = f"{path.resolve().name}-{digest(str(path.resolve()))[:6]}"
    return paths.figures_dir() / f"{name}-{bench.profile.name}"


def _execute_notebooks(
    *, parameters: dict[str, str], inputs: str, output: Path | None, n_processes: int
) -> list[Path]:
    """Execute the notebooks: all of them the first time, then those out of date.

    A clone contains executed notebooks, so that the first time shows that they run
    here.

    Args:
        parameters: as `execute_all`.
        inputs: digest of what their outputs depend on beside their sources.
        output: where they are written; None for in place.
        n_processes: kernels at a time.
    """
    from heapr_lab.experiments.notebooks import execute_all

    key = {"inputs": inputs, "output": str(output)}
    done = cache.cache_path("reproduced", key, extension="json")
    with progress_bar("notebooks", "notebook") as bar:
        executed = execute_all(
            paths.project_dir() / "notebooks",
            parameters=parameters,
            inputs=inputs,
            output=output,
            force=not done.exists(),
            n_kernels=n_processes,
            progress=bar,
        )
    files.write_json(done, key)
    return executed


def _inputs(bench: Workbench, drawn: list[Path]) -> str:
    """Digest of what the notebooks' outputs depend on beside their sources."""
    benchmarks = sorted(paths.project_dir().glob("benchmarks/results/*.csv"))
    tables = [path for path in drawn if path.suffix == ".csv"]
    data = [path.read_text() for path in (*tables, *benchmarks)]
    return digest({"model": bench.identity, "data": data})
