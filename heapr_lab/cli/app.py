"""The command line: its shorter commands, and how every command ends.

Everything that needs torch is imported inside the commands, so that `--help` answers
at once. Results go to standard output, as text or with `--json` as one JSON object;
progress and errors go to standard error.
"""

import os
import threading
import tomllib
import webbrowser
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from heapr_lab.cli import options
from heapr_lab.cli.compare import compare
from heapr_lab.cli.console import in_one_line, line_of_interrupt, print_facts
from heapr_lab.cli.measure import evaluate, score
from heapr_lab.cli.prune import prune
from heapr_lab.models.safetensors_headers import check_there

_EXAMPLES = tomllib.loads(Path(__file__).with_name("examples.toml").read_text("utf-8"))


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


def _examples(command: str) -> str:
    """The end of the `--help` of a command, or of them all."""
    lines = [f"  heapr-lab {line}" for line in _EXAMPLES[command]]
    return "\n".join(["\b\nExamples:", *lines])


app = typer.Typer(
    cls=_Commands,
    help="Score, prune and study the atomic experts of Mixture-of-Experts models.",
    epilog=_examples("heapr-lab"),
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


@app.command(epilog=_examples("plan"))
def plan(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A hub id, a folder, a config.json, `lab`, `smollm2` or `smolmoe`.",
        ),
    ],
    n_sequences: Annotated[int, typer.Option(min=1, help="Calibration windows.")] = 128,
    seq_len: Annotated[int, typer.Option(min=2, help="Tokens per window.")] = 2048,
    memory: Annotated[
        str | None,
        typer.Option(help="Of the device, such as 24GB [default: what is free]."),
    ] = None,
    dtype: options.Dtype = "auto",
    as_json: options.AsJson = False,
) -> None:
    """Say what the scores of a model need, and whether it is streamed.

    Its configuration and the headers of its files are read, and no weight; `smollm2`
    and `smolmoe` are first fetched and made, if they are not in the cache.
    """
    if Path(model).suffix != ".json":
        check_there(model)
    from heapr_lab.streaming.plan import plan as planned

    needs = planned(
        model, n_sequences=n_sequences, seq_len=seq_len, memory=memory, dtype=dtype
    )
    if as_json:
        print_facts(needs.to_dict(), as_json=True)
    else:
        typer.echo(str(needs))


app.command(epilog=_examples("score"))(score)
app.command(cls=_InGroups, epilog=_examples("prune"))(prune)
app.command(epilog=_examples("evaluate"))(evaluate)
app.command(epilog=_examples("compare"))(compare)


@app.command(epilog=_examples("reproduce"))
def reproduce(
    model: Annotated[
        str, typer.Option(help=options.NAME_HELP, callback=options.model_name)
    ] = "lab",
    profile: options.Profile = None,
    publish: Annotated[
        bool,
        typer.Option(
            "--publish", help="Overwrite the committed figures and notebooks."
        ),
    ] = False,
    n_workers: Annotated[
        int | None,
        typer.Option(
            "--workers",
            min=1,
            help="Number of processes [default: one per core for a small model on the "
            "CPU, else one].",
        ),
    ] = None,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
) -> None:
    """Make every figure and execute every notebook.

    It scores the model, prunes it at 10 to 90 %, evaluates and draws.
    """
    from heapr_lab.experiments.reproduce import reproduce as make

    lines = make(
        model,
        profile=profile,
        device=device,
        dtype=dtype,
        publish=publish,
        n_workers=n_workers,
    )
    typer.echo("\n".join(lines))


@app.command(epilog=_examples("provenance"))
def provenance(
    file: Annotated[
        Path, typer.Argument(help="A png or parquet file, or a checkpoint.")
    ],
    as_json: options.AsJson = False,
) -> None:
    """Show where a file written by this package came from."""
    from heapr_lab.checkpoints.provenance import read_provenance

    facts = {"file": str(file), **read_provenance(file)}
    print_facts(facts if as_json else _flat(facts), as_json=as_json)


def _flat(facts: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Nested facts by their dotted names."""
    flat: dict[str, Any] = {}
    for name, value in facts.items():
        whole = f"{before}{name}"
        flat |= _flat(value, f"{whole}.") if isinstance(value, dict) else {whole: value}
    return flat


@app.command("app", epilog=_examples("app"))
def panel(
    source: Annotated[
        str,
        typer.Argument(
            metavar="MODEL_OR_TABLE",
            help="A hub id, a local folder, `lab`, `smollm2`, `smolmoe`, or a table of "
            "`score`, which cannot be evaluated.",
        ),
    ] = "lab",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port; 0 chooses a free one.")
    ] = 0,
    browser: Annotated[bool, typer.Option(help="Open the page in a browser.")] = True,
    profile: options.Profile = None,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
) -> None:
    """Show the panel as a page, on this machine only.

    Needs Voilà: pip install -e '.[app]'. With &theme=dark the page is dark.
    """
    from heapr_lab.panel.app import panel_source, serve

    code = panel_source(
        source, profile=profile, device=device, dtype=dtype, folder=Path.cwd()
    )
    if device != "auto":
        from heapr_lab.models.loading import check_device

        check_device(device)

    def announce(address: str) -> None:
        typer.echo(address)
        typer.echo("Press Control-C to stop.", err=True)
        if browser:
            # A browser that runs in the terminal would keep the server from answering.
            threading.Thread(target=webbrowser.open, args=(address,)).start()

    serve(code, source=source, port=port, on_ready=announce)
