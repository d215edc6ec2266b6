"""Language models inside multimodal wrappers.

A wrapper, such as a `*ForConditionalGeneration`, has a language model beside a vision
or audio tower. With token ids alone only the language model runs, so its experts are
measured and pruned, and all other weights stay as they are.
"""

from collections.abc import Iterator
from typing import Any

from torch import nn

from heapr_lab.errors import LayoutError


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


def decoder_layers(model: Any) -> list[nn.Module]:
    """The decoder layers of a model, in order.

    Raises:
        LayoutError: they are not in one list.
    """
    config = model.config.get_text_config()
    lists = [
        module
        for _, module in text_modules(model)
        if isinstance(module, nn.ModuleList) and len(module) == config.num_hidden_layers
    ]
    if not lists:
        raise LayoutError(
            f"{type(model).__name__} has no list of {config.num_hidden_layers} decoder "
            "layers, so it cannot be streamed"
        )
    return list(lists[0])
