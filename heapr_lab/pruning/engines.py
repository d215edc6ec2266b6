"""What widths engines load: the structure and the multiple to select with, for each.

Said once, for the command line (`prune --for`) and the documentation.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from heapr_lab.errors import SpecError


@dataclass(frozen=True)
class Engine:
    """The widths that an engine takes."""

    structure: str
    multiple: int
    """Of which every width is a multiple."""
    why: str
    """What needs it."""


ENGINES: Mapping[str, Engine] = MappingProxyType(
    {
        "transformers": Engine("ragged", 1, "loads any width, with heapr_lab"),
        "vllm": Engine(
            "uniform", 64, "one width for the model; Marlin kernels need 64"
        ),
        "sglang": Engine(
            "uniform", 64, "one width for the model, divided by the ranks"
        ),
        "tensorrt-llm": Engine("uniform", 64, "one width for the model"),
        "llama.cpp": Engine(
            "uniform", 32, "one width; blocks of q8_0, q5 and q4_0 have 32 weights"
        ),
        "llama.cpp-q4_k": Engine(
            "uniform", 256, "one width; blocks of K-quants have 256 weights"
        ),
    }
)
"""By the names that `--for` takes. From the engines' code and documentation, 2026."""


def widths_for(
    engine: str | None, structure: str | None, multiple: int | None
) -> tuple[str, int | None]:
    """The structure and the multiple to select with.

    Args:
        engine: a name in `ENGINES`; without one, what is given is taken.
        structure: if it was given; by default the engine's, or ragged.
        multiple: if it was given; it may be a multiple of the engine's.

    Raises:
        SpecError: there is no such engine, or it does not load what is given besides.

    Example:
        >>> widths_for("llama.cpp-q4_k", None, None)
        ('uniform', 256)
    """
    if engine is None:
        return structure or "ragged", multiple
    if engine not in ENGINES:
        raise SpecError(f"there is no engine {engine!r}, expected {', '.join(ENGINES)}")
    own = ENGINES[engine]
    if structure not in (None, own.structure):
        raise SpecError(
            f"{engine} takes the structure {own.structure} ({own.why}), and "
            f"{structure} is asked for: leave one of them out"
        )
    if multiple is not None and multiple % own.multiple:
        raise SpecError(
            f"{engine} needs widths that are multiples of {own.multiple} ({own.why}), "
            f"and multiples of {multiple} are asked for: leave one of them out"
        )
    return own.structure, own.multiple if multiple is None else multiple
