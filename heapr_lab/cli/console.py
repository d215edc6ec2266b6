"""What commands print: facts on standard output, notes on standard error."""

import json
import math
from typing import Any

import typer


def say(message: str) -> None:
    """Print one line to standard error."""
    typer.echo(f"heapr-lab: {' '.join(message.split())}", err=True)


def print_facts(facts: dict[str, Any], *, as_json: bool) -> None:
    """Print facts to standard output, one on each line or as one JSON object."""
    if as_json:
        typer.echo(json.dumps(_plain(facts), indent=2))
        return
    for name, value in facts.items():
        if value is not None:
            shown = f"{value:,.6g}" if isinstance(value, float) else str(value)
            typer.echo(f"{name.replace('_', ' '):<28} {shown}")


def names_in(text: str) -> list[str]:
    """The names in a comma-separated list."""
    return [name.strip() for name in text.split(",") if name.strip()]


def _plain(value: Any) -> Any:
    """`value` for JSON, which has no NaN: what was not measured is null."""
    if isinstance(value, dict):
        return {name: _plain(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
