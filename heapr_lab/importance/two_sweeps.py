"""The gradients of a streamed model's layers: one sweep forward, one sweep back.

Forward, each decoder layer runs on all batches and its inputs are kept. The loss gives
the gradient of the last states. Back, each layer runs again on its inputs, with
gradients, and hands the gradient of its input to the layer before it: two forward
passes and one backward pass, with one layer in memory, whose weights are read twice.

Scores that are computed again may differ in the last bit, and then a top-k sends a
token to another expert. So the second sweep takes the indices that the first one chose,
and the tokens of each expert are compared.

Shapes: B windows, L tokens in each; E n_experts, I d_inter.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from heapr_lab.errors import CoverageError
from heapr_lab.models.experts import ExpertsLayer, refuse_broken
from heapr_lab.models.hooks import Probe, counting
from heapr_lab.models.layerwise import LayerByLayer
from heapr_lab.models.likelihood import input_device, sampled_targets, token_nll

_TOP_K = (torch.topk, torch.Tensor.topk)
_Choices = list[torch.Tensor]


class TwoSweeps:
    """A pass over all batches, in which the probe of a layer sees each batch once."""

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[ExpertsLayer],
        batches: Sequence[torch.Tensor],
        *,
        sampled: bool,
        step: Callable[[], None],
    ) -> None:
        """Nothing but the embeddings is run.

        Args:
            model: a streamed model, without gradients of its parameters.
            layers: all of its MoE layers.
            batches: token ids, each (B, L).
            sampled: whether the next tokens are drawn from the model's predictions.
            step: called after each batch of each layer, in both sweeps.

        Raises:
            LayoutError: the layers cannot be run one by one.
        """
        self._model, self._step, self._sampled = model, step, sampled
        self._device = input_device(model)
        # Clones are no inference tensors, even if the ids are.
        self._batches = [ids.clone().to(self._device) for ids in batches]
        self._layers = {layer.layer: layer for layer in layers}
        with torch.no_grad():
            self._walk = LayerByLayer(model, self._batches, layers)
        self._inputs: list[list[torch.Tensor]] = []
        self._choices: list[list[_Choices]] = []
        self._tokens = {layer.layer: _Tokens(layer) for layer in layers}

    @property
    def n_steps(self) -> int:
        """How often `step` is called."""
        return 2 * self._walk.n_layers * len(self._batches)

    @torch.no_grad()
    def forward(self) -> dict[int, dict[str, torch.Tensor]]:
        """Run every layer; returns the squared norms of its atoms' weights.

        Raises:
            LayoutError: a weight is not finite.
        """
        norms = {}
        for number in range(self._walk.n_layers):
            if number in self._layers:
                norms[number] = refuse_broken(self._layers[number])
            # The states of a batch are replaced, not overwritten.
            self._inputs.append([states.cpu() for states in self._walk.states])
            self._choices.append([])
            for index, states in enumerate(self._walk.states):
                choices: _Choices = []
                with _Noted(choices), self._counted(number):
                    self._walk.states[index] = self._walk.output(number, index, states)
                self._choices[-1].append(choices)
                self._step()
        return norms

    def backward(self, probes: dict[int, Probe]) -> Iterator[tuple[int, int]]:
        """Go back through every layer.

        Yields the numbers of the MoE layer and of the batch after each step.

        Raises:
            CoverageError: an expert has not as many tokens as in the first sweep.
        """
        gradients = self._of_loss()
        for number in reversed(range(self._walk.n_layers)):
            inputs, choices = self._inputs.pop(), self._choices.pop()
            for index, gradient in enumerate(gradients):
                states = inputs[index].to(self._device).requires_grad_()
                with _Replayed(choices[index]):
                    found = self._walk.output(number, index, states)
                (gradients[index],) = torch.autograd.grad(found, states, gradient)
                self._step()
                if number in self._layers:
                    yield number, index
            if number in self._layers:
                self._tokens[number].check(probes[number])

    def _counted(self, number: int) -> contextlib.AbstractContextManager[None]:
        found = self._tokens.get(number)
        return contextlib.nullcontext() if found is None else found.counted()

    def _of_loss(self) -> list[torch.Tensor]:
        """The gradient of the loss with respect to each batch's last states."""
        gradients: list[torch.Tensor] = []
        done = 0
        for ids, states in zip(self._batches, self._walk.states, strict=True):
            targets = self._drawn(ids, states, done) if self._sampled else None
            leaf = states.detach().requires_grad_()
            finals = self._walk.finished(ids, leaf)
            nll = token_nll(self._model, ids, targets=targets, states=finals)
            gradients += torch.autograd.grad(nll.sum(), leaf)
            done += len(ids)
        return gradients

    @torch.no_grad()
    def _drawn(
        self, ids: torch.Tensor, states: torch.Tensor, done: int
    ) -> torch.Tensor:
        """Next tokens drawn from the predictions, with the seeds of the windows."""
        finals = self._walk.finished(ids, states)
        seeds = range(done, done + len(ids))
        return sampled_targets(self._model, ids, seeds=seeds, states=finals)


class _Tokens:
    """The tokens that a layer routes to each expert."""

    def __init__(self, layer: ExpertsLayer) -> None:
        self._layer = layer
        self._seen = torch.zeros(layer.n_experts, dtype=torch.long)

    def counted(self) -> contextlib.AbstractContextManager[None]:
        """Count what is routed inside."""
        return counting(self._layer, self._count)

    def _count(self, top_k_index: torch.Tensor) -> None:
        chosen = top_k_index.flatten().cpu()
        self._seen += torch.bincount(chosen, minlength=self._layer.n_experts)

    def check(self, probe: Probe) -> None:
        """Check that the probe of the layer has seen as many.

        Raises:
            CoverageError: it has not.
        """
        again = probe.moments.experts["tokens"].long().cpu()
        if not torch.equal(self._seen, again):
            raise CoverageError(
                f"{self._layer.name} routed other tokens in the second sweep than in "
                "the first one, so its gradients would be of another function; load "
                "the model with stream=False, or in float32"
            )


class _Noted(TorchFunctionMode):
    """Notes the indices of every top-k."""

    def __init__(self, choices: _Choices) -> None:
        super().__init__()
        self._choices = choices

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        if func in _TOP_K:
            self._choices.append(found.indices.to(torch.int32).cpu())
        return found


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
