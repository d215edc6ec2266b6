"""`heapr-lab reproduce`: make the published results again."""

from typing import Annotated

import typer

from heapr_lab.cli import options, preflight
from heapr_lab.cli.console import print_facts


def reproduce(
    model: options.ModelOption = "lab",
    profile: options.Profile = None,
    out: options.OutFolder = None,
    notebooks: Annotated[bool, typer.Option(help="Also execute the notebooks.")] = True,
    publish: Annotated[
        bool,
        typer.Option(
            "--publish",
            help="Overwrite the committed figures and notebooks.",
        ),
    ] = False,
    n_workers: options.Workers = None,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    as_json: options.AsJson = False,
) -> None:
    """Make every figure and execute every notebook.

    It scores the model, prunes it at 10 to 90 %, evaluates and draws.
    """
    if out is not None:
        preflight.check_folder(out)
    from heapr_lab.experiments.reproduce import reproduce as make

    summary = make(
        model,
        profile=profile,
        device=device,
        dtype=dtype,
        figures_dir=out,
        notebooks=notebooks,
        publish=publish,
        n_workers=n_workers,
    )
    if not as_json:
        typer.echo("\n".join(summary.lines()))
        return
    facts = {
        "model": model,
        "figures": str(summary.figures),
        "files": [str(path) for path in summary.files],
        "notebooks": [str(path) for path in summary.notebooks],
        "skipped": summary.skipped,
        "perplexity": summary.perplexity,
        "claims": summary.claims.to_dict("records"),
        "seconds": summary.seconds,
    }
    print_facts(facts, as_json=True)
