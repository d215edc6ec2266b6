"""The gradients of a streamed model's layers: one sweep forward, one sweep back.

Forward, each decoder layer runs on all batches and its inputs are kept. The loss gives
the gradient of the last states. Back, each layer runs again on its inputs, with
gradients, and hands the gradient of its input to the layer before it: two forward
passes and one backward pass, with one layer in memory, whose weights are read twice.

As many windows as there is room for go through both together, and are done then, as
those of a pass in memory are. What is kept in between (the output of every layer, the
indices of its top-k, then the gradient and the moments) goes to a store, with which
another process can go on.

Scores that are computed again may differ in the last bit, and then a top-k sends a
token to another expert. So the second sweep takes the indices that the first one chose,
and the tokens of each expert are compared.

Shapes: B windows, L tokens in each; E n_experts, I d_inter.
"""

import contextlib
import functools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, Protocol

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from heapr_lab.errors import CoverageError
from heapr_lab.models.backend import Gradient, GradientPass
from heapr_lab.models.hooks import called
from heapr_lab.models.likelihood import input_device
from heapr_lab.progress import Progress, noted
from heapr_lab.streaming.layerwise import Handed, LayerByLayer
from heapr_lab.streaming.plan import EXTRA_STATES, state_bytes, state_of
from heapr_lab.streaming.stream import OUTSIDE, Stream
from heapr_lab.streaming.sweep_store import Group, SweepStore, budget_of, opened

_TOP_K = (torch.topk, torch.Tensor.topk)
_Choices = list[torch.Tensor]
_TOKENS, _STATES, _HANDED, _CHOICE = "tokens", "states", "handed", "choice."
_VERSION = 2
"""Increased whenever what is kept in between changes."""


def streamed_pass(model: Any, stream: Stream, run: GradientPass) -> None:
    """Measure every window that is not done.

    Raises:
        SpecError: there is no room for one window.
        CacheError: the state belongs to another pass, or is damaged.
        HeaprLabError: a file cannot be written.
    """
    if run.done == len(run.ids):
        return
    folder = None if run.state is None else run.state.with_suffix(".sweeps")
    key = {"pass": run.key, "batch_size": run.batch_size, "version": _VERSION}
    with opened(folder, key, budget=budget_of(stream)) as store:
        size = _windows_at_once(model, stream, run, store)
        while run.done < len(run.ids):
            windows = slice(run.done, min(run.done + size, len(run.ids)))
            store.begin(f"from-{windows.start}")
            sweeps = TwoSweeps(model, stream, run, windows, store)
            sweeps.forward()
            sweeps.backward()
            run.finish(windows.stop, save=True)
            store.drop("")


def _windows_at_once(
    model: Any, stream: Stream, run: GradientPass, store: SweepStore
) -> int:
    """How many windows go through both sweeps together.

    Raises:
        SpecError: there is no room for one.
    """
    store.begin("all")
    if "windows" in store:  # the room for them is taken already
        return int(store.get("windows")["at_once"])
    n_groups = len(stream.blocks) + EXTRA_STATES
    size = fitting_windows(
        len(run.ids),
        n_bytes=run.ids.shape[1] * token_bytes(model, stream.dtype) * n_groups,
        batch_size=run.batch_size,
        store=store,
    )
    store.put("windows", {"at_once": torch.tensor(size)})
    return size


def token_bytes(model: Any, dtype: torch.dtype) -> int:
    """Bytes of what is kept of a token between two layers, at most."""
    return state_bytes(state_of(model.config), dtype.itemsize)


def fitting_windows(
    n_windows: int, *, n_bytes: int, batch_size: int, store: SweepStore
) -> int:
    """How many windows' states there is room for: whole batches where possible.

    Args:
        n_windows: the largest result.
        n_bytes: of the states of one window.
        batch_size: windows in a batch.
        store: of the states, which is empty.

    Raises:
        SpecError: there is none for one window.
    """
    remedy = "take shorter windows (seq_len)"
    store.check_room(n_bytes, what="the states of one window", remedy=remedy)
    fit = sum(store.room) // n_bytes
    if fit >= n_windows:
        return n_windows
    return max(fit // batch_size * batch_size, min(fit, batch_size))


# --- the sweeps -------------------------------------------------------------------


class Trained(Protocol):
    """What takes the gradients of weights."""

    def weights(self, number: int) -> dict[str, nn.Parameter]:
        """Those of a part that is in memory, whose gradients it takes."""

    def take(self, number: int, gradients: dict[str, torch.Tensor]) -> None:
        """Their gradients, summed over all batches."""


def weight_gradients(
    stream: Stream,
    ids: torch.Tensor,
    batch_size: int,
    gradient: Gradient,
    trained: Trained,
    store: SweepStore,
    progress: Progress,
) -> None:
    """Two sweeps with windows of tokens (n_windows, L), for gradients of weights.

    Args:
        stream: what reads the layers.
        ids: the windows.
        batch_size: windows that are run together.
        gradient: that of the loss by the final states of some windows.
        trained: takes the gradients, a part at a time.
        store: for what is kept in between, which is dropped before and after.
        progress: called with (windows done, windows in all).
    """

    def loss(windows: slice, states: torch.Tensor) -> torch.Tensor:
        return (states * gradient(windows, states)).sum()

    run: Any = SimpleNamespace(ids=ids, batch_size=batch_size, loss=loss)
    run.layers, run.probes, run.progress = (), {}, progress
    store.drop("")  # of a call that was cut off
    with stream.lock:
        windows, model = slice(0, len(ids)), stream.model
        sweeps = TwoSweeps(model, stream, run, windows, store, trained)
        sweeps.forward()
        sweeps.backward()
    store.drop("")


class TwoSweeps:
    """A pass over all batches, in which the probe of a layer sees each batch once."""

    def __init__(
        self,
        model: nn.Module,
        stream: Stream,
        run: GradientPass,
        windows: slice,
        store: SweepStore,
        trained: Trained | None = None,
    ) -> None:
        """Nothing but the embeddings is run.

        Args:
            model: a streamed model, without gradients of its parameters.
            stream: what reads its layers.
            run: the pass.
            windows: those of it that go through both sweeps here.
            store: for these windows, of which it may have a part.
            trained: takes the gradients of weights, a part at a time.

        Raises:
            LayoutError: the layers cannot be run one by one.
        """
        self._pass, self._store, self._stream = run, store, stream
        self._trained = trained
        self._weights: dict[str, nn.Parameter] = {}
        self._gradients: dict[str, torch.Tensor] = {}
        self._device, self._n_steps = input_device(model), 0
        self.windows = [
            slice(start, min(start + run.batch_size, windows.stop))
            for start in range(windows.start, windows.stop, run.batch_size)
        ]
        """The windows of each batch."""
        # Clones are no inference tensors, even if the ids are.
        self._batches = [run.ids[w].clone().to(self._device) for w in self.windows]
        with torch.no_grad():
            self._walk = LayerByLayer(model, self._batches)
        self._layers = {layer.layer: layer for layer in run.layers}

    @torch.no_grad()
    def forward(self) -> None:
        """Run every layer.

        Raises:
            LayoutError: a weight is not finite.
        """
        for index, states in enumerate(self._walk.states):
            self._store.put(_out(-1, index), {_STATES: states})
        self._walk.states = []
        for number in range(self._walk.n_layers):
            self._run(number)

    def _step(self, sweep: int, number: int) -> None:
        """Report that a batch went through a layer."""
        run, n_layers = self._pass, self._walk.n_layers
        noted(
            run.progress,
            f"sweep {sweep} of 2, layer {number + 1} of {n_layers}, "
            f"{self._stream.n_bytes_read / 1e9:.1f} GB read",
        )
        self._n_steps += 1
        first, stop = self.windows[0].start, self.windows[-1].stop
        n_steps = 2 * n_layers * len(self.windows)
        done = first + (stop - first) * self._n_steps // n_steps
        run.progress(done, len(run.ids))

    def _run(self, number: int) -> None:
        """Run a layer, unless it has been run."""
        name = f"layer-{number}"
        if name in self._store:
            for _ in self._batches:
                self._step(1, number)
            return
        counts: Group = {}
        with contextlib.ExitStack() as watched:
            if number in self._layers:
                self._pass.weighed(number)
                layer = self._layers[number]
                counts[_TOKENS] = torch.zeros(layer.n_experts, dtype=torch.long)
                count = functools.partial(_count, counts[_TOKENS])
                watched.enter_context(called([layer], [count]))
            for index in range(len(self._batches)):
                self._run_batch(number, index)
                self._step(1, number)
        self._store.put(name, counts)

    def _run_batch(self, number: int, index: int) -> None:
        choices: _Choices = []
        with _Noted(choices):
            out, handed = self._walk.output(number, index, *self._input(number, index))
        group = {f"{_CHOICE}{n:03d}": choice for n, choice in enumerate(choices)}
        if handed is not None:
            group[_HANDED] = handed
        self._store.put(_out(number, index), {_STATES: out} | group)

    def backward(self) -> None:
        """Go back through every layer.

        Raises:
            CoverageError: an expert has not as many tokens as in the first sweep.
        """
        last = self._walk.n_layers - 1
        if f"back-{last}" not in self._store:
            with self._collecting(OUTSIDE):
                self._of_loss()
        for number in range(last, -1, -1):
            if f"back-{number}" in self._store:
                self._recall(number)
            else:
                self._stream.fill(number)
                with self._collecting(number):
                    self._back(number)

    def _recall(self, number: int) -> None:
        """Take over what an earlier process measured in a layer."""
        if number in self._pass.probes:
            moments = self._store.get(f"back-{number}")
            self._pass.probes[number].load_state(dict(moments))
        for _ in self._batches:
            self._step(2, number)

    def _back(self, number: int) -> None:
        """Go back through one layer, and keep what was measured."""
        probe = self._pass.probes.get(number)
        if probe is not None:
            self._pass.weighed(number)
            before = probe.tokens.clone()
        for index in range(len(self._batches)):
            self._back_batch(number, index)
            self._step(2, number)
            if probe is not None:
                self._pass.check(number, self.windows[index])
        if probe is not None:
            self._check_tokens(number, probe.tokens - before)
        state = {} if probe is None else probe.state()
        self._store.put(f"back-{number}", state)
        self._store.drop(f"grad-{number + 1}-")  # after what makes it needless
        self._store.drop(f"out-{number}-")

    def _check_tokens(self, number: int, again: torch.Tensor) -> None:
        """Check that each expert of a layer had as many tokens in both sweeps.

        Raises:
            CoverageError: it had not.
        """
        first = self._store.get(f"layer-{number}")[_TOKENS]
        if not torch.equal(first, again.long().cpu()):
            raise CoverageError(
                f"{self._layers[number].name} routed other tokens in the second sweep "
                "than in the first one, so its gradients would be of another function; "
                "load the model with stream=False, or in float32"
            )

    def _back_batch(self, number: int, index: int) -> None:
        kept = self._store.get(_out(number, index))
        choices = [kept[name] for name in sorted(kept) if name.startswith(_CHOICE)]
        states, handed = self._input(number, index)
        states = states.to(self._device).requires_grad_()
        with _Replayed(choices):
            output, _ = self._walk.output(number, index, states, handed)
        gradient = self._store.get(f"grad-{number + 1}-{index}")[_STATES]
        before = self._input_grad(output, states, gradient.to(output.device))
        self._store.put(f"grad-{number}-{index}", {_STATES: before})

    @contextlib.contextmanager
    def _collecting(self, number: int) -> Iterator[None]:
        """The gradients of a part's trained weights are summed here, and then taken."""
        if self._trained is None:
            yield
            return
        self._weights, self._gradients = self._trained.weights(number), {}
        for weight in self._weights.values():
            weight.requires_grad_()
        yield
        self._trained.take(number, self._gradients)

    def _input_grad(
        self,
        output: torch.Tensor,
        states: torch.Tensor,
        gradient: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The gradient of what a batch came with, from that of its output.

        Those of trained weights are summed.
        """
        # What was read for the loss may have made none of the model require any.
        weights = [weight.requires_grad_() for weight in self._weights.values()]
        before, *gradients = torch.autograd.grad(
            output, [states, *weights], gradient, allow_unused=True
        )
        for name, more in zip(self._weights, gradients, strict=True):
            if more is not None:
                known = self._gradients.get(name)
                self._gradients[name] = more if known is None else known + more
        return before

    def _input(self, number: int, index: int) -> tuple[torch.Tensor, Handed]:
        """The states with which a batch comes to a layer, and what came beside them."""
        group = self._store.get(_out(number - 1, index))
        return group[_STATES], group.get(_HANDED)

    def _of_loss(self) -> None:
        """Keep the gradient of the loss with respect to each batch's last states."""
        last = self._walk.n_layers
        for index, ids in enumerate(self._batches):
            states, _ = self._input(last, index)
            leaf = states.to(self._device).detach().requires_grad_()
            finals = self._walk.finished(ids, leaf)
            loss = self._pass.loss(self.windows[index], finals)
            gradient = self._input_grad(loss, leaf)
            self._store.put(f"grad-{last}-{index}", {_STATES: gradient})


def _out(number: int, index: int) -> str:
    return f"out-{number}-{index}"


def _count(tokens: torch.Tensor, _: Any, top_k_index: torch.Tensor, *__: Any) -> None:
    """Add the tokens of each expert."""
    tokens += torch.bincount(top_k_index.flatten().cpu(), minlength=len(tokens))


class _Noted(TorchFunctionMode):
    """Notes the indices of every top-k."""

    def __init__(self, choices: _Choices) -> None:
        super().__init__()
        self._choices = choices

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        if func in _TOP_K:
            self._choices.append(output.indices.to(torch.int32).cpu())
        return output


class _Replayed(TorchFunctionMode):
    """Takes the noted indices in every top-k, and the new scores at these indices."""

    def __init__(self, choices: _Choices) -> None:
        super().__init__()
        self._choices = iter(choices)

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func not in _TOP_K:
            return func(*args, **(kwargs or {}))
        given = dict(zip(("input", "k", "dim"), args, strict=False)) | (kwargs or {})
        scores, dim = given["input"], given.get("dim", -1)
        indices = next(self._choices).to(scores.device, torch.int64)
        return torch.return_types.topk((scores.gather(dim, indices), indices))
