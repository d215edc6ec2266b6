"""Methods that merge experts against loops over tokens and experts."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from families import tiny_model
from methods_by_hand import (
    FAMILIES,
    IDS,
    SIX,
    check,
    counted,
    fitted,
    mean_by_hand,
    outputs_of,
    replaced,
    sets,
)
from text_models import experts_calls

from heapr_lab.errors import LayoutError, SpecError
from heapr_lab.methods import merging
from heapr_lab.models.experts import find_experts
from heapr_lab.models.loading import load_model

NAMES = ("hc-smoe", "mc-smoe", "sub-moe-like", "ream", "random-groups")


# --- HC-SMoE ----------------------------------------------------------------------


def linked_by_hand(features: torch.Tensor, number: int) -> set[frozenset[int]]:
    """Average linkage: all pairs of groups, all pairs of their rows."""
    groups = [frozenset({e}) for e in range(len(features))]
    while len(groups) > number:
        means = {
            (a, b): np.mean(
                [float((features[i] - features[j]).norm()) for i in a for j in b]
            )
            for a, b in itertools.combinations(groups, 2)
        }
        a, b = min(means, key=lambda pair: means[pair])
        groups = [group for group in groups if group not in (a, b)] + [a | b]
    return set(groups)


@pytest.mark.parametrize("number", range(1, 7))
def test_average_linkage_by_hand(number):
    """Six rows, for every number of groups and several draws."""
    for seed in range(10):
        rows = torch.randn(6, 3, generator=torch.Generator().manual_seed(seed))
        groups = merging.average_linkage(rows, number)
        assert sets(groups) == linked_by_hand(rows.double(), number)
        assert [min(g) for g in groups] == sorted(min(g) for g in groups)


@pytest.mark.parametrize("family", FAMILIES)
def test_hc_smoe_by_hand(family):
    """Three groups of six experts, each the mean weighted by routed tokens."""
    model = tiny_model(family, **SIX)
    calls, tokens, new = experts_calls(model, IDS), counted(model), {}
    for layer in find_experts(model):
        number = layer.layer
        means = outputs_of(layer, calls[number][0]).mean(1)
        for group in linked_by_hand(means, 3):
            experts = [layer.expert(e) for e in group]
            mean = mean_by_hand(experts, [tokens[number][e] for e in group])
            new |= {(number, e): mean for e in group}
    compression = fitted("hc-smoe", model, 0.5)
    check(compression, model, replaced(model, new))
    assert compression.achieved_ratio == 0.5
    assert fitted("hc-smoe", model, 0.95).achieved_ratio == pytest.approx(5 / 6)


def test_a_group_without_tokens_is_the_plain_mean():
    """By hand: 1 and 3 give 2, and with weights 1 and 3 they give 2.5."""
    one, three = ({"up": torch.full((1, 1), value)} for value in (1.0, 3.0))
    assert merging.averaged([one, three], [0.0, 0.0])["up"].item() == 2.0
    assert merging.averaged([one, three], [1.0, 3.0])["up"].item() == 2.5


# --- Sub-MoE ----------------------------------------------------------------------


def k_means_by_hand(units: torch.Tensor, centres: torch.Tensor) -> np.ndarray:
    """Lloyd's rounds until nothing moves, or a group would be empty."""
    labels, numbers = np.empty(0), range(len(centres))
    while True:
        before, labels = labels, torch.cdist(units, centres).argmin(1).numpy()
        if np.array_equal(labels, before) or {*labels} != {*numbers}:
            return before
        centres = torch.stack([units[labels == number].mean(0) for number in numbers])


@pytest.mark.parametrize("number", range(1, 7))
def test_k_means_by_hand(number):
    """Six rows, for every number of groups and several draws of first centres."""
    for seed in range(10):
        rows = torch.randn(6, 3, generator=torch.Generator().manual_seed(seed)).double()
        units = rows / rows.norm(dim=1, keepdim=True)
        cosines = (units @ units.T).numpy()
        first = merging.seeds(cosines, number, np.random.default_rng(seed))
        labels = k_means_by_hand(units, units[first])
        expected = [np.flatnonzero(labels == c).tolist() for c in set(labels)]
        groups = merging.k_means(cosines, number, np.random.default_rng(seed))
        assert sets(groups) == sets(expected)


def test_first_centres_are_drawn_by_their_squared_distance():
    """k-means++: a row at 60° is drawn once for two draws of one at 90°."""
    rows = np.array([[1.0, 0.0], [1.0, 0.0], [0.5, 0.75**0.5], [0.0, 1.0]])
    rng = np.random.default_rng(0)
    pairs = [merging.seeds(rows @ rows.T, 2, rng) for _ in range(4000)]
    second = [b for a, b in pairs if a < 2]
    assert not set(second) & {0, 1}
    assert second.count(3) / second.count(2) == pytest.approx(2, rel=0.15)


def test_equal_directions_are_still_as_many_groups():
    """Where k-means would leave a group empty, and no distance is left to draw by."""
    rows = np.array([[1.0, 0.0]] * 4 + [[0.0, 1.0]])
    groups = merging.k_means(rows @ rows.T, 4, np.random.default_rng(0))
    assert len(groups) == 4


@pytest.mark.parametrize("family", FAMILIES)
def test_sub_moe_by_hand(family):
    """Three groups, each U Σ · Σ f V of the decomposition of its matrices together."""
    model = tiny_model(family, **SIX)
    calls, tokens, new = experts_calls(model, IDS), counted(model), {}
    rng = np.random.default_rng(0)
    for layer in find_experts(model):
        k, (x, index, p) = layer.layer, calls[layer.layer]
        f = outputs_of(layer, x)
        units = f / f.norm(dim=2, keepdim=True) / len(x) ** 0.5
        used = {e: (n, float(p[index == e].sum())) for e, n in tokens[k].items()}
        order = sorted(used, key=used.__getitem__, reverse=True)
        rows = units[order].flatten(1)
        first = merging.seeds((rows @ rows.T).numpy(), 3, rng)
        labels = k_means_by_hand(rows, rows[first])
        for label in range(3):
            group = [order[place] for place in np.flatnonzero(labels == label)]
            counts = np.array([tokens[k][e] for e in group])
            whole = {
                name: by_decomposition([layer.expert(e)[name] for e in group], counts)
                for name in ("gate", "up", "down")
            }
            new |= {(k, e): whole for e in group}
    check(fitted("sub-moe-like", model, 0.5), model, replaced(model, new))


def by_decomposition(experts: list[torch.Tensor], counts: np.ndarray) -> torch.Tensor:
    """Sub-MoE's merge of matrices (out, in)."""
    shares = (counts / counts.sum()).tolist()
    u, s, v = torch.linalg.svd(torch.cat(experts, dim=1), full_matrices=False)
    blocks = v.chunk(len(experts), dim=1)
    mean = sum(f * block for f, block in zip(shares, blocks, strict=True))
    return u @ torch.diag(s) @ mean


# --- the control ------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_random_groups_by_hand(family):
    """As many groups as HC-SMoE's, merged as those are, of experts that are drawn."""
    model = tiny_model(family, **SIX)
    tokens, compression = counted(model), fitted("random-groups", model, 0.5)
    new: dict[tuple[int, int], Any] = {}
    for layer in find_experts(model):
        k = layer.layer
        index = [id(expert["up"]) for expert in compression.compositions[k]]
        assert len(set(index)) == 3
        for group in [np.flatnonzero(np.array(index) == place) for place in set(index)]:
            experts = [layer.expert(e) for e in group]
            mean = mean_by_hand(experts, [tokens[k][e] for e in group])
            new |= {(k, int(e)): mean for e in group}
    check(compression, model, replaced(model, new))


def test_every_grouping_can_be_drawn():
    """Four experts in two groups: three pairs of pairs, and four single ones."""
    rng = np.random.default_rng(0)
    draws = [merging.drawn(4, 2, rng) for _ in range(200)]
    assert len({frozenset(map(frozenset, groups)) for groups in draws}) == 7
    assert all(sorted(itertools.chain(*groups)) == [0, 1, 2, 3] for groups in draws)


# --- refusals ---------------------------------------------------------------------


def test_what_is_refused_by_name():
    """Routers whose logits are unknown, by methods that need them."""
    odd: Any = tiny_model("minimax_m2")
    with torch.no_grad():
        for name, buffer in odd.named_buffers():
            if "correction" in name:
                buffer.copy_(torch.tensor([9.0, 0, 0, 0]))
    for name in ("mc-smoe", "ream"):
        with pytest.raises(LayoutError, match=f"{name} needs its logits"):
            fitted(name, odd, 0.25)
    with pytest.raises(LayoutError, match="cannot be routed anew"):
        fitted("naee", odd, 0.25)
    assert fitted("hc-smoe", odd, 0.25).achieved_ratio == 0.25


def test_streamed_models_are_refused():
    """They are refused before any text is read."""
    model, _ = load_model("lab", stream=True)
    for name in NAMES:
        with pytest.raises(SpecError, match="stream=False"):
            fitted(name, model, 0.25)
