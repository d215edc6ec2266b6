"""`heapr-lab compare`: compression methods side by side."""

import functools
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from heapr_lab.cli import options
from heapr_lab.cli.console import names_in, print_facts, say
from heapr_lab.errors import SpecError
from heapr_lab.methods import check_name
from heapr_lab.text.calibration_spec import Calibration

if TYPE_CHECKING:
    import pandas as pd

    from heapr_lab.methods.comparison import Entry

_LABELS = ("method", "ratio", "achieved_ratio", "dataset")
_NOT_SHOWN = {"compresses", "nll", "bytes", "routed_flops", "parameters"}
_PRESET = "paper-table1"
_USUAL = {
    "methods": "heapr,compress,reap",
    "ratios": "0.2,0.4",
    "corpora": "pydocs",
    "tasks": "",
    "corpus": "pydocs",
}
"""The options where none are given, and no preset."""


def compare(
    model: Annotated[
        str | None, typer.Argument(metavar="MODEL", help=options.NAME_HELP)
    ] = None,
    listed: Annotated[
        bool, typer.Option("--list", help="List the methods, and run none.")
    ] = False,
    preset: Annotated[
        str | None,
        typer.Option(
            metavar=_PRESET,
            help="Defaults for the options below: the methods, ratios and text of the "
            "paper's Table 1, which is printed beside the results, and HEAPr-L, "
            "CAMERA-P, REAP, compress and C4.",
        ),
    ] = None,
    names: Annotated[
        str | None,
        typer.Option(
            "--methods",
            help="Methods, separated by commas [default: heapr,compress,reap].",
        ),
    ] = None,
    ratios: Annotated[
        str | None,
        typer.Option(
            help="Shares of the routed experts' parameters to remove [default: "
            "0.2,0.4]."
        ),
    ] = None,
    corpora: Annotated[
        str | None,
        typer.Option(
            help="Corpora whose test splits are used, separated by commas [default: "
            "pydocs]."
        ),
    ] = None,
    tasks: Annotated[
        str | None,
        typer.Option(
            help="Tasks whose accuracy is measured, separated by commas, as in "
            "`evaluate` [default: none]."
        ),
    ] = None,
    limit: options.Limit = None,
    corpus: Annotated[
        str | None,
        typer.Option(
            help="Calibration text: a corpus, a file, or a mixture of them [default: "
            "pydocs]."
        ),
    ] = None,
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
    name = _named(model)
    asked = _asked(
        _defaults(name, preset), methods=names, ratios=ratios, corpora=corpora,
        tasks=tasks, corpus=corpus,
    )  # fmt: skip
    calibration = Calibration(asked["corpus"], n_sequences, seed=seed)
    options.check_corpora([asked["corpus"]], split="train")
    options.check_corpora(asked["corpora"], split="test")
    options.check_tasks(asked["tasks"])
    from heapr_lab.methods.comparison import compare_methods, entries

    wanted = entries(asked["methods"], asked["ratios"])
    bench = options.open_bench(
        name, profile, seq_len, device, dtype, stream, host_memory
    )
    refused: list[dict[str, Any]] = []
    frame = compare_methods(
        bench,
        wanted,
        asked["corpora"],
        tasks=asked["tasks"],
        limit=limit,
        calibration=calibration,
        refused=functools.partial(_refuse, refused) if preset else None,
    )
    if preset:
        _show_table1(name, frame, refused, as_json=as_json)
    elif as_json:
        print_facts({"model": name, "results": frame.to_dict("records")}, as_json=True)
    else:
        shown = [column for column in frame if column not in {*_LABELS, *_NOT_SHOWN}]
        typer.echo(_aligned(frame[[*_LABELS, *shown, "parameters"]]))


def _named(model: str | None) -> str:
    """The model as a hub id or folder.

    Raises:
        SpecError: none is given.
    """
    if model is None:
        raise SpecError(
            "nothing to compare: give MODEL, or --list for the methods that there are"
        )
    return options.model_name(model)


def _asked(defaults: Mapping[str, str], **given: str | None) -> dict[str, Any]:
    """What is compared, on what text, with what is given in place of the defaults.

    Raises:
        SpecError: a ratio is no share, or there is nothing to measure.
    """
    from heapr_lab.pruning.options import read_ratio

    texts = {**defaults, **{k: v for k, v in given.items() if v is not None}}
    lists = {name: names_in(texts[name]) for name in ("methods", "corpora", "tasks")}
    for name in lists["methods"]:
        check_name(name)
    ratios = [read_ratio(part) for part in names_in(texts["ratios"])]
    if not (lists["methods"] and ratios and (lists["corpora"] or lists["tasks"])):
        raise SpecError("nothing to measure: give --methods, --ratios and --corpora")
    return {**lists, "ratios": ratios, "corpus": texts["corpus"]}


def _defaults(model: str, preset: str | None) -> dict[str, str]:
    """What is compared, on what text, where no option says it.

    Raises:
        SpecError: there is no such preset.
    """
    if preset is None:
        return _USUAL
    if preset != _PRESET:
        raise SpecError(f"--preset is {preset!r}, expected {_PRESET}")
    from heapr_lab.experiments import paper
    from heapr_lab.tasks.paper_tasks import PAPER_TASKS

    of_table = filter(None, paper.methods_of_table1().values())
    lists = {
        "methods": dict.fromkeys([*of_table, *paper.TABLE1_BESIDE]),
        "ratios": map(str, paper.ratios_of_table1(model)),
        "corpora": paper.TABLE1_CORPORA,
        "tasks": PAPER_TASKS,
    }
    texts = {name: ",".join(parts) for name, parts in lists.items()}
    return texts | {"corpus": paper.TABLE1_TEXT}


def _refuse(refused: list[dict[str, Any]], entry: "Entry", error: Exception) -> None:
    """Say that a method cannot be fitted, and note it."""
    say(f"{entry.label} is left out: {error}")
    row = {"method": entry.method.name, "ratio": entry.ratio}
    refused.append(row | {"reason": str(error)})


def _show_table1(
    name: str, frame: "pd.DataFrame", refused: list[dict[str, Any]], *, as_json: bool
) -> None:
    """Print what was measured, and could not be, beside the paper's own table."""
    from heapr_lab.experiments import paper

    missing = [k for k, method in paper.methods_of_table1().items() if method is None]
    published = paper.published_rows(name)
    if as_json:
        facts = {"model": name, "preset": _PRESET, "results": frame.to_dict("records")}
        facts |= {"refused": refused, "not_here": missing}
        facts |= {"published": published.to_dict("records")}
        facts |= {"not_comparable": paper.NOT_COMPARABLE}
        print_facts(facts, as_json=True)
        return
    typer.echo(_aligned(paper.as_table1(frame)))
    for row in refused:
        typer.echo(f"{row['method']} at {row['ratio']:.2%}: {row['reason']}")
    if missing:
        typer.echo(f"Methods of the table that are not here: {', '.join(missing)}")
    typer.echo(f"\nPublished in the paper ({paper.NOT_COMPARABLE}):")
    typer.echo(_aligned(published.drop(columns="published")))


def _aligned(frame: "pd.DataFrame") -> str:
    """The table as text; what was not measured is a dash."""
    import pandas as pd

    from heapr_lab.figures.files import format_column

    cells = {name: format_column(column) for name, column in frame.items()}
    text: str = pd.DataFrame(cells).to_string(index=False)
    return text


def _list(*, as_json: bool) -> None:
    """Print every method with its citation and how it differs from its paper."""
    from heapr_lab import methods

    known = [methods.get(name) for name in methods.names()]
    if as_json:
        names = ("name", "title", "compresses", "citation", "options", "deviations")
        rows = [{name: getattr(method, name) for name in names} for method in known]
        rows = [row | {"options": {**row["options"]}} for row in rows]
        print_facts({"methods": rows}, as_json=True)
        return
    for method in known:
        typer.echo(f"{method.name} ({method.compresses}): {method.title}")
        typer.echo(f"  {method.citation}")
        for name, default in method.options.items():
            typer.echo(f"  option {name} [default: {json.dumps(default)}]")
        for text in method.deviations:
            typer.echo(f"  * {text}")
