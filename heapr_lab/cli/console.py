"""What commands print: facts on standard output, notes and errors on standard error.

Importing this needs no torch.
"""

import contextlib
import errno
import json
from collections.abc import Callable, Iterator
from typing import Any

import typer

from heapr_lab.errors import HeaprLabError
from heapr_lab.storage.hashing import without_nan
from heapr_lab.storage.paths import disk_error


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


# --- errors that a user can correct -----------------------------------------------

_CACHED = "measurements are kept, and the same command continues from there"
SAVED = "the same command continues from the last saved state"
_RESUMED = {
    **dict.fromkeys(["compare", "evaluate", "prune", "reproduce"], _CACHED),
    "score": SAVED,
}
"""What remains of an interrupted command; other commands leave nothing behind."""


def line_of(error: BaseException) -> str | None:
    """One line for an error that the user can correct; None for other errors."""
    if isinstance(error, HeaprLabError):
        return str(error)
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return (
            f"not enough memory ({error or 'none left'}): use shorter or fewer "
            "windows (--seq-len, --profile), a smaller dtype or another device"
        )
    return disk_error(error)


def line_of_interrupt(command: str | None) -> str:
    """One line for a command that Control-C has interrupted."""
    left = _RESUMED.get(command or "")
    return "interrupted" + (f"; {left}" if left else "")


@contextlib.contextmanager
def in_one_line(interrupted: Callable[[], str]) -> Iterator[None]:
    """A context in which an error that the user can correct is said in one line.

    Raises:
        Exit: with status 2, or after Control-C, of which `interrupted` speaks, 130.
    """
    try:
        yield
    except KeyboardInterrupt as error:
        say(interrupted())
        raise typer.Exit(130) from error
    except Exception as error:
        line = line_of(error)
        if line is None or getattr(error, "errno", None) == errno.EPIPE:
            raise  # click ends quietly on a closed pipe
        say(line)
        raise typer.Exit(2) from error
