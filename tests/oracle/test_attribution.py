"""Attribution of the loss, against loops over tokens and over pruned copies."""

import numpy as np
import pandas as pd
import pytest
import torch
from families import tiny_ids, tiny_model
from keeps import logits_of, random_keep, zeroed_twin
from oracles import token_by_token
from text_models import SINGLE, experts_calls
from torch import nn

from heapr_lab import HeaprLabError, KeepMask, evaluate_perplexity, masking
from heapr_lab.errors import CoverageError, SpecError
from heapr_lab.inspection.attribution import attribute_loss
from heapr_lab.models.experts import find_experts
from heapr_lab.models.likelihood import token_nll

FAMILIES = ["qwen2_moe", "mixtral", "deepseek_v2", "gpt_oss", "nemotron_h", "kolibri1"]
CLOSE = {"rtol": 1e-7, "atol": 1e-10}


def tolerance(family: str) -> dict[str, float]:
    """Some routers compute in float32, whatever the model's type."""
    return CLOSE if family in ("mixtral", "gpt_oss") else SINGLE


def scaled_twin(model: nn.Module, keep: KeepMask, factor: float) -> nn.Module:
    """A copy whose removed columns of W_down are multiplied by `factor`."""
    twin = zeroed_twin(model, keep)
    for weight, dense in zip(twin.parameters(), model.parameters(), strict=True):
        weight.data.lerp_(dense.data, factor)
    return twin


def by_hand(model: nn.Module, keep: KeepMask, ids: torch.Tensor) -> pd.DataFrame:
    """−⟨∂ℓ/∂y, removed output⟩ of every atom, token after token, half pruned."""
    twin, rows = scaled_twin(model, keep, 0.5), []
    calls = experts_calls(twin, ids)
    records = token_by_token.run(twin, ids)
    for layer in find_experts(twin):
        record, index = records[id(layer.module)], calls[layer.layer][1]
        for expert, served in record.items():
            kept = keep.by_layer(layer.layer)[expert]
            places = [t for t, row in enumerate(index.tolist()) if expert in row]
            for place, token in zip(places, served, strict=True):
                for atom in np.flatnonzero(~kept):
                    whole = token.e[atom] / 0.5
                    value = -float(token.E.grad @ whole)
                    where = layer.layer, place, expert, atom
                    rows.append((*where, value))
    names = ["layer", "place", "expert", "atom", "value"]
    frame = pd.DataFrame(rows, columns=names)
    frame["value"] /= ids[:, 1:].numel()
    return frame


@pytest.mark.parametrize("family", FAMILIES)
def test_attribution(family):
    """Atoms, tokens and layers are those of the loops.

    They are of the mask that is given, also while another is on.
    """
    model, ids = tiny_model(family), tiny_ids(n_sequences=1, seq_len=27)
    keep = random_keep(model)
    expected = by_hand(model, keep, ids)
    close = tolerance(family)
    attribution = attribute_loss(model, keep, ids)
    assert expected["value"].abs().max() > 1e-4
    for layer, values in attribution.atoms.items():
        wanted = np.zeros(values.shape)
        for row in expected[expected["layer"].eq(layer)].itertuples():
            wanted[row.expert, row.atom] += row.value
        np.testing.assert_allclose(values, wanted, **close)
        assert not values[keep.by_layer(layer)].any()
    wanted = np.zeros((ids.shape[1], len(keep.layers)))
    for row in expected.itertuples():
        wanted[row.place, keep.layers.index(row.layer)] += row.value
    np.testing.assert_allclose(attribution.tokens, wanted, **close)
    layers = attribution.layers()
    np.testing.assert_allclose(layers["first_order"], wanted.sum(0), **close)
    assert layers["n_removed"].sum() == keep.n_removed
    assert attribution.total == pytest.approx(expected["value"].sum(), rel=1e-5)
    with masking(model, random_keep(model, seed=5)), torch.inference_mode():
        inside = attribute_loss(model, keep, ids).tokens
    np.testing.assert_array_equal(inside, attribution.tokens)


@pytest.mark.parametrize("family", ["qwen2_moe", "gpt_oss"])
def test_shares_add_up_to_the_change(family):
    """It is ℓ'(½), which is closer to Δloss than the dense or the pruned gradient.

    The model is nearly quadratic: every expert is used, so no routing jumps.
    """
    model = tiny_model(family, num_experts_per_tok=4)
    keep, ids = random_keep(model), tiny_ids(n_sequences=1, seq_len=27)
    with torch.no_grad():
        for layer in find_experts(model):
            layer.down.mul_(0.1)

    def nll(factor: float) -> float:
        return evaluate_perplexity(scaled_twin(model, keep, factor), ids).nll

    change, total = nll(0) - nll(1), attribute_loss(model, keep, ids).total
    step = 0.05  # some routers compute in float32
    slope = (nll(0.5 - step) - nll(0.5 + step)) / (2 * step)
    assert total == pytest.approx(slope, rel=2e-3)
    # Gradients at both ends, by finite differences: half the second derivative away.
    dense = (4 * nll(1 - step) - 3 * nll(1) - nll(1 - 2 * step)) / (2 * step)
    pruned = (3 * nll(0) - 4 * nll(step) + nll(2 * step)) / (2 * step)
    assert (dense - change) * (pruned - change) < 0
    assert abs(total - change) < 0.5 * min(abs(dense - change), abs(pruned - change))


def test_an_error_leaves_the_model_as_it_was(monkeypatch):
    """An interrupt in the pass, say."""
    model, ids = tiny_model("qwen2_moe"), tiny_ids(n_sequences=1)
    keep, before = random_keep(model), logits_of(model, ids)
    flags = [weight.requires_grad for weight in model.parameters()]

    def interrupted(*args: torch.Tensor) -> torch.Tensor:
        token_nll(*args).sum().backward()
        raise KeyboardInterrupt

    monkeypatch.setattr("heapr_lab.inspection.attribution.token_nll", interrupted)
    with pytest.raises(KeyboardInterrupt):
        attribute_loss(model, keep, ids)
    assert torch.equal(logits_of(model, ids), before)
    assert [weight.requires_grad for weight in model.parameters()] == flags


def test_what_cannot_be_attributed():
    """Several texts, and a mask of another model."""
    model, ids = tiny_model("qwen2_moe"), tiny_ids()
    with pytest.raises(SpecError, match="3 windows, expected one text"):
        attribute_loss(model, random_keep(model), ids)
    other = random_keep(tiny_model("mixtral", num_hidden_layers=3))
    with pytest.raises(SpecError, match="made for another model"):
        attribute_loss(model, other, ids[:1])


def test_passes_that_cannot_be_trusted(monkeypatch):
    """A layer that runs twice, and a gradient that is not finite, are errors."""
    model, ids = tiny_model("qwen2_moe"), tiny_ids(n_sequences=1)
    keep = random_keep(model)
    mlp = model.model.layers[0].mlp
    forward = mlp.forward
    with monkeypatch.context() as patch:
        patch.setattr(mlp, "forward", lambda x: (forward(x) + forward(x)) / 2)
        with pytest.raises(CoverageError, match="layer 0 took part 2 times"):
            attribute_loss(model, keep, ids)
    monkeypatch.setattr(
        "heapr_lab.inspection.attribution.token_nll",
        lambda *args: token_nll(*args) * float("nan"),
    )
    with pytest.raises(HeaprLabError, match="non-finite gradients in layer"):
        attribute_loss(model, keep, ids)
