"""`heapr-lab export-gguf` and `heapr-lab provenance`: convert and describe files."""

from pathlib import Path
from typing import Annotated

import typer

from heapr_lab.cli import options, preflight
from heapr_lab.cli.console import print_facts


def export_gguf(
    folder: Annotated[Path, typer.Argument(exists=True, file_okay=False)],
    out: Annotated[Path, typer.Option(help="The file to write.")],
    as_json: options.AsJson = False,
) -> None:
    """Write a uniform checkpoint as a GGUF file, for llama.cpp."""
    preflight.check_file(out)
    from heapr_lab.checkpoints.gguf import write_gguf
    from heapr_lab.progress import progress_bar

    with progress_bar(f"writing {out.name}", "tensor") as bar:
        write_gguf(folder, out, progress=bar)
    print_facts({"out": str(out), "bytes": out.stat().st_size}, as_json=as_json)


def provenance(
    file: Annotated[
        Path,
        typer.Argument(
            help="A png, pdf, md, tex, csv or parquet file, or a checkpoint."
        ),
    ],
    as_json: options.AsJson = False,
) -> None:
    """Show where a file written by this package came from."""
    from heapr_lab.storage.provenance import read_provenance

    found = read_provenance(file)
    print_facts(found.facts() if as_json else dict(found.lines()), as_json=as_json)
