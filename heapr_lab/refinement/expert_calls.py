"""What the experts of each layer are called with, and what they return.

The calls of one layer are in memory at a time: layers are run one after the other, with
the arithmetic of one forward pass.

Shapes: T tokens of all windows, K experts of each, D d_expert.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from heapr_lab.errors import CoverageError
from heapr_lab.models.experts import ExpertsLayer, find_experts
from heapr_lab.models.hooks import called
from heapr_lab.models.likelihood import final_states
from heapr_lab.models.modes import evaluating
from heapr_lab.progress import Progress, no_report
from heapr_lab.streaming.layerwise import walk_over

_TOKENS_AT_ONCE = 4096


@dataclass(frozen=True)
class ExpertCalls:
    """The arguments and the results of one layer's experts, token by token."""

    layer: ExpertsLayer
    hidden_states: torch.Tensor
    """(T, D)."""
    top_k_index: torch.Tensor
    """(T, K)."""
    top_k_weights: torch.Tensor
    """(T, K)."""
    output: torch.Tensor
    """Weighted sum of the experts' outputs, (T, D)."""

    def of(self, tokens: torch.Tensor) -> "ExpertCalls":
        """The calls of some tokens."""
        fields = self.hidden_states, self.top_k_index, self.top_k_weights, self.output
        return ExpertCalls(self.layer, *(field[tokens] for field in fields))

    def routed(self, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The inputs (n, D) of the tokens routed to an expert, and p (n,)."""
        tokens, slots = (self.top_k_index == expert).nonzero(as_tuple=True)
        return self.hidden_states[tokens], self.top_k_weights[tokens, slots]


Watching = Callable[[list[ExpertsLayer], list[Any]], AbstractContextManager[None]]


def watched(
    model: nn.Module,
    batches: Sequence[torch.Tensor],
    groups: Sequence[list[ExpertsLayer]],
    make: Callable[[ExpertsLayer], Any],
    watching: Watching,
    report: Progress,
) -> Iterator[tuple[ExpertsLayer, Any]]:
    """What the watcher of each layer kept; layers are run one by one.

    Each group takes a forward pass of the whole model in its place if the model is in
    memory and there is one group, or if its layers cannot be run separately: then a
    warning is logged.

    Args:
        model: a causal language model of transformers.
        batches: token ids, each (B, L).
        groups: the layers that are watched.
        make: makes the watcher of a layer, whose `finished` returns what it kept of
            its `calls`.
        watching: the context in which they see forwards: `observed`, or `called`.
        report: called with the layers done and all layers, or with windows of all
            passes.

    Raises:
        CoverageError: a layer did not take part in every forward.
    """
    layers = {layer.layer: layer for group in groups for layer in group}
    walk = walk_over(model, batches, n_passes=len(groups))
    if walk is not None:
        for number in range(walk.n_layers):
            there = [layers[number]] if number in layers else []
            watchers = [make(layer) for layer in there]
            with evaluating(model), watching(there, watchers):
                walk.run(number)
            report(number + 1, walk.n_layers)
            while watchers:  # what is finished is dropped before the next layer is run
                yield there[0], _finished(there[0], watchers.pop(), len(batches))
        return
    done, total = 0, len(groups) * sum(map(len, batches))
    for group in groups:
        watchers = [make(layer) for layer in group]
        with evaluating(model), watching(group, watchers):
            for ids in batches:
                final_states(model, ids)
                done += len(ids)
                report(done, total)
        for layer, watcher in zip(group, watchers, strict=True):
            yield layer, _finished(layer, watcher, len(batches))


def _finished(layer: ExpertsLayer, watcher: Any, n_forwards: int) -> Any:
    """What a watcher kept of all forwards.

    Raises:
        CoverageError: the layer did not take part in all of them.
    """
    if watcher.calls != n_forwards:
        raise CoverageError(
            f"layer {layer.layer} took part in {watcher.calls} of {n_forwards} "
            "forwards, expected all"
        )
    return watcher.finished()


class _Recorder:
    """Keeps every call of one layer's experts, on `n_tokens` tokens."""

    def __init__(self, layer: ExpertsLayer, *, n_tokens: int) -> None:
        self._layer, self._n_tokens, self.calls = layer, n_tokens, 0
        self._parts: list[list[torch.Tensor]] = []

    def __call__(self, *call: torch.Tensor) -> None:
        self.calls += 1
        self._parts.append([x.detach().reshape(-1, x.shape[-1]) for x in call])

    def finished(self) -> ExpertCalls:
        """All calls, in the order of the tokens.

        Raises:
            CoverageError: there are more or fewer tokens.
        """
        fields = [torch.cat(pieces) for pieces in zip(*self._parts, strict=True)]
        seen = len(fields[0]) if fields else 0
        if seen != self._n_tokens:
            raise CoverageError(
                f"{self._layer.name} was called with {seen} tokens, expected "
                f"{self._n_tokens}"
            )
        return ExpertCalls(self._layer, *fields)


def iter_expert_calls(
    model: nn.Module, ids: torch.Tensor, *, progress: Progress | None = None
) -> Iterator[ExpertCalls]:
    """The calls of each MoE layer's experts on all windows, in order.

    If the layers of a model cannot be run separately, each takes a forward pass, and a
    warning is logged.

    Args:
        model: a causal language model of transformers.
        ids: token ids, (n windows, L).
        progress: called with (decoder layers done, decoder layers in all), or with
            windows where layers cannot be run separately.

    Raises:
        CoverageError: not every token went through a layer's experts once.
    """
    batches = ids.split(max(1, _TOKENS_AT_ONCE // ids.shape[1]))
    groups = [[layer] for layer in find_experts(model)]

    recorder = functools.partial(_Recorder, n_tokens=ids.numel())
    calls = watched(model, batches, groups, recorder, called, progress or no_report)
    return (of_layer for _, of_layer in calls)
