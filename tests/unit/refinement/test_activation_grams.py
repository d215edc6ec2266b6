"""Second moments of routed activations, against the products of a dense matrix."""

import gc
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from families import tiny_ids, tiny_model
from heard import Heard
from oracles.features import all_grams, features_of
from torch import nn

from heapr_lab.errors import LayoutError, SpecError
from heapr_lab.models.experts import find_experts
from heapr_lab.refinement import activation_grams
from heapr_lab.refinement.activation_grams import LayerGrams, StoredLayers, default_span
from heapr_lab.streaming import layerwise
from heapr_lab.streaming.sweep_store import SweepStore
from heapr_lab.text.calibration import CalibrationSet

N_WINDOWS = 6
HELD = torch.arange(N_WINDOWS) % 4 == 1
IDS = tiny_ids(n_sequences=N_WINDOWS)
WINDOWS = CalibrationSet.from_ids(IDS)
N_EXPERTS, D_INTER = 4, 8
BLOCK_BYTES = 2 * 8 * N_EXPERTS * D_INTER**2
"""Bytes of the sums of a tiny layer, expert by expert."""


def phi_of(model: nn.Module) -> dict[int, torch.Tensor]:
    """φ of each layer, (windows, tokens, E, I)."""
    features = features_of(model, IDS)
    return {layer: rows.unflatten(0, IDS.shape) for layer, rows in features.items()}


def expected(phi: torch.Tensor, span: str) -> torch.Tensor:
    """Σ φ φᵀ of the windows to fit and of those held out: 1 and 5."""
    sums = []
    for chosen in (~HELD, HELD):
        rows = phi[chosen].flatten(0, 1)
        blocks = rows.movedim(1, 0) if span == "expert" else rows.flatten(1)[None]
        sums.append(blocks.mT @ blocks)
    return torch.stack(sums)


def assert_right(layers: dict[int, LayerGrams], model: nn.Module, span: str) -> None:
    """The sums of every layer in `layers` are those of its φ."""
    phi = phi_of(model)
    for number, grams in layers.items():
        right = expected(phi[number], span)
        assert grams.span == span
        assert (grams.sums.dtype, grams.tokens.dtype) == (torch.float64, torch.int64)
        torch.testing.assert_close(grams.sums, right, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(grams.total, right[0] + right[1])
        used = (phi[number] != 0).any(-1)
        for tokens, chosen in zip(grams.tokens, (~HELD, HELD), strict=True):
            assert torch.equal(tokens, used[chosen].sum((0, 1)))


def watched(model: nn.Module, span: str) -> tuple[dict[int, LayerGrams], list[Any]]:
    """What iter_grams gives, and what it tells."""
    told = Heard()
    grams = activation_grams.iter_grams(model, WINDOWS, span=span, progress=told)
    return {layer.layer: sums for layer, sums in grams}, told


@pytest.mark.parametrize("span", ["expert", "layer"])
def test_an_expert_without_tokens(span):
    """Its sums are nought, and those of the others are right."""
    other: Any = tiny_model("qwen2_moe")
    with torch.no_grad():
        other.model.embed_tokens.weight.add_(1)  # so that all states are positive
        other.model.layers[0].mlp.gate.weight[0] = -1
    layers = all_grams(other, WINDOWS, span=span)
    assert (layers[0].tokens == 0).all(0).any()
    assert_right(layers, other, span)


@pytest.mark.parametrize(
    ("tokens", "steps"),
    [
        (8192, [4, 6]),
        (9 * 3, [3, 4, 6]),
        (9 * 2 - 1, [1, 2, 3, 4, 5, 6]),
        (1, [1, 2, 3, 4, 5, 6]),
    ],
)
def test_forwards_are_of_a_few_windows(tokens, steps, model, monkeypatch):
    """As many as have about 8192 tokens, at least one; after each it is told."""
    assert activation_grams._TOKENS_AT_ONCE == 8192
    monkeypatch.setattr(activation_grams, "_TOKENS_AT_ONCE", tokens)
    layers, told = watched(model, "expert")
    assert told == [(step, N_WINDOWS) for step in steps]
    assert_right(layers, model, "expert")


@pytest.mark.parametrize("size", [1, 2, 3, 7, 12])
def test_half_of_the_products_is_mirrored(size, monkeypatch):
    """By blocks of at most two features, of any number of features."""
    monkeypatch.setattr(activation_grams, "_SMALLEST_BLOCK", 2)
    phi = torch.randn(2, 5, size, dtype=torch.float64)
    sums = torch.zeros(2, size, size, dtype=torch.float64)
    for into, part in zip(sums, phi, strict=True):
        activation_grams._add_upper(into, part)
    activation_grams._mirror(sums)
    torch.testing.assert_close(sums, phi.mT @ phi)


def test_too_little_to_sum(model):
    """Two windows are enough, one is not."""
    two = CalibrationSet.from_ids(IDS[:2])
    assert all_grams(model, two)[0].tokens.sum(1).tolist() == [18, 18]
    with pytest.raises(SpecError, match="there is 1 window, expected at least 2"):
        all_grams(model, CalibrationSet.from_ids(IDS[:1]))
    with pytest.raises(SpecError, match="must be one of 'expert', 'layer', got 'row'"):
        all_grams(model, WINDOWS, span="row")
    with (
        torch.autocast("cpu", dtype=torch.bfloat16),
        pytest.raises(SpecError, match="autocast to bfloat16"),
    ):
        all_grams(model, WINDOWS)


def test_low_precision_is_multiplied_in_single(model):
    """Activations are; their products are added up in double precision."""
    low = tiny_model("qwen2_moe").to(torch.bfloat16)
    sums = all_grams(low, WINDOWS)[0].total
    assert sums.dtype == torch.float64
    right = expected(phi_of(model)[0], "expert").sum(0)
    assert (sums - right).norm() < 0.05 * right.norm()
    assert (sums.bfloat16().double() != sums).any()
    symmetric = sums.transpose(1, 2)
    torch.testing.assert_close(sums, symmetric, rtol=1e-5, atol=1e-9)


# --- layer by layer ---------------------------------------------------------------


@pytest.fixture
def small(monkeypatch) -> None:
    """Room for the sums of one layer."""
    monkeypatch.setattr(activation_grams, "_AT_ONCE", BLOCK_BYTES)


@pytest.mark.usefixtures("small")
def test_passes_for_groups_where_layers_do_not_run_alone(model, caplog, monkeypatch):
    """It is said why and how many; windows done are those of one pass."""
    refuse = Mock(side_effect=LayoutError("no"))
    monkeypatch.setattr(layerwise, "LayerByLayer", refuse)
    layers, told = watched(model, "expert")
    assert caplog.messages == ["no; so 2 forward passes are used instead of one"]
    assert told == [(2, 6), (3, 6), (5, 6), (6, 6)]
    assert [*layers] == [0, 1]
    assert_right(layers, model, "expert")


# --- sizes ------------------------------------------------------------------------


def test_sizes(model, monkeypatch):
    """What fits is counted in bytes of both sums."""
    layers = find_experts(model)
    for room, fit in {2 * BLOCK_BYTES: True, 2 * BLOCK_BYTES - 1: False}.items():
        monkeypatch.setattr(activation_grams, "_AT_ONCE", room)
        assert activation_grams.fits_in_memory(layers, "expert") == fit
    assert activation_grams.fits_in_memory(layers[:1], "expert")
    assert not activation_grams.fits_in_memory(layers, "layer")
    groups = [len(group) for group in activation_grams._groups(layers * 3, "layer")]
    assert groups == [1] * 6
    monkeypatch.setattr(activation_grams, "_AT_ONCE", 2 * BLOCK_BYTES)
    groups = [len(group) for group in activation_grams._groups(layers * 3, "expert")]
    assert groups == [2, 2, 2]


def test_the_span_by_default(model, monkeypatch):
    """Whole layers up to 4096 atoms, where no output is normalised before the sum."""
    layers = find_experts(model)
    assert activation_grams._LARGEST_LAYER == 4096
    assert default_span(layers) == "layer"
    monkeypatch.setattr(activation_grams, "_LARGEST_LAYER", N_EXPERTS * D_INTER)
    assert default_span(layers) == "layer"
    monkeypatch.setattr(activation_grams, "_LARGEST_LAYER", N_EXPERTS * D_INTER - 1)
    assert default_span(layers) == "expert"
    monkeypatch.undo()
    monkeypatch.setattr(layers[1].module, "has_post_expert_norm", True)
    assert default_span(layers) == "expert"
    with pytest.raises(SpecError, match="normalises each expert's output"):
        activation_grams.checked_span(layers, "layer")


# --- layers of a streamed model ---------------------------------------------------


def down(value: float) -> torch.Tensor:
    """A weight of two experts."""
    return torch.full((2, 3, 4), value, dtype=torch.float64)


@pytest.fixture(params=[0, 10**6])
def store(request, tmp_path) -> SweepStore:
    """A store in files, and one in memory."""
    return SweepStore(tmp_path, budget=request.param, durable=False)


def test_it_is_a_mapping(store):
    """It acts as a dict, also after a layer is given new weights."""
    downs, expected = StoredLayers(store, "down"), dict[int, torch.Tensor]()
    for number, value in ((3, 1.0), (1, 2.0), (3, 3.0), (11, 4.0), (1, 5.0)):
        downs[number] = down(value)
        expected[number] = down(value)
        assert list(downs) == list(expected)
        assert len(downs) == len(expected)
        for key, tensor in expected.items():
            assert torch.equal(downs[key], tensor)
    with pytest.raises(KeyError):
        downs[2]


def test_two_of_one_store_are_apart(store, tmp_path):
    """Each has its own weights, and removes them alone."""
    first, second = StoredLayers(store, "down"), StoredLayers(store, "down")
    first[0], second[0] = down(1.0), down(2.0)
    assert (first[0].unique().item(), second[0].unique().item()) == (1.0, 2.0)
    del first
    gc.collect()
    assert second._store is store
    assert len(store._memory) + len(list(tmp_path.iterdir())) == 1
    assert second[0].unique().item() == 2.0
