"""What engines load: the structure and the multiple to select with, for each.

Said once, for the command line (`prune --for`) and the documentation.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from heapr_lab.errors import SpecError, one_of


@dataclass(frozen=True)
class Engine:
    """The widths that an engine takes."""

    structure: str
    multiple: int
    """The number that every width is a multiple of."""
    why: str
    """What needs it."""


_IN_BLOCKS = "one width; FP8 has a scale for 128 weights, and none is padded"

ENGINES: Mapping[str, Engine] = MappingProxyType(
    {
        "transformers": Engine("ragged", 1, "loads any width, with heapr_lab"),
        "vllm": Engine(
            "uniform", 64, "one width for the model; Marlin kernels pad to 64"
        ),
        "vllm-fp8": Engine("uniform", 128, _IN_BLOCKS),
        "sglang": Engine(
            "uniform", 64, "one width for the model, divided by the ranks"
        ),
        "sglang-fp8": Engine("uniform", 128, _IN_BLOCKS),
        "tensorrt-llm": Engine("uniform", 64, "one width for the model"),
        "llama.cpp": Engine(
            "uniform", 32, "one width; blocks of q8_0, q5 and q4_0 have 32 weights"
        ),
        "llama.cpp-q4_k": Engine(
            "uniform", 256, "one width; blocks of K-quants have 256 weights"
        ),
    }
)
"""Engines by the names that `--for` takes, from their code and documentation, 2026.

vLLM pads the experts' width of each rank with zeros to a multiple of 64 where it runs
Marlin kernels (its pull requests 45295 and 45703), but no blocks of FP8: it refuses
what is not whole ones, as SGLang does.
"""


def widths_for(
    engine: str | None, structure: str | None, multiple: int | None
) -> tuple[str, int | None]:
    """The structure and the multiple to select with.

    Args:
        engine: a name in `ENGINES`; without one, what is given is taken.
        structure: the one asked for; by default the engine's, or ragged.
        multiple: the one asked for; it may be a multiple of the engine's.

    Raises:
        SpecError: there is no such engine, or it does not load what else is given.

    Example:
        >>> widths_for("llama.cpp-q4_k", None, None)
        ('uniform', 256)
    """
    if engine is None:
        return structure or "ragged", multiple
    row = ENGINES[one_of(engine, ENGINES, name="engine")]
    if structure not in (None, row.structure):
        raise SpecError(
            f"{engine} takes the structure {row.structure} ({row.why}), and "
            f"{structure} is asked for: leave one of them out"
        )
    if multiple is not None and multiple % row.multiple:
        raise SpecError(
            f"{engine} needs widths that are multiples of {row.multiple} ({row.why}), "
            f"and multiples of {multiple} are asked for: leave one of them out"
        )
    return row.structure, row.multiple if multiple is None else multiple


_NORMALISES = {"qwen2_moe": False, "qwen3_moe": True, "olmoe": False, "deepseek": False}
"""Whether llama.cpp makes top-k weights sum to one, whatever the model's file says."""


def check_computed(engine: str | None, config: Any) -> None:
    """Check that an engine computes what transformers does, where nobody else does.

    Args:
        engine: a name in `ENGINES`, or none.
        config: the configuration of the model that is to be pruned.

    Raises:
        SpecError: llama.cpp would give other logits, and say nothing.

    Source: llama.cpp, src/models/*.cpp, as of llama-cpp-python 0.3.36.
    """
    if engine is None or not engine.startswith("llama.cpp"):
        return
    family = config.model_type
    always = _NORMALISES.get(family)
    clash = None
    if always is not None and bool(config.norm_topk_prob) != always:
        clash = f"norm_topk_prob {config.norm_topk_prob}, and it takes {always} of all"
    elif family == "deepseek_v2" and config.topk_method != "greedy":
        clash = f"topk_method {config.topk_method}, and it knows greedy"
    elif family == "deepseek" and config.routed_scaling_factor != 1:
        clash = f"routed_scaling_factor {config.routed_scaling_factor}, and it takes 1"
    elif family == "deepseek_v3" and not hasattr(config, "scoring_func"):
        clash = "no scoring_func, which published configurations have: it takes softmax"
    if clash:
        raise SpecError(
            f"llama.cpp would compute other logits: this {family} has {clash}. Use "
            "another engine for this model"
        )
