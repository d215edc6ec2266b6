"""What the experts of each layer are called with, and what they return.

The calls of one layer are in memory at a time: layers are run one after the other, with
the arithmetic of one forward pass.

Shapes: T tokens of all windows, K experts of each, D d_expert.
"""

import contextlib
import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from heapr_lab.errors import CoverageError
from heapr_lab.models.experts import ExpertsLayer, find_experts
from heapr_lab.models.likelihood import final_states
from heapr_lab.models.modes import evaluating
from heapr_lab.progress import Progress, no_report
from heapr_lab.streaming.layerwise import walk_over

_TOKENS_AT_ONCE = 4096


@dataclass(frozen=True)
class ExpertCalls:
    """The arguments and the results of one layer's experts, token by token."""

    hidden_states: torch.Tensor
    """(T, D)."""
    top_k_index: torch.Tensor
    """(T, K)."""
    top_k_weights: torch.Tensor
    """(T, K)."""
    output: torch.Tensor
    """Weighted sum of the experts' outputs, (T, D)."""

    def of(self, tokens: torch.Tensor | slice) -> "ExpertCalls":
        """The calls of some tokens."""
        fields = self.hidden_states, self.top_k_index, self.top_k_weights, self.output
        return ExpertCalls(*(field[tokens] for field in fields))

    def batches(self) -> "Iterator[ExpertCalls]":
        """The calls of 4096 tokens at a time, in order."""
        for start in range(0, len(self.output), _TOKENS_AT_ONCE):
            yield self.of(slice(start, start + _TOKENS_AT_ONCE))


class _Recorder:
    """Keeps every call of one layer's experts."""

    def __init__(self, layer: ExpertsLayer) -> None:
        self._layer = layer
        self._parts: list[list[torch.Tensor]] = []

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        hook = self._layer.module.register_forward_hook(self._keep, with_kwargs=True)
        try:
            yield
        finally:
            hook.remove()

    def _keep(self, module: Any, args: Any, options: Any, output: Any) -> None:
        # Families differ in the names of the arguments, not in their order.
        given = inspect.signature(type(module).forward).bind(module, *args, **options)
        _, *tensors = [*given.arguments.values(), output]
        self._parts.append([x.detach().reshape(-1, x.shape[-1]) for x in tensors])

    def calls(self, n_tokens: int) -> ExpertCalls:
        """All calls, in the order of the tokens.

        Raises:
            CoverageError: there are more or fewer tokens.
        """
        fields = [torch.cat(pieces) for pieces in zip(*self._parts, strict=True)]
        seen = len(fields[0]) if fields else 0
        if seen != n_tokens:
            raise CoverageError(
                f"{self._layer.name} was called with {seen} tokens, expected {n_tokens}"
            )
        return ExpertCalls(*fields)


def iter_expert_calls(
    model: nn.Module, ids: torch.Tensor, *, progress: Progress | None = None
) -> Iterator[tuple[ExpertsLayer, ExpertCalls]]:
    """The calls of each MoE layer's experts on all windows, in order.

    If the layers of a model cannot be run separately, each takes a forward pass, and a
    warning is logged.

    Args:
        model: a causal language model of transformers.
        ids: token ids, (n windows, L).
        progress: called with (decoder layers done, decoder layers in all).

    Raises:
        CoverageError: not every token went through a layer's experts once.
    """
    layers = find_experts(model)
    batches = list(ids.split(max(1, _TOKENS_AT_ONCE // ids.shape[1])))
    report = progress or no_report
    walk = walk_over(model, batches, n_passes=len(layers))
    if walk is None:
        yield from _one_by_one(model, batches, layers, report)
        return
    with_experts = {layer.layer: layer for layer in layers}
    for number, run in walk.layers():
        recorder = None
        with contextlib.ExitStack() as contexts:
            contexts.enter_context(evaluating(model))
            if number in with_experts:
                recorder = _Recorder(with_experts[number])
                contexts.enter_context(recorder.recording())
            for _ in run:
                pass
        report(number + 1, walk.n_layers)
        if recorder is not None:
            yield with_experts[number], recorder.calls(ids.numel())


def _one_by_one(
    model: nn.Module,
    batches: Sequence[torch.Tensor],
    layers: Sequence[ExpertsLayer],
    report: Progress,
) -> Iterator[tuple[ExpertsLayer, ExpertCalls]]:
    """The calls of each layer, by a forward pass of the whole model."""
    for number, layer in enumerate(layers):
        recorder = _Recorder(layer)
        with evaluating(model), recorder.recording():
            for part in batches:
                final_states(model, part)
        report(number + 1, len(layers))
        yield layer, recorder.calls(sum(part.numel() for part in batches))
