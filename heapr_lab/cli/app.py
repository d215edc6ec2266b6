"""The command line: every command, and how it ends.

Everything that needs torch is imported inside the commands, so that `--help` answers
at once. Results go to standard output, as text or with `--json` as one JSON object;
progress and errors go to standard error.
"""

import os
from importlib.metadata import version
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from heapr_lab.cli import (
    compare,
    evaluate,
    options,
    panel,
    plan,
    provenance,
    prune,
    reproduce,
    score,
)
from heapr_lab.cli.console import in_one_line, line_of_interrupt


class _Commands(TyperGroup):
    """The commands; an error that the user can correct is reported in one line."""

    def invoke(self, ctx: Any) -> Any:
        with in_one_line(lambda: line_of_interrupt(ctx.invoked_subcommand)):
            return super().invoke(ctx)


class _InGroups(TyperCommand):
    """A command whose `--help` lists each option below its `rich_help_panel`."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write a section for each group, in the order of their first options."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                kind = f"{param.param_type_name.title()}s"
                group = getattr(param, "rich_help_panel", None) or kind
                sections.setdefault(group, []).append(record)
        for name, records in sections.items():
            with formatter.section(name):
                formatter.write_dl(records)


app = typer.Typer(
    cls=_Commands,
    help="Score, prune and study the atomic experts of Mixture-of-Experts models.",
    epilog=options.EXAMPLES,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"heapr-lab {version('heapr-lab')}")
        raise typer.Exit


def _offline(asked: bool) -> None:
    """Fetch nothing, before anything that could is imported."""
    if asked:
        os.environ["HF_HUB_OFFLINE"] = "1"


@app.callback()
def _common(
    _shown: Annotated[
        bool,
        typer.Option(
            "--version", callback=_version, is_eager=True, help="Show the version."
        ),
    ] = False,
    _alone: Annotated[
        bool,
        typer.Option(
            "--offline",
            callback=_offline,
            help="Fetch no model and no text: only what is on this machine.",
        ),
    ] = False,
) -> None:
    pass


app.command(epilog=options.PLAN_EXAMPLES)(plan.plan)
app.command(epilog=options.SCORE_EXAMPLES)(score.score)
app.command(cls=_InGroups, epilog=options.PRUNE_EXAMPLES)(prune.prune)
app.command(epilog=options.EVALUATE_EXAMPLES)(evaluate.evaluate)
app.command(epilog=options.COMPARE_EXAMPLES)(compare.compare)
app.command(epilog=options.REPRODUCE_EXAMPLES)(reproduce.reproduce)
app.command(epilog=options.PROVENANCE_EXAMPLES)(provenance.provenance)
app.command("app", epilog=options.APP_EXAMPLES)(panel.panel)
