"""What compression methods measure and make, by loops over tokens and experts."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from families import tiny_ids
from keeps import logits_of
from oracles.token_by_token import RoutedToken, atom_activations, matrices, run
from text_models import experts_calls
from torch import nn
from transformers import AutoModelForCausalLM

from heapr_lab import CalibrationSet, methods
from heapr_lab.methods.expert_axes import dropping, find_expert_axes
from heapr_lab.models.experts import ExpertsLayer, find_experts

IDS = tiny_ids(n_sequences=6, seq_len=10)
WINDOWS = CalibrationSet.from_ids(IDS)
FAMILIES = ("mixtral", "deepseek_v2")
SIX = dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 6)
CLOSE = {"rtol": 1e-9, "atol": 1e-9}
IN_SINGLE = {"rtol": 1e-5, "atol": 1e-6}
"""The tolerance where a router computes its softmax in float32."""


def fitted(name: str, model: nn.Module, ratio: float, **options: Any) -> Any:
    """What the method finds."""
    return methods.get(name).fit(model, WINDOWS, ratio=ratio, **options)


def check(
    compression: Any, model: nn.Module, expected: nn.Module, **close: float
) -> None:
    """Check the logits against those of a model made by hand, not the dense ones."""
    by_hand = logits_of(expected, IDS)
    assert (by_hand - logits_of(model, IDS)).abs().max() > 1e-3
    with compression.apply(model):
        torch.testing.assert_close(logits_of(model, IDS), by_hand, **(close or CLOSE))


def outputs_of(layer: ExpertsLayer, x: torch.Tensor) -> torch.Tensor:
    """Every expert's output for every token x (T, D), one after the other (E, T, D)."""
    rows = []
    for expert in range(layer.n_experts):
        w: Any = matrices(layer.module, expert)
        bias = 0 if w["b_down"] is None else w["b_down"]
        h = [atom_activations(layer.module, token, w) for token in x]
        rows.append(torch.stack([w["W_down"] @ atoms + bias for atoms in h]))
    return torch.stack(rows).detach()


def logits_by_hand(model: nn.Module, number: int, x: torch.Tensor) -> torch.Tensor:
    """The router's logits (T, E) of tokens x (T, D)."""
    axes = {axis.layer.layer: axis for axis in find_expert_axes(model)}
    router: Any = axes[number].router
    bias = getattr(router, "bias", None)
    return (x @ router.weight.T + (0 if bias is None else bias)).detach()


def counted(model: nn.Module) -> dict[int, dict[int, int]]:
    """By layer and expert, the number of tokens that are routed to it."""
    return {
        number: {e: int((index == e).sum()) for e in range(6)}
        for number, (_, index, _) in experts_calls(model, IDS).items()
    }


def mean_by_hand(experts: list[dict[str, Any]], weights: list[float]) -> dict[str, Any]:
    """The weighted mean of matrices."""
    return {
        name: sum(w * expert[name] for w, expert in zip(weights, experts, strict=True))
        / sum(weights)
        for name in experts[0]
    }


def replaced(model: nn.Module, new: dict[tuple[int, int], Any]) -> nn.Module:
    """A copy with other matrices in place of those of experts, by layer and expert."""
    twin = copy.deepcopy(model)
    for layer in find_experts(twin):
        for expert in range(layer.n_experts):
            for name, value in new.get((layer.layer, expert), {}).items():
                layer.expert(expert)[name].copy_(value)
    return twin


def multiplied(expert: Any, name: str) -> torch.Tensor:
    """One matrix or bias of an expert, of which it may have a part and factors."""
    if f"{name}_left" not in expert:
        return expert[name]
    return expert.get(name, 0) + expert[f"{name}_left"] @ expert[f"{name}_right"]


def truncated(matrix: torch.Tensor, rank: int) -> torch.Tensor:
    """The nearest matrix of a rank: the first terms of Σ σ u vᵀ."""
    u, s, v = torch.linalg.svd(matrix, full_matrices=False)
    return torch.stack([s[i] * torch.outer(u[:, i], v[i]) for i in range(rank)]).sum(0)


def sets(groups: Any) -> set[frozenset[int]]:
    """Groups without their order."""
    return {frozenset(group) for group in groups}


def lowest(scores: dict[Any, float], number: int) -> set[Any]:
    """The keys of the `number` lowest values, which no tie hides."""
    ordered = sorted(scores, key=lambda key: scores[key])
    assert scores[ordered[number - 1]] < scores[ordered[number]]
    return set(ordered[:number])


def routed(model: nn.Module) -> dict[tuple[int, int], list[RoutedToken]]:
    """What each expert does of each token routed to it, one after the other."""
    model.requires_grad_(False)
    records = run(model, IDS)
    return {
        (layer.layer, expert): [
            RoutedToken(t.x, t.h.detach(), t.p, t.E.detach(), t.e)
            for t in records[id(layer.module)][expert]
        ]
        for layer in find_experts(model)
        for expert in range(layer.n_experts)
    }


def gradients_by_hand(model: nn.Module) -> Iterator[dict[tuple[int, int], Any]]:
    """For each window, the gradients of the matrices of experts, by autograd."""
    twin: Any = copy.deepcopy(model).requires_grad_(True)
    for ids in IDS:
        twin.zero_grad()
        logits = twin(ids[None]).logits[0, :-1]
        F.cross_entropy(logits, ids[1:], reduction="sum").backward()
        gradients = {}
        for layer in find_experts(twin):
            module = copy.copy(layer.module)
            module._parameters = {n: p.grad for n, p in module._parameters.items()}
            gradients |= {
                (layer.layer, e): matrices(module, e) for e in range(layer.n_experts)
            }
        yield gradients


def removed(compression: Any) -> set[tuple[int, int, int]]:
    """(layer, expert, atom) of every removed atom."""
    return {
        (layer, int(e), int(a))
        for layer, kept in compression.keep.arrays.items()
        for e, a in np.argwhere(~kept)
    }


def without_experts(model: nn.Module, kept: Any) -> nn.Module:
    """A copy with the experts `kept`, by layer."""
    with dropping(model, kept):
        return copy.deepcopy(model)


def reloaded(folder: Path) -> Any:
    """The model of a folder, in float64, as transformers loads it."""
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    loaded.set_experts_implementation("eager")
    return loaded
