"""Run the decoder layers one by one over all windows, keeping the inputs of each.

Statistics then need memory for one layer at a time, while all layers together cost the
arithmetic of one forward pass. A layer is called with the arguments that its model gave
it: masks and positions depend only on the shape of a batch, which is checked if two
batches have the same shape. Two arguments are of a batch itself: the ids, by which
layers with hash tables route, and what the layer before handed on beside its states,
the tokens that indexed attention attends to.

Shapes: B windows, L tokens in each; d_model.
"""

import contextlib
import functools
import inspect
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from heapr_lab.errors import HeaprLabError, LayoutError
from heapr_lab.models.likelihood import final_states
from heapr_lab.models.modes import evaluating, exchanging
from heapr_lab.streaming.stream import decoder_layers, replace_layers, stream_of

logger = logging.getLogger(__name__)

_Call = tuple[tuple[Any, ...], dict[str, Any]]
Handed = torch.Tensor | None
"""What a layer hands on to the next one beside its states, if anything."""
_IDS, _HANDED = "input_ids", "prev_topk_indices"
"""Arguments of decoder layers that are of a batch, not of its shape."""


class _ReachedFirstLayerError(Exception):
    """Ends a forward as soon as the first layer's input is known."""


def walk_over(
    model: nn.Module,
    batches: Sequence[torch.Tensor],
    *,
    n_passes: int,
) -> "LayerByLayer | None":
    """A walk; None if passes over the whole model take its place.

    They do for a model in memory, if one is enough, or if its layers cannot be run one
    by one: then a warning is logged.

    Arguments are those of `LayerByLayer`, and the forward passes that are run instead.

    Raises:
        LayoutError: the model is streamed, and they cannot.
    """
    in_memory = stream_of(model) is None
    if in_memory and n_passes == 1:
        return None
    try:
        with evaluating(model):
            return LayerByLayer(model, batches)
    except LayoutError as error:
        if not in_memory:
            raise
        logger.warning(
            "%s; so %d forward passes are used instead of one", error, n_passes
        )
        return None


class LayerByLayer:
    """The decoder layers of a model, run one after the other.

    Example:
        >>> walk = LayerByLayer(model, batches)  # doctest: +SKIP
        >>> for number in range(walk.n_layers):  # doctest: +SKIP
        ...     with observed([layers[number]], [observer]):
        ...         walk.run(number)
    """

    def __init__(
        self,
        model: nn.Module,
        batches: Sequence[torch.Tensor],
    ) -> None:
        """Run the batches up to the first layer, in eval mode without gradients.

        Args:
            model: a causal language model of transformers.
            batches: token ids, each (B, L).

        Raises:
            LayoutError: the model does not pass hidden states directly from one decoder
                layer to the next.
        """
        self._model = model
        self._blocks = decoder_layers(model)
        self._batches = batches
        self._shapes = [tuple(ids.shape) for ids in batches]
        self.handed: list[Handed] = [None] * len(batches)
        """What the layer before handed on beside the states of each batch."""
        self._calls = self._recorded(batches)
        self.states = [self._first_input(ids) for ids in batches]
        """The inputs of the next layer."""

    @property
    def n_layers(self) -> int:
        """The number of decoder layers, with experts or without."""
        return len(self._blocks)

    def run(self, number: int) -> None:
        """Run all batches through a layer, after those before it."""
        for index, given in enumerate(zip(self.states, self.handed, strict=True)):
            output = self.output(number, index, *given)
            self.states[index], self.handed[index] = output

    def output(
        self, number: int, index: int, states: torch.Tensor, handed: Handed
    ) -> tuple[torch.Tensor, Handed]:
        """What a layer makes of the states of a batch, and hands on beside them.

        Args:
            number: of the layer.
            index: of the batch.
            states: those that the layer before gave.
            handed: what it handed on.
        """
        call = self._calls[self._shapes[index]][number]
        extras = {_IDS: self._batches[index], _HANDED: handed}
        return self._output(number, call, states, extras)

    def finished(self, ids: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """What the rest of the body makes of the last layer's output."""
        last = self.n_layers - 1

        def stand_in(number: int, inputs: torch.Tensor, *_: Any, **__: Any) -> Any:
            return self._returned(states if number == last else inputs)

        with replace_layers(stand_in, embeds=False):
            return final_states(self._model, ids)

    def _output(
        self, number: int, call: _Call, states: torch.Tensor, extras: dict[str, Any]
    ) -> tuple[torch.Tensor, Handed]:
        """The states, and what is handed on beside them."""
        block = self._blocks[number]
        args, options = call
        stream = stream_of(block)
        device = next(block.parameters()).device if stream is None else stream.device
        extras = {k: _on(device, extras[k]) for k in options.keys() & extras.keys()}
        output = block(states.to(device), *args, **options | extras)
        return _states_in(output), output[1] if self.hands_on else None

    @functools.cached_property
    def hands_on(self) -> bool:
        """Whether layers return what the next one takes beside the states."""
        forward = type(self._blocks[0]).forward
        return _HANDED in inspect.signature(forward).parameters

    def _returned(self, states: torch.Tensor) -> Any:
        """What a layer with these states returns if it is not run."""
        return (states, None) if self.hands_on else states

    # --- how the model calls its layers -------------------------------------------

    def _recorded(
        self, batches: Sequence[torch.Tensor]
    ) -> dict[tuple[int, ...], list[_Call]]:
        """The arguments of every layer other than the states, by shape of the batch.

        With the first window it is checked that layers run one by one give the states
        of the model, and that their arguments do not depend on states; if not, each
        shape takes forward passes of the model.

        Raises:
            LayoutError: they depend on more than the shape, or give other results.
        """
        if stream_of(self._model) is not None:
            return self._by_shape(batches, self._without_layers)
        window, forwards = batches[0][:1], [block.forward for block in self._blocks]
        called, states, last = self._record(window, forwards)
        handed = None
        for number, call in enumerate(called):
            extras = {_IDS: window, _HANDED: handed}
            states, handed = self._output(number, call, states, extras)
        if not torch.equal(states, _states_in(last)):
            raise LayoutError(
                "decoder layers run one by one give other states than the model"
            )
        alone = isinstance(last, torch.Tensor) or self.hands_on
        if alone and self._same_without(window, called):
            return self._by_shape(batches, self._without_layers)
        return self._by_shape(batches, lambda ids: self._record(ids, forwards)[0])

    def _same_without(self, window: torch.Tensor, called: list[_Call]) -> bool:
        """Whether layers get the same arguments if none is run."""
        try:
            return _same(called, self._without_layers(window))
        except LayoutError:
            return False

    def _by_shape(
        self,
        batches: Sequence[torch.Tensor],
        record: Callable[[torch.Tensor], list[_Call]],
    ) -> dict[tuple[int, ...], list[_Call]]:
        """What `record` finds for each shape.

        Raises:
            LayoutError: it finds other arguments for another batch of the same shape.
        """
        calls: dict[tuple[int, ...], list[_Call]] = {}
        checked: set[tuple[int, ...]] = set()
        for ids, shape in zip(batches, self._shapes, strict=True):
            if shape in checked:
                continue
            layer_calls = record(ids)
            if shape in calls:
                checked.add(shape)
            if not _same(calls.setdefault(shape, layer_calls), layer_calls):
                raise LayoutError(
                    "the arguments of decoder layers differ between two batches of one "
                    f"shape, {shape}, so layers cannot be run one by one"
                )
        return calls

    def _without_layers(self, ids: torch.Tensor) -> list[_Call]:
        """Arguments of each layer, none of which is run: each returns its states.

        Raises:
            LayoutError: layers hand on more than hidden states, or are not called once
                each, in order.
            HeaprLabError: a file changed.
        """

        def unchanged(states: torch.Tensor, *_args: Any, **_options: Any) -> Any:
            return self._returned(states)

        try:
            return self._record(ids, [unchanged] * self.n_layers, RuntimeError)[0]
        except HeaprLabError:  # of a file
            raise
        except (TypeError, ValueError, RuntimeError, LookupError) as error:
            raise LayoutError(
                f"decoder layers of {type(self._model).__name__} hand on more than "
                f"hidden states ({error}), so they cannot be streamed: load the model "
                "with stream=False"
            ) from error

    def _record(
        self,
        ids: torch.Tensor,
        run: Sequence[Callable[..., Any]],
        error: type[Exception] = LayoutError,
    ) -> tuple[list[_Call], torch.Tensor, Any]:
        """Arguments of each layer, the first one's input and what the last returned.

        Args:
            ids: (B, L).
            run: for each layer, what is called in its place.
            error: raised unless layers are called once each, in order, states first.
        """
        calls: list[_Call] = []
        inputs: list[torch.Tensor] = []
        outputs: list[Any] = []

        def note(number: int, /, *args: Any, **options: Any) -> Any:
            if number != len(calls):
                raise error("decoder layers are not run once each, in order")
            if not args:
                raise error("decoder layers get their states by keyword")
            calls.append((args[1:], _of_shape(options)))
            inputs.append(args[0])
            outputs.append(run[number](*args, **options))
            return outputs[-1]

        with self._replaced(note):
            final_states(self._model, ids)
        if len(calls) != self.n_layers:
            raise error(f"{len(calls)} of {self.n_layers} decoder layers took part")
        return calls, inputs[0], outputs[-1]

    def _first_input(self, ids: torch.Tensor) -> torch.Tensor:
        inputs: list[torch.Tensor] = []

        def reached(_number: int, states: torch.Tensor, /, *_: Any, **__: Any) -> Any:
            inputs.append(states)
            raise _ReachedFirstLayerError

        with contextlib.suppress(_ReachedFirstLayerError), self._replaced(reached):
            final_states(self._model, ids)
        return inputs[0]

    @contextlib.contextmanager
    def _replaced(self, instead: Callable[..., Any]) -> Iterator[None]:
        """A context in which `instead` is called in place of layers.

        It gets the number of the layer, and its arguments.
        """
        if stream_of(self._model) is not None:
            with replace_layers(instead):
                yield
            return
        forwards = [block.__dict__.get("forward") for block in self._blocks]
        with exchanging(self._model):  # other threads would call `instead`, too
            try:
                for number, block in enumerate(self._blocks):
                    block.__dict__["forward"] = functools.partial(instead, number)
                yield
            finally:
                for block, forward in zip(self._blocks, forwards, strict=True):
                    del block.forward
                    if forward is not None:
                        block.forward = forward


def _states_in(returned: Any) -> torch.Tensor:
    """The states among what a decoder layer returned."""
    states: torch.Tensor = returned[0] if isinstance(returned, tuple) else returned
    return states


def _on(device: torch.device, tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.to(device)


def _of_shape(options: dict[str, Any]) -> dict[str, Any]:
    """Arguments without what is of a batch itself, of which the names are kept."""
    return options | dict.fromkeys(options.keys() & {_IDS, _HANDED})


def _same(calls: Any, others: Any) -> bool:
    """Whether arguments are equal, including the values of tensors."""
    if isinstance(calls, torch.Tensor):
        return isinstance(others, torch.Tensor) and torch.equal(calls, others)
    if isinstance(calls, dict):
        keys = calls.keys() == others.keys()
        return keys and all(_same(value, others[key]) for key, value in calls.items())
    if isinstance(calls, list | tuple):
        pairs = zip(calls, others, strict=False)
        return len(calls) == len(others) and all(_same(a, b) for a, b in pairs)
    return calls is others or bool(calls == others)
