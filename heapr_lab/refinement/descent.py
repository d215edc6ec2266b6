"""Move W_down by a few steps towards the predictions of the dense model.

Least squares make up for what is removed within each layer. What they leave adds up
from layer to layer, and only the whole model shows what it does to the predictions. So
W_down takes steps down the gradient of KL(p ‖ q), with p the prediction of the dense
model and q that of the pruned one; the text itself is not learned. The steps are those
of Adafactor, which are relative to the size of the weights, and whose second moments
are a row and a column of each matrix.

Source: this project; N. Shazeer and M. Stern, Adafactor, 2018 (arXiv:1804.04235).

Shapes: E n_experts, D d_expert, I d_inter.
"""

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from heapr_lab.models.backend import backend_of
from heapr_lab.models.experts import find_experts
from heapr_lab.models.likelihood import final_states, states_of_all
from heapr_lab.models.memory import in_batches
from heapr_lab.models.modes import differentiating, evaluating
from heapr_lab.progress import Parts, Progress
from heapr_lab.pruning.masks import KeepMask
from heapr_lab.pruning.surgery import ReplacedDownProj, masking
from heapr_lab.refinement.activation_grams import ByLayer, by_layer, layer_store
from heapr_lab.refinement.healing import loss_and_gradient
from heapr_lab.text.calibration import CalibrationSet
from heapr_lab.text.calibration_spec import spread

N_STEPS = 4
RATE = 1e-2
"""Of the first step, relative to the root mean square of a layer's W_down, at most."""
AT_MOST_FROM = 0.25
"""The KL [nats per token] from which on that is the rate; below it is in proportion."""
_TIMES = 2**13
"""By which gradients are multiplied, as Adafactor has a bound below which all are as
large, and float16 one below which they are 0. Steps do not depend on it otherwise."""
FEWEST_TOKENS, MOST_TOKENS = 2**15, 2**14
"""Of the text that is fitted to, of less of which they gain little; and of all steps,
as more would take their time on any longer text."""


@torch.inference_mode(False)
def descended(
    model: nn.Module,
    keep: KeepMask,
    down_projs: ReplacedDownProj,
    windows: CalibrationSet,
    progress: Progress | None = None,
) -> ByLayer:
    """W_down after the steps, in the model's dtype.

    The cost is a forward pass of the dense model, and a forward and a backward pass of
    the masked one, over at most 16,384 tokens or, if these are longer, four windows;
    new weights and their gradients are in memory, those of a streamed model where the
    states of its passes are.

    Args:
        model: the dense model, which is not changed.
        keep: the kept atoms.
        down_projs: W_down by layer, (E, D, I), before; 0 for atoms that are removed.
        windows: the text, of which `n_windows` are used, each once.
        progress: called with (windows done, windows in all).

    Raises:
        SpecError: there is no room for the new weights of a streamed model.
        HeaprLabError: there is not enough memory for one window.
    """
    n = n_windows(windows)
    ids = windows.ids[spread(windows.n_sequences, n)]
    n_steps = min(N_STEPS, n)
    steps = [ids[first::n_steps] for first in range(n_steps)]
    with evaluating(model):
        goals = [states.cpu() for states in states_of_all(model, steps)]
    parts, trained = Parts(n, progress), _Weights(model, down_projs)
    rate = 0.0
    for done, (step, goal) in enumerate(zip(steps, goals, strict=True)):
        with masking(model, keep, trained), differentiating(model):
            apart = trained.measure(step, goal, parts.part(len(step)))
        rate = rate or RATE * min(1.0, apart / AT_MOST_FROM)
        trained.move(rate * (1 - done / n_steps))
    return trained.down


def n_windows(windows: CalibrationSet) -> int:
    """How many of the windows the steps take; none if there are too few tokens."""
    if windows.ids.numel() < FEWEST_TOKENS:
        return 0
    most = max(N_STEPS, MOST_TOKENS // windows.seq_len)
    return min(windows.n_sequences, most)


class _Weights(Mapping[int, torch.Tensor]):
    """W_down of each layer, as `masking` reads it, and the gradients of one step.

    In memory all are leaves of one graph. Of a streamed model one is at a time; the
    protocol is then `heapr_lab.streaming.two_sweeps.Trained`.
    """

    def __init__(self, model: nn.Module, down_projs: ReplacedDownProj) -> None:
        self._model, self._layers = model, {e.layer: e for e in find_experts(model)}
        store = layer_store(model, [*self._layers.values()], span=None, copies=2)
        self.down, self._gradients = by_layer(store, "down"), by_layer(store, "grad")
        for number, down in down_projs.items():
            self.down[number] = down.detach().clone()
        self._streamed = store is not None
        self._leaves: dict[int, torch.Tensor] = {}
        self._moments: dict[int, dict[str, torch.Tensor]] = {}

    def __getitem__(self, number: int) -> torch.Tensor:
        if number not in self._leaves:
            if self._streamed:
                self._leaves.clear()
            layer = self._layers[number]
            down = self.down[number].to(layer.device, layer.dtype)
            self._leaves[number] = down.detach().requires_grad_()
        return self._leaves[number]

    def __iter__(self) -> Iterator[int]:
        return iter(self.down)

    def __len__(self) -> int:
        return len(self.down)

    def weights(self, number: int) -> dict[str, Any]:
        """W_down of a part of a streamed model, if it has any."""
        return {"": self[number]} if number in self.down else {}

    def take(self, number: int, gradients: dict[str, torch.Tensor]) -> None:
        """Keep the gradient of a streamed part."""
        for gradient in gradients.values():
            self._gradients[number] = gradient

    def measure(
        self, ids: torch.Tensor, goals: torch.Tensor, progress: Progress
    ) -> float:
        """The mean KL on windows of tokens (n_windows, L), whose gradients are kept."""
        model, n_targets, total = self._model, ids.numel() - len(ids), 0.0

        def gradient(windows: slice, states: torch.Tensor) -> torch.Tensor:
            nonlocal total
            goal = goals[windows]
            more, by_states = loss_and_gradient(model, model, None, states, goal, 1)
            total += more / n_targets
            return by_states * (_TIMES / n_targets)

        def run(batch_size: int) -> None:
            nonlocal total
            total = 0.0
            for leaf in self._leaves.values():
                leaf.grad = None  # of a batch that was too large
            states = functools.partial(final_states, model)
            backend_of(model).weight_gradients(
                model, ids, batch_size, states, gradient, self, progress
            )

        in_batches(run, model, ids, None)
        return total

    def move(self, rate: float) -> None:
        """Take a step, but in layers whose gradients overflowed in the model's type."""
        for number in self.down:
            down = self.down[number]
            wide = torch.promote_types(down.dtype, torch.float32)
            weight = nn.Parameter(down.to(wide, copy=True))
            if self._streamed:
                gradient: Any = self._gradients[number]
            else:
                gradient = self._leaves[number].grad
            if not gradient.isfinite().all():
                continue
            weight.grad = gradient.to(weight)
            optimizer = torch.optim.Adafactor([weight], lr=rate, eps=(None, 0.0))
            optimizer.state[weight].update(self._moments.get(number, {}))
            optimizer.step()
            self._moments[number] = dict(optimizer.state[weight])
            self.down[number] = weight.detach().to(down)
        self._leaves.clear()
