"""Methods of low rank against single tokens and decompositions as papers write them."""

import math
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import pytest
import torch
from families import tiny_model
from heard import Heard
from methods_by_hand import (
    IDS,
    SIX,
    WINDOWS,
    fitted,
    gradients_by_hand,
    multiplied,
    routed,
    truncated,
)
from oracles.token_by_token import RoutedToken
from oracles.token_by_token import matrices as by_hand
from torch import nn

from heapr_lab import CalibrationSet, HeaprLabError, methods
from heapr_lab.errors import CoverageError, SpecError
from heapr_lab.methods.collectors import Measurements, sum_over_windows
from heapr_lab.methods.composing import Composition, distinct
from heapr_lab.methods.compression import ExpertComposition
from heapr_lab.methods.low_rank import (
    MOMENTS,
    Sizes,
    base_of,
    ranks_of,
    sensitivity,
    sizes_of,
    squares,
)
from heapr_lab.models.architecture import LayerShape
from heapr_lab.models.experts import ExpertsLayer, find_experts

FAMILIES = ("deepseek_v2", "gpt_oss")
CLOSE = {"rtol": 1e-6, "atol": 1e-6}
IN_SINGLE = {"rtol": 1e-4, "atol": 1e-5}
"""Gradients pass through routers' softmax, which is computed in float32."""
NAMES = ("gate", "up", "down")

Inputs = dict[tuple[int, int], list[RoutedToken]]


def root_of(tokens: list[Any], name: str, matrix: torch.Tensor) -> torch.Tensor:
    """S of S Sᵀ = Σ x xᵀ, damped, where x are the inputs of a matrix of an expert."""
    unit = torch.eye(matrix.shape[1], dtype=torch.float64)
    if not tokens:
        return unit
    x = torch.stack([t.h if name == "down" else t.x for t in tokens])
    second = x.mT @ x
    return torch.linalg.cholesky(second + 1e-6 * second.trace() / len(unit) * unit)


def whitened(matrix: torch.Tensor, rank: int, root: torch.Tensor) -> torch.Tensor:
    """SVD-LLM as its authors write it: SVD of W S, truncated, times S⁻¹."""
    return truncated(matrix @ root, rank) @ torch.linalg.inv(root)


def every_matrix(
    model: nn.Module, compression: ExpertComposition
) -> Iterator[tuple[ExpertsLayer, int, str, torch.Tensor, torch.Tensor]]:
    """Layer, expert, projection, its own matrix and the one in its place."""
    for layer in find_experts(model):
        composition = compression.compositions[layer.layer]
        for expert in range(layer.n_experts):
            for name in NAMES if layer.gated else NAMES[1:]:
                matrix = by_hand(layer.module, expert)[f"W_{name}"].detach()
                new = multiplied(composition[expert], name)
                yield layer, expert, name, matrix, new


# --- what they share --------------------------------------------------------------


def test_ranks_by_hand():
    """A rank costs 24 of the 384 numbers of an expert, and a bias 2 of each atom."""
    shape = LayerShape(n_experts=4, d_inter=8, d_expert=16)
    half = Fraction(1, 2)
    assert ranks_of(shape, half, layer=0) == {"gate": 2, "up": 3, "down": 3}
    assert ranks_of(shape, half, layer=0, shared=384) == {"gate": 1, "up": 1, "down": 2}
    biased = LayerShape(n_experts=4, d_inter=8, d_expert=16, atom_biases=2)
    assert sum(ranks_of(biased, half, layer=0).values()) == (200 - 16) // 24
    plain = LayerShape(n_experts=4, d_inter=8, d_expert=16, n_matrices=2)
    assert ranks_of(plain, half, layer=0) == {"up": 2, "down": 3}
    most = 1 - Fraction(3 * 24, 384)
    assert ranks_of(shape, most, layer=0) == dict.fromkeys(NAMES, 1)
    with pytest.raises(SpecError, match=r"layer 5 .* ratio is 0\.8125"):
        ranks_of(shape, most + Fraction(1, 1000), layer=5)


# --- plain SVD --------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_svd(family):
    """Every matrix is the truncated one, with whitening."""
    model = tiny_model(family, **SIX)
    compression = fitted("svd", model, 0.4)
    inputs = routed(model)
    shapes = compression.shapes
    for layer, expert, name, matrix, new in every_matrix(model, compression):
        rank = ranks_of(shapes[layer.layer], Fraction(2, 5), layer=0)[name]
        root = root_of(inputs[layer.layer, expert], name, matrix)
        expected = whitened(matrix, rank, root)
        torch.testing.assert_close(new, expected, **CLOSE)


def test_a_matrix_that_factors_would_not_shrink_stays_dense():
    """11 ranks of 21 numbers fit, so up and down have 4, more than their 80 numbers."""
    model = tiny_model("mixtral", intermediate_size=5, hidden_size=16)
    compression = fitted("svd", model, 0.02)
    layer = find_experts(model)[0]
    ranks = ranks_of(compression.shapes[layer.layer], Fraction("0.02"), layer=0)
    assert ranks == {"gate": 3, "up": 4, "down": 4}
    experts = compression.compositions[layer.layer]
    assert [set(e) for e in experts] == [{"gate_left", "gate_right", "up", "down"}] * 4
    for name in ("up", "down"):
        assert torch.equal(experts[1][name], layer.expert(1)[name])
    assert compression.achieved_ratio == pytest.approx((80 - 3 * 21) / 240)


# --- D²-MoE -----------------------------------------------------------------------


def test_the_model_is_as_before():
    """Modes, flags and gradients, after a pass and after an exception in one.

    The windows are reported.
    """
    model, progress = tiny_model("qwen2_moe").train(), Heard()
    weight = find_experts(model)[0].module.down_proj
    weight.grad = torch.full_like(weight, 3.0)
    next(model.parameters()).requires_grad_(False)
    flags = [parameter.requires_grad for parameter in model.parameters()]

    def fail(_done: int, _total: int) -> None:
        assert not model.training
        raise KeyError

    with pytest.raises(KeyError):
        sum_over_windows(model, WINDOWS, squares, fail)
    sum_over_windows(model, WINDOWS, squares, progress)
    assert progress == [(done, len(IDS)) for done in range(1, len(IDS) + 1)]
    assert model.training
    assert [parameter.requires_grad for parameter in model.parameters()] == flags
    assert torch.equal(weight.grad, torch.full_like(weight, 3.0))
    rest = [p.grad for p in model.parameters() if p is not weight]
    assert rest == [None] * len(rest)


def test_gradients_that_are_missing_or_not_finite_are_refused():
    """The layer is named by its number, and a later pass is as if there were none."""
    model = tiny_model("mixtral")
    before = sum_over_windows(model, WINDOWS, squares)
    model.config.num_hidden_layers = 1
    with pytest.raises(CoverageError, match="layer 1 took part 0 times in the pass"):
        sum_over_windows(model, WINDOWS, squares)
    model.config.num_hidden_layers = 2
    weight = find_experts(model)[1].module.down_proj
    with (
        weight.register_hook(lambda gradient: gradient * torch.inf),
        pytest.raises(HeaprLabError, match="non-finite gradients in layer 1"),
    ):
        sum_over_windows(model, WINDOWS, squares)
    torch.testing.assert_close(sum_over_windows(model, WINDOWS, squares), before)


@pytest.mark.parametrize("family", [*FAMILIES, "nemotron_h"])
def test_d2_moe(family):
    """The base is the weighted mean; differences are those of the whitened SVD."""
    model = tiny_model(family, **SIX)
    windows, inputs = [*gradients_by_hand(model)], routed(model)
    compression = fitted("d2-moe", model, 0.4)
    for layer, expert, name, matrix, new in every_matrix(model, compression):
        number = layer.layer
        top = bottom = torch.zeros_like(matrix)
        for e in range(6):
            squares = [of[number, e][f"W_{name}"].square() for of in windows]
            weight = sum(squares) * len(inputs[number, e])
            top = top + weight * by_hand(layer.module, e)[f"W_{name}"].detach()
            bottom = bottom + weight
        base = top / bottom
        made = compression.compositions[number][expert]
        torch.testing.assert_close(made[name], base, **IN_SINGLE)
        root = root_of(inputs[number, expert], name, matrix)
        rank = len(made[f"{name}_right"])
        expected = base + whitened(matrix - base, rank, root)
        torch.testing.assert_close(new, expected, **IN_SINGLE)


def test_the_base_where_nothing_is_known():
    """Entries without a gradient are the mean, those of one expert its own."""
    stack = torch.tensor([[[1.0, 2.0]], [[5.0, 8.0]]], dtype=torch.float64)
    fisher = torch.tensor([[[0.0, 1.0]], [[0.0, 1.0]]], dtype=torch.float64)
    base = base_of(stack, fisher, torch.tensor([3.0, 1.0]))
    assert base.tolist() == [[3.0, 3.5]]
    assert base_of(stack, fisher, torch.tensor([0.0, 1.0])).tolist() == [[3.0, 8.0]]


def test_d2_moe_has_room_for_its_base():
    """The base takes a quarter of 4 experts, three ranks of each 72 of 384 numbers."""
    model = tiny_model("mixtral")
    most = 1 - (Fraction(1, 4) + Fraction(72, 384))
    assert fitted("d2-moe", model, float(most)).achieved_ratio == float(most)
    with pytest.raises(SpecError, match=r"largest possible ratio is 0\.5625"):
        fitted("d2-moe", model, float(most) + 0.01)
    achieved = fitted("d2-moe", model, 0.5).achieved_ratio
    assert 0.5 <= achieved < 0.5 + 24 / 384  # a rank of each expert


# --- MoE-SVD ----------------------------------------------------------------------


def sensitivity_by_hand(layer: ExpertsLayer, inputs: Inputs) -> float:
    """Σ f r a, one expert after the other."""
    total, n_tokens = 0.0, sum(len(inputs[layer.layer, e]) for e in range(6))
    for expert in range(layer.n_experts):
        tokens, ranks = inputs[layer.layer, expert], 0
        for name in NAMES:
            values = torch.linalg.svdvals(layer.expert(expert)[name])
            ranks += int((values > 0.01 * values.max()).sum())
        sizes = torch.stack([t.h for t in tokens]).abs()
        outliers = float((sizes > 2 * sizes.mean()).double().mean())
        total += len(tokens) / n_tokens * ranks / 3 * outliers
    return total


@pytest.mark.parametrize("family", FAMILIES)
def test_the_least_sensitive_layers_are_decomposed(family):
    """Less than a third of a layer goes: 0.3 of one of two layers is 0.15 of all."""
    model = tiny_model(family, **SIX)
    inputs = routed(model)
    moments = Measurements(model, WINDOWS).collected(MOMENTS)
    scores = {k.layer: sensitivity_by_hand(k, inputs) for k in find_experts(model)}
    for layer in find_experts(model):
        score = sensitivity(layer, moments[layer.layer])
        assert score == pytest.approx(scores[layer.layer])
    for ratio in (0.1, 0.15):
        compression = fitted("moe-svd-like", model, ratio)
        assert list(compression.compositions) == [min(scores, key=lambda k: scores[k])]
    assert len(fitted("moe-svd-like", model, 0.16).compositions) == 2


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("ratio", [0.03, 0.3, 0.7])
def test_moe_svd(family, ratio):
    """V is that of the expert with most tokens, U the least squares for its inputs."""
    model = tiny_model(family, **SIX)
    inputs = routed(model)
    reduced = fitted("moe-svd-like", model, ratio, most_of_layer=0.6)
    shared_lefts = dense_experts = 0
    for layer in [k for k in find_experts(model) if k.layer in reduced.compositions]:
        for name in NAMES:
            experts = reduced.compositions[layer.layer]
            low = [e for e in range(6) if f"{name}_left" in experts[e]]
            dense_experts += 6 - len(low)
            shared_lefts += len(low) - n_lefts(experts, name)
            check_projection(layer, name, experts, low, inputs)
    assert (dense_experts > 0) == (ratio == 0.03)
    assert (shared_lefts > 0) == (ratio > 0.03)


def n_lefts(experts: Composition, name: str) -> int:
    """How many different U a projection has."""
    return sum(part == f"{name}_left" for part, _ in distinct(experts).values())


def check_projection(
    layer: ExpertsLayer, name: str, experts: Composition, low: list[int], inputs: Inputs
) -> None:
    """One projection of a decomposed layer, against least squares on its tokens."""

    def weight_of(expert: int) -> tuple[int, float]:
        tokens = inputs[layer.layer, expert]
        return len(tokens), sum(float(t.p) for t in tokens)

    low = sorted(low, key=weight_of, reverse=True)
    for expert in set(range(6)) - set(low):
        assert weight_of(expert) > weight_of(low[0])
        assert torch.equal(experts[expert][name], layer.expert(expert)[name])
    if not low:
        return
    right = experts[low[0]][f"{name}_right"]
    assert all(experts[e][f"{name}_right"] is right for e in low)
    dense = {e: layer.expert(e)[name] for e in low}
    roots = {e: root_of(inputs[layer.layer, e], name, dense[e]) for e in low}
    best = {
        e: torch.linalg.lstsq(
            (right @ roots[e]).mT, (dense[e] @ roots[e]).mT
        ).solution.mT
        @ right
        for e in low
    }
    expected = whitened(dense[low[0]], len(right), roots[low[0]])
    torch.testing.assert_close(best[low[0]], expected, **CLOSE)
    kept = low[: n_lefts(experts, name)]
    for expert in low:
        errors = [((dense[expert] - best[e]) @ roots[expert]).norm() for e in kept]
        nearest = best[kept[torch.stack(errors).argmin()]]
        torch.testing.assert_close(multiplied(experts[expert], name), nearest, **CLOSE)


def test_sizes_fit_the_budget():
    """At most one rank is left over, and every expert has its own U if it can."""
    for n_experts, out, into in ((6, 8, 16), (6, 16, 8), (4, 5, 5), (8, 3, 40)):
        dense = n_experts * out * into
        for budget in range(out + into, dense, 7):
            sizes = sizes_of(Fraction(budget), n_experts, out, into)
            numbers = sizes.numbers(n_experts, out, into)
            assert budget - sizes.lefts * out - into < numbers <= budget
            assert 1 <= sizes.rank <= min(out, into)
            half = math.ceil(min(out, into) / 2)
            more = Sizes(sizes.decomposed, sizes.lefts + 1, half)
            if sizes.lefts < sizes.decomposed:
                assert more.numbers(n_experts, out, into) > budget
            more = Sizes(sizes.decomposed + 1, sizes.decomposed + 1, min(out, into))
            if sizes.decomposed < n_experts:
                assert more.numbers(n_experts, out, into) < budget


@pytest.mark.parametrize("name", ["svd", "d2-moe", "moe-svd-like"])
def test_experts_without_tokens_or_weights(name):
    """Weights are finite if two tokens reach few experts, and some matrices are 0."""
    model, two = tiny_model("mixtral", **SIX), CalibrationSet.from_ids(IDS[:1, :2])
    for layer in find_experts(model):
        for expert in range(6):
            layer.expert(expert)["up"][:6] = 0
    compression = methods.get(name).fit(model, two, ratio=0.4)
    assert all(new.isfinite().all() for *_, new in every_matrix(model, compression))
