"""Language models inside multimodal wrappers.

A wrapper, such as a `*ForConditionalGeneration`, has a language model beside a vision
or audio tower. With token ids alone only the language model runs, so its experts are
measured and pruned, and all other weights stay as they are.
"""

from collections.abc import Iterator
from typing import Any

from torch import nn


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
