"""The main job: every figure and table of the paper, on any model, from one call.

Score, prune at 10 to 90 %, evaluate, draw, execute the notebooks. Each step goes
through the cache, so that an interrupted run goes on where it stopped and a second one
only draws. What is committed is rewritten only by `publish`.
"""

import functools
import importlib
import operator
import time
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.figure import Figure

from heapr_lab import figures, hub
from heapr_lab.errors import SpecError
from heapr_lab.experiments import claims, paper, readme
from heapr_lab.experiments.workers import Step, default_workers, run_steps, workers
from heapr_lab.models.loading import LAB
from heapr_lab.progress import progress_bar
from heapr_lab.pruning.savings import at_context
from heapr_lab.refinement.elimination import COLUMN as ELIMINATION
from heapr_lab.storage import cache, files, paths
from heapr_lab.storage.hashing import digest
from heapr_lab.storage.provenance import rows_digest
from heapr_lab.text import pydocs
from heapr_lab.workbench.settings import Setting
from heapr_lab.workbench.workbench import Workbench, open_workbench

COST_RESULTS = "benchmarks/results/cost.csv"
QUALITY_RESULTS = "benchmarks/results/quality.csv"
ACCURACY_RESULTS = "benchmarks/results/quality_accuracy.csv"
WIDE_QUALITY_RESULTS = "benchmarks/results/quality_wide.csv"
WIDE_ACCURACY_RESULTS = "benchmarks/results/quality_wide_accuracy.csv"
PARETO_RESULTS = "benchmarks/results/pareto.csv"
DAMAGE_RESULTS = "benchmarks/results/damage.csv"
WIDE_STRUCTURE_RESULTS = "benchmarks/results/structures_wide.csv"
OUTLIER_RESULTS = "benchmarks/results/outliers.csv"
LEARNED_RESULTS = "benchmarks/results/learned.csv"
STRUCTURE_RESULTS = "benchmarks/results/structures.csv"
SPEED_RESULTS = "benchmarks/results/speed.csv"
PANEL_RESULTS = "benchmarks/results/panel.csv"
"""Measured by scripts in `benchmarks/`, which a reproduction does not repeat."""

_Drawn = Callable[[pd.DataFrame], Figure]
_Shown = Callable[[pd.DataFrame], pd.DataFrame]


@dataclass(frozen=True)
class Summary:
    """What a reproduction made."""

    figures: Path
    """Folder of the figures and tables."""
    files: list[Path] = field(repr=False)
    notebooks: list[Path]
    """Notebooks executed (those that were up to date are not)."""
    skipped: dict[str, str]
    """Corpora that could not be had, and why."""
    perplexity: dict[str, tuple[float, float]]
    """Per corpus: of the dense model, and with 25 % of the atoms gone."""
    saved: pd.Series = field(repr=False)
    """Parameters and FLOPs saved at 25 %."""
    claims: pd.DataFrame = field(repr=False)
    """What the paper says, what was found, and whether it holds here."""
    seconds: float

    def lines(self) -> list[str]:
        """What a person would want to know."""
        changes = "; ".join(
            f"{corpus} {dense:.2f} → {pruned:.2f}"
            for corpus, (dense, pruned) in self.perplexity.items()
        )
        saved = self.saved
        made = [
            f"made {len(self.files)} files and {len(self.notebooks)} notebooks "
            f"in {self.seconds:.0f} s"
        ]
        made += [f"skipped {name}: {why}" for name, why in self.skipped.items()]
        return [
            *made,
            f"perplexity, dense → 25 % of the atomic experts pruned: {changes}",
            f"saved at 25 %: {saved['parameter_reduction']:.1%} of the parameters, "
            f"{saved['flops_reduction']:.1%} of the FLOPs "
            f"{at_context(saved['seq_len'])} "
            f"({saved['routed_flops_reduction']:.1%} of the routed experts')",
            f"{self.claims['holds'].sum()} of {len(self.claims)} claims of the paper "
            "hold here (0_claims_table.md)",
            f"figures and tables: {self.figures}",
        ]


def reproduce(
    name_or_path: str = LAB,
    *,
    profile: str | None = None,
    device: str = "auto",
    dtype: str = "auto",
    figures_dir: Path | None = None,
    notebooks: bool = True,
    publish: bool = False,
    n_workers: int | None = 1,
) -> Summary:
    """Make every figure and table for a model, and execute the notebooks.

    Args:
        name_or_path: a hub id, a local folder, or `lab`.
        profile: how much text to use; a name of `settings.PROFILES`.
        device: as `load_model`.
        dtype: as `load_model`.
        figures_dir: where figures and executed notebooks go; by default a folder of
            this model and profile in `figures/`.
        notebooks: whether to execute the notebooks.
        publish: rewrite what is committed instead: the figures in `figures/`, the
            notebooks where they are, and the tables of the README.
        n_workers: processes that share the steps; None takes one for each core where
            the model is small and on the CPU, else one. With more than one, a script
            needs `if __name__ == "__main__"`.

    Raises:
        HeaprLabError: something cannot be had or measured, or notebooks failed, after
            all of them were run; what was done is kept.
    """
    started = time.perf_counter()
    _check_publish(publish, name_or_path, profile, figures_dir)
    hub.answers()  # once, for this process and those to come
    open_bench = functools.partial(
        open_workbench, name_or_path, profile=profile, device=device, dtype=dtype
    )
    bench = open_bench()
    folder = figures_dir or _folder_of(bench, name_or_path, publish=publish)
    with workers(n_workers or default_workers(bench), open_bench) as executor:
        _harvest(bench, executor)
        corpora, skipped = paper.test_corpora()
        found = find(bench, run_experiments(bench, corpora, executor))
        drawing = draw_all(bench, found, folder, executor)
        if publish:
            _fill_readme(found)
        if notebooks:
            # It takes seconds, in which the figures are drawn.
            importlib.import_module("heapr_lab.experiments.notebooks")
        files = drawing()
        executed: list[Path] = []
        if notebooks:
            output = None if publish else folder / "notebooks"
            executed = _execute_notebooks(bench, name_or_path, files, output, executor)
    return Summary(
        figures=folder,
        files=files,
        notebooks=executed,
        skipped=skipped,
        perplexity=_perplexities(bench, corpora),
        saved=bench.savings(Setting(0.25)).iloc[0],
        claims=found.claims,
        seconds=time.perf_counter() - started,
    )


def _check_publish(
    publish: bool, name_or_path: str, profile: str | None, figures_dir: Path | None
) -> None:
    """Make sure that what is committed is only made of what it says it is of.

    Raises:
        SpecError: it would be of another model or profile, or lie elsewhere.
    """
    ours = name_or_path == LAB and profile in (None, LAB) and figures_dir is None
    if publish and not ours:
        raise SpecError(
            "what is committed is of the lab model with its own profile: publish goes "
            "with no other model, profile or folder; leave it out"
        )


def _harvest(bench: Workbench, executor: Executor | None) -> None:
    """Read the docstrings of every package, which each corpus of them needs first."""
    steps = [functools.partial(_harvest_one, name) for name in pydocs.not_harvested()]
    with progress_bar("reading docstrings", "package") as show:
        run_steps(steps, bench, executor, progress=show)


def _harvest_one(package: str, _bench: Workbench) -> None:
    pydocs.harvested(package)


@dataclass(frozen=True)
class Measurements:
    """Rows of all experiments."""

    results: pd.DataFrame
    """Of the dense model and every setting, on every corpus."""
    sizes: pd.DataFrame
    """Of every calibration draw, at every size."""
    tenths: pd.DataFrame
    """Δloss of each tenth of the atoms."""


def run_experiments(
    bench: Workbench, corpora: list[str], executor: Executor | None = None
) -> Measurements:
    """All that the figures need, measured or from the cache, under one bar with an ETA.

    Args:
        bench: the model.
        corpora: where perplexity is measured.
        executor: as `workers.workers` gives it; by default this process.
    """
    draws: list[Step] = [
        functools.partial(paper.calibration_results, draws=[draw])
        for draw in paper.calibration_draws(bench)
    ]
    evaluations: list[Step] = [
        operator.methodcaller("evaluate", setting, corpora)
        for setting in (None, *paper.all_settings())
    ]
    # The long ones first, so that no process waits for them at the end.
    steps = [_measure, _eliminate, *draws, paper.bin_results, *evaluations]
    with progress_bar("experiments", "step") as show:
        given = run_steps(steps, bench, executor, progress=show)
    sizes, (tenths, *results) = given[2 : 2 + len(draws)], given[2 + len(draws) :]
    return Measurements(
        results=pd.concat(results, ignore_index=True),
        # Each draw has the rows of the dense model.
        sizes=pd.concat(sizes).drop_duplicates(ignore_index=True),
        tenths=tenths,
    )


def _measure(bench: Workbench) -> None:
    bench.importance()


def _eliminate(bench: Workbench) -> None:
    """For a notebook, which would wait for it."""
    bench.importance(estimator=ELIMINATION)


@dataclass(frozen=True)
class Findings:
    """What several figures, tables and the README have in common."""

    measured: Measurements
    savings: pd.DataFrame
    claims: pd.DataFrame
    summary: pd.DataFrame
    cost: pd.DataFrame | None
    structures: pd.DataFrame | None
    """None, like `cost`, where the benchmark was not run, or on another model."""
    speed: pd.DataFrame | None
    quality: pd.DataFrame | None
    pareto: pd.DataFrame | None
    damage: pd.DataFrame | None
    wide: pd.DataFrame | None
    """Structures of the wide lab model."""
    wide_quality: pd.DataFrame | None
    accuracy: pd.DataFrame | None
    wide_accuracy: pd.DataFrame | None
    learned: pd.DataFrame | None
    outliers: pd.DataFrame | None


def find(bench: Workbench, measured: Measurements) -> Findings:
    """What follows from what was measured, here and by the benchmarks."""
    savings = paper.savings(bench, paper.all_settings())
    costs = _measured(COST_RESULTS)
    structures = _measured(STRUCTURE_RESULTS, bench.name)
    quality = _measured(QUALITY_RESULTS, bench.name)
    pareto = _measured(PARETO_RESULTS, bench.name)
    damage = _measured(DAMAGE_RESULTS, bench.name)
    wide = _measured(WIDE_STRUCTURE_RESULTS)
    wide_quality = _measured(WIDE_QUALITY_RESULTS)
    learned = _measured(LEARNED_RESULTS, bench.name)
    return Findings(
        measured=measured,
        savings=savings,
        claims=claims.claims(measured.results, measured.tenths),
        summary=readme.summary_table(measured.results, savings),
        cost=None if costs is None else figures.cost_data(costs, baseline="plain"),
        speed=_measured(SPEED_RESULTS),
        structures=None if structures is None else figures.structures_data(structures),
        quality=None if quality is None else figures.quality_data(quality),
        pareto=None if pareto is None else figures.pareto_data(pareto),
        damage=None if damage is None else figures.damage_data(damage),
        wide=None if wide is None else figures.structures_data(wide),
        wide_quality=(
            None if wide_quality is None else figures.quality_data(wide_quality)
        ),
        accuracy=_measured(ACCURACY_RESULTS, bench.name),
        wide_accuracy=_measured(WIDE_ACCURACY_RESULTS),
        learned=learned,
        outliers=_measured(OUTLIER_RESULTS, bench.name),
    )


def _measured(name: str, model: str | None = None) -> pd.DataFrame | None:
    """Results of a benchmark; None where it was not run, or not on `model`."""
    path = paths.project_dir() / name
    if not path.exists():
        return None
    frame = pd.read_csv(path)
    other = model is not None and "model" in frame and set(frame["model"]) != {model}
    return None if other else frame


def draw_all(
    bench: Workbench, found: Findings, folder: Path, executor: Executor | None = None
) -> Callable[[], list[Path]]:
    """Write every figure (png, pdf), table (csv, md, tex) and its data (csv).

    Returns:
        What waits for the figures and gives all that was written.
    """
    pen = _Pen(bench, folder, executor)
    results, savings = found.measured.results, found.savings
    common = results[results["ratio"].le(max(paper.METHOD_RATIOS))]
    masks = paper.layer_masks(bench)
    pen.draw(
        "1_layer_ratios", figures.layer_ratios_data(masks), figures.figure_layer_ratios
    )
    pen.draw("2_bins", figures.bins_data(found.measured.tenths), figures.figure_bins)
    sizes = figures.calibration_size_data(
        found.measured.sizes, ratio=paper.CALIBRATION_RATIO
    )
    pen.draw("3_calibration_size", sizes, figures.figure_calibration_size)
    boundary = figures.boundary_data(results, savings)
    pen.draw("4_boundary", boundary, figures.figure_boundary)
    grain = figures.granularity_data(common, savings)
    pen.draw("5_granularity", grain, figures.figure_granularity)
    pen.table("5_granularity", figures.comparison_table(grain))
    scope = figures.scope_data(common)
    pen.draw("6_scope", scope, figures.figure_scope)
    pen.table("6_scope", figures.comparison_table(scope))
    atom = figures.atomic_expert_data()
    pen.draw("7_atomic_expert", atom, figures.figure_atomic_expert)
    main = figures.main_data(common)
    pen.draw("8_methods", main, figures.figure_main)
    pen.table("8_methods", figures.main_table(main))
    pen.table("0_claims", found.claims)
    pen.table("0_summary", found.summary)
    for name, source, data, figure_of, table_of in _benchmarks(found):
        if data is not None:
            pen.draw(name, data, figure_of, source=source)
            pen.table(name, table_of(data), source=source)
    return pen.files


def _benchmarks(
    found: Findings,
) -> list[tuple[str, str, pd.DataFrame | None, _Drawn, _Shown]]:
    """Name, results, rows, figure and table of every benchmark that is shown."""
    return [
        ("9_cost", COST_RESULTS, found.cost, figures.figure_cost, figures.cost_table),
        (
            "10_structures",
            STRUCTURE_RESULTS,
            found.structures,
            figures.figure_structures,
            figures.structures_table,
        ),
        (
            "11_quality",
            QUALITY_RESULTS,
            found.quality,
            figures.figure_quality,
            figures.quality_table,
        ),
        (
            "11_quality_wide",
            WIDE_QUALITY_RESULTS,
            found.wide_quality,
            figures.figure_quality,
            figures.quality_table,
        ),
        (
            "12_pareto",
            PARETO_RESULTS,
            found.pareto,
            figures.figure_pareto,
            figures.pareto_table,
        ),
        (
            "13_damage",
            DAMAGE_RESULTS,
            found.damage,
            figures.figure_damage,
            figures.damage_table,
        ),
    ]


def _fill_readme(found: Findings) -> None:
    """Put what was found where people read it first."""
    holds = found.claims["holds"].map({True: "yes", False: "**no**"})
    blocks = {
        "summary": readme.as_block(found.summary),
        "claims": readme.as_block(found.claims.assign(holds=holds)),
    }
    if found.cost is not None:
        cost = found.cost
        ours = cost[cost["source"].eq("ours")] if "source" in cost else cost
        blocks["cost"] = readme.as_block(figures.cost_table(ours))
    measured: dict[str, tuple[pd.DataFrame | None, Callable[..., pd.DataFrame]]] = {
        "structures": (found.structures, figures.structures_table),
        "structures_wide": (found.wide, figures.structures_table),
        "quality": (found.quality, figures.quality_table),
        "quality_wide": (found.wide_quality, figures.quality_table),
        "accuracy": (found.accuracy, figures.accuracy_table),
        "accuracy_wide": (found.wide_accuracy, figures.accuracy_table),
        "learned": (found.learned, figures.learned_table),
        "outliers": (found.outliers, figures.outliers_table),
        "damage": (found.damage, figures.damage_table),
        "speed": (found.speed, figures.speed_table),
        "panel": (_measured(PANEL_RESULTS), figures.panel_table),
    }
    for name, (data, table_of) in measured.items():
        if data is not None:
            blocks[name] = readme.as_block(table_of(data))
    readme.fill_blocks(paths.project_dir() / "README.md", blocks)


class _Pen:
    """Writes figures and tables with the provenance of one workbench.

    Figures are drawn by the executor, if there is one: they take most of the time of a
    run that finds everything else in the cache.
    """

    def __init__(
        self, bench: Workbench, folder: Path, executor: Executor | None
    ) -> None:
        self.folder = folder
        self._executor = executor
        self._parts: list[Callable[[], list[Path]]] = []
        table = bench.importance().metadata
        calibration = table["provenance"]["calibration"]
        drawn = ("corpus", "split", "n_sequences", "seq_len", "seed")
        # Of a folder only the name: where it lies differs from machine to machine.
        name = Path(bench.name).name if Path(bench.name).is_dir() else bench.name
        self._made_on = {
            "model": {"name": name, **bench.identity},
            "profile": asdict(bench.profile),
            "calibration": {name: calibration[name] for name in drawn},
            "importance": table["spec_hash"],
        }

    def files(self) -> list[Path]:
        """All that was written, once it is."""
        return [path for part in self._parts for path in part()]

    def draw(
        self, name: str, data: pd.DataFrame, figure_of: _Drawn, *, source: str = ""
    ) -> None:
        """Write a figure and its rows, which are those of the bench or of `source`."""
        rows = figures.rows_text(data)
        provenance = self._provenance(source, figure=name, data=rows_digest(rows))
        path = self.folder / "data" / f"{name}.csv"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(rows, encoding="utf-8", newline="\n")
        stem = self.folder / name
        drawing = functools.partial(_draw_one, data, figure_of, stem, provenance)
        if self._executor is None:
            drawn = drawing()
            self._parts.append(lambda: [*drawn, path])
        else:
            future = self._executor.submit(drawing)
            self._parts.append(lambda: [*future.result(), path])

    def table(self, name: str, frame: pd.DataFrame, *, source: str = "") -> None:
        """Write a table of what the bench, or `source`, has measured."""
        provenance = self._provenance(source, table=name)
        stem = self.folder / f"{name}_table"
        written = figures.write_table(frame, stem, provenance=provenance)
        self._parts.append(lambda: written)

    def _provenance(self, source: str, **facts: str) -> dict[str, Any]:
        return facts | ({"source": source} if source else self._made_on)


def _draw_one(
    data: pd.DataFrame, figure_of: _Drawn, stem: Path, provenance: dict[str, Any]
) -> list[Path]:
    """Draw a figure and write it."""
    figure = figure_of(data)
    written = figures.save_figure(figure, stem, provenance=provenance)
    plt.close(figure)
    return written


def _folder_of(bench: Workbench, name_or_path: str, *, publish: bool) -> Path:
    """`figures/` for what is committed, else a folder in it of this model alone."""
    if publish:
        return paths.figures_dir()
    name, path = name_or_path.replace("/", "-"), Path(name_or_path)
    if path.is_dir():  # two folders may have one name
        name = f"{path.resolve().name}-{digest(str(path.resolve()))[:6]}"
    return paths.figures_dir() / f"{name}-{bench.profile.name}"


def _execute_notebooks(
    bench: Workbench,
    name_or_path: str,
    drawn: list[Path],
    output: Path | None,
    executor: Executor | None,
) -> list[Path]:
    """Execute the notebooks: all of them unless this was done before with the cache.

    A clone carries executed notebooks; that they run here has to be shown once.
    """
    from heapr_lab.experiments.notebooks import execute_all

    inputs = _inputs(bench, drawn)
    key = {"inputs": inputs, "output": str(output)}
    done = cache.cache_path("reproduced", key, extension="json")
    path = Path(name_or_path)
    model = str(path.resolve()) if path.is_dir() else name_or_path
    with progress_bar("notebooks", "notebook") as bar:
        executed = execute_all(
            paths.project_dir() / "notebooks",
            parameters={"MODEL": model, "PROFILE": bench.profile.name},
            inputs=inputs,
            output=output,
            force=not done.exists(),
            executor=executor,
            progress=bar,
        )
    files.write_json(done, key)
    return executed


def _perplexities(
    bench: Workbench, corpora: list[str]
) -> dict[str, tuple[float, float]]:
    keep = bench.keep(Setting(0.25))
    return {
        corpus: (
            bench.perplexity(None, bench.test_windows(corpus)).value,
            bench.perplexity(keep, bench.test_windows(corpus)).value,
        )
        for corpus in corpora
    }


def _inputs(bench: Workbench, drawn: list[Path]) -> str:
    """What the notebooks' outputs depend on besides their sources."""
    data = [path.read_text() for path in drawn if path.suffix == ".csv"]
    return digest({"model": bench.identity, "data": data})
