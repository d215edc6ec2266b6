"""How experts run: ragged ones against single atoms, all on all tokens against some."""

from unittest.mock import Mock

import pytest
import torch
from families import REPRESENTATIVES, tiny_ids, tiny_model
from keeps import logits_of, masked_logits, random_keep, widths_keep
from tiny_folder import write_model
from torch import nn

from heapr_lab import evaluate_perplexity, load_model, prune
from heapr_lab.models import hooks
from heapr_lab.models.experts import ExpertsLayer, find_experts, sliced_experts
from heapr_lab.models.hooks import Edit, _routed_forward
from heapr_lab.models.ragged_experts import RaggedExperts, normalises


def layer(*, bias: bool = False, empty: bool = False) -> RaggedExperts:
    """The ragged experts of one layer, of all widths or of none."""
    model = tiny_model("qwen3_moe", dtype=torch.float64)
    keep = widths_keep(model, 0, structure="") if empty else random_keep(model)
    (module, *_) = sliced_experts(prune(model, keep)).values()
    if bias:
        n_experts, d_expert = len(module.heapr_widths), module.d_expert
        module.down_bias = nn.Parameter(torch.randn(n_experts, d_expert).double())
    return module


@pytest.mark.parametrize(("empty", "n_tokens"), [(False, 3), (False, 0), (True, 3)])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("index", [[0, 0], [1, 2], [2, 4], [4, 4]], ids=str)
def test_against_atom_by_atom(index, bias, empty, n_tokens):
    """Experts without tokens or without atoms, and slots that no expert runs (4).

    Of no tokens nothing comes out.
    """
    torch.manual_seed(0)
    module = layer(bias=bias, empty=empty)
    x = torch.randn(n_tokens, module.d_expert, dtype=torch.float64)
    ids, p = torch.tensor(index).expand(n_tokens, 2), torch.rand(n_tokens, 2).double()
    expected = torch.zeros_like(x)
    for token in range(n_tokens):
        for slot, expert in enumerate(index):
            if expert < len(module.heapr_widths):
                out = by_atoms(module, expert, x[token])
                expected[token] += p[token, slot] * out
    torch.testing.assert_close(module(x, ids, p), expected)


def by_atoms(module: RaggedExperts, expert: int, x: torch.Tensor) -> torch.Tensor:
    """The output of one expert for one token, one atom after the other."""
    start, width = module.starts[expert], module.heapr_widths[expert]
    out = torch.zeros_like(x)
    for atom in range(width):
        gate = module.up_rows[2 * start + atom] @ x
        up = module.up_rows[2 * start + width + atom] @ x
        out += gate * torch.sigmoid(gate) * up * module.down_columns[start + atom]
    return out if module.down_bias is None else out + module.down_bias[expert]


# --- every expert on every token --------------------------------------------------

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
def test_every_family(family):
    """Within 1e-12 of the family's own loop and of the masked experts function."""
    layer = find_experts(tiny_model(family))[-1]
    if normalises(layer.module):
        assert not hooks.most_are_active(layer.module, torch.zeros(1, 9))
        return
    states, index, weights = inputs = routed(layer)
    output = hooks.all_experts(layer.module, *inputs)
    torch.testing.assert_close(output, layer.module(*inputs), rtol=1e-12, atol=1e-12)
    noise = torch.Generator().manual_seed(1)
    keep = torch.rand(layer.n_experts, layer.d_inter, generator=noise) < 0.5
    edit = Edit(keep.to(layer.dtype), torch.randn_like(layer.down))
    output = hooks.all_experts(layer.module, *inputs, edit=edit)
    expected = _routed_forward(
        layer.module, states, index, weights, edit=edit, probe=None, observer=None
    )
    torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)


@torch.no_grad()
def test_slots_without_an_expert_and_repeated_ones():
    """An index of E adds nothing; an expert in two slots counts twice."""
    layer = find_experts(tiny_model("qwen2_moe"))[0]
    states, index, weights = routed(layer)
    index[0, 1] = layer.n_experts
    index[1, 2] = index[1, 0]
    output = hooks.all_experts(layer.module, states, index, weights)
    weights = weights.clone()
    weights[0, 1] = 0
    index[0, 1] = 0
    expected = layer.module(states, index, weights)
    torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("n_active", "used"), [(3, True), (2, False)])
def test_where_it_is_used(n_active, used, tmp_path, monkeypatch):
    """Models loaded on a CPU use it, masked or not, if most experts are active.

    So they do with new columns, as a pruned model has them.
    """
    spy = Mock(wraps=hooks.all_experts)
    monkeypatch.setattr(hooks, "all_experts", spy)
    folder = write_model(tmp_path, num_experts_per_tok=n_active)
    model, _ = load_model(folder, device="cpu")
    assert model.config._experts_implementation == hooks.ON_CPU
    keep, ids = random_keep(model), tiny_ids()
    dense = logits_of(model, ids)
    down_projs = {layer.layer: 2 * layer.down.detach() for layer in find_experts(model)}
    masked = masked_logits(model, ids, keep, down_projs)
    assert spy.call_count == (2 * model.config.num_hidden_layers if used else 0)
    model.set_experts_implementation("eager")
    pruned = prune(model, keep, down_projs=down_projs)
    for logits, net in ((dense, model), (masked, pruned)):
        torch.testing.assert_close(logits, logits_of(net, ids), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(dense, masked)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("width", "dtype"), [(7, "float32"), (4, "bfloat16")])
def test_widths_that_fill_no_16_bytes_run(width, dtype, stream, tmp_path):
    """Grouped kernels refuse them, so they are not asked."""
    folder = write_model(tmp_path, moe_intermediate_size=width)
    model, _ = load_model(folder, device="cpu", dtype=dtype, stream=stream)
    exact, _ = load_model(folder, device="cpu", dtype="float64")
    ids = tiny_ids()
    losses = [evaluate_perplexity(m, ids).nll for m in (model, exact)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-2)
