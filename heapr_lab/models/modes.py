"""The modes in which a model is run: evaluation, with or without gradients.

Modes and `requires_grad` flags belong to a model, and so to every thread that runs it.
The first context that needs other modes switches them, and the last one restores them.
Passes with gradients take turns on a model, because each counts its backward passes.
Modules that one thread exchanges are others in every thread, so those are refused.
"""

import contextlib
import logging
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from heapr_lab.errors import HeaprLabError, LayoutError, SpecError
from heapr_lab.models.backend import NewModule, backend_of

logger = logging.getLogger(__name__)


@dataclass
class _State:
    """The switched modes of one model."""

    n_users: int = 0
    """Number of contexts that need evaluation mode."""
    modes: list[tuple[nn.Module, bool]] = field(default_factory=list)
    """Each module, and whether it was in training mode before."""
    turn: threading.Lock = field(default_factory=threading.Lock)
    """Held by the pass with gradients."""
    owner: int | None = None
    """The thread of that pass."""
    holder: int | None = None
    """The thread that has exchanged modules."""
    exchanges: Counter[int] = field(default_factory=Counter)
    """How often each thread has."""

    @property
    def exchanges_elsewhere(self) -> int:
        """How often threads other than this one have exchanged modules."""
        return self.exchanges.total() - self.exchanges[threading.get_ident()]


_lock = threading.Lock()
_states: WeakKeyDictionary[nn.Module, _State] = WeakKeyDictionary()


@contextlib.contextmanager
def exchanging(model: nn.Module) -> Iterator[None]:
    """This thread may exchange modules of the model, and no other may run it.

    Contexts of one thread nest. What others have begun before raises when it ends.

    Raises:
        SpecError: another thread is in this context of the model.
    """
    state = _state_of(model)
    with _lock:
        _refuse_held(state)
        before, state.holder = state.holder, threading.get_ident()
        state.exchanges[state.holder] += 1
    try:
        yield
    finally:
        state.holder = before


@contextlib.contextmanager
def unexchanged(model: nn.Module) -> Iterator[None]:
    """Check that no other thread exchanges modules of the model in this context.

    Raises:
        SpecError: one had begun before.
        HeaprLabError: one did meanwhile, so that the result belongs to no single model.
    """
    state = _state_of(model)
    with _lock:
        _refuse_held(state)
        before = state.exchanges_elsewhere
    yield
    if state.exchanges_elsewhere != before:
        raise HeaprLabError(
            "another thread replaced modules of this model meanwhile, so the result is "
            "invalid; run it again when that has ended"
        )


def _refuse_held(state: _State) -> None:
    if state.holder not in (None, threading.get_ident()):
        raise SpecError(
            "another thread has replaced modules of this model, as while a method is "
            "measured; expected the model's own: run it again when that has ended"
        )


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; the previous modes are restored.

    Several threads may evaluate a model at the same time.

    Raises:
        SpecError: as `unexchanged`.
        HeaprLabError: as `unexchanged`.
    """
    with unexchanged(model), _evaluation_mode(model), torch.no_grad():
        yield


@contextlib.contextmanager
def differentiating(
    model: nn.Module, trained: Sequence[nn.Parameter] = ()
) -> Iterator[None]:
    """Evaluation mode in which `trained`, and no other parameter, requires gradients.

    Modes and flags are restored, and gradients of `trained` are dropped. It also works
    inside `torch.no_grad` and `torch.inference_mode`. Only one thread at a time is in
    this context of a model; others wait.

    Raises:
        SpecError: this thread is already in such a context of the model, or another
            has exchanged modules, as in `unexchanged`.
        LayoutError: the weights cannot take part in a backward pass.
    """
    _refuse_inference_tensors(model)
    with (
        _taking_turns(model),
        unexchanged(model),
        _evaluation_mode(model),
        _requiring(model, trained),
        torch.inference_mode(False),
        torch.enable_grad(),
    ):
        yield


@contextlib.contextmanager
def assigned(values: Sequence[tuple[Any, str, Any]]) -> Iterator[None]:
    """Attributes have other values in this context, in every thread.

    Args:
        values: an object, the name of an attribute, and its value; of a module also
            parameters, buffers and modules in it.
    """
    before = [(thing, name, getattr(thing, name)) for thing, name, _ in values]
    try:
        for each in values:
            setattr(*each)
        yield
    finally:
        for each in before:
            setattr(*each)


def copied(
    model: nn.Module, memo: dict[int, object], new: Sequence[NewModule] = ()
) -> nn.Module:
    """A copy of `model` in its own modes, even while other threads evaluate it.

    It waits for a pass with gradients to end, whose flags and hooks would be copied.

    Args:
        model: the model to copy.
        memo: the objects already copied, as for `copy.deepcopy`.
        new: modules of the copy in place of those of the model.

    Raises:
        SpecError: this thread is in a pass with gradients on the model, another has
            exchanged modules, or it is streamed and has no new modules.
    """
    with _taking_turns(model), unexchanged(model):
        modes = _own_modes(model)
        twin = backend_of(model).copy(model, memo, new)
    for name, module in twin.named_modules():
        module.training = modes.get(name, module.training)
    return twin


def _own_modes(model: nn.Module) -> dict[str, bool]:
    """Whether each module is in training mode outside of evaluation, by name."""
    state = _state_of(model)
    with _lock:
        saved = {id(module): training for module, training in state.modes}
        return {
            name: saved.get(id(module), module.training)
            for name, module in model.named_modules()
        }


def _state_of(model: nn.Module) -> _State:
    with _lock:
        return _states.setdefault(model, _State())


@contextlib.contextmanager
def _evaluation_mode(model: nn.Module) -> Iterator[None]:
    state = _state_of(model)
    with _lock:
        if not state.n_users:
            state.modes = [(module, module.training) for module in model.modules()]
            _set_modes([(module, False) for module, _ in state.modes])
        state.n_users += 1
    try:
        yield
    finally:
        with _lock:
            state.n_users -= 1
            if not state.n_users:
                _set_modes(state.modes)
                state.modes = []  # which would keep the model alive


def _set_modes(modes: list[tuple[nn.Module, bool]]) -> None:
    for module, training in modes:
        if module.training != training:
            module.training = training


@contextlib.contextmanager
def _taking_turns(model: nn.Module) -> Iterator[None]:
    state = _state_of(model)
    if state.owner == threading.get_ident():
        raise SpecError(
            "a pass with gradients is running on this model in this thread already; "
            "let it end before another begins"
        )
    if not state.turn.acquire(blocking=False):
        logger.info("waiting for another pass with gradients on this model")
        state.turn.acquire()
    state.owner = threading.get_ident()
    try:
        yield
    finally:
        state.owner = None
        state.turn.release()


@contextlib.contextmanager
def _requiring(model: nn.Module, trained: Sequence[nn.Parameter]) -> Iterator[None]:
    # No weight of a streamed model does: they would stay in memory with the list.
    required = [p for p in model.parameters() if p.requires_grad]
    model.requires_grad_(False)
    for parameter in trained:
        parameter.requires_grad_(True)
    try:
        yield
    finally:
        for parameter in trained:
            parameter.grad = None
            parameter.requires_grad_(False)
        for parameter in required:
            parameter.requires_grad_(True)


def _refuse_inference_tensors(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if parameter.is_inference():
            raise LayoutError(
                f"{name} was created in torch.inference_mode(), so it has no "
                "gradient; load the model outside of that block"
            )
