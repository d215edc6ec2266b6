"""Methods that align the atoms of experts before merging, against loops."""

import copy
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from families import tiny_model
from keeps import logits_of
from methods_by_hand import (
    CLOSE,
    FAMILIES,
    IDS,
    IN_SINGLE,
    SIX,
    check,
    counted,
    fitted,
    logits_by_hand,
    mean_by_hand,
    outputs_of,
    replaced,
    without_experts,
)
from text_models import experts_calls
from torch import nn
from torch.nn.functional import normalize

from heapr_lab.methods import merging, ream
from heapr_lab.models.experts import find_experts
from heapr_lab.text.calibration import CalibrationSet

FOUR_ATOMS = SIX | dict.fromkeys(("intermediate_size", "moe_intermediate_size"), 4)


def atoms_by_hand(expert: Any) -> torch.Tensor:
    """All weights of each atom, (I, F)."""
    return torch.cat([expert["gate"], expert["up"], expert["down"].T], dim=1)


def aligned_by_hand(
    expert: Any, rows: torch.Tensor, cost: Callable[[torch.Tensor], torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The expert in the one of all orders of its atoms whose `rows` cost least."""
    orders = map(list, itertools.permutations(range(len(rows))))
    atoms = min(orders, key=lambda order: float(cost(rows[order])))
    new = {name: expert[name][atoms] for name in ("gate", "up")}
    return new | {"down": expert["down"][:, atoms]}


# --- MC-SMoE ----------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_mc_smoe_by_hand(family):
    """Seven of twelve experts stay; atoms are in the best of all 24 orders."""
    model = tiny_model(family, **FOUR_ATOMS).double()  # its router, too
    calls, tokens = experts_calls(model, IDS), counted(model)
    p = {  # of experts with equally many tokens, the one with the larger weights
        (k, e): float(weights[index == e].double().sum())
        for k, (_, index, weights) in calls.items()
        for e in range(6)
    }
    ordered = sorted(p, key=lambda key: (-tokens[key[0]][key[1]], -p[key]))
    leaders = [next(key for key in ordered if key[0] == k) for k in calls]
    leaders += [key for key in ordered if key not in leaders][: 7 - len(leaders)]
    new = {}
    for layer in find_experts(model):
        k, groups = layer.layer, {e: [e] for n, e in leaders if n == layer.layer}
        units = normalize(logits_by_hand(model, k, calls[k][0]), dim=0)
        for expert in set(range(6)) - set(groups):
            near = (units.T @ units[:, expert]).tolist()
            groups[max(groups, key=near.__getitem__)].append(expert)
        for leader, group in groups.items():
            like = atoms_by_hand(layer.expert(leader))
            experts = [
                aligned_by_hand(
                    expert,
                    atoms_by_hand(expert),
                    lambda rows, like=like: (rows - like).square().sum(),
                )
                for expert in map(layer.expert, group)
            ]
            mean = mean_by_hand(experts, [tokens[k][e] + 1e-300 for e in group])
            new |= {(k, e): mean for e in group}
    compression = fitted("mc-smoe", model, 0.42)  # 5 of 12 go
    check(compression, model, replaced(model, new))
    assert compression.achieved_ratio == pytest.approx(5 / 12)


def test_dominant_experts_by_hand():
    """The most used of each layer, though rarely used, then the largest shares."""
    rows = [(0, 2, 0.5), (0, 1, 0.3), (0, 0, 0.2), (1, 0, 0.1), (1, 1, 0.05)]
    frame = pd.DataFrame(rows, columns=["layer", "expert", "share"])
    assert merging.dominant(frame, 2) == {0: [2], 1: [0]}
    assert merging.dominant(frame, 4) == {0: [2, 1, 0], 1: [0]}


@pytest.mark.parametrize("name", ["mc-smoe", "ream"])
@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "nemotron_h"])
def test_the_order_of_atoms_does_not_matter(family, name):
    """With the atoms of experts in other orders, merged ones compute the same."""
    model = tiny_model(family)
    turned = copy.deepcopy(model)
    for layer in find_experts(turned):
        for expert in range(1, layer.n_experts):
            atoms = {k: v.clone() for k, v in layer.expert(expert).items()}
            order = torch.arange(layer.d_inter).roll(expert)
            for key, target in layer.expert(expert).items():
                if key != "down_bias":
                    rows = atoms[key].T[order].T if key == "down" else atoms[key][order]
                    target.copy_(rows)
    torch.testing.assert_close(logits_of(turned, IDS), logits_of(model, IDS), **CLOSE)
    one, other = (fitted(name, m, 0.5) for m in (model, turned))
    with one.apply(model), other.apply(turned):
        expected, logits = logits_of(model, IDS), logits_of(turned, IDS)
    torch.testing.assert_close(logits, expected, **IN_SINGLE)
    assert (expected - logits_of(model, IDS)).abs().max() > 1e-3


# --- REAM -------------------------------------------------------------------------


def components_by_hand(layer: Any) -> torch.Tensor:
    """All atoms of a layer along their principal directions, (E, I, n).

    Each atom's weights have length 1, their mean is taken off, and each direction is
    multiplied by its singular value, which is the root of an eigenvalue. The results
    have length 1 again.
    """
    rows = [atoms_by_hand(layer.expert(e)) for e in range(layer.n_experts)]
    atoms = normalize(torch.cat(rows).detach(), dim=1)
    atoms = atoms - atoms.mean(0)
    values, directions = torch.linalg.eigh(atoms.T @ atoms)
    components = atoms @ directions * values.clamp_min(0).sqrt()
    return normalize(components, dim=1).unflatten(0, (layer.n_experts, -1))


def saliency_by_hand(model: nn.Module, size: int) -> dict[int, np.ndarray]:
    """The authors' saliency: the gate enters twice, and absent experts count as 0.

    Windows are taken `size` at a time; REAP's mean of p · ‖·‖ over the tokens of which
    an expert is one of the K most probable, of outputs that are times p already.
    """
    calls, saliency = experts_calls(model, IDS), {}
    prints = CalibrationSet.from_ids(IDS).window_fingerprints()
    windows = sorted(range(len(IDS)), key=lambda window: prints[window])
    places = torch.cat([torch.arange(10 * w, 10 * w + 10) for w in windows])
    for layer in find_experts(model):
        x, index, _ = calls[layer.layer]
        gates = logits_by_hand(model, layer.layer, x).softmax(1)
        norms = gates**2 * outputs_of(layer, x).norm(dim=2).T
        probable = gates.topk(index.shape[1]).indices
        chosen = torch.zeros_like(gates).scatter(1, probable, 1)
        means = [
            (norms * chosen)[batch].sum(0) / chosen[batch].sum(0).clamp_min(1)
            for batch in places.split(10 * size)
        ]
        saliency[layer.layer] = torch.stack(means).mean(0).numpy()
    return saliency


def test_components_are_scaled_by_their_singular_values():
    """To their signs, which distances do not have."""
    layer = find_experts(tiny_model("qwen3_moe", **FOUR_ATOMS))[0]
    expected = components_by_hand(layer)
    components = ream.components(ream._atoms(layer)).double()
    near = torch.cdist(components[0], components[1])
    by_hand = torch.cdist(expected[0], expected[1])
    torch.testing.assert_close(near, by_hand, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_ream_by_hand(family, size):
    """Four of six experts stay; groups have at most two, in the order of saliency.

    It is that of batches, the last of which is smaller; in one window some experts have
    no tokens.
    """
    model = tiny_model(family, **FOUR_ATOMS).double()  # its router, too
    calls, scores = experts_calls(model, IDS), saliency_by_hand(model, size)
    new: dict[tuple[int, int], Any] = {}
    kept: dict[int, tuple[int, ...]] = {}
    for layer in find_experts(model):
        k, x = layer.layer, calls[layer.layer][0]
        logits = logits_by_hand(model, k, x)
        gated = (logits.softmax(1).T[:, :, None] * outputs_of(layer, x)).mean(1)
        columns = normalize(logits, dim=0).T
        far = torch.cdist(columns, columns)
        cosines = torch.cosine_similarity(gated[:, None], gated, dim=2)
        near = (((1 + cosines) / 2 + 1 - far / far.max()) / 2).tolist()
        ordered = sorted(range(6), key=lambda e, k=k: -scores[k][e])
        left, kept[k] = ordered[4:], tuple(sorted(ordered[:4]))
        places = components_by_hand(layer)
        for expert in ordered[:2]:  # the two others stay alone
            other = max(left, key=near[expert].__getitem__)
            left.remove(other)
            moved = aligned_by_hand(
                layer.expert(other),
                places[other],
                lambda rows, like=places[expert]: (rows - like).norm(dim=1).sum(),
            )
            weights = [scores[k][expert], scores[k][other]]
            new[k, expert] = mean_by_hand([layer.expert(expert), moved], weights)
        assert not left
    merged = fitted("ream", model, 0.34, group_size=2, batch_size=size)
    assert merged.kept == kept
    check(merged, model, without_experts(replaced(model, new), kept), **IN_SINGLE)


def test_large_groups_are_filled_first():
    """By hand: the most salient expert takes in both others, as they may be three."""
    near = np.array([[1, 0.9, 0.1, 0.2], [0.9, 1, 0.8, 0.3], [0.1, 0.8, 1, 0], [0] * 4])
    assert ream.gathered(near, [0, 2, 1, 3], 2, size=3) == [[0, 1, 3], [2]]
    assert ream.gathered(near, [0, 2, 1, 3], 2, size=2) == [[0, 1], [2, 3]]


def test_saliency_of_unused_experts():
    """The least positive one, at most 0.5; where all are 0 they weigh the same."""
    assert ream.raised(np.array([0.0, 3.0, 0.2])).tolist() == [0.2, 3.0, 0.2]
    assert ream.raised(np.array([0.0, 3.0, 2.0])).tolist() == [0.5, 3.0, 2.0]
    assert len(set(ream.raised(np.zeros(2)))) == 1
