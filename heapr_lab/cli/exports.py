"""`heapr-lab convert` and `provenance`: convert and describe files."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from heapr_lab.cli import options
from heapr_lab.cli.console import print_facts


def convert(
    folder: Annotated[Path, typer.Argument(exists=True, file_okay=False)],
    out: Annotated[Path, typer.Option(help="A new folder.")],
    quantised: options.Quantised,
    as_json: options.AsJson = False,
) -> None:
    """Write a pruned checkpoint again with quantised experts.

    What is written is read again and compared bit for bit.
    """
    from heapr_lab.checkpoints.convert import convert as write
    from heapr_lab.checkpoints.folder import check_new
    from heapr_lab.models.sources import weights_bytes

    check_new(out)
    write(folder, out, quantised=quantised)
    print_facts({"out": str(out), "bytes": weights_bytes(out)}, as_json=as_json)


def provenance(
    file: Annotated[
        Path,
        typer.Argument(help="A png or parquet file, or a checkpoint."),
    ],
    as_json: options.AsJson = False,
) -> None:
    """Show where a file written by this package came from."""
    from heapr_lab.checkpoints.provenance import read_provenance

    said = {"file": str(file), **read_provenance(file)}
    print_facts(said if as_json else _flat(said), as_json=as_json)


def _flat(facts: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Nested facts by their dotted names."""
    flat: dict[str, Any] = {}
    for name, value in facts.items():
        whole = f"{before}{name}"
        flat |= _flat(value, f"{whole}.") if isinstance(value, dict) else {whole: value}
    return flat
