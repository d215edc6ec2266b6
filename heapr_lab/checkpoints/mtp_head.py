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
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import nn
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutput

from heapr_lab.checkpoints.predicting import (
    Block,
    Further,
    Heads,
    are_readable,
    can_be_sliced,
    check_experts,
    conversions_of,
    floats_of,
    has_experts,
    predicting_heads,
    said_of,
)
from heapr_lab.errors import LayoutError, SpecError
from heapr_lab.importance.collect import collect_statistics
from heapr_lab.importance.table import ImportanceTable
from heapr_lab.models.backend import backend_of
from heapr_lab.models.folders import read_mtp
from heapr_lab.models.likelihood import input_device, states_of_all
from heapr_lab.models.modes import evaluating
from heapr_lab.models.safetensors_headers import SINGLE, Stored
from heapr_lab.models.sources import read_source
from heapr_lab.pruning.masks import KeepMask
from heapr_lab.pruning.ranking import lowest
from heapr_lab.streaming.file_reader import check_whole, differs, find_tensors
from heapr_lab.streaming.quantisation import SCALES
from heapr_lab.text.calibration import CalibrationSet

_STEM = re.compile(r".*?(layers\.\d+|mtp\w*)\.")

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
    heads, unknown = whole_heads(skeleton, base)
    if not heads:
        return Further((), {})
    block = read_source(heads[0].file.parent).block
    dropped = Further((), said_of(heads, "dropped"))
    if not are_readable(heads, block):
        return dropped
    if width is None or not has_experts(heads):
        return Further(heads, said_of(heads, "kept", ", not pruned"), block=block)
    if calibration is None or not can_be_sliced(heads):
        return dropped
    try:
        if unknown is not None:
            raise unknown
        layer = open_head(model, heads, block)
    except LayoutError:
        raise
    except _OTHER_FORMS as error:
        logger.warning("transformers cannot run %s*: %s", _stem_of(heads), error)
        return dropped
    table = head_table(model, layer, calibration)
    how = f", to the width of all others, by its own loss on {calibration.label}"
    facts = said_of(heads, "also pruned", how)
    return Further(heads, facts, highest(table, width), block)


def whole_heads(skeleton: Any, base: str) -> tuple[Heads, Exception | None]:
    """`predicting_heads`, checked to be whole as far as their form is known.

    Returns:
        The tensors, and why their form is not known, if it is not.

    Raises:
        LayoutError: a part is missing.
    """
    heads = predicting_heads(skeleton, base)
    check_experts(heads)
    if heads:
        try:
            _check_parts(_trunk_with_one(skeleton, heads), heads)
        except LayoutError:
            raise
        except _OTHER_FORMS as error:
            return heads, error
    return heads, None


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


def open_head(model: Any, heads: Heads, block: Block = None) -> Any:
    """The layer that predicts a further token.

    Args:
        model: the trunk, dense or pruned, whose embeddings are used.
        heads: the tensors of the layer, of a form that is known.
        block: as in `are_readable`.

    Raises:
        ValueError: it cannot be run; or another of `_OTHER_FORMS`.
    """
    trunk = _trunk_with_one(model, heads)
    with tempfile.TemporaryDirectory() as place:
        if block is not None:
            save_file(floats_of(heads, block), Path(place) / SINGLE)
            trunk.config.name_or_path = place
        layer = read_mtp(trunk, input_device(model)).eval()
    layer.embed_tokens = _in_memory(layer.embed_tokens)
    layer.shared_head = _in_memory(layer.shared_head)
    layer.set_experts_implementation("eager")  # runs in any type
    with evaluating(layer):
        _run(layer, torch.zeros(1, 2, dtype=torch.long), None)
    return layer


def _stem_of(heads: Heads) -> str:
    place = _STEM.match(heads[0].name)
    return place[0] if place else heads[0].name


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


def _trunk_with_one(model: Any, heads: Heads) -> Any:
    """The same modules, with a configuration that has one such layer, where it is."""
    trunk, stem = copy.copy(model), _stem_of(heads)
    trunk.config = copy.deepcopy(model.config)
    trunk.config.name_or_path = str(heads[0].file.parent)
    trunk.config.dtype = model.get_input_embeddings().weight.dtype
    config = trunk.config.get_text_config()
    config.num_mtp_layers = 1
    kinds = {"layer_types": "full_attention", "mlp_layer_types": "sparse"}
    for types, kind in kinds.items():
        if getattr(config, types, None) and not getattr(config, f"mtp_{types}", None):
            setattr(config, f"mtp_{types}", [kind])
    trunk._weight_conversions = conversions_of(model)
    # The class has the number of the layer in the largest published model.
    trunk._keys_to_ignore_on_load_unexpected = [f"^{re.escape(stem)}"]
    return trunk


def _check_parts(trunk: Any, heads: Heads) -> None:
    """Check, by names and shapes, that a layer is one that transformers reads.

    Raises:
        LayoutError: what is there is of such a layer, and a part is missing.
        ValueError: it is another.
    """
    from transformers.modeling_layers import MtpModel  # not in every version

    with torch.device("meta"):
        layer: Any = MtpModel(trunk, 1)
    stored: Stored = {}
    for head in heads:
        if not head.name.endswith(SCALES):
            stored.setdefault(head.file, {})[head.name] = head.tensor
    shared = re.compile("|".join(layer._keys_to_ignore_on_load_unexpected))
    known = layer.state_dict()
    conversions = layer.get_weight_conversions(trunk)
    every = [
        entry
        for entry in find_tensors(layer, conversions, stored)
        if not shared.search(entry.parameter)
    ]
    for entry in every:
        if entry.parameter not in known or differs(entry, known):
            raise ValueError(f"it has no place for {entry}")
    try:
        check_whole(layer, every)
    except LayoutError as error:
        stem = _stem_of(heads)
        raise LayoutError(
            f"{stem}*, which predicts a further token: {error}"
        ) from error


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
        SpecError: a token is not in the vocabulary, or two windows differ in the first
            one alone.
        LayoutError: the experts of the layer cannot be measured.
    """
    windows = calibration.ids
    if len(windows.unique(dim=0)) > len(windows[:, 1:].unique(dim=0)):
        raise SpecError(
            "two windows of the calibration text differ in their first token alone: "
            "leave one of them out"
        )
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
