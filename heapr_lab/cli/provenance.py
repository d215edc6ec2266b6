"""`heapr-lab provenance`: where a file came from."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from heapr_lab.cli import options
from heapr_lab.cli.console import print_facts


def provenance(
    file: Annotated[
        Path,
        typer.Argument(help="A png or parquet file, or a checkpoint."),
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
