"""Methods that remove atoms by measurements of their own, against slow twins."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from families import tiny_ids, tiny_model
from oracles.token_by_token import matrices
from torch import nn

from heapr_lab import methods
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


def removed(found: Any) -> set[Key]:
    """(layer, expert, atom) of every removed atom."""
    return {
        (layer, int(e), int(a))
        for layer, kept in found.keep.arrays.items()
        for e, a in np.argwhere(~kept)
    }


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
                    own = [w["W_up"][atom], w["W_down"][:, atom]]
                    own += [] if w["W_gate"] is None else [w["W_gate"][atom]]
                    size = float(torch.cat(own).abs().mean()) / len(IDS)
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
            own = {k: s for k, s in scores.items() if k[:scope] == group}
            expected |= without(own, 0.3)
        assert removed(fitted(name, model, 0.3)) == expected


def test_intdim_sums_sizes_and_not_gradients() -> None:
    """|gradient| of each window: of all text at once the score would be another."""
    model = tiny_model("qwen2_moe")
    windows = [CalibrationSet.from_ids(ids[None]) for ids in IDS]
    alone = [gradient_scores(model, own) for own in windows]
    np.testing.assert_allclose(gradient_scores(model, WINDOWS), np.mean(alone, axis=0))


def gradient_scores(model: nn.Module, windows: CalibrationSet) -> np.ndarray:
    """The scores of the first layer, as the three methods share them."""
    shared = Measurements(model, windows)
    methods.get("intdim-g").fit(model, windows, ratio=0.3, shared=shared)
    found = shared.once("intdim", lambda: pytest.fail("measured again"))
    scores: np.ndarray = found[0]
    return scores
