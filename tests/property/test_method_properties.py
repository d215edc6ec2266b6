"""What every registered method promises, on tiny models of two families."""

import copy
from fractions import Fraction

import pytest
import torch
from families import tiny_ids, tiny_model, tiny_windows
from keeps import logits_of
from methods_by_hand import SIX, reloaded
from torch import nn

from heapr_lab import CalibrationSet, Compression, methods, save_pruned
from heapr_lab.errors import SpecError
from heapr_lab.methods.collectors import Measurements
from heapr_lab.methods.compression import AtomCompression
from heapr_lab.methods.expert_axes import find_expert_axes
from heapr_lab.models.experts import describe, find_experts

FAMILIES = ("mixtral", "deepseek_v2")
"""Families of different routers and tensor names; the oracles have each method's."""
METHODS = {name: methods.get(name) for name in methods.names()}
WINDOWS = tiny_windows(n_sequences=8, seq_len=24)
"""They have as many tokens as an expert's least squares have unknowns, or rounding
would select its atoms."""
IDS = tiny_ids(seed=5)
RATIO = 0.34
DRAWN = {"random", "random-groups"}
"""Methods that number atoms or experts, and do not look at them."""
ORDERED = {"compress"}
"""Methods that hold out windows by their place, which their deviations say."""
SMALL = {"population": 5, "generations": 2, "most_windows": 4}
"""Options with which `moe-i2-like` takes less time."""
MEASURED_ALONE = {
    *("mone", "moe-i2-like", "hc-smoe", "mc-smoe", "sub-moe-like", "random-groups"),
    *("svd", "d2-moe", "moe-svd-like", "evoesap"),
}
"""Methods of experts that share matrices, are factors or constants, or are other
numbers in each layer."""
STEPS: dict[str, float] = {
    "atoms": 2,  # one of each layer
    "experts": 16,
    "merging": 16,
    "low rank": 6,  # a rank of one of three matrices of each expert
    "weights": 12,  # a weight of each row of 16 or, in W_down, of 8
    **dict.fromkeys(("heapr-expert", "mc-smoe", "evoesap"), 8),
    "intdim-e": 12,  # one of each expert
    "moe-i2-like": 1,  # a singular value of each layer
}
"""What kinds of methods, and some of them, remove at a time: atoms, of 96 in all."""
CLOSE = {"rtol": 1e-9, "atol": 1e-9}
IN_SINGLE = {"rtol": 1e-4, "atol": 1e-5}
"""Routers compute a softmax in float32, whose sum depends on the order of experts."""

Fitted = tuple[nn.Module, dict[str, Compression], dict[str, torch.Tensor]]
ONE_FAMILY = pytest.mark.parametrize("fitted", ["deepseek_v2"], indirect=True)
"""Of tests in which the other one would run the same code."""


@pytest.fixture(scope="module", params=FAMILIES)
def fitted(request) -> Fitted:
    """A model, what each method found for it, and its tensors before that."""
    model = tiny_model(request.param, **SIX)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    return model, fit_all(model, WINDOWS), before


def fit_all(
    model: nn.Module, windows: CalibrationSet, ratio: float = RATIO
) -> dict[str, Compression]:
    """What each method finds, with shared measurements."""
    shared = Measurements(model, windows)
    return {name: fit(name, model, windows, ratio, shared) for name in METHODS}


def fit(
    name: str,
    model: nn.Module,
    windows: CalibrationSet = WINDOWS,
    ratio: float = RATIO,
    shared: Measurements | None = None,
) -> Compression:
    """What one method finds."""
    options = SMALL if name == "moe-i2-like" else {}
    return METHODS[name].fit(model, windows, ratio=ratio, shared=shared, **options)


def applied(compression: Compression, model: nn.Module) -> torch.Tensor:
    """The logits of the compressed model."""
    with compression.apply(model):
        return logits_of(model, IDS)


def same(
    compression: Compression, model: nn.Module, other: Compression, twin: nn.Module
) -> bool:
    """Whether as much is removed of both models, and they compute the same then."""
    logits = applied(compression, model), applied(other, twin)
    alike = torch.allclose(*logits, **(CLOSE if model is twin else IN_SINGLE))
    return alike and compression.achieved_ratio == other.achieved_ratio


@pytest.mark.parametrize("ratio", [0.1, 0.5])
def test_the_budget_is_exact(fitted, ratio):
    """Within one of what the method removes at a time, and counted by hand."""
    model, _, _ = fitted
    architecture = describe(model)
    for name, reduction in fit_all(model, WINDOWS, ratio).items():
        small = reduction.materialise(model)
        experts = [small.get_submodule(layer.name) for layer in find_experts(model)]
        atoms = sum(
            weight.numel()
            for module in experts
            for part, weight in module.named_parameters()
            if "down_bias" not in part  # a constant, which is in `savings`
        )
        zeros = 0
        if METHODS[name].compresses == "weights":
            every = [weight for module in experts for weight in module.parameters()]
            zeros = sum(int((weight == 0).sum()) for weight in every)
        atoms -= zeros
        layers = architecture.layers.values()
        total = sum(shape.n_atoms * shape.atom_parameters for shape in layers)
        assert reduction.achieved_ratio == pytest.approx(1 - atoms / total, abs=1e-12)
        step = STEPS.get(name, STEPS[METHODS[name].compresses])
        apart = abs(Fraction(reduction.achieved_ratio) - Fraction(ratio))
        assert apart <= step / 96, name
        after = sum(weight.numel() for weight in small.parameters()) - zeros
        assert reduction.savings(model).parameters == (architecture.n_parameters, after)


@ONE_FAMILY
def test_ratio_zero_changes_nothing(fitted):
    """The logits are those of the dense model."""
    model, _, _ = fitted
    dense = logits_of(model, IDS)
    for name, compression in fit_all(model, WINDOWS, 0.0).items():
        assert compression.achieved_ratio == 0.0, name
        torch.testing.assert_close(applied(compression, model), dense, **CLOSE)


@ONE_FAMILY
def test_the_same_seed_gives_the_same_result(fitted):
    """Fitted again, with measurements of its own; another seed is another draw."""
    model, before, _ = fitted
    for name in METHODS:
        assert same(fit(name, model), model, before[name], model), name
    for name in DRAWN:
        drawn = METHODS[name].fit(model, WINDOWS, ratio=RATIO, seed=1)
        assert not same(drawn, model, before[name], model)


def test_the_order_of_experts_does_not_matter(fitted):
    """With permuted experts and router rows the compressed function is the same."""
    model, before, _ = fitted
    permuted = with_permuted_experts(model)
    dense = logits_of(model, IDS)
    torch.testing.assert_close(logits_of(permuted, IDS), dense, **IN_SINGLE)
    for name, compression in fit_all(permuted, WINDOWS).items():
        if name not in DRAWN:
            assert same(before[name], model, compression, permuted), name


def with_permuted_experts(model: nn.Module) -> nn.Module:
    """A copy that computes the same, with other numbers of its experts."""
    permuted = copy.deepcopy(model)
    for axis in find_expert_axes(permuted):
        order = torch.tensor([4, 2, 0, 5, 1, 3])
        for module, name in axis.tensors:
            tensor = getattr(module, name)
            tensor.data = tensor.data[order]
    return permuted


@ONE_FAMILY
def test_the_order_of_windows_does_not_matter(fitted):
    """Except where windows are held out by their place."""
    model, before, _ = fitted
    turned = CalibrationSet.from_ids(WINDOWS.ids.flip(0))
    compressions = fit_all(model, turned)
    for name in set(METHODS) - ORDERED:
        assert same(compressions[name], model, before[name], model), name
    for name in ORDERED:
        assert any("order" in text for text in METHODS[name].deviations)


def test_the_dense_model_is_untouched(fitted):
    """Bit for bit, after fitting, applying, an exception inside, and materialising."""
    model, compressions, state = fitted
    objects = [id(weight) for weight in model.parameters()]
    dense = logits_of(model, IDS)
    for compression in compressions.values():
        with pytest.raises(KeyError), compression.apply(model):
            raise KeyError
        compression.savings(model)
        small = compression.materialise(model)
        with torch.no_grad():
            for weight in small.parameters():
                weight.fill_(7.0)
    assert [id(weight) for weight in model.parameters()] == objects
    torch.testing.assert_close(dict(model.state_dict()), state, rtol=0, atol=0)
    assert torch.equal(logits_of(model, IDS), dense)


def test_applied_is_materialised_is_reloaded(fitted, tmp_path):
    """The three have the same logits, which are not those of the dense model.

    What is no ordinary model of the family is not written.
    """
    model, compressions, _ = fitted
    dense = logits_of(model, IDS)
    for name, compression in compressions.items():
        expected = applied(compression, model)
        assert (expected - dense).abs().max() > 1e-3, name
        small = compression.materialise(model)
        torch.testing.assert_close(logits_of(small, IDS), expected, **CLOSE)
        folder = tmp_path / name
        if name in MEASURED_ALONE:
            with pytest.raises(SpecError, match="no configuration can express"):
                small.save_pretrained(folder)
            continue
        if isinstance(compression, AtomCompression):
            save_pruned(small, folder)
        else:
            small.save_pretrained(folder)
        loaded = reloaded(folder)
        torch.testing.assert_close(logits_of(loaded, IDS), expected, **CLOSE)
