"""Many problems at once are each problem by itself, in float32 as in float64."""

from unittest.mock import Mock

import pytest
import torch
from families import tiny_model

from heapr_lab.models.experts import find_experts
from heapr_lab.refinement import elimination, normal_equations
from heapr_lab.refinement.activation_grams import LayerGrams
from heapr_lab.refinement.compensation import LayerSolver
from heapr_lab.refinement.elimination import layer_costs
from heapr_lab.refinement.normal_equations import at_once, scarcity

RNG = torch.Generator()


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    """Random numbers in float64."""
    return torch.randn(*shape, generator=RNG.manual_seed(seed), dtype=torch.float64)


def products(n_problems: int, size: int, *, rows: int = 60) -> torch.Tensor:
    """Products of random correlated features, (2, P, F, F)."""
    X = numbers(2, n_problems, rows, size) @ numbers(n_problems, size, size, seed=1)
    return X.mT @ X


# --- pieces -----------------------------------------------------------------------


def test_an_expert_with_fewer_tokens_than_atoms_is_scarce():
    """8 atoms: as many tokens are enough; none count as one."""
    tokens = torch.tensor([[3, 8, 1, 0], [3, 9, 1, 0]])
    grams = LayerGrams("expert", torch.zeros(2, 4, 8, 8).double(), tokens)
    assert scarcity(grams, 8).tolist() == pytest.approx([8 / 6, 1, 4, 8])


def test_problems_of_a_cpu_fit_its_cache():
    """8 MiB of float64: 128 problems of 90 features, two of 512, one of 4096."""
    sizes = {90: 129, 512: 4, 1024: 1, 4096: 1}
    for size, expected in sizes.items():
        sums = torch.empty(1, dtype=torch.float64).expand(200, size, size)
        assert at_once(sums) == expected


# --- batches ----------------------------------------------------------------------


def test_problems_together_are_problems_alone(monkeypatch):
    """Costs and weights, of experts that keep from none to all of their atoms."""
    layer = find_experts(tiny_model("qwen2_moe"))[0]
    grams = LayerGrams("expert", products(4, 8), torch.full((2, 4), 60))
    base = numbers(4, 8, seed=2).exp()
    kept = torch.arange(8)[None] < torch.tensor([0, 3, 5, 8])[:, None]
    solutions = []
    for size in (4, 3, 1):
        monkeypatch.setattr(normal_equations, "at_once", lambda _sums, n=size: n)
        down, row = LayerSolver(layer, grams).solve(kept)
        solutions.append((layer_costs(layer, grams, base), down, row))
    for costs, down, row in solutions[1:]:
        torch.testing.assert_close(costs, solutions[0][0], rtol=1e-4, atol=0)
        torch.testing.assert_close(down, solutions[0][1], rtol=1e-9, atol=1e-12)
        assert row["ridge"] == solutions[0][2]["ridge"]
        assert row["compensated"] == pytest.approx(solutions[0][2]["compensated"])


@pytest.mark.parametrize("n_atoms", [64, 520])
def test_float32_is_enough_under_the_default_ridge(monkeypatch, n_atoms):
    """Costs to four digits, of correlated atoms of all sizes; float64 is used else."""
    sums = products(3, n_atoms, rows=2 * n_atoms)[0]
    size = (2 * numbers(3, n_atoms, seed=3)).exp()
    sums = sums * size[:, :, None] * size[:, None]
    weights = numbers(3, 40, n_atoms, seed=4) / size[:, None]
    rates = numbers(3, n_atoms, seed=5).exp()
    ridge = torch.full((3, n_atoms), 0.03).double()
    spy = Mock(wraps=elimination._eliminated)
    monkeypatch.setattr(elimination, "_eliminated", spy)
    narrow = elimination._costs(sums, weights, ridge, rates, n_steps=32)
    monkeypatch.setattr(elimination, "_FLOAT32_ENOUGH", 0.0)
    wide = elimination._costs(sums, weights, ridge, rates, n_steps=32)
    used = [call.args[0].dtype for call in spy.mock_calls]
    assert used == [torch.float32, torch.float64]
    torch.testing.assert_close(narrow, wide, rtol=1e-4, atol=0)
