"""The rules of compression methods against loops over single tokens and experts."""

import itertools
from typing import Any
from unittest.mock import Mock

import numpy as np
import pandas as pd
import pytest
import torch
from families import tiny_model
from methods_by_hand import (
    FAMILIES,
    IDS,
    SIX,
    WINDOWS,
    fitted,
    gradients_by_hand,
    lowest,
    removed,
    routed,
)
from oracles.token_by_token import matrices
from text_models import atoms_by_hand
from torch import nn

from heapr_lab import KeepMask, collect_statistics, masking, select
from heapr_lab.methods import experts
from heapr_lab.methods.collectors import Measurements
from heapr_lab.methods.expert_axes import dropping, find_expert_axes
from heapr_lab.models.experts import find_experts
from heapr_lab.refinement.expert_calls import iter_expert_calls

# --- experts ----------------------------------------------------------------------


SCORES = {
    "frequency": lambda tokens: len(tokens),
    "ean": lambda tokens: sum(float(t.E.norm()) for t in tokens),
    "reap": lambda tokens: np.mean([float(t.p * t.E.norm()) for t in tokens] or [0]),
    "man": lambda tokens: np.mean([float(t.E.norm()) for t in tokens] or [0]),
    "msan": lambda tokens: np.mean([float(t.E @ t.E) for t in tokens] or [0]),
}


@pytest.mark.parametrize("family", [*FAMILIES, "gpt_oss", "nemotron_h"])
def test_experts_of_the_lowest_score_are_dropped(family):
    """Each layer loses two of six, by the score of a loop over its tokens."""
    model = tiny_model(family, **SIX)
    tokens = routed(model)
    frame = Measurements(model, WINDOWS).experts()
    keys = zip(frame["layer"], frame["expert"], strict=True)
    means = [SCORES["reap"](tokens[key]) for key in keys]
    assert experts.reap_scores(frame) == pytest.approx(means, rel=1e-6)
    for name, score in SCORES.items():
        for layer, kept in fitted(name, model, 0.34).kept.items():
            scores = {e: score(tokens[layer, e]) for e in range(6)}
            assert set(range(6)) - set(kept) == lowest(scores, 2), name


# --- NAEE -------------------------------------------------------------------------


def output_of(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """What a block returns, without the logits that some return too."""
    output = block(x)
    return output[0] if isinstance(output, tuple) else output


def change_by_running(model: nn.Module, layer: int, kept: tuple[int, ...]) -> float:
    """‖Z − Z_S‖ of a layer's experts, by running the whole layer without experts."""
    full = {o.layer: tuple(range(o.n_experts)) for o in find_experts(model)}
    dense = {calls.layer.layer: calls for calls in iter_expert_calls(model, IDS)}
    block = model.get_submodule(
        next(o.name for o in find_experts(model) if o.layer == layer).rpartition(".")[0]
    )
    x = dense[layer].hidden_states[None]
    with torch.no_grad():
        before = output_of(block, x)
        with dropping(model, full | {layer: kept}):
            after = output_of(block, x)
    return float((before - after).double().norm())


@pytest.mark.parametrize("family", [*FAMILIES, "gpt_oss", "deepseek_v3"])
def test_naee_measures_the_change_of_the_output(family):
    """The loss from Gram matrices is that of running the block without the experts."""
    model = tiny_model(family)
    axes = {axis.layer.layer: axis for axis in find_expert_axes(model)}
    for calls in iter_expert_calls(model, IDS):
        layer = calls.layer
        with torch.no_grad():
            loss = experts.LayerLoss(axes[layer.layer], calls)
            losses = {s: loss(s) for s in itertools.combinations(range(4), 3)}
        for subset, value in losses.items():
            expected = change_by_running(model, layer.layer, subset)
            assert value == pytest.approx(expected, rel=1e-5, abs=1e-9)
            assert value > 0


@pytest.mark.parametrize("family", FAMILIES)
def test_naee_tries_every_subset(family):
    """No pair of five experts is better to lose than the one that it drops."""
    five = dict.fromkeys(SIX, 5)
    model = tiny_model(family, **five)
    compression = fitted("naee", model, 0.4)
    for layer, kept in compression.kept.items():
        losses = {
            subset: change_by_running(model, layer, subset)
            for subset in itertools.combinations(range(5), 3)
        }
        assert kept == min(losses, key=lambda subset: losses[subset])


def test_naee_is_greedy_where_there_are_too_many_subsets():
    """One goes after the other, each the one whose loss is least, by a loop."""
    model = tiny_model("qwen2_moe", **SIX)
    compression = fitted("naee", model, 0.5, most_subsets=1)
    for layer, kept in compression.kept.items():
        left = set(range(6))
        for _ in range(3):
            losses = {
                e: change_by_running(model, layer, tuple(sorted(left - {e})))
                for e in left
            }
            left -= lowest(losses, 1)
        assert set(kept) == left


def test_naee_on_fewer_tokens_takes_those_of_every_window(monkeypatch):
    """20 of 60 tokens: positions 0, 3, 6, 9 of each window."""
    model = tiny_model("qwen2_moe")
    loss = Mock(wraps=experts.LayerLoss)
    monkeypatch.setattr(experts, "LayerLoss", loss)
    fitted("naee", model, 0.25, most_tokens=20)
    assert [len(call.args[1].hidden_states) for call in loss.mock_calls] == [24, 24]


# --- atoms ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("heapr", {}),
        ("heapr-l", {"scope": "layer"}),
        ("heapr-expert", {"granularity": "expert"}),
    ],
)
def test_ours_are_selections_of_the_statistics(name, settings):
    """Of which test_families.py has the numbers."""
    model = tiny_model("qwen2_moe")
    expected = select(collect_statistics(model, WINDOWS), ratio=0.3, **settings)
    assert fitted(name, model, 0.3).keep == expected


def weights_of(w: dict[str, Any]) -> torch.Tensor:
    """All weights of each atom of an expert, (I, F)."""
    parts = w["W_up"], w["W_down"].T, w["W_gate"]
    return torch.cat([part for part in parts if part is not None], dim=1)


def test_magnitude_by_hand():
    """The atoms go whose weights have the least norms."""
    model = tiny_model("mixtral").requires_grad_(False)
    sizes = {
        (layer.layer, expert, atom): float(row.square().sum())
        for layer in find_experts(model)
        for expert in range(layer.n_experts)
        for atom, row in enumerate(weights_of(matrices(layer.module, expert)))
    }
    assert removed(fitted("magnitude", model, 0.3)) == lowest(sizes, 19)


def camera_by_hand(frame: pd.DataFrame) -> dict[Any, float]:
    """CAMERA's score of each atom of each layer, from all p · h."""
    scores = {}
    for key, rows in frame.groupby(["layer", "expert", "atom"]):
        ph, w = np.abs(rows["p"] * rows["h"]), rows["w_down_norm"].iloc[0]
        scores[key] = w**2 * (0.1 * sum(ph**2) + 0.9 * max(ph) ** 2)
    return scores


@pytest.mark.parametrize("family", FAMILIES)
def test_camera_is_sequential(family):
    """The last layer's atoms are scored on what the pruned ones before it give."""
    model = tiny_model(family)
    compression = fitted("camera-p", model, 0.5)
    expected = set()
    keep = {layer.layer: np.ones((4, 8), bool) for layer in find_experts(model)}
    for layer in keep:
        with masking(model, KeepMask.from_arrays(keep)):
            frame = atoms_by_hand(model, IDS)
        scores = camera_by_hand(frame[frame["layer"] == layer])
        assert len(scores) == 32
        gone = lowest(scores, 16)
        expected |= gone
        for _, expert, atom in gone:
            keep[layer][expert, atom] = False
    assert removed(compression) == expected


# --- IntDim -----------------------------------------------------------------------


Key = tuple[int, int, int]


def sizes_by_hand(model: nn.Module) -> dict[Key, float]:
    """Mean |gradient| of each atom's weights, one window and atom after the other."""
    scores: dict[Key, float] = {}
    for gradients in gradients_by_hand(model):
        for key, w in gradients.items():
            for atom, size in enumerate(weights_of(w).abs().mean(1).tolist()):
                scores[*key, atom] = scores.get((*key, atom), 0.0) + size / len(IDS)
    return scores


@pytest.mark.parametrize("family", [*FAMILIES, "gpt_oss", "nemotron_h"])
def test_intdim_by_loops(family):
    """Each variant removes the lowest of its scope."""
    model = tiny_model(family)
    scores = sizes_by_hand(model)
    assert removed(fitted("intdim-g", model, 0.3)) == lowest(scores, 19)  # of 64
    for name, scope in {"intdim-l": 1, "intdim-e": 2}.items():
        expected: set[Key] = set()
        for group in {key[:scope] for key in scores}:
            members = {k: s for k, s in scores.items() if k[:scope] == group}
            expected |= lowest(members, int(0.3 * len(members)))
        assert removed(fitted(name, model, 0.3)) == expected
