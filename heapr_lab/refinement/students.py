"""The experts of a pruned model, beside the dense ones that they learn from."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from heapr_lab.errors import SpecError
from heapr_lab.models.backend import backend_of
from heapr_lab.models.experts import ExpertsLayer, find_experts, sliced_experts
from heapr_lab.models.identity import refuse_disturbed
from heapr_lab.models.ragged_experts import RaggedExperts
from heapr_lab.progress import Progress
from heapr_lab.refinement.expert_calls import ExpertCalls, iter_expert_calls
from heapr_lab.text.calibration import CalibrationSet


@dataclass(frozen=True)
class Lesson:
    """The sliced experts of one layer, and what the dense ones do."""

    layer: ExpertsLayer
    """The dense ones."""
    student: RaggedExperts
    fit: ExpertCalls
    """Calls on three of every four windows."""
    held_out: ExpertCalls
    """Those on the others."""


def lessons(
    pruned: nn.Module,
    dense: nn.Module,
    calibration: CalibrationSet,
    *,
    progress: Progress | None = None,
) -> Iterator[Lesson]:
    """Each layer in order, in one forward pass of `dense`, with one in memory.

    Args:
        pruned: a model made from `dense` by `prune`, `compensate` or `compress`.
        dense: the dense model.
        calibration: at least two windows.
        progress: called with (decoder layers done, decoder layers in all).

    Raises:
        SpecError: `pruned` was not made from `dense` or is streamed, there is only one
            window, or a mask, autocast or hook changes what `dense` computes.
    """
    refuse_disturbed(dense, remedy="begin again with the dense model")
    students = _students(pruned, dense)
    fit, held_out = calibration.split()
    ids, n_fit = torch.cat([fit.ids, held_out.ids]), fit.ids.numel()
    for layer, calls in iter_expert_calls(dense, ids, progress=progress):
        parts = calls.of(slice(None, n_fit)), calls.of(slice(n_fit, None))
        yield Lesson(layer, students[layer.name], *parts)


def _students(pruned: nn.Module, dense: nn.Module) -> dict[str, RaggedExperts]:
    """The sliced experts of `pruned` by their names, which are those of `dense`.

    Raises:
        SpecError: it has none, was not made from `dense`, or is streamed.
    """
    backend_of(pruned).require_loaded(
        remedy="make it from a dense model that is loaded with stream=False "
        "(--no-stream) to distil",
    )
    found = sliced_experts(pruned)
    expected = {layer.name: layer.n_experts for layer in find_experts(dense)}
    if {name: len(own.heapr_widths) for name, own in found.items()} != expected:
        raise SpecError(
            f"this {type(pruned).__name__} has {len(found)} layers of sliced experts, "
            f"expected those of the dense {type(dense).__name__}, {len(expected)}: "
            "give a model that heapr_lab.prune, compensate or compress made from it"
        )
    return found


def note_change(pruned: Any, text: str) -> None:
    """Add what was done to the weights of `pruned` to its description."""
    said = getattr(pruned, "heapr_weights", "sliced")
    pruned.__dict__["heapr_weights"] = f"{said}; then {text}"
