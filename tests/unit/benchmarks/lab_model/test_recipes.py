"""The recipes build the models that their names promise."""

import dataclasses
import functools

import pytest

from benchmarks.lab_model.recipes import RECIPES
from benchmarks.lab_model.train import build_lab_model
from heapr_lab.models.experts import find_experts

SHAPES = {
    # family, layers with experts, experts, atoms, top-k
    "bundled": ("qwen2_moe", 8, 16, 96, 4),
    "unbalanced": ("qwen3_moe", 4, 16, 128, 4),
    "fine": ("deepseek_v2", 3, 64, 48, 6),
    "biased": ("gpt_oss", 4, 16, 96, 4),
    "upcycled": ("qwen3_moe", 4, 16, 128, 4),
}


built = functools.cache(lambda recipe: build_lab_model(RECIPES[recipe][-1]))
"""The model of a recipe, made once."""


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_is_of_its_family_and_shape(recipe):
    """Experts as transformers built them, in every layer that is not dense."""
    model = built(recipe)
    layers = find_experts(model)
    sizes = {(layer.n_experts, layer.d_inter) for layer in layers}
    family, n_layers, n_experts, d_inter, top_k = SHAPES[recipe]
    assert model.config.model_type == family
    assert (len(layers), sizes) == (n_layers, {(n_experts, d_inter)})
    assert model.config.num_experts_per_tok == top_k
    assert model.config.tie_word_embeddings


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_trains_as_long_for_its_size_as_the_bundled_one(recipe):
    """At least 2.98 tokens for each parameter, over all runs."""
    runs = RECIPES[recipe]
    size = sum(p.numel() for p in built(recipe).parameters())
    assert sum(run.n_tokens for run in runs) / size >= 2.98


def test_only_the_unbalanced_recipe_balances_no_router():
    """It does so neither before the learning rate decays nor while it does."""
    for name, runs in RECIPES.items():
        weights = {(r.balance_weight > 0, r.decay_balance_weight > 0) for r in runs}
        assert weights == {(name != "unbalanced",) * 2}


def test_shared_experts_of_deepseek_are_as_wide_as_asked():
    """Two of 48 atoms; the dense layer has as many as a token uses elsewhere."""
    config = build_lab_model(RECIPES["fine"][0]).config
    assert (config.n_shared_experts, config.moe_intermediate_size) == (2, 48)
    assert config.intermediate_size == 48 * (6 + 2)
    spec = dataclasses.replace(RECIPES["fine"][0], d_shared=48, n_layers=2)
    assert build_lab_model(spec).config.n_shared_experts == 1
