"""Output biases against least squares by hand, and in checkpoints."""

from pathlib import Path
from typing import Any

import pytest
import torch
from families import tiny_ids, tiny_model
from keeps import logits_of, random_keep
from torch import nn
from transformers import AutoModelForCausalLM

from heapr_lab.checkpoints.save import save_pruned
from heapr_lab.errors import SpecError
from heapr_lab.pruning.masks import KeepMask
from heapr_lab.pruning.surgery import prune
from heapr_lab.refinement.expert_calls import iter_expert_calls
from heapr_lab.refinement.layer_distillation import distill_layers
from heapr_lab.refinement.output_bias import add_output_bias
from heapr_lab.text.calibration import CalibrationSet

WINDOWS = CalibrationSet.from_ids(tiny_ids(n_sequences=48))
FAMILIES = ["qwen2_moe", "gpt_oss", "nemotron_h", "deepseek_v2", "mixtral"]


def pruned_of(dense: nn.Module, **settings: Any) -> Any:
    """Half of the atoms are gone: one expert is empty, one whole."""
    keep = random_keep(dense)
    return prune(dense, KeepMask(keep.arrays, {**keep.settings, **settings}))


def biases_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """The output biases of all layers, by name; 0 where there are none."""
    return {
        name: torch.zeros(
            len(module.heapr_widths), module.d_expert, dtype=torch.float64
        )
        if module.down_bias is None
        else module.down_bias.detach().clone()
        for name, module in model.named_modules()
        if hasattr(module, "heapr_widths")
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_the_bias_is_that_of_least_squares(family: str) -> None:
    """Each layer against a ridge regression on stacked tokens, in float64."""
    dense = tiny_model(family)
    plain = pruned_of(dense)
    before = biases_of(plain)
    pruned = add_output_bias(pruned_of(dense), dense, WINDOWS)
    after = biases_of(pruned)
    report = pruned.heapr_output_bias.set_index("layer")
    fit, held_out = WINDOWS.split()
    ids = torch.cat([fit.ids, held_out.ids])
    n_fit = fit.ids.numel()
    assert report["ridge"].notna().any()
    for layer, calls in iter_expert_calls(dense, ids):
        module = plain.get_submodule(layer.name)
        P = torch.zeros(len(ids.flatten()), layer.n_experts, dtype=torch.float64)
        for token, (experts, p) in enumerate(
            zip(calls.top_k_index, calls.top_k_weights, strict=True)
        ):
            for expert, weight in zip(experts, p, strict=True):
                P[token, expert] += weight
        with torch.no_grad():
            R = calls.output - module(
                calls.hidden_states, calls.top_k_index, calls.top_k_weights
            )
        row = report.loc[layer.layer]
        total = calls.output[n_fit:].square().sum()
        assert row["before"] == pytest.approx(float(R[n_fit:].square().sum() / total))
        found = after[layer.name] - before[layer.name]
        if row.isna()["ridge"]:
            assert not found.any()
            continue

        def by_hand(P: torch.Tensor, R: torch.Tensor, ridge: float) -> torch.Tensor:
            size = P.square().sum(0).sqrt()
            stacked = torch.cat([P, ridge**0.5 * torch.diag(size)])
            wanted = torch.cat([R, R.new_zeros(P.shape[1], R.shape[1])])
            return torch.linalg.pinv(stacked) @ wanted

        torch.testing.assert_close(found, by_hand(P, R, row["ridge"]))
        half = by_hand(P[:n_fit], R[:n_fit], row["ridge"])
        left = (R[n_fit:] - P[n_fit:] @ half).square().sum() / total
        assert row["after"] == pytest.approx(float(left))
        assert left < row["before"]


@pytest.mark.parametrize("family", ["qwen2_moe", "gpt_oss", "deepseek_v2", "mixtral"])
@pytest.mark.parametrize("remote", [False, True])
def test_a_checkpoint_has_the_biases(family: str, remote: bool, tmp_path: Path) -> None:
    """What is loaded gives the same logits, with and without our code beside it."""
    dense = tiny_model(family, dtype=torch.float32)
    pruned = add_output_bias(pruned_of(dense), dense, WINDOWS)
    expected = logits_of(pruned, WINDOWS.ids[:2])
    folder = save_pruned(pruned, tmp_path / "biased")
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        folder, trust_remote_code=remote
    ).eval()
    assert torch.equal(logits_of(loaded, WINDOWS.ids[:2]), expected)
    again = save_pruned(loaded_with_keep(loaded, pruned), tmp_path / "again")
    second = AutoModelForCausalLM.from_pretrained(again).eval()
    assert torch.equal(logits_of(second, WINDOWS.ids[:2]), expected)
    quantization: Any = loaded.config.quantization_config
    assert quantization.format_version == (1 if family == "gpt_oss" else 2)


def loaded_with_keep(loaded: Any, pruned: Any) -> Any:
    """A loaded model with the mask that `save_pruned` asks for."""
    loaded.__dict__["heapr_keep"] = pruned.heapr_keep
    return loaded


def test_biases_are_distilled_too() -> None:
    """They are weights of the experts like any other."""
    dense = tiny_model("qwen2_moe", dtype=torch.float32)
    pruned = add_output_bias(pruned_of(dense), dense, WINDOWS)
    before = biases_of(pruned)
    distill_layers(pruned, dense, WINDOWS, n_steps=10)
    assert pruned.heapr_distillation["way"].max() > 0
    after = biases_of(pruned)
    assert any(not torch.equal(before[name], after[name]) for name in before)


def test_what_cannot_have_biases_is_refused(tmp_path: Path) -> None:
    """Stock checkpoints, loaded ones, and other models."""
    dense = tiny_model("qwen2_moe", dtype=torch.float32)
    with pytest.raises(SpecError, match="another structure than uniform"):
        add_output_bias(pruned_of(dense, structure="uniform"), dense, WINDOWS)
    pruned = add_output_bias(pruned_of(dense), dense, WINDOWS)
    uniform = {**pruned.heapr_keep.settings, "structure": "uniform"}
    even = {k: v | True for k, v in pruned.heapr_keep.arrays.items()}
    whole = prune(dense, KeepMask(even, pruned.heapr_keep.settings))
    add_output_bias(whole, dense, WINDOWS)
    whole.__dict__["heapr_keep"] = KeepMask(even, uniform)
    with pytest.raises(SpecError, match="have no output bias"):
        save_pruned(whole, tmp_path / "uniform")
    assert not (tmp_path / "uniform").exists()
    folder = save_pruned(pruned_of(dense), tmp_path / "plain")
    loaded = AutoModelForCausalLM.from_pretrained(folder).eval()
    with pytest.raises(SpecError, match="was loaded from a pruned checkpoint"):
        add_output_bias(loaded, dense, WINDOWS)
    with pytest.raises(SpecError, match="has 0 layers"):
        add_output_bias(dense, dense, WINDOWS)
    one = CalibrationSet.from_ids(WINDOWS.ids[:1])
    pruned = pruned_of(dense)
    with pytest.raises(SpecError, match="there is 1 window"):
        add_output_bias(pruned, dense, one)


def test_a_norm_on_outputs_is_refused() -> None:
    """Least squares would fit what the norm then changes."""
    dense = tiny_model("qwen2_moe")
    pruned = pruned_of(dense)
    for module in pruned.modules():
        if hasattr(module, "heapr_widths"):
            module.family.has_post_expert_norm = True
    with pytest.raises(SpecError, match="normalises each expert's output"):
        add_output_bias(pruned, dense, WINDOWS)
