"""Every expert on every token gives what the routed experts give."""

from typing import Any

import pytest
import torch
from families import REPRESENTATIVES, tiny_ids, tiny_model
from keeps import logits_of, random_keep
from tiny_folder import write_model

from heapr_lab.models import all_experts as fast
from heapr_lab.models.experts import ExpertsLayer, find_experts
from heapr_lab.models.hooks import Edit, _routed_forward
from heapr_lab.models.loading import load_model
from heapr_lab.models.ragged_experts import normalises
from heapr_lab.pruning.surgery import masking

N_TOKENS, N_SLOTS = 11, 3


def routed(layer: ExpertsLayer) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, three of the four experts for each, in any order, and their weights."""
    noise = torch.Generator().manual_seed(0)
    states = torch.randn(N_TOKENS, layer.d_expert, generator=noise, dtype=layer.dtype)
    order = torch.rand(N_TOKENS, layer.n_experts, generator=noise).argsort(1)
    weights = torch.rand(N_TOKENS, N_SLOTS, generator=noise, dtype=layer.dtype)
    return states, order[:, :N_SLOTS], weights


@torch.no_grad()
@pytest.mark.parametrize("family", REPRESENTATIVES)
def test_every_family(family: str) -> None:
    """Within 1e-12 of the family's own loop and of the masked experts function."""
    layer = find_experts(tiny_model(family))[-1]
    if normalises(layer.module):
        assert not fast.most_are_active(layer.module, torch.zeros(1, 9))
        return
    states, index, weights = inputs = routed(layer)
    output = fast.all_experts(layer.module, *inputs)
    torch.testing.assert_close(output, layer.module(*inputs), rtol=1e-12, atol=1e-12)
    noise = torch.Generator().manual_seed(1)
    keep = torch.rand(layer.n_experts, layer.d_inter, generator=noise) < 0.5
    edit = Edit(keep.to(layer.dtype), torch.randn_like(layer.down))
    output = fast.all_experts(layer.module, *inputs, keep=edit.keep, down=edit.new_down)
    expected = _routed_forward(
        layer.module, states, index, weights, edit=edit, probe=None, observer=None
    )
    torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)


@torch.no_grad()
def test_slots_without_an_expert_and_repeated_ones() -> None:
    """An index of E adds nothing; an expert in two slots counts twice."""
    layer = find_experts(tiny_model("qwen2_moe"))[0]
    states, index, weights = routed(layer)
    index[0, 1] = layer.n_experts
    index[1, 2] = index[1, 0]
    output = fast.all_experts(layer.module, states, index, weights)
    weights = weights.clone()
    weights[0, 1] = 0
    index[0, 1] = 0
    expected = layer.module(states, index, weights)
    torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("n_active", "used"), [(3, True), (2, False)])
def test_where_it_is_used(
    n_active: int, used: bool, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Models loaded on a CPU use it, masked or not, if most experts are active."""
    calls: list[int] = []
    original = fast.all_experts

    def noted(*args: Any, **options: Any) -> torch.Tensor:
        calls.append(1)
        return original(*args, **options)

    for module in ("heapr_lab.models.all_experts", "heapr_lab.models.hooks"):
        monkeypatch.setattr(f"{module}.all_experts", noted)
    folder = write_model(tmp_path, num_experts_per_tok=n_active)
    model, _ = load_model(folder, device="cpu")
    assert model.config._experts_implementation == fast.ON_CPU
    keep, ids = random_keep(model), tiny_ids()
    with torch.no_grad():
        dense = logits_of(model, ids)
        with masking(model, keep):
            masked = logits_of(model, ids)
        assert len(calls) == (2 * model.config.num_hidden_layers if used else 0)
        model.set_experts_implementation("eager")
        torch.testing.assert_close(dense, logits_of(model, ids), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(dense, masked)
