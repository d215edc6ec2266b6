"""Compensation is least squares over the routed activations, and never does harm."""

import threading
from typing import Any

import numpy as np
import pytest
import torch
from families import tiny_ids, tiny_model
from keeps import logits_of, random_keep, widths_keep
from oracles import token_by_token
from oracles.features import Features, all_grams, features_of
from torch import nn

from heapr_lab.errors import CoverageError, LayoutError, SpecError
from heapr_lab.importance.collect import collect_statistics
from heapr_lab.models.experts import find_experts
from heapr_lab.models.hooks import observed
from heapr_lab.pruning.masks import KeepMask
from heapr_lab.pruning.surgery import masking, prune
from heapr_lab.refinement.activation_grams import SPANS
from heapr_lab.refinement.compensation import (
    RIDGES,
    compensate,
    fit_compensation,
)
from heapr_lab.text.calibration import CalibrationSet

pytestmark = pytest.mark.oracle

FAMILIES = ("qwen2_moe", "gpt_oss", "nemotron_h", "deepseek_v2")
WINDOWS = CalibrationSet.from_ids(tiny_ids(n_sequences=8, seq_len=24))
HELD = torch.tensor([False, True, False, False] * 2)
"""Which of the windows are held out: the second of every four."""
CLOSE: dict[str, Any] = {"rtol": 1e-8, "atol": 1e-10}


# --- its sums -------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_sums_of_an_expert_token_by_token(family: str) -> None:
    """Σ (p h)(p h)ᵀ over the tokens that each expert was routed to, one by one."""
    model, ids = tiny_model(family), tiny_ids()
    grams = all_grams(model, CalibrationSet.from_ids(ids))
    _, records = token_by_token.run(model, ids)
    for layer in find_experts(model):
        gram = grams[layer.layer]
        for expert, total in enumerate(gram.total):
            tokens = records[id(layer.module)].tokens.get(expert, [])
            assert int(gram.tokens.sum(0)[expert]) == len(tokens)
            expected = torch.zeros_like(total)
            for token in tokens:
                feature = (token.p * token.h).detach()
                expected += torch.outer(feature, feature)
            torch.testing.assert_close(total, expected, **CLOSE)


def test_another_thread_s_forward_is_not_summed() -> None:
    """What is watched is this thread's, as masks are."""
    model = tiny_model("qwen2_moe")
    layers = find_experts(model)
    observers = [Features(layer.n_experts) for layer in layers]
    with observed(layers, observers):
        thread = threading.Thread(target=logits_of, args=(model, WINDOWS.ids))
        thread.start()
        thread.join()
    assert not any(observer.parts for observer in observers)


def test_a_layer_takes_part_once_in_every_forward() -> None:
    """One that is skipped, or runs twice, would leave sums of other tokens."""
    for times, seen in ((0, 0), (2, 4)):
        model = tiny_model("qwen2_moe")
        mlp = model.model.layers[1].mlp
        forward = mlp.forward

        def run(
            x: torch.Tensor, times: int = times, forward: Any = forward
        ) -> torch.Tensor:
            return sum((forward(x) for _ in range(times)), torch.zeros_like(x))

        mlp.forward = run
        text = f"layer 1 took part in {seen} of 2 forwards, expected all"
        with pytest.raises(CoverageError, match=text):
            all_grams(model, WINDOWS)


# --- the solution -----------------------------------------------------------------


def least_squares(
    features: torch.Tensor, W: torch.Tensor, kept: torch.Tensor, ridge: float
) -> torch.Tensor:
    """The same by QR of the features, with the ridge as rows of their own.

    Shapes: features (n, F); W (D, F); kept (F,); result (D, F).
    """
    free = features[:, kept]
    pull = (ridge * free.square().sum(0)).sqrt().diag()
    goal = torch.cat([features @ W.T, pull @ W[:, kept].T])
    weights = torch.linalg.lstsq(torch.cat([free, pull]), goal, driver="gelsd").solution
    new = torch.zeros_like(W)
    new[:, kept] = weights.T
    return new


@pytest.mark.parametrize("ridge", [1e-4, 1e-1])
@pytest.mark.parametrize("span", SPANS)
@pytest.mark.parametrize("family", FAMILIES)
def test_new_weights_are_the_least_squares(
    family: str, span: str, ridge: float
) -> None:
    """They equal a QR of the features themselves, for every orientation of weights."""
    model = tiny_model(family)
    keep = widths_keep(model, 5, structure="ragged")
    compensation = fit_compensation(model, keep, WINDOWS, ridge=ridge, span=span)
    features = features_of(model, WINDOWS.ids)
    for layer in find_experts(model):
        kept = torch.from_numpy(keep.by_layer(layer.layer).copy())
        inputs, down = features[layer.layer], layer.down.detach()
        if span == "layer":
            joined = down.movedim(0, 1).flatten(1)
            new = least_squares(inputs.flatten(1), joined, kept.flatten(), ridge)
            expected = new.unflatten(1, kept.shape).movedim(1, 0)
        else:
            expected = torch.stack(
                [
                    least_squares(inputs[:, e], down[e], kept[e], ridge)
                    for e in range(layer.n_experts)
                ]
            )
        torch.testing.assert_close(
            compensation.down_projs[layer.layer], expected, rtol=1e-6, atol=1e-9
        )


@pytest.mark.parametrize("span", SPANS)
def test_a_copy_of_a_kept_atom_goes_at_no_loss(span: str) -> None:
    """Its activation is another's, so that one's column takes over, exactly."""
    model = tiny_model("qwen2_moe")
    arrays = {}
    with torch.no_grad():
        for layer in find_experts(model):
            first = layer.atom_rows(torch.tensor([0]))
            last = layer.atom_rows(torch.tensor([layer.d_inter - 1]))
            layer.up_rows[:, last] = 0.5 * layer.up_rows[:, first]
            layer.up_rows[:, last[0]] = layer.up_rows[:, first[0]]  # of the gate
            arrays[layer.layer] = np.ones((layer.n_experts, layer.d_inter), bool)
            arrays[layer.layer][:, -1] = False
    keep = KeepMask.from_arrays(arrays)
    dense = logits_of(model, WINDOWS.ids)
    dropped = logits_of(prune(model, keep), WINDOWS.ids)
    pruned = compensate(model, keep, WINDOWS, ridge=1e-12, span=span)
    torch.testing.assert_close(
        logits_of(pruned, WINDOWS.ids), dense, rtol=1e-6, atol=1e-7
    )
    assert (dropped - dense).abs().max() > 1e-3


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("span", SPANS)
def test_no_error_over_the_calibration_tokens_rises(span: str, seed: int) -> None:
    """The error of each expert, or of the layer, whatever the mask and the ridge."""
    model = tiny_model("qwen2_moe", seed=seed)
    keep = random_keep(model, seed=seed)
    features = features_of(model, WINDOWS.ids)
    for ridge in (0.0, 1e-3, 1.0, None):
        compensation = fit_compensation(model, keep, WINDOWS, ridge=ridge, span=span)
        for layer in find_experts(model):
            inputs, W = features[layer.layer], layer.down.detach()
            kept = torch.from_numpy(keep.by_layer(layer.layer).copy())
            errors = []
            for new in (compensation.down_projs[layer.layer], W * kept[:, None]):
                change = torch.einsum("tei,edi->ted", inputs, new - W)
                if span == "layer":
                    change = change.sum(1, keepdim=True)
                errors.append(change.square().sum((0, 2)))
            assert (errors[0] <= errors[1] * (1 + 1e-9) + 1e-12).all()


def test_the_ridge_is_the_one_that_errs_least_on_held_out_tokens() -> None:
    """It is fitted on the other windows, by the features themselves."""
    model = tiny_model("qwen2_moe")
    keep = widths_keep(model, 4, structure="ragged")
    compensation = fit_compensation(model, keep, WINDOWS, span="layer")
    fitted = features_of(model, WINDOWS.ids[~HELD])
    tested = features_of(model, WINDOWS.ids[HELD])
    for layer in find_experts(model):
        kept = torch.from_numpy(keep.by_layer(layer.layer).copy()).flatten()
        W = layer.down.detach().movedim(0, 1).flatten(1)
        errors = {}
        for ridge in RIDGES:
            new = least_squares(fitted[layer.layer].flatten(1), W, kept, ridge)
            change = tested[layer.layer].flatten(1) @ (new - W).T
            errors[ridge] = float(change.square().sum())
        row = compensation.report.set_index("layer").loc[layer.layer]
        assert row["ridge"] == min(errors, key=errors.__getitem__)
        size = (tested[layer.layer].flatten(1) @ W.T).square().sum()
        gone = (tested[layer.layer].flatten(1) @ (W * ~kept).T).square().sum()
        least = min(*errors.values(), float(gone))  # else the weights stay
        assert row["compensated"] == pytest.approx(least / float(size))


# --- edges ------------------------------------------------------------------------


@pytest.mark.parametrize("span", SPANS)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_broken_expert_that_no_token_reaches(span: str, value: float) -> None:
    """Its weights reach no other expert: it is named, before any pass."""
    model = tiny_model("qwen2_moe")
    few = CalibrationSet.from_ids(WINDOWS.ids[:2, :3])
    number, expert = collect_statistics(model, few).unrouted().iloc[0]
    layer = next(layer for layer in find_experts(model) if layer.layer == number)
    with torch.no_grad():
        layer.down[expert, 5, 6] = value
    assert logits_of(model, few.ids).isfinite().all()
    named = rf"layers.{number}.mlp.experts: 1 atoms .* w_down .* \({expert}, 6\)"
    keep = widths_keep(model, 4, structure="ragged")
    for call in (
        lambda: compensate(model, keep, few, span=span),
        lambda: collect_statistics(model, few),
    ):
        with pytest.raises(LayoutError, match=named):
            call()


# --- in a model -------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_masked_is_sliced_with_new_weights(family: str) -> None:
    """The context and the pruned model use the same columns; the model stays."""
    model = tiny_model(family)
    keep = random_keep(model)
    compensation = fit_compensation(model, keep, WINDOWS)
    dense = logits_of(model, WINDOWS.ids)
    with masking(model, keep, compensation.down_projs):
        masked = logits_of(model, WINDOWS.ids)
        with masking(model, keep):  # an inner mask keeps the outer weights
            torch.testing.assert_close(logits_of(model, WINDOWS.ids), masked)
    pruned = prune(model, keep, down_projs=compensation.down_projs)
    torch.testing.assert_close(masked, logits_of(pruned, WINDOWS.ids), **CLOSE)
    with masking(model, keep):
        assert (masked - logits_of(model, WINDOWS.ids)).abs().max() > 1e-4
    assert torch.equal(logits_of(model, WINDOWS.ids), dense)


def test_normalised_experts_cannot_make_up_for_each_other() -> None:
    """Outputs are not added up as they are; within an expert is the default there."""
    model = tiny_model("qwen2_moe")
    for layer in find_experts(model):
        layer.module.has_post_expert_norm = True
        layer.module.post_expert_norm = nn.Identity()
    keep = random_keep(model)
    assert fit_compensation(model, keep, WINDOWS).settings["span"] == "expert"
    with pytest.raises(SpecError, match="normalises each expert's output"):
        fit_compensation(model, keep, WINDOWS, span="layer")
