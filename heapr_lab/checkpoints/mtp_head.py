"""The layer that predicts a further token (MTP) as a model: its atoms are scored.

Its input is the final state of a token and the embedding of the next one, from which it
predicts the one after that. transformers has the modules, for speculative decoding; on
whole windows they are a causal language model, whose loss scores its atoms as HEAPr
scores all others.

Shapes: L tokens in a window; D d_model; E n_experts, I d_inter.
"""

import copy
import logging
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutput

from heapr_lab.checkpoints.predicting import (
    Further,
    are_floats,
    can_be_sliced,
    check_experts,
    predicting_heads,
    said_of,
)
from heapr_lab.errors import LayoutError
from heapr_lab.importance.collect import collect_statistics
from heapr_lab.importance.table import ImportanceTable
from heapr_lab.models.backend import backend_of
from heapr_lab.models.folders import read_mtp
from heapr_lab.models.likelihood import input_device, states_of_all
from heapr_lab.models.modes import evaluating
from heapr_lab.pruning.masks import KeepMask
from heapr_lab.pruning.ranking import lowest
from heapr_lab.text.calibration import CalibrationSet

_STEM = re.compile(r".*?(layers\.\d+|mtp)\.")

logger = logging.getLogger(__name__)

_OTHER_FORMS = (
    AttributeError,
    ImportError,
    KeyError,
    RuntimeError,
    StopIteration,
    TypeError,
    ValueError,
)
"""What transformers raises on a layer of another form than it knows."""


def further_layers(
    model: Any,
    skeleton: Any,
    base: str,
    calibration: CalibrationSet | None,
    *,
    width: int | None,
) -> Further:
    """What a pruned checkpoint has of the layers that predict further tokens.

    Args:
        model: the pruned model.
        skeleton: the dense one, without weights.
        base: folder or hub id of the dense model.
        calibration: windows to score on; None prunes nothing.
        width: the atoms of every expert of the checkpoint; None if they differ.

    Raises:
        LayoutError: a part of such a layer is missing.
    """
    heads = predicting_heads(skeleton, base)
    check_experts(heads)
    if width is None and are_floats(heads):
        return Further(heads, said_of(heads, "kept", ", not pruned"))
    dropped = Further((), said_of(heads, "dropped"))
    if calibration is None or width is None or not can_be_sliced(heads):
        return dropped
    layer = open_head(model, heads[0].file.parent, name=heads[0].name)
    if layer is None:
        return dropped
    table = head_table(model, layer, calibration)
    how = f", to the width of all others, by its own loss on {calibration.label}"
    facts = said_of(heads, "also pruned", how)
    return Further(heads, facts, highest(table, width))


class MtpHead(nn.Module):
    """The layer as a causal language model, on windows whose trunk states are known.

    Its windows begin at the second token of the trunk's.
    """

    logits_of: Callable[[torch.Tensor], torch.Tensor]
    """The map from its states to logits."""

    def __init__(self, layer: Any, states: Mapping[bytes, torch.Tensor]) -> None:
        """Take the layer, and the trunk's states of all but the last token (L, D)."""
        super().__init__()
        self.config = layer.config
        self.body = _Body(layer, states)
        self.__dict__["logits_of"] = layer._project_to_logits

    def get_decoder(self) -> nn.Module:
        """The layer without its head."""
        return self.body

    def get_input_embeddings(self) -> Any:
        """The trunk's embeddings."""
        return self.body.layer.embed_tokens

    def get_output_embeddings(self) -> Any:
        """The trunk's output embeddings."""
        return self.body.layer.shared_head

    def forward(self, input_ids: torch.Tensor) -> CausalLMOutput:
        """The logits of the token after each."""
        states = self.body(input_ids=input_ids).last_hidden_state
        return CausalLMOutput(logits=self.logits_of(states))


class _Body(nn.Module):
    """The map from token ids to the layer's states."""

    states: Mapping[bytes, torch.Tensor]

    def __init__(self, layer: Any, states: Mapping[bytes, torch.Tensor]) -> None:
        super().__init__()
        self.layer = layer
        self.__dict__["states"] = states

    def forward(self, input_ids: torch.Tensor) -> BaseModelOutput:
        before = torch.stack([self.states[_key(window)] for window in input_ids])
        return BaseModelOutput(_run(self.layer, input_ids, before))


def _key(window: torch.Tensor) -> bytes:
    return window.cpu().numpy().tobytes()


def open_head(model: Any, folder: Path, *, name: str) -> Any:
    """The layer in `folder` that predicts a further token; None if it cannot be run.

    Args:
        model: the trunk, dense or pruned, whose embeddings are used.
        folder: the files of the dense model.
        name: the name of a tensor of the layer.

    Raises:
        LayoutError: a part of it is missing.
    """
    place = _STEM.match(name)
    assert place is not None
    try:
        from transformers.modeling_layers import MtpModel  # not in every version

        trunk = _trunk_with_one(model, folder, stem=place[0])
        with torch.device("meta"):
            MtpModel(trunk, 1)
    except _OTHER_FORMS as error:
        _say_not_run(place[0], error)
        return None
    device = input_device(model)
    try:
        layer = read_mtp(trunk, device).eval()
    except RuntimeError as error:
        raise LayoutError(
            f"the layer {place[0]}* of {folder}, which predicts a further token, is "
            f"not whole ({error}): download the files again"
        ) from error
    layer.embed_tokens = _in_memory(layer.embed_tokens)
    layer.shared_head = _in_memory(layer.shared_head)
    layer.set_experts_implementation("eager")  # runs in any type
    try:
        with evaluating(layer):
            _run(layer, torch.zeros(1, 2, dtype=torch.long), None)
    except _OTHER_FORMS as error:
        _say_not_run(place[0], error)
        return None
    return layer


def _in_memory(module: Any) -> Any:
    """`module`; if the model is streamed, a copy whose weights stay in memory."""
    if not module.weight.is_meta:
        return module
    clone = copy.copy(backend_of(module).loaded(module))
    clone.__dict__ = {
        name: value
        for name, value in clone.__dict__.items()
        if name != "forward" and not name.startswith("heapr_")
    }
    clone._parameters = dict(clone._parameters)
    return clone


def _say_not_run(stem: str, error: Exception) -> None:
    logger.warning("transformers cannot run %s*: %s", stem, error)


def _trunk_with_one(model: Any, folder: Path, *, stem: str) -> Any:
    """The same modules, with a configuration that has one such layer, in `folder`."""
    trunk = copy.copy(model)
    trunk.config = copy.deepcopy(model.config)
    trunk.config.name_or_path = str(folder)
    trunk.config.dtype = model.get_input_embeddings().weight.dtype
    config = trunk.config.get_text_config()
    config.num_mtp_layers = 1
    kinds = {"layer_types": "full_attention", "mlp_layer_types": "sparse"}
    for types, kind in kinds.items():
        if getattr(config, types, None) and not getattr(config, f"mtp_{types}", None):
            setattr(config, f"mtp_{types}", [kind])
    # The class has the number of the layer in the largest published model.
    trunk._keys_to_ignore_on_load_unexpected = [f"^{re.escape(stem)}"]
    return trunk


def _run(layer: Any, ids: torch.Tensor, before: torch.Tensor | None) -> torch.Tensor:
    """The layer's states (B, L, D), from ids (B, L) and the states before, or zeros."""
    embedded = layer.embed_tokens(ids.to(layer.embed_tokens.weight.device))
    before = torch.zeros_like(embedded) if before is None else before.to(embedded)
    positions = 1 + torch.arange(ids.shape[1], device=embedded.device)[None]
    states: torch.Tensor = layer.forward_layer(
        0, before, positions, None, inputs_embeds=embedded
    )
    return states


def head_table(model: Any, layer: Any, calibration: CalibrationSet) -> ImportanceTable:
    """The statistics of the layer's atoms, of its own loss on the states of `model`.

    Args:
        model: the pruned model.
        layer: the one that `open_head` returned.
        calibration: the windows to measure on.

    Raises:
        SpecError: a token is not in the vocabulary.
        LayoutError: the experts of the layer cannot be measured.
    """
    windows = calibration.ids
    with evaluating(model):
        states = states_of_all(model, windows.split(1))
    by_window = {
        _key(window[1:]): state[0, :-1]
        for window, state in zip(windows, states, strict=True)
    }
    later = CalibrationSet(windows[:, 1:].contiguous(), calibration.provenance)
    return collect_statistics(MtpHead(layer, by_window), later)


def highest(table: ImportanceTable, width: int) -> KeepMask:
    """The mask of the `width` atoms of each expert that have the highest scores."""
    (shape,) = table.shapes().values()
    scores = table.score("heapr").to_numpy().reshape(shape)
    rows = [~lowest(row, shape[1] - width) for row in scores]
    return KeepMask.from_rows(table, np.concatenate(rows))
