"""Methods that remove atoms by measurements of their own, against slow twins."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from families import tiny_ids, tiny_model
from methods_by_hand import removed
from oracles.token_by_token import atom_activations, matrices
from text_models import experts_calls
from torch import nn

from heapr_lab import methods
from heapr_lab.errors import SpecError
from heapr_lab.models.experts import find_experts
from heapr_lab.text.calibration import CalibrationSet

pytestmark = pytest.mark.oracle

IDS = tiny_ids(n_sequences=4, seq_len=10)
WINDOWS = CalibrationSet.from_ids(IDS)
FAMILIES = ("qwen2_moe", "qwen3_moe", "mixtral", "deepseek_v2")
Key = tuple[int, int, int]


def fitted(name: str, model: nn.Module, ratio: float, **options: Any) -> Any:
    """What the method finds."""
    return methods.get(name).fit(model, WINDOWS, ratio=ratio, **options)


def without(scores: dict[Key, float], share: float) -> set[Key]:
    """The keys of the lowest values, rounded down."""
    return set(sorted(scores, key=lambda key: scores[key])[: int(share * len(scores))])


# --- IntDim -----------------------------------------------------------------------


def gradients_by_hand(model: nn.Module) -> dict[Key, float]:
    """Mean |gradient| of each atom's weights: loops over windows and atoms."""
    scores: dict[Key, float] = {}
    twin: Any = copy.deepcopy(model).requires_grad_(True)
    for ids in IDS:
        twin.zero_grad()
        logits = twin(ids[None]).logits[0, :-1]
        F.cross_entropy(logits, ids[1:], reduction="sum").backward()
        for layer in find_experts(twin):
            for tensor in layer.module.requires_grad_(False).parameters():
                tensor.data = tensor.grad  # so that `matrices` reads gradients
            for expert in range(layer.n_experts):
                w = matrices(layer.module, expert)
                for atom in range(layer.d_inter):
                    weights = [w["W_up"][atom], w["W_down"][:, atom]]
                    weights += [] if w["W_gate"] is None else [w["W_gate"][atom]]
                    size = float(torch.cat(weights).abs().mean()) / len(IDS)
                    key = layer.layer, expert, atom
                    scores[key] = scores.get(key, 0.0) + size
        twin = copy.deepcopy(model).requires_grad_(True)
    return scores


@pytest.mark.parametrize("family", [*FAMILIES, "gpt_oss", "nemotron_h"])
def test_intdim_by_loops(family: str) -> None:
    """Each variant removes the lowest of its scope."""
    model = tiny_model(family)
    scores = gradients_by_hand(model)
    assert removed(fitted("intdim-g", model, 0.3)) == without(scores, 0.3)
    for name, scope in {"intdim-l": 1, "intdim-e": 2}.items():
        expected: set[Key] = set()
        for group in {key[:scope] for key in scores}:
            members = {k: s for k, s in scores.items() if k[:scope] == group}
            expected |= without(members, 0.3)
        assert removed(fitted(name, model, 0.3)) == expected


# --- TENP -------------------------------------------------------------------------


def tenp_by_hand(
    model: nn.Module,
) -> tuple[dict[tuple[int, int], float], dict[Key, float]]:
    """Scores of experts and of atoms, from each atom's own output vector."""
    experts: dict[tuple[int, int], float] = {}
    atoms: dict[Key, float] = {}
    layers = {layer.layer: layer for layer in find_experts(model)}
    for number, (inputs, index, weights) in experts_calls(model, IDS).items():
        for expert in range(layers[number].n_experts):
            w: Any = matrices(layers[number].module.requires_grad_(False), expert)
            lengths, score = [], 0.0
            for token, slot in (index == expert).nonzero().tolist():
                x, p = inputs[token], float(weights[token, slot])
                written = w["W_down"] * atom_activations(layers[number].module, x, w)
                y = written.sum(1)  # the sum of what the atoms write
                turned = 1 - float(x @ y / x.norm() / y.norm())
                score += p * float(y.norm()) * turned
                lengths.append([float(column @ y / y.norm()) for column in written.T])
            experts[number, expert] = score
            for atom, length in enumerate(np.mean(lengths, axis=0)):
                atoms[number, expert, atom] = float(length)
    return experts, atoms


@pytest.mark.parametrize("family", [*FAMILIES, "nemotron_h"])
def test_tenp_by_loops(family: str) -> None:
    """Two of six experts of the first layer are whole, three of the second."""
    sizes = ("num_experts", "num_local_experts", "n_routed_experts")
    model = tiny_model(family, **dict.fromkeys(sizes, 6))
    experts, atoms = tenp_by_hand(model)
    compression = fitted("tenp-like", model, 0.3, whole=0.6)  # 5 of 12 experts
    first, second = (layer.layer for layer in find_experts(model))
    expected: set[Key] = set()
    for layer, number in ((first, 2), (second, 3)):
        order = sorted(range(6), key=lambda e, k=layer: experts[k, e])
        for expert in order[: 6 - number]:
            scores = {k: s for k, s in atoms.items() if k[:2] == (layer, expert)}
            expected |= set(sorted(scores, key=lambda k, scores=scores: scores[k])[:4])
    assert removed(compression) == expected  # 0.3 · 96 atoms of 7 experts: 4 of each
    assert any(value < 0 for value in atoms.values())  # scores have signs


def test_enp_keeps_no_expert_whole() -> None:
    """With whole=0 every expert loses as many atoms; a wrong share is refused."""
    model = tiny_model("qwen3_moe")
    kept = fitted("tenp-like", model, 0.5, whole=0.0).keep.arrays
    assert {int(n) for mask in kept.values() for n in mask.sum(1)} == {4}
    with pytest.raises(SpecError, match=r"whole is 1\.0, expected a share"):
        fitted("tenp-like", model, 0.5, whole=1.0)


# --- experts without tokens -------------------------------------------------------


def test_dead_experts_lose_their_atoms_first() -> None:
    """Ours: in each layer no token reaches two of four experts, which go first."""
    model, ids = tiny_model("qwen3_moe"), IDS[:1, :3]
    calls = experts_calls(model, ids)
    used = {k: {*index[:-1].flatten().tolist()} for k, (_, index, _) in calls.items()}
    assert all(len(experts) == 2 for experts in used.values())
    windows = CalibrationSet.from_ids(ids)
    gone = removed(methods.get("heapr").fit(model, windows, ratio=0.5))
    dead = {(k, e) for k, experts in used.items() for e in {0, 1, 2, 3} - experts}
    assert {key[:2] for key in gone} == dead
    assert len(gone) == 8 * len(dead)
