"""The widths in a checkpoint, by decoder layer, as an engine needs them.

Shapes: E n_experts.
"""

import re
from collections.abc import Mapping
from typing import Any

from heapr_lab.errors import LayoutError, SpecError
from heapr_lab.models.ragged_experts import check_format
from heapr_lab.models.safetensors_headers import PREDICTING

_LAYER = re.compile(r"(?:.*\.)?layers\.(\d+)\..*")

Widths = dict[int, list[int]]
"""Atoms of each expert (E,), by decoder layer."""


def widths_by_layer(settings: Mapping[str, Any]) -> Widths:
    """The widths in `quantization_config` of a checkpoint's config.json.

    An engine has names of its own for modules, but the same numbers of layers.

    Raises:
        SpecError: the format is of a later version, or one that is no longer read.
        LayoutError: an experts module is in no numbered layer, or shares it.
    """
    try:
        check_format(settings)
    except ValueError as error:
        raise SpecError(str(error)) from error
    paths: dict[int, str] = {}
    for path in settings["widths"]:
        layer = layer_of(path)
        if layer in paths:
            raise LayoutError(
                f"layer {layer} has two experts modules, {paths[layer]} and {path}, "
                "expected one: use transformers for this model"
            )
        paths[layer] = path
    return {layer: list(settings["widths"][path]) for layer, path in paths.items()}


def layer_of(path: str) -> int:
    """The number of the decoder layer in the path of a module.

    Raises:
        LayoutError: it has none, or the module predicts further tokens (MTP).

    Example:
        >>> layer_of("model.layers.3.mlp.experts")
        3
    """
    if PREDICTING.search(path):
        raise LayoutError(
            f"the experts module {path} predicts further tokens (MTP) and is not "
            "pruned, which is not supported beside experts of other widths: serve "
            "without speculative decoding"
        )
    match = _LAYER.fullmatch(path)
    if match is None:
        raise LayoutError(
            f"the experts module {path} is in no numbered layer, expected "
            "'layers.NUMBER.' in its path: use transformers for this model"
        )
    return int(match[1])


def shard(width: int, rank: int, n_ranks: int) -> slice:
    """The atoms of an expert that a rank has; the parts differ by at most one atom.

    Example:
        >>> shard(5, 0, 2), shard(5, 1, 2)
        (slice(0, 2, None), slice(2, 5, None))
    """
    return slice(width * rank // n_ranks, width * (rank + 1) // n_ranks)
