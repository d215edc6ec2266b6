"""`heapr-lab plan`: what scores need and cost, before anything is loaded."""

from typing import Annotated

import typer

from heapr_lab.cli import options
from heapr_lab.cli.console import print_facts


def plan(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A hub id, a folder, a config.json, `lab` or `smollm2`.",
        ),
    ],
    n_sequences: Annotated[
        int, typer.Option("--sequences", min=1, help="Calibration windows.")
    ] = 128,
    seq_len: Annotated[int, typer.Option(min=2, help="Tokens per window.")] = 2048,
    device: Annotated[
        str,
        typer.Option(help="this (measured in two seconds), or a GPU such as h100."),
    ] = "this",
    device_memory: Annotated[
        str | None,
        typer.Option(help="Such as 24GB [default: the device's, or what is free]."),
    ] = None,
    host_memory: Annotated[
        str | None,
        typer.Option(help="For layer inputs, such as 64GB [default: what is free]."),
    ] = None,
    dtype: options.Dtype = "auto",
    stream: options.Stream = None,
    as_json: options.AsJson = False,
) -> None:
    """Say what the scores of a model need and cost; only its configuration is read.

    Memory, FLOPs, bytes read and time, in memory or a layer at a time from disk.
    """
    from heapr_lab.streaming.plan import plan as planned

    found = planned(
        model,
        n_sequences=n_sequences,
        seq_len=seq_len,
        device=device,
        device_memory=device_memory,
        host_memory=host_memory,
        dtype=dtype,
        stream="auto" if stream is None else stream,
    )
    if as_json:
        print_facts(found.to_dict(), as_json=True)
    else:
        typer.echo(str(found))
