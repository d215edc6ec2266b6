"""`heapr-lab compare`: compression methods side by side."""

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from heapr_lab.cli import options, preflight
from heapr_lab.cli.console import names_in, print_facts
from heapr_lab.cli.opening import open_bench
from heapr_lab.errors import SpecError
from heapr_lab.models.paper_models import hub_id

if TYPE_CHECKING:
    import pandas as pd

_COLUMNS = ("method", "ratio", "achieved", "dataset", "perplexity", "parameters")


def compare(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="A hub id or a model of the paper, a local folder, or `lab`.",
        ),
    ] = None,
    listed: Annotated[
        bool, typer.Option("--list", help="List the methods, and run none.")
    ] = False,
    names: Annotated[
        str, typer.Option("--methods", help="Methods, separated by commas.")
    ] = "heapr,compress,reap",
    ratios: Annotated[
        str,
        typer.Option(
            help="Shares of the routed experts' parameters to remove, such as 0.2,0.4."
        ),
    ] = "0.2,0.4",
    corpora: Annotated[
        str,
        typer.Option(help="Corpora whose test splits are used, separated by commas."),
    ] = "pydocs",
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="METHOD.OPTION=VALUE",
            help="An option of a method, such as camera-p.sequential=false; can be "
            "given several times.",
        ),
    ] = None,
    corpus: options.Corpus = "pydocs",
    n_sequences: options.Sequences = None,
    seq_len: options.SeqLen = None,
    seed: Annotated[
        int, typer.Option(help="Seed of the windows and of methods that draw numbers.")
    ] = 0,
    profile: options.Profile = None,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    stream: options.Stream = None,
    host_memory: options.HostMemory = None,
    as_json: options.AsJson = False,
) -> None:
    """Compare compression methods, fitted to the same text, by perplexity and size.

    Results are kept in the cache, and the same command continues from there.
    """
    if listed:
        _list(as_json=as_json)
        return
    name, tests = _given(model), names_in(corpora)
    from heapr_lab.text.calibration_spec import Calibration
    from heapr_lab.workbench.comparison import compare_methods, entries

    wanted = entries(names_in(names), _numbers(ratios), _settings(settings or []))
    _check_asked(wanted, tests)
    calibration = Calibration(corpus, n_sequences, seed=seed)
    preflight.check_corpora([corpus], split="train")
    preflight.check_corpora(tests, split="test")
    bench = open_bench(name, profile, seq_len, device, dtype, stream, host_memory)
    frame = compare_methods(bench, wanted, tests, calibration=calibration)
    if as_json:
        rows = frame.to_dict("records")
        print_facts({"model": name, "results": rows}, as_json=True)
    else:
        typer.echo(_table(frame))


def _given(model: str | None) -> str:
    """The model as a hub id or folder.

    Raises:
        SpecError: none is given.
    """
    if model is None:
        raise SpecError(
            "nothing to compare: give MODEL, or --list for the methods that there are"
        )
    return hub_id(model)


def _check_asked(*lists: Sequence[Any]) -> None:
    """Make sure that there is something to measure.

    Raises:
        SpecError: a list is empty.
    """
    if not all(lists):
        raise SpecError("nothing to measure: give --methods, --ratios and --corpora")


def _table(frame: "pd.DataFrame") -> str:
    shown = frame.rename(columns={"achieved_ratio": "achieved"})[list(_COLUMNS)]
    formats: Any = {
        "ratio": "{:.2%}".format,
        "achieved": "{:.2%}".format,
        "perplexity": "{:.4f}".format,
        "parameters": "{:,}".format,
    }
    text: str = shown.to_string(index=False, formatters=formats)
    return text


def _list(*, as_json: bool) -> None:
    """Print every method with its citation and how it differs from its paper."""
    from heapr_lab import methods

    found = [methods.get(name) for name in methods.names()]
    if as_json:
        rows = [
            {
                "name": method.name,
                "title": method.title,
                "compresses": method.compresses,
                "citation": method.citation,
                "options": dict(method.options),
                "deviations": list(method.deviations),
            }
            for method in found
        ]
        print_facts({"methods": rows}, as_json=True)
        return
    for method in found:
        typer.echo(f"{method.name} ({method.compresses}): {method.title}")
        typer.echo(f"  {method.citation}")
        for name, default in method.options.items():
            typer.echo(f"  option {name} [default: {json.dumps(default)}]")
        for text in method.deviations:
            typer.echo(f"  * {text}")


def _numbers(text: str) -> list[float]:
    """The numbers in a comma-separated list.

    Raises:
        SpecError: one cannot be read.
    """
    try:
        return [float(part) for part in names_in(text)]
    except ValueError as error:
        raise SpecError(
            f"--ratios is {text!r}, expected numbers separated by commas, such as "
            "0.2,0.4"
        ) from error


def _settings(texts: list[str]) -> dict[str, dict[str, Any]]:
    """By method, the options in texts such as `reap.protect_super_experts=true`.

    Raises:
        SpecError: a text cannot be read.
    """
    found: dict[str, dict[str, Any]] = {}
    for text in texts:
        place, equals, value = text.partition("=")
        method, dot, option = place.partition(".")
        if not (equals and dot):
            raise SpecError(
                f"--set is {text!r}, expected METHOD.OPTION=VALUE, such as "
                "camera-p.sequential=false"
            )
        try:
            found.setdefault(method, {})[option] = json.loads(value)
        except ValueError:
            found.setdefault(method, {})[option] = value
    return found
