"""The main job: every figure and table of the paper, on any model, from one call.

Score, prune at 10 to 90 %, evaluate, draw, execute the notebooks. Each step goes
through the cache, so that an interrupted run goes on where it stopped and a second one
only draws. What is committed is rewritten only by `publish`.
"""

import functools
import importlib
import operator
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd

from heapr_lab import figures, hub
from heapr_lab.errors import SpecError
from heapr_lab.experiments import claims, paper, readme
from heapr_lab.experiments.benchmarks import BENCHMARKS, Draw, Reshape, measured_for
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
            notebooks where they are, and the blocks of README.md and figures/README.md.
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
            _fill_readmes(found)
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
    """What several figures, tables and the READMEs have in common."""

    measured: Measurements
    savings: pd.DataFrame
    claims: pd.DataFrame
    summary: pd.DataFrame
    benchmarks: dict[str, pd.DataFrame]
    """Rows of the benchmarks that are shown beside this model, by name."""


def find(bench: Workbench, measured: Measurements) -> Findings:
    """What follows from what was measured, here and by the benchmarks."""
    savings = paper.savings(bench, paper.all_settings())
    return Findings(
        measured=measured,
        savings=savings,
        claims=claims.claims(measured.results, measured.tenths),
        summary=readme.summary_table(measured.results, savings),
        benchmarks=measured_for(bench.name),
    )


@dataclass(frozen=True)
class Drawing:
    """A figure to draw, with its table where it has one."""

    name: str
    data: pd.DataFrame
    figure: Draw
    table: Reshape | None = None
    source: str = ""
    """The committed results that `data` was made of, where the bench did not."""


def draw_all(
    bench: Workbench, found: Findings, folder: Path, executor: Executor | None = None
) -> Callable[[], list[Path]]:
    """Write every figure (png, pdf), table (csv, md, tex) and its data (csv).

    Returns:
        What waits for the figures and gives all that was written.
    """
    pen = _Pen(bench, folder, executor)
    for drawing in _of_the_paper(bench, found):
        pen.draw(drawing)
    pen.table("0_claims", found.claims)
    pen.table("0_summary", found.summary)
    for drawing in _of_benchmarks(found):
        pen.draw(drawing)
    return pen.files


def _of_the_paper(bench: Workbench, found: Findings) -> Iterator[Drawing]:
    """The paper's figures, each with its own data function."""
    results, savings = found.measured.results, found.savings
    common = results[results["ratio"].le(max(paper.METHOD_RATIOS))]
    layers = figures.layer_ratios_data(paper.layer_masks(bench))
    yield Drawing("1_layer_ratios", layers, figures.figure_layer_ratios)
    tenths = figures.bins_data(found.measured.tenths)
    yield Drawing("2_bins", tenths, figures.figure_bins)
    sizes = figures.calibration_size_data(
        found.measured.sizes, ratio=paper.CALIBRATION_RATIO
    )
    yield Drawing("3_calibration_size", sizes, figures.figure_calibration_size)
    boundary = figures.boundary_data(results, savings)
    yield Drawing("4_boundary", boundary, figures.figure_boundary)
    comparison = figures.comparison_table
    grain = figures.granularity_data(common, savings)
    yield Drawing("5_granularity", grain, figures.figure_granularity, comparison)
    scope = figures.scope_data(common)
    yield Drawing("6_scope", scope, figures.figure_scope, comparison)
    atom = figures.atomic_expert_data()
    yield Drawing("7_atomic_expert", atom, figures.figure_atomic_expert)
    main = figures.main_data(common)
    yield Drawing("8_methods", main, figures.figure_main, figures.main_table)


def _of_benchmarks(found: Findings) -> Iterator[Drawing]:
    """Those of the benchmarks that have a figure."""
    for name, data in found.benchmarks.items():
        row = BENCHMARKS[name]
        if row.figure is not None:
            yield Drawing(row.stem, data, row.figure, row.table, row.results)


def _fill_readmes(found: Findings) -> None:
    """Put what was found where people read it."""
    told = (found.summary, found.claims, found.benchmarks)
    readme.fill_blocks(paths.project_dir() / "README.md", readme.front_blocks(*told))
    readme.fill_sections(paths.figures_dir() / "README.md", readme.sections(*told))


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

    def draw(self, drawing: Drawing) -> None:
        """Write a figure, its rows, and its table where it has one."""
        name, data, source = drawing.name, drawing.data, drawing.source
        rows = figures.rows_text(data)
        provenance = self._provenance(source, figure=name, data=rows_digest(rows))
        path = self.folder / "data" / f"{name}.csv"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(rows, encoding="utf-8", newline="\n")
        self._start(
            functools.partial(
                _draw_one, data, drawing.figure, self.folder / name, provenance
            ),
            path,
        )
        if drawing.table is not None:
            self.table(name, drawing.table(data), source=source)

    def _start(self, drawing: Callable[[], list[Path]], rows: Path) -> None:
        if self._executor is None:
            drawn = drawing()
            self._parts.append(lambda: [*drawn, rows])
        else:
            future = self._executor.submit(drawing)
            self._parts.append(lambda: [*future.result(), rows])

    def table(self, name: str, frame: pd.DataFrame, *, source: str = "") -> None:
        """Write a table of what the bench, or `source`, has measured."""
        provenance = self._provenance(source, table=name)
        stem = self.folder / f"{name}_table"
        written = figures.write_table(frame, stem, provenance=provenance)
        self._parts.append(lambda: written)

    def _provenance(self, source: str, **facts: str) -> dict[str, Any]:
        return facts | ({"source": source} if source else self._made_on)


def _draw_one(
    data: pd.DataFrame, figure_of: Draw, stem: Path, provenance: dict[str, Any]
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
