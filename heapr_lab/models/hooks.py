"""One experts function for all families, which masks and measures; and one for CPUs.

The first is registered with transformers under `IMPLEMENTATION`. While a model is
switched to it, each call looks up whether *this thread's context* masks the module and
whether a probe is attached to it. If neither is the case, it calls the model's previous
implementation, so that a dense forward in one thread and a masked one in another are
both correct. The other, `ON_CPU`, runs all experts on all tokens where that is faster.

Within `masked` a layer computes something else; `observed` shows its activations,
`called` its calls, and `probed` sums what flows through it forward and back.

Shapes: T tokens, K slots per token, n = T·K routed rows sorted by expert,
E n_experts, I d_inter, D d_expert.
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from heapr_lab.errors import CoverageError, HeaprLabError
from heapr_lab.models.experts import ExpertsLayer
from heapr_lab.models.grouped_linear import (
    routed_linear,
    rows_of_experts,
    scattered_linear,
)
from heapr_lab.models.likelihood import input_device
from heapr_lab.models.moments import LayerMoments
from heapr_lab.models.ragged_experts import activate, fused_experts, normalises

IMPLEMENTATION = "heapr_lab"
ON_CPU = "heapr_lab_on_cpu"
"""The implementation of models that are loaded on a CPU."""
_MOST = 2 / 3
"""Share of the experts from which on running all of them is faster."""
_ROW_BYTES = 16
"""Grouped kernels take matrices whose rows are a multiple of it."""
_T = TypeVar("_T")
_NONE: Mapping[int, Any] = MappingProxyType({})


@contextlib.contextmanager
def setting(variable: ContextVar[_T], value: _T) -> Iterator[None]:
    """A variable of this thread's context has a value."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


# --- the switch ---------------------------------------------------------------------

_switch_lock = threading.Lock()
_switched: dict[int, tuple[int, str | None]] = {}
"""Number of users and previous implementation of each switched config, by id."""


@contextlib.contextmanager
def switching(layers: list[ExpertsLayer]) -> Iterator[None]:
    """Route the layers' forwards through this module; re-entrant and thread-safe."""
    with _switch_lock:
        for layer in layers:
            _switch_on(layer.module)
    try:
        yield
    finally:
        with _switch_lock:
            for layer in layers:
                _switch_off(layer.module)


def _switch_on(module: Any) -> None:
    """Switch the config of one module, which other modules and models may share.

    The previous implementation stays noted on the module after switching off, because a
    forward in another thread may be about to look it up.
    """
    config = module.config
    now = config._experts_implementation
    if now == IMPLEMENTATION:  # the model is a copy, made while it was switched on
        now = module.__dict__.get("_heapr_previous")
    n_users, previous = _switched.get(id(config), (0, now))
    _switched[id(config)] = n_users + 1, previous
    module.__dict__["_heapr_previous"] = previous
    config._experts_implementation = IMPLEMENTATION


def _switch_off(module: Any) -> None:
    config = module.config
    n_users, previous = _switched.pop(id(config))
    if n_users > 1:
        _switched[id(config)] = n_users - 1, previous
    else:
        config._experts_implementation = previous


# --- masks --------------------------------------------------------------------------

Replacement = torch.Tensor | Callable[[], torch.Tensor]
"""A tensor, or what reads it each time that it is needed."""


@dataclass(frozen=True)
class Edit:
    """A change to how a layer's experts run in a context; their weights stay."""

    keep: torch.Tensor
    """Factor of h, (E, I)."""
    down: Replacement | None = None
    """Replacement for W_down, (E, D, I)."""

    @property
    def new_down(self) -> torch.Tensor | None:
        """The replacement itself, read if it is on disk."""
        return self.down() if callable(self.down) else self.down


_edits: ContextVar[Mapping[int, Edit]] = ContextVar("edits", default=_NONE)


@contextlib.contextmanager
def masked(
    layers: list[ExpertsLayer],
    keeps: list[torch.Tensor],
    down_projs: Sequence[Replacement | None] | None = None,
) -> Iterator[None]:
    """Mask atoms of `layers` in this thread's forwards, and replace W_down if given.

    Shapes: each of `keeps` (E, I), one for each layer, True for kept atoms; each of
    `down_projs` (E, D, I).
    """
    outer = _edits.get()
    mine = {}
    for layer, keep, replacement in zip(
        layers, keeps, down_projs or [None] * len(layers), strict=True
    ):
        before = outer.get(id(layer.module))
        kept = keep.to(layer.device, layer.dtype)
        down = replacement if callable(replacement) else _like(layer, replacement)
        if before is not None:
            kept = kept * before.keep
            down = before.down if down is None else down
        mine[id(layer.module)] = Edit(kept, down)
    with setting(_edits, {**outer, **mine}), switching(layers):
        yield


def _like(layer: ExpertsLayer, down: torch.Tensor | None) -> torch.Tensor | None:
    return None if down is None else down.to(layer.device, layer.dtype)


def edits_of(model: nn.Module) -> dict[str, Edit]:
    """The edits of this context to the experts modules of `model`, by name."""
    edits = _edits.get()
    return {
        name: edits[id(module)]
        for name, module in model.named_modules()
        if id(module) in edits
    }


# --- what sees activations ----------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Routed:
    """The activations of one call of a layer's experts, in rows sorted by expert."""

    h: torch.Tensor
    """(n, I)."""
    p: torch.Tensor
    """Routing weights, (n,)."""
    rows: torch.Tensor
    """The token of each row, (n,)."""
    tokens: list[int]
    """The number of rows of each expert, (E,)."""

    @property
    def experts(self) -> torch.Tensor:
        """The expert of each row, (n,), on the CPU."""
        counts = torch.tensor(self.tokens)
        return torch.arange(len(counts)).repeat_interleave(counts)


Observer = Callable[[Routed], None]
"""Sees the activations of one layer in every forward."""
_observers: ContextVar[Mapping[int, Observer]] = ContextVar("observers", default=_NONE)
Watcher = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]
"""Sees what the experts of one layer are called with, and what they return: hidden
states (T, D), the experts of each token (T, K) and their weights (T, K); (T, D)."""
_watchers: ContextVar[Mapping[int, Watcher]] = ContextVar("watchers", default=_NONE)


@contextlib.contextmanager
def observed(
    layers: list[ExpertsLayer], observers: Sequence[Observer]
) -> Iterator[None]:
    """Show the layers' activations to `observers`, one each, in this thread's forwards.

    They are those of the dense model, even inside a context that masks it.
    """
    watching = _by_module(layers, observers)
    with setting(_observers, watching), setting(_edits, _NONE), switching(layers):
        yield


@contextlib.contextmanager
def called(layers: list[ExpertsLayer], watchers: Sequence[Watcher]) -> Iterator[None]:
    """Show calls of the layers' experts to `watchers`, one each, in this thread."""
    with setting(_watchers, _by_module(layers, watchers)), switching(layers):
        yield


def _by_module(layers: list[ExpertsLayer], watchers: Sequence[_T]) -> dict[int, _T]:
    pairs = zip(layers, watchers, strict=True)
    return {id(layer.module): watcher for layer, watcher in pairs}


# --- what sees gradients ------------------------------------------------------------


class _Accounting(torch.autograd.Function):
    """The identity on h, whose backward adds h and dl/dh to the moments.

    As a node of the graph it runs exactly once per backward, even if activation
    checkpointing runs the forward twice.
    """

    @staticmethod
    def forward(
        ctx: Any,
        h: torch.Tensor,
        p: torch.Tensor,
        tokens: torch.Tensor,
        moments: LayerMoments,
    ) -> torch.Tensor:
        ctx.save_for_backward(h, p, tokens)
        ctx.moments = moments
        return h.view_as(h)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        h, p, tokens = ctx.saved_tensors
        with torch.no_grad():
            ctx.moments.add(h, g, p, tokens)
        return g, None, None, None


@contextlib.contextmanager
def probed(layers: list[ExpertsLayer]) -> Iterator[dict[int, LayerMoments]]:
    """Sum up each layer in every backward pass until the context ends.

    The sums are attached to the module, not to the thread, because autograd may run a
    checkpointed forward again in a thread of its own.
    """
    probes = {e.layer: LayerMoments(e.n_experts, e.d_inter, e.device) for e in layers}
    for layer in layers:
        layer.module.__dict__["_heapr_probe"] = probes[layer.layer]
    try:
        with switching(layers):
            yield probes
    finally:
        for layer in layers:
            layer.module.__dict__.pop("_heapr_probe", None)


def check_gradients(layer: int, times: int, *, finite: bool, where: str) -> None:
    """Check what the probe of a layer has seen of one backward pass.

    Args:
        layer: its number.
        times: how often it took part.
        finite: whether its gradients are finite.
        where: the text of the pass, in words.

    Raises:
        CoverageError: it did not take part once.
        HeaprLabError: its gradients are not finite.
    """
    if times != 1:
        raise CoverageError(
            f"layer {layer} took part {times} times in the pass over {where}, expected "
            "once; this model does not run each experts module once per forward"
        )
    if not finite:
        raise HeaprLabError(
            f"non-finite gradients in layer {layer} on {where}: use bfloat16 or "
            "float32 weights, or check the text"
        )


# --- the experts function -----------------------------------------------------------


def _experts_forward(
    module: Any,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    edit = _edits.get().get(id(module))
    observer = _observers.get().get(id(module))
    probe = module.__dict__.get("_heapr_probe") if torch.is_grad_enabled() else None
    if edit is None and probe is None and observer is None:
        forward = _plain_implementation(module)
    elif probe is None and observer is None and most_are_active(module, top_k_index):
        forward = functools.partial(all_experts, edit=edit)
    else:
        forward = functools.partial(
            _routed_forward, edit=edit, probe=probe, observer=observer
        )
    total: torch.Tensor = forward(module, hidden_states, top_k_index, top_k_weights)
    watcher = _watchers.get().get(id(module))
    if watcher is not None:
        watcher(hidden_states, top_k_index, top_k_weights, total)
    return total


ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, _experts_forward)


def _plain_implementation(module: Any) -> Any:
    forward: Any = type(module).forward
    eager = forward.__wrapped__  # what the decorator wrapped
    noted = 0, module.__dict__.get("_heapr_previous")
    _, previous = _switched.get(id(module.config), noted)
    return ALL_EXPERTS_FUNCTIONS.get(previous, eager)


def _routed_forward(
    module: Any,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    *,
    edit: Edit | None,
    probe: LayerMoments | None,
    observer: Observer | None,
) -> torch.Tensor:
    """The result of every implementation, with h masked and observed in between."""
    layer = ExpertsLayer(-1, "", module)
    n_slots = top_k_index.shape[-1]
    experts, order = torch.sort(top_k_index.reshape(-1), stable=True)  # (n,)
    tokens = rows_of_experts(experts, layer.n_experts)
    of_tokens = order // n_slots  # (n,)
    p = top_k_weights.reshape(-1)[order]  # (n,)

    up, bias = layer.up_rows, layer.up_bias
    rows = routed_linear(hidden_states, up, bias, experts, tokens, of_tokens)
    h = activate(module, rows)  # (n, I)
    if observer is not None:
        observer(Routed(h, p, of_tokens, tokens.tolist()))
    new = None if edit is None else _like(layer, edit.new_down)
    down = layer.down if new is None else new
    if edit is not None:
        h = h * edit.keep[experts]
    if probe is not None:
        h = _Accounting.apply(h, p.detach(), tokens, probe)
    if h.is_cuda or layer.down_bias is not None or normalises(module):
        out = routed_linear(h, down, layer.down_bias, experts, tokens)  # (n, D)
        total = _combined(module, out, p, order, n_slots)
    else:
        total = scattered_linear(
            h, down, p, rows=of_tokens, tokens=tokens, n_tokens=len(hidden_states)
        )
    result: torch.Tensor = total.to(hidden_states.dtype)
    return result


def _combined(
    module: Any, out: torch.Tensor, p: torch.Tensor, order: torch.Tensor, n_slots: int
) -> torch.Tensor:
    """The weighted sum of the outputs of each token's experts, (T, D).

    Shapes: out (n, D) and p (n,) sorted by expert; order (n,) the slot of each row.
    """
    if normalises(module):
        out = module.post_expert_norm(out)
    weighted = out * p[:, None]
    unsorted = torch.empty_like(weighted).index_copy(0, order, weighted)
    total: torch.Tensor = unsorted.unflatten(0, (-1, n_slots)).sum(1)
    return total


# --- every expert on every token: two products of whole matrices --------------------

# Where a token goes to most of the experts anyway, a CPU multiplies by all of them
# faster than it sorts, gathers and scatters tokens: with 20 of 24 experts of 64 neurons
# it runs 3.9 times as many tokens as transformers' `grouped_mm`, the default, 1.7 times
# as many as `eager`, and 1.4 times as many as `_routed_forward`.


def all_experts(
    module: Any,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    *,
    edit: Edit | None = None,
) -> torch.Tensor:
    """The routed experts' weighted sum, (T, D), as every implementation has it.

    Activations of experts that a token is not routed to are multiplied by 0.

    Args:
        module: transformers' experts, whose outputs are not normalised.
        hidden_states: (T, D).
        top_k_index: (T, K); E for none.
        top_k_weights: (T, K).
        edit: the change to how they run, if there is one.
    """
    layer = ExpertsLayer(-1, "", module)
    gates = _gates(top_k_index, top_k_weights, layer.n_experts)
    bias = None if layer.up_bias is None else layer.up_bias.flatten()
    rows = F.linear(hidden_states, layer.up_rows.flatten(0, 1), bias)
    h = activate(module, rows.view(len(rows) * layer.n_experts, -1))
    h = h.view(len(rows), layer.n_experts, -1) * gates[..., None]
    if edit is not None:
        h = h * edit.keep
    new, dtype = None if edit is None else edit.new_down, hidden_states.dtype
    weight = (layer.down if new is None else new).transpose(0, 1).flatten(1)
    total = F.linear(h.flatten(1).to(dtype), weight.to(dtype))
    if layer.down_bias is not None:
        total = total + gates.to(dtype) @ layer.down_bias
    return total


def _gates(
    top_k_index: torch.Tensor, top_k_weights: torch.Tensor, n_experts: int
) -> torch.Tensor:
    """The routing weight of each expert for each token, (T, E): 0 for most or a few."""
    none = top_k_weights.new_zeros(len(top_k_index), n_experts + 1)
    return none.scatter_add(1, top_k_index, top_k_weights)[:, :n_experts]


def most_are_active(module: Any, top_k_index: torch.Tensor) -> bool:
    """Whether `all_experts` is the fast way here, and can be used."""
    n_experts = len(module.down_proj)
    return (
        top_k_index.device.type == "cpu"
        and top_k_index.shape[-1] >= _MOST * n_experts
        and not normalises(module)
    )


def _experts_on_cpu(
    module: Any,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    most = most_are_active(module, top_k_index)
    forward = all_experts if most else ALL_EXPERTS_FUNCTIONS["grouped_mm"]
    total: torch.Tensor = forward(module, hidden_states, top_k_index, top_k_weights)
    return total


ALL_EXPERTS_FUNCTIONS.register(ON_CPU, _experts_on_cpu)


def ready(model: Any) -> Any:
    """A model that was just loaded, in eval mode, with experts functions for its type.

    The default, grouped kernels do not support float64, nor experts of every width, and
    are slower on a CPU.
    """
    kind, now = input_device(model).type, model.config._experts_implementation
    if model.dtype == torch.float64 or not _fit_grouped_kernels(model):
        model.set_experts_implementation("eager")
    elif kind == "cpu" and now == "grouped_mm":
        model.set_experts_implementation(ON_CPU)
    return model.eval()


def _fit_grouped_kernels(model: Any) -> bool:
    """Whether rows of all experts' matrices, and of their transposes, fill 16 bytes."""
    return all(
        size * weight.element_size() % _ROW_BYTES == 0
        for module in fused_experts(model.named_modules()).values()
        for weight in module.parameters(recurse=False)
        if weight.ndim == 3
        for size in weight.shape[1:]
    )
