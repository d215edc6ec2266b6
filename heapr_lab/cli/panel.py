"""`heapr-lab app`: the panel as a page."""

import threading
import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from heapr_lab.cli import options


def panel(
    source: Annotated[
        str,
        typer.Argument(
            metavar="MODEL_OR_TABLE",
            help="A hub id, a local folder, `lab`, `smollm2`, `smolmoe`, or a table of "
            "`score`, which cannot be evaluated.",
        ),
    ] = "lab",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port; 0 chooses a free one.")
    ] = 0,
    browser: Annotated[bool, typer.Option(help="Open the page in a browser.")] = True,
    profile: options.Profile = None,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
) -> None:
    """Show the panel as a page, on this machine only.

    Needs Voilà: pip install -e '.[app]'. With &theme=dark the page is dark.
    """
    from heapr_lab.panel.app import panel_source, serve

    code = panel_source(
        source, profile=profile, device=device, dtype=dtype, folder=Path.cwd()
    )
    if device != "auto":
        from heapr_lab.models.loading import check_device

        check_device(device)

    def announce(address: str) -> None:
        typer.echo(address)
        typer.echo("Press Control-C to stop.", err=True)
        if browser:
            # A browser that runs in the terminal would keep the server from answering.
            threading.Thread(target=webbrowser.open, args=(address,)).start()

    serve(code, source=source, port=port, on_ready=announce)
