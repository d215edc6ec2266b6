"""The layer that predicts a further token (MTP) as a model: its atoms are scored.

Its input is the final state of a token and the embedding of the next one, from which it
predicts the one after that. transformers has the modules, for speculative decoding; on
whole windows they are a causal language model, whose loss scores its atoms as HEAPr
scores all others. One form that it does not know is here: in Nemotron-3 such a layer is
a row of the trunk's blocks, each with a number of its own in files, of which the first
also has the projection and the last the norm at the end.

Shapes: L tokens in a window; D d_model; E n_experts, I d_inter.
"""

import copy
import functools
import logging
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import nn
from transformers.core_model_loading import WeightRenaming
from transformers.modeling_layers import MtpModel
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutput

from heapr_lab.checkpoints.predicting import (
    Further,
    Heads,
    are_readable,
    by_layer,
    check_experts,
    check_number,
    check_sliceable,
    floats_of,
    has_experts,
    predicting_heads,
    said_of,
    stem_of,
)
from heapr_lab.checkpoints.stored_type import conversions_of
from heapr_lab.errors import LayoutError, SpecError
from heapr_lab.importance.collect import collect_statistics
from heapr_lab.importance.table import ImportanceTable
from heapr_lab.models.backend import backend_of
from heapr_lab.models.folders import read_mtp
from heapr_lab.models.likelihood import input_device, states_of_all
from heapr_lab.models.modes import evaluating
from heapr_lab.models.safetensors_headers import SINGLE
from heapr_lab.pruning.masks import KeepMask
from heapr_lab.pruning.ranking import lowest
from heapr_lab.pruning.surgery import prune
from heapr_lab.streaming.file_reader import check_whole, differs, find_tensors
from heapr_lab.text.calibration import CalibrationSet

_STEM = re.compile(r".*?(layers\.\d+|mtp\w*)\.")

logger = logging.getLogger(__name__)

_INDEXED = "indexed_attention"
_BLOCKS = "mtp_layers_block_type"
"""The key of the kinds of blocks that such a layer is made of (Nemotron-3)."""
_KINDS = {"layer_types": "full_attention", "mlp_layer_types": "sparse"}
"""What it is if the configuration does not say and the trunk has such layers."""

_OF_BLOCKS = {
    r"mtp\.layers\.\d+\.(enorm|hnorm|eh_proj)\.": r"layers.0.\1.",
    r"mtp\.layers\.\d+\.final_layernorm\.": "layers.0.post_norm.",
}
"""Names in files and in modules."""

_OTHER_FORMS = (
    AttributeError,
    ImportError,
    LookupError,
    RuntimeError,
    StopIteration,
    TypeError,
    ValueError,
)
"""What transformers raises on a layer of another form than it knows."""


def further_layers(
    model: Any, skeleton: Any, base: str, calibration: CalibrationSet | None
) -> Further:
    """What a pruned checkpoint has of the layers that predict further tokens.

    Args:
        model: the pruned model.
        skeleton: the dense one, without weights.
        base: folder or hub id of the dense model.
        calibration: windows to score on; None prunes nothing.

    Raises:
        LayoutError: a part of such a layer is missing.
    """
    width = model.heapr_keep.one_width
    heads, unknown = whole_heads(skeleton, base)
    if not heads:
        return Further((), {})
    dropped = Further((), said_of(heads, "dropped"))
    if not are_readable(heads):
        return dropped
    if width is None or not has_experts(heads):
        return Further(heads, said_of(heads, "kept", ", not pruned"))
    if calibration is None:
        return dropped
    every = by_layer(heads, _n_blocks(skeleton))
    try:
        if unknown is not None:
            raise unknown
        check_sliceable(heads)
        layers = [open_head(model, one) for one in every.values()]
    except LayoutError:
        raise
    except _OTHER_FORMS as error:
        logger.warning("%s*, an MTP layer, is left out: %s", stem_of(heads), error)
        return dropped
    how = f", each to the width of all others, by its own loss on {calibration.label}"
    facts = said_of(heads, "also pruned", how)
    kept = _kept_in(model, layers, calibration, width)
    return Further(heads, facts, dict(zip(every, kept, strict=True)))


def _kept_in(
    model: Any, layers: Iterable[Any], calibration: CalibrationSet, width: int
) -> Iterator[torch.Tensor]:
    """The kept atoms (E, I) of each layer, scored after the pruned one before it."""
    for layer in layers:
        head, calibration = head_after(model, layer, calibration)
        keep = highest(collect_statistics(head, calibration), width)
        model = prune(head, keep)
        (kept,) = keep.arrays.values()
        yield torch.tensor(kept)


def whole_heads(skeleton: Any, base: str) -> tuple[Heads, Exception | None]:
    """`predicting_heads`, checked to be whole as far as their form is known.

    Returns:
        The tensors, and why their form is not known, if it is not.

    Raises:
        LayoutError: a part is missing.
    """
    heads = predicting_heads(skeleton, base)
    if heads:
        every = by_layer(heads, _n_blocks(skeleton))
        check_number(heads, len(every), skeleton.config)
        try:
            for one in every.values():
                _check_parts(_trunk_with_one(skeleton, one), one)
        except LayoutError:
            raise
        except _OTHER_FORMS as error:
            check_experts(heads)
            return heads, error
    return heads, None


class MtpHead(nn.Module):
    """The layer as a causal language model, on windows whose states are known.

    Its windows begin at the second token of those of the model before it.
    """

    logits_of: Callable[[torch.Tensor], torch.Tensor]
    """The map from its states to logits."""

    def __init__(self, layer: Any, states: Mapping[bytes, torch.Tensor]) -> None:
        """Take the layer, and the states before it of all but the last token (L, D)."""
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


def open_head(model: Any, heads: Heads) -> Any:
    """The layer that predicts a further token.

    Args:
        model: the trunk, dense or pruned, whose embeddings are used.
        heads: the tensors of one layer, of a form that is known.

    Raises:
        ValueError: it cannot be run; or another of `_OTHER_FORMS`.
    """
    trunk = _trunk_with_one(model, heads)
    with tempfile.TemporaryDirectory() as place:
        if any(head.packed for head in heads):
            save_file(floats_of(heads), Path(place) / SINGLE)
            trunk.config.name_or_path = place
        layer = read_mtp(_class_of(trunk), trunk, input_device(model)).eval()
    layer.embed_tokens = _in_memory(layer.embed_tokens)
    layer.shared_head = _in_memory(layer.shared_head)
    layer.set_experts_implementation("eager")  # runs in any type
    if getattr(layer.config, "layer_types", None) == [_INDEXED]:
        _let_indexed_run(layer)
    with evaluating(layer):
        _run(layer, torch.zeros(1, 2, dtype=torch.long), None)
    return layer


def _let_indexed_run(layer: Any) -> None:
    """Give a block with an indexer the mask that it needs, and take its states alone.

    transformers has both in the trunk of DeepSeek-V3.2 and GLM-5, not in such a layer.
    """
    layer.config.layer_types = ["full_attention"]  # the kinds that it knows masks of
    block = layer.layers[0].mtp_block
    block.register_forward_pre_hook(_with_mask, with_kwargs=True)
    block.register_forward_hook(_states_alone)


def _with_mask(
    _block: nn.Module, inputs: tuple[Any, ...], options: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The inputs (B, L, D) of a block, with a causal mask."""
    if options["attention_mask"] is None:
        n_windows, length, _ = inputs[0].shape
        mask = torch.ones(length, length, dtype=torch.bool, device=inputs[0].device)
        options["attention_mask"] = mask.tril().expand(n_windows, 1, -1, -1)
    return inputs, options


def _states_alone(_block: nn.Module, _inputs: Any, outputs: Any) -> torch.Tensor:
    """The states of a block that may also return which tokens it attended to."""
    states: torch.Tensor = outputs[0] if isinstance(outputs, tuple) else outputs
    return states


def _in_memory(module: Any) -> Any:
    """A copy of `module` whose weights are kept in memory."""
    clone = copy.copy(module)
    clone.__dict__ = {
        name: value
        for name, value in clone.__dict__.items()
        if name != "forward" and not name.startswith("heapr_")
    }
    weight = functools.partial(backend_of(module).weight, module)
    clone._parameters = {name: weight(name) for name in module._parameters}
    return clone


def _trunk_with_one(model: Any, heads: Heads) -> Any:
    """The same modules, with a configuration that has one such layer, where it is."""
    trunk, numbers = copy.copy(model), list(by_layer(heads))
    trunk.config = copy.deepcopy(model.config)
    trunk.config.name_or_path = str(heads[0].file.parent)
    trunk.config.dtype = model.get_input_embeddings().weight.dtype
    _leave_one(trunk.config.get_text_config(), numbers[0])
    trunk._weight_conversions = conversions_of(model)
    # The class has the number of the layer in the largest published model.
    place = _STEM.match(heads[0].name)
    stem = place[0] if place else heads[0].name
    others = rf"(?!layers\.(?!({'|'.join(map(str, numbers))})\.))"
    trunk._keys_to_ignore_on_load_unexpected = [f"^{re.escape(stem)}{others}"]
    return trunk


def _leave_one(config: Any, number: int) -> None:
    """Let a configuration have only the layer of this number in files, as the first."""
    place = number % config.num_hidden_layers
    for types, usual in _KINDS.items():
        if known := getattr(config, types, None):
            kind = usual if len(set(known)) > 1 else known[0]
            kinds = getattr(config, f"mtp_{types}", None) or [kind] * (place + 1)
            setattr(config, f"mtp_{types}", [kinds[place]])
    if blocks := getattr(config, _BLOCKS, None):
        config.mtp_layer_types, config.mtp_first_block = blocks, number
        config.rms_norm_eps = config.layer_norm_epsilon
        config.block_configs = getattr(config, "mtp_block_configs", None)
    config.num_mtp_layers, config.num_hidden_layers = 1, number


def _n_blocks(model: Any) -> int:
    """How many of the trunk's blocks, each with a number, are such a layer."""
    return len(getattr(model.config.get_text_config(), _BLOCKS, None) or [None])


def _class_of(trunk: Any) -> Any:
    """The class of such layers."""
    of_blocks = hasattr(trunk.config.get_text_config(), _BLOCKS)
    return MtpOfBlocks if of_blocks else MtpModel


def _check_parts(trunk: Any, heads: Heads) -> None:
    """Check, by names and shapes, that a layer is one that transformers reads.

    Raises:
        LayoutError: what is there is of such a layer, and a part is missing.
        ValueError: it is another.
    """
    with torch.device("meta"):
        layer = _class_of(trunk)(trunk, 1)
    stored = {head.name: head for head in heads}
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
        raise LayoutError(
            f"{stem_of(heads)}*, which predicts a further token: {error}"
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


def head_after(
    model: Any, layer: Any, calibration: CalibrationSet
) -> tuple[MtpHead, CalibrationSet]:
    """The layer on the states of `model`, and the windows that it is measured on.

    Args:
        model: the pruned model, or the pruned layer before this one.
        layer: the one that `open_head` returned.
        calibration: the windows of `model`.

    Raises:
        SpecError: a token is not in the vocabulary, or two windows differ in the first
            one alone.
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
    return MtpHead(layer, by_window), later


def highest(table: ImportanceTable, width: int) -> KeepMask:
    """The mask of the `width` atoms of each expert that have the highest scores."""
    (shape,) = table.shapes().values()
    scores = table.score("heapr").to_numpy().reshape(shape)
    rows = [~lowest(row, shape[1] - width) for row in scores]
    return KeepMask.from_rows(table, np.concatenate(rows))


# --- a form that transformers does not know ---------------------------------------


class MtpOfBlocks(MtpModel):
    """One such layer, of blocks of the kinds that the configuration names."""

    def __init__(self, main_model: Any, num_mtp_layers: int) -> None:
        """Take the trunk, whose configuration names the blocks and the first."""
        super().__init__(main_model, num_mtp_layers)
        block, kinds = type(main_model.get_decoder().layers[0]), self.config.layer_types
        blocks = [block(self.config, number) for number in range(len(kinds))]
        self.layers[0].mtp_block = _Blocks(blocks)

    def get_weight_conversions(self, main_model: Any) -> list[Any]:
        """What transformers makes of the tensors in files."""
        first = self.config.mtp_first_block
        blocks = {
            rf"mtp\.layers\.{first + n}\.(?=norm|mixer)": f"layers.0.mtp_block.{n}."
            for n in range(len(self.config.layer_types))
        }
        names = (_OF_BLOCKS | blocks).items()
        renamings = [WeightRenaming(old, new) for old, new in names]
        return [*renamings, *main_model._weight_conversions]


class _Blocks(nn.ModuleList):
    """One block after the other, as in the trunk."""

    def forward(
        self, states: torch.Tensor, attention_mask: torch.Tensor, **options: Any
    ) -> torch.Tensor:
        """The states (B, L, D) after the last block."""
        for block in self:
            mask = attention_mask if block.block_type == "full_attention" else None
            states = block(states, attention_mask=mask, **options)
        return states
