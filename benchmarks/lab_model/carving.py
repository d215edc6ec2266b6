"""Carve dense feed-forward layers into shared neurons and routed experts, untrained.

What a neuron k adds to the output for a token t has the energy
a[t, k] = (h_k(x_t)·‖w_down,k‖)². Neurons that are active for the same tokens go into
the same expert, and a router that is linear in x, fitted in closed form, predicts which
experts have the energy. Routers and experts are fitted in turns, as in the EM
algorithm.

Source: MoEfication (2110.01786) and CMoE (2502.04416) carve by activations as well; the
ridge router on log energies and the balanced assignment are our own.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.lab_model.carved_ffn import Carving, GatedFfn
from heapr_lab.errors import SpecError
from heapr_lab.pretrained.carved import Layout
from heapr_lab.progress import Progress, no_report

_N_ROUNDS = 5
_N_CLUSTERINGS = 4
_CLUSTERED_TOKENS = 3072
_N_PRICES = 300
_PRICE_DECAY = 0.95
_RIDGE = 1e-2
_LOGIT_STD = 0.1
"""Gates are 2·σ(z): with this standard deviation of z they are near 1."""


def carve(
    model: Any,
    ids: torch.Tensor,
    layout: Layout,
    *,
    seed: int = 0,
    progress: Progress | None = None,
) -> list[Carving]:
    """Divide every feed-forward layer of `model`, whose `mlp` are `GatedFfn`.

    Args:
        model: a decoder with `model.layers`, which is not changed.
        ids: windows of tokens, (n_windows, seq_len).
        layout: the division, the same in all layers.
        seed: seed of the first centres of the clusters.
        progress: called with the layers done.

    Raises:
        SpecError: the layout has another number of neurons than the layers.
    """
    report = progress or no_report
    carvings: list[Carving] = []
    layers = model.model.layers
    for layer, tokens in zip(layers, _captured(model, ids), strict=True):
        ffn = layer.mlp
        d_ff = ffn.down_proj.shape[1]
        if layout.d_ff != d_ff:
            raise SpecError(
                f"layout {layout.name} has {layout.d_ff} neurons, the layers {d_ff}"
            )
        carvings.append(_carve_layer(ffn, *tokens, layout, seed))
        report(len(carvings), len(layers))
    return carvings


@torch.no_grad()
def _captured(
    model: Any, ids: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """What enters the ffn of each layer, (n, d_model), and the weight of each token.

    A token counts by 1/‖residual stream‖², because a few tokens with massive
    activations, which no later layer reads at that size, would outweigh all others.
    """
    inputs: list[list[torch.Tensor]] = [[] for _ in model.model.layers]
    weights: list[list[torch.Tensor]] = [[] for _ in model.model.layers]
    handles = []
    for index, layer in enumerate(model.model.layers):
        handles += [
            layer.mlp.register_forward_pre_hook(
                lambda _m, args, rows=inputs[index]: rows.append(args[0].flatten(0, 1))
            ),
            layer.register_forward_hook(
                lambda _m, _a, out, rows=weights[index]: rows.append(
                    1 / out.flatten(0, 1).square().sum(-1)
                )
            ),
        ]
    try:
        for batch in ids.split(4):
            model.model(input_ids=batch, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    for rows, weight in zip(inputs, weights, strict=True):
        joined = torch.cat(weight)
        yield torch.cat(rows), joined / joined.mean()
        rows.clear()


@torch.no_grad()
def _carve_layer(
    ffn: GatedFfn, x: torch.Tensor, weights: torch.Tensor, layout: Layout, seed: int
) -> Carving:
    """Divide one layer by what its neurons do for the tokens x, (n, d_model).

    Neurons that make massive activations belong to the shared part, although weighted
    tokens hide them: gates would scale what all later layers rely on.
    """
    generator = torch.Generator().manual_seed(seed)
    some = torch.randperm(len(x), generator=generator)[:_CLUSTERED_TOKENS]
    energy = ffn.energies(x).float()  # (n, d_ff)
    peaks = energy.sum(0) / energy.sum()
    energy *= weights[:, None].float()
    shared = torch.maximum(peaks, energy.sum(0) / energy.sum())
    x = x.float()
    few, few_x = energy[some], x[some]
    parts = _clustered(few, shared, layout, generator)
    ridge = _Ridge(few_x)
    for _ in range(_N_ROUNDS):
        router, intercept = ridge.fit(_log_energies(few, parts, layout))
        chosen = _membership(few_x @ router.T + intercept, layout.top_k)
        gain = torch.cat([torch.ones(len(some), 1), chosen], 1).T @ few
        parts = _assigned(gain.T, _sizes(layout))
    router, intercept = _Ridge(x).fit(_log_energies(energy, parts, layout))
    scale = _LOGIT_STD / float((x @ router.T).std())
    router, intercept = router * scale, intercept * scale
    # A logit is a quarter of its change of the sigmoid, which experts are chosen by.
    bias = (intercept - intercept.mean()) / 4
    chosen = _membership((x @ router.T).sigmoid() + bias, layout.top_k)
    by_part = energy @ _one_hot(parts, layout)
    kept = by_part[:, 0].sum() + (by_part[:, 1:] * chosen).sum()
    order = torch.from_numpy(np.argsort(parts, kind="stable"))
    return Carving(order, router, bias, float(kept / energy.sum()))


def _clustered(
    energy: torch.Tensor,
    shared: torch.Tensor,
    layout: Layout,
    generator: torch.Generator,
) -> np.ndarray:
    """The part of each neuron, (d_ff,): 0 is shared, then experts from 1.

    Shared are the neurons with the highest value of `shared`, the others are divided by
    spherical k-means with equal sizes, on the square roots of their energies.
    """
    order = shared.argsort(descending=True)
    rest = order[layout.n_shared :].sort().values
    features = energy[:, rest].sqrt()
    features = nn.functional.normalize(features - features.mean(0), dim=0)
    centres = features[:, _spread(features, layout.n_experts, generator)]
    sizes = _sizes(layout)[1:]
    for _ in range(_N_CLUSTERINGS):
        label = _assigned(features.T @ centres, sizes)
        means = [features[:, label == part].mean(1) for part in range(layout.n_experts)]
        centres = nn.functional.normalize(torch.stack(means, 1), dim=0)
    parts = np.zeros(energy.shape[1], dtype=np.int64)
    parts[rest.numpy()] = label + 1
    return parts


def _spread(
    features: torch.Tensor, n_centres: int, generator: torch.Generator
) -> list[int]:
    """Columns that are far from each other: farthest first, from a random one."""
    chosen = [int(torch.randint(features.shape[1], (1,), generator=generator))]
    nearest = features.T @ features[:, chosen[0]]
    while len(chosen) < n_centres:
        chosen.append(int(nearest.argmin()))
        nearest = torch.maximum(nearest, features.T @ features[:, chosen[-1]])
    return chosen


def _sizes(layout: Layout) -> list[int]:
    """Neurons of the shared part, and of each expert."""
    return [layout.n_shared, *[layout.d_inter] * layout.n_experts]


def _assigned(gain: torch.Tensor, sizes: list[int]) -> np.ndarray:
    """The part of each row, of the given sizes, with nearly the largest sum of gains.

    Parts that more rows want than they have places rise in price (dual ascent); what is
    left is settled by those with the most to lose. scipy's exact assignment, for up to
    a hundredth more of the sum, would take most of the time of a carving.
    """
    values, places = gain.double().numpy(), np.array(sizes)
    price, step = np.zeros(len(sizes)), np.abs(values).max()
    for _ in range(_N_PRICES):
        wanted = np.bincount((values - price).argmax(1), minlength=len(sizes))
        price += step * (wanted - places) / np.maximum(places, 1)
        step *= _PRICE_DECAY
    values = values - price
    best = np.sort(values, 1)
    parts = np.empty(len(values), dtype=np.int64)
    for row in np.argsort(best[:, -2] - best[:, -1], kind="stable"):
        parts[row] = np.where(places > 0, values[row], -np.inf).argmax()
        places[parts[row]] -= 1
    return parts


def _one_hot(parts: np.ndarray, layout: Layout) -> torch.Tensor:
    """(d_ff, 1 + n_experts): the part of each neuron."""
    return nn.functional.one_hot(torch.from_numpy(parts), layout.n_experts + 1).float()


def _log_energies(
    energy: torch.Tensor, parts: np.ndarray, layout: Layout
) -> torch.Tensor:
    """Logarithms of the experts' energies less their mean over experts: (n, E)."""
    by_expert = (energy @ _one_hot(parts, layout))[:, 1:]
    logs = torch.log(by_expert + 1e-9 * by_expert.mean())
    return logs - logs.mean(1, keepdim=True)


def _membership(scores: torch.Tensor, top_k: int) -> torch.Tensor:
    """1 where an expert is among the `top_k` of a token, else 0: (n, E)."""
    return torch.zeros_like(scores).scatter_(1, scores.topk(top_k, 1).indices, 1.0)


class _Ridge:
    """Ridge regression from x, with an intercept and outputs of mean about 0."""

    def __init__(self, x: torch.Tensor) -> None:
        mean = x.mean(0)
        self._centred = x - mean
        gram = self._centred.T @ self._centred / len(x)
        ridge = _RIDGE * gram.diagonal().mean() * torch.eye(len(gram))
        # The last term makes W·mean(x) vanish, so that gates are 1 on average.
        gram = gram + ridge + 100.0 * torch.outer(mean, mean)
        self._cholesky = torch.linalg.cholesky(gram.double())

    def fit(self, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights (E, d_model) and intercepts (E,) for targets (n, E)."""
        intercept = targets.mean(0)
        products = self._centred.T @ (targets - intercept) / len(targets)
        weights = torch.cholesky_solve(products.double(), self._cholesky)
        return weights.float().T.contiguous(), intercept
