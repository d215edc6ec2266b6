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
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from heapr_lab import methods
from heapr_lab.errors import SpecError
from heapr_lab.methods import slimming
from heapr_lab.methods.collectors import Measurements
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


# --- MoE-Slimming -----------------------------------------------------------------


def scaled_by_token(
    module: Any, hidden_states: Any, top_k_index: Any, top_k_weights: Any
) -> torch.Tensor:
    """The experts with α = 0.9 times their outputs, which keep their gradients."""
    rows = []
    for x, experts, weights in zip(
        hidden_states, top_k_index, top_k_weights, strict=True
    ):
        total = torch.zeros_like(x)
        for expert, p in zip(experts.tolist(), weights, strict=True):
            w = matrices(module, expert)
            h = atom_activations(module, x, w)
            z = (w["W_down"] @ h).requires_grad_()
            z.retain_grad()
            acts = [F.linear(x, w["W_gate"]), F.linear(x, w["W_up"]), h]
            module.seen.append((expert, z, torch.stack(acts)))
            total = total + p * 0.9 * z
        rows.append(total)
    return torch.stack(rows)


ALL_EXPERTS_FUNCTIONS.register("scaled_by_token", scaled_by_token)


def slimming_by_hand(
    model: Any, layer: Any
) -> tuple[np.ndarray, np.ndarray, list[float]]:
    """Saliency (E, I), attribution (E,) and losses, by autograd through the layer."""
    model.requires_grad_(False)
    block = model.get_submodule(layer.name.rpartition(".mlp")[0])
    saliency = [[] for _ in range(layer.n_experts)]  # type: ignore[var-annotated]
    attribution = [[] for _ in range(layer.n_experts)]  # type: ignore[var-annotated]
    losses = []
    for ids in IDS:
        calls: list[Any] = []
        hook = block.register_forward_hook(
            lambda _m, args, options, out, calls=calls: calls.append(
                (args, options, out)
            ),
            with_kwargs=True,
        )
        model(ids[None])
        hook.remove()
        args, options, dense = calls[0]
        layer.module.seen = []
        model.set_experts_implementation("scaled_by_token")
        changed = block(*args, **options)
        model.set_experts_implementation("eager")
        dense, changed = (
            out[0] if isinstance(out, tuple) else out for out in (dense, changed)
        )
        squares = (changed - dense).square().sum(-1)
        loss = (squares / (dense.square().sum(-1) + 1e-6)).sum()
        loss.backward()
        losses.append(loss.item() / len(ids))
        for expert in range(layer.n_experts):
            tokens = [token for token in layer.module.seen if token[0] == expert]
            if not tokens:
                continue
            terms = torch.stack([z.grad * z.detach() for _, z, _ in tokens]).numpy()
            if len(terms) > 2:
                limit = np.quantile(np.abs(terms), 0.99, axis=0)
                terms = np.clip(terms, -limit, limit)
            share = len(tokens) / len(ids)
            attribution[expert].append(-terms.mean(0).sum() * share)
            acts = torch.stack([act.detach() for *_, act in tokens])
            saliency[expert].append(acts.norm(dim=0).mean(0).numpy())
        del layer.module.seen
    return (
        np.array([np.mean(rows, axis=0) for rows in saliency]),
        np.array([np.mean(sums) for sums in attribution]),
        losses,
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_slimming_measures_by_autograd(family: str) -> None:
    """Saliency, attribution and loss of each layer, token by token."""
    model = tiny_model(family)
    shared = Measurements(model, WINDOWS)
    methods.get("moe-slimming").fit(model, WINDOWS, ratio=0.3, shared=shared)
    by_layer = shared.once("moe-slimming", lambda: pytest.fail("measured again"))
    for layer in find_experts(model):
        saliency, attribution, losses = slimming_by_hand(model, layer)
        stats = by_layer[layer.layer]
        np.testing.assert_allclose(stats.saliency, saliency, rtol=1e-6)
        np.testing.assert_allclose(stats.attribution, attribution, rtol=1e-5, atol=1e-9)
        assert stats.loss == pytest.approx(np.mean(losses), rel=1e-6)
        assert (attribution > 0).any()


def count_by_bisection(groups: Any, weights: Any, n_kept: int) -> list[int]:
    """Counts at which coverages are s · weight, with the s that keeps `n_kept`."""

    def counts(s: float) -> list[int]:
        numbers = []
        for group, weight in zip(groups, weights, strict=True):
            goal, covered, count = s * weight * sum(group), 0.0, 0
            while count < len(group) and covered < goal:
                covered, count = covered + group[count], count + 1
            numbers.append(count)
        return numbers

    low, high = 0.0, 2 / min(weights)
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(counts(middle)) < n_kept else (low, middle)
    return counts(high)


@pytest.mark.parametrize("n_kept", [3, 17, 40, 47])
def test_budgets_are_those_of_a_bisection(n_kept: int) -> None:
    """The lowest thresholds are the atoms that the search keeps, for any budget."""
    draw = np.random.default_rng(n_kept)
    groups = [np.sort(draw.random(size))[::-1] for size in (12, 20, 16)]
    weights = [0.5, 1.1, 1.4]
    counts = slimming.covering(groups, weights, n_kept)
    assert counts == count_by_bisection(groups, weights, n_kept)
    assert sum(counts) == n_kept


def test_layers_by_smoothed_losses() -> None:
    """Four roots; the largest of 1, 1 and 16 is each time clipped to mean + spread."""
    weights = [1.0, 1.0, 16.0]
    for _ in range(4):
        weights = [weight**0.5 for weight in weights]
        limit = np.mean(weights) + np.std(weights, ddof=1)
        assert weights[2] > limit
        weights[2] = limit
    expected = np.array(weights) / np.mean(weights)
    np.testing.assert_allclose(slimming.smoothed([1.0, 1.0, 16.0]), expected)
    assert slimming.smoothed([3.0]).tolist() == [1.0]


def test_experts_by_the_roots_of_their_attributions() -> None:
    """Weights 2 : 1, and none for the expert whose attribution is negative."""
    saliency = np.array([[4.0, 3, 2, 1], [1, 1, 1, 1.5], [9, 8, 7, 6]])
    layer = slimming.LayerFound(saliency, np.array([4.0, 1.0, -1.0]), 1.0)
    # Coverage before each atom, over weights of 2/3, 1/3 and 0: 0, .6, 1.05, 1.35;
    # 0, 1, 1.67, 2.33; 0, and then more than a thousand.
    kept = slimming.of_experts(layer, 5, least=0)
    assert kept.tolist() == [[1, 1, 0, 0], [1, 0, 0, 1], [1, 0, 0, 0]]
    emptied = slimming.of_experts(layer, 5, least=2)  # 1.05 is the next
    assert emptied.tolist() == [[1, 1, 1, 0], [1, 0, 0, 1], [0, 0, 0, 0]]
    assert slimming.of_experts(layer, 12, least=5).all()


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
