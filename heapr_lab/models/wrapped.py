"""Language models inside multimodal wrappers, and families that are refused by name.

A wrapper, such as a `*ForConditionalGeneration`, has a language model beside a vision
or audio tower. With token ids alone only the language model runs, so its experts are
measured and pruned, and all other weights stay as they are.
"""

from collections.abc import Iterator
from typing import Any

from torch import nn

from heapr_lab.errors import LayoutError

_OWN_EXPERTS = (
    "its experts do not go through transformers' experts interface, so that they can "
    "be neither measured nor masked"
)
REFUSED = {
    "dbrx": _OWN_EXPERTS,
    "llama4": _OWN_EXPERTS,
    "llama4_text": _OWN_EXPERTS,
    "diffusion_gemma": (
        "it is a diffusion model, and has no likelihood of the next token"
    ),
    "openai_privacy_filter": (
        "it labels tokens, and has no head of a causal language model"
    ),
    "ernie4_5_vl_moe": (
        "each of its layers has a second set of experts, for images, which text does "
        "not reach and whose tensors are in one list with those of the first"
    ),
    "qwen3_omni_moe": (
        "the class of the whole checkpoint has no forward pass, and its talker has "
        "experts of its own; a checkpoint of the thinker alone "
        "(qwen3_omni_moe_thinker) can be pruned"
    ),
}
"""By model type, why a family of transformers cannot be scored and pruned."""


def refuse_family(config: Any) -> None:
    """Check that the family of a configuration can be scored and pruned.

    Raises:
        LayoutError: it cannot; the family and the reason are named.
    """
    kind = getattr(config, "model_type", None)
    if kind in REFUSED:
        raise LayoutError(
            f"models of the family {kind!r} are not supported: {REFUSED[kind]}"
        )


def is_wrapper(config: Any) -> bool:
    """Whether a model with this configuration has more than its language model."""
    return config is not None and config.get_text_config() is not config


def text_modules(model: Any) -> Iterator[tuple[str, nn.Module]]:
    """The modules that token ids pass through, but for a wrapper's head, and names."""
    if not is_wrapper(getattr(model, "config", None)):
        yield from model.named_modules()
        return
    inside = model.get_decoder()
    name = next(name for name, module in model.named_modules() if module is inside)
    yield from inside.named_modules(prefix=name)


def what_is_pruned(model: Any) -> str | None:
    """Which part of a wrapper is pruned, in words; None of another model."""
    if not is_wrapper(model.config):
        return None
    inside = type(model.get_decoder()).__name__
    return (
        f"the language model ({inside}) of a {type(model).__name__}; all other parts "
        "are unchanged"
    )
