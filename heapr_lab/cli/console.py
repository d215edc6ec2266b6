"""What commands print: facts on standard output, notes on standard error."""

import json
from typing import Any

import typer

from heapr_lab.storage.hashing import without_nan


def say(message: str) -> None:
    """Print one line to standard error."""
    typer.echo(f"heapr-lab: {' '.join(message.split())}", err=True)


def print_facts(facts: dict[str, Any], *, as_json: bool) -> None:
    """Print facts to standard output, one on each line or as one JSON object."""
    if as_json:
        typer.echo(json.dumps(without_nan(facts), indent=2))
        return
    for name, value in facts.items():
        if value is not None:
            shown = f"{value:,.6g}" if isinstance(value, float) else str(value)
            typer.echo(f"{name.replace('_', ' '):<28} {shown}")


def names_in(text: str) -> list[str]:
    """The names in a comma-separated list."""
    return [name.strip() for name in text.split(",") if name.strip()]
