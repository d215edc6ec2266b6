"""`heapr-lab grid`: many runs, one row each."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from heapr_lab.cli import options, preflight
from heapr_lab.cli.console import print_facts
from heapr_lab.errors import SpecError

if TYPE_CHECKING:
    from heapr_lab.experiments.grid import Grid


def grid(
    spec: Annotated[
        Path, typer.Argument(metavar="SPEC", help="A TOML file; see docs/clusters.md.")
    ],
    count: Annotated[
        bool, typer.Option("--count", help="Print the number of tasks.")
    ] = False,
    task: Annotated[
        int | None,
        typer.Option(
            min=0, envvar="SLURM_ARRAY_TASK_ID", help="Run one task, counted from 0."
        ),
    ] = None,
    merge: Annotated[
        bool, typer.Option("--merge", help="Write all rows to one table.")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(help="Table of --merge, .csv or .parquet [default: SPEC's .csv]."),
    ] = None,
    device: options.Device = "auto",
    as_json: options.AsJson = False,
) -> None:
    """Run every combination of models, methods, ratios, corpora and seeds.

    Without --count, --task or --merge, all tasks that have no row run here. Rows are
    kept in a folder beside SPEC, and measurements in the cache.
    """
    _check_one(count=count, merge=merge)
    from heapr_lab.experiments import grid as grids

    found = grids.read_grid(spec)
    if merge:
        _merge(found, out or spec.with_suffix(".csv"), as_json=as_json)
        return
    found.check()
    if count:
        _count(found, as_json=as_json)
        return
    if task is None:
        grids.run(found, device=device)
    else:
        grids.run_task(found.task(task), found.folder, device=device)
    facts = {"rows": str(found.folder), "tasks": len(found.tasks)}
    print_facts(facts | {"missing": len(found.missing())}, as_json=as_json)


def _check_one(**asked: bool) -> None:
    """Make sure that at most one of the options is given.

    Raises:
        SpecError: several are.
    """
    given = [f"--{name}" for name, value in asked.items() if value]
    if len(given) > 1:
        raise SpecError(f"{' and '.join(given)} are given: give one of them")


def _count(found: "Grid", *, as_json: bool) -> None:
    if as_json:
        print_facts({"tasks": len(found.tasks)}, as_json=True)
    else:
        typer.echo(len(found.tasks))


def _merge(found: "Grid", out: Path, *, as_json: bool) -> None:
    """Write the rows that there are to `out`.

    Raises:
        SpecError: `out` is neither .csv nor .parquet, or rows are missing.
    """
    from heapr_lab.experiments.grid import named, write_merged

    preflight.check_file(out, suffix=".parquet" if out.suffix == ".parquet" else ".csv")
    n_rows = write_merged(found, out)
    missing = found.missing()
    if missing:
        raise SpecError(
            f"{out} has {n_rows} of {len(found.tasks)} rows, missing: "
            f"{named(missing.items())}; run them, and merge again"
        )
    print_facts({"out": str(out), "tasks": n_rows}, as_json=as_json)
