"""`heapr-lab plan`: what scores need, before a weight is read."""

from typing import Annotated

import typer

from heapr_lab.cli import options
from heapr_lab.cli.console import print_facts


def plan(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A hub id, a folder, a config.json, `lab`, `smollm2` or `smolmoe`.",
        ),
    ],
    n_sequences: Annotated[
        int, typer.Option("--sequences", min=1, help="Calibration windows.")
    ] = 128,
    seq_len: Annotated[int, typer.Option(min=2, help="Tokens per window.")] = 2048,
    memory: Annotated[
        str | None,
        typer.Option(help="Of the device, such as 24GB [default: what is free]."),
    ] = None,
    dtype: options.Dtype = "auto",
    as_json: options.AsJson = False,
) -> None:
    """Say what the scores of a model need, and whether it is streamed.

    Its configuration and the headers of its files are read, and no weight.
    """
    from heapr_lab.streaming.plan import plan as planned

    needs = planned(
        model, n_sequences=n_sequences, seq_len=seq_len, memory=memory, dtype=dtype
    )
    if as_json:
        print_facts(needs.to_dict(), as_json=True)
    else:
        typer.echo(str(needs))
