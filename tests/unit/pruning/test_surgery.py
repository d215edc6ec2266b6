"""What a pruned model remembers, and which tables and masks are of which model."""

from unittest.mock import Mock

import pytest
import torch
from families import tiny_ids, tiny_model
from keeps import logits_of, random_keep
from torch import nn

from heapr_lab import (
    CalibrationSet,
    ImportanceTable,
    collect_statistics,
    masking,
    prune,
)
from heapr_lab.errors import SpecError
from heapr_lab.models.experts import find_experts
from heapr_lab.pruning.surgery import check_table

IDS = tiny_ids()


@pytest.fixture
def model() -> nn.Module:
    """A tiny qwen2_moe."""
    return tiny_model("qwen2_moe")


def doubled(model: nn.Module, *numbers: int) -> dict[int, torch.Tensor]:
    """Twice the W_down of these layers."""
    layers = find_experts(model)
    return {number: 2 * layers[number].down.detach() for number in numbers}


@pytest.mark.parametrize("inplace", [False, True])
def test_a_pruned_model_knows_its_mask(model, inplace):
    """It knows, too, that its weights were replaced, if they were."""
    keep = random_keep(model)
    assert not hasattr(prune(model, keep), "heapr_weights")
    pruned = prune(model, keep, down_projs=doubled(model, 0, 1), inplace=inplace)
    assert pruned.heapr_keep is keep
    assert pruned.heapr_weights == "W_down replaced, all else sliced"
    for name in ("heapr_keep", "heapr_weights"):
        assert hasattr(model, name) == inplace


@pytest.mark.parametrize("numbers", [(0,), (1,), (0, 1)])
def test_only_the_layers_that_are_given_are_replaced(model, numbers):
    """Masked, sliced and sliced in place, as if the weights had been those."""
    keep, down_projs = random_keep(model), doubled(model, *numbers)
    twin = tiny_model("qwen2_moe")
    for number in numbers:
        find_experts(twin)[number].down.data.mul_(2)
    expected = logits_of(prune(twin, keep), IDS)
    with masking(model, keep, down_projs) as same:
        assert same is model
        torch.testing.assert_close(logits_of(model, IDS), expected)
    torch.testing.assert_close(
        logits_of(prune(model, keep, down_projs=down_projs), IDS), expected
    )
    prune(model, keep, down_projs=down_projs, inplace=True)
    torch.testing.assert_close(logits_of(model, IDS), expected)


def test_methods_of_the_dense_model_are_left_behind(model):
    """Methods that accelerate binds to a model: the copy has those of its class."""
    refuse = Mock(side_effect=AssertionError("of the dense model"))
    model.to = model.cuda = refuse  # type: ignore[method-assign,assignment]
    pruned = prune(model, random_keep(model))
    assert pruned.to(torch.float32) is pruned
    assert {"to", "cuda"} & pruned.__dict__.keys() == set()
    assert model.to is refuse
    # In place the model is the same, and so are they.
    assert prune(model, random_keep(model), inplace=True).to is refuse


# --- what belongs together --------------------------------------------------------


def test_a_table_is_of_the_model_it_was_measured_on(model):
    """It is known by its layers, and by what its specification says of the model."""
    table = collect_statistics(model, CalibrationSet.from_ids(IDS))
    check_table(model, find_experts(model), table)
    other = tiny_model("qwen2_moe", seed=1)
    with pytest.raises(SpecError, match="differs in weights; collect the statistics"):
        check_table(other, find_experts(other), table)
    fewer = tiny_model("qwen2_moe", num_experts=3)
    shapes = r"table of layer 0 has shape \(4, 8\), expected \(3, 8\)"
    with pytest.raises(SpecError, match=shapes):
        check_table(fewer, find_experts(fewer), table)
    for metadata in ({}, {"spec": None}, {"spec": {"schema": 1}}):  # says nothing of it
        silent = ImportanceTable.from_frame(table.frame, **metadata)
        check_table(model, find_experts(model), silent)
    # The names are in order, also of what only one of the two says.
    spec = table.metadata["spec"]
    facts = {**spec["model"], "a": 1, "weights": "other"}
    del facts["dtype"]
    changed = ImportanceTable.from_frame(table.frame, spec={**spec, "model": facts})
    with pytest.raises(SpecError, match="differs in a, dtype, weights; collect"):
        check_table(model, find_experts(model), changed)
