"""What is reported of a compensation, and when weights stay as they are, by hand."""

from contextlib import nullcontext

import numpy as np
import pytest
import torch
from families import model_with_sink, tiny_model, tiny_windows
from heard import Heard
from keeps import random_keep
from oracles.features import COUPLED, grams_of, two_columns

from heapr_lab import CalibrationSet, KeepMask, compensate, masking
from heapr_lab.errors import LayoutError, SpecError
from heapr_lab.models.experts import ExpertsLayer, find_experts
from heapr_lab.refinement.activation_grams import LayerGrams
from heapr_lab.refinement.compensation import (
    Compensation,
    LayerSolver,
    compensation_of,
    describe_weights,
    fit_compensation,
)
from heapr_lab.refinement.own_text import continuations

WINDOWS = tiny_windows(n_sequences=8, seq_len=12)
START = torch.zeros(32, 1, dtype=torch.long)


@pytest.fixture
def layer() -> ExpertsLayer:
    """Columns (1, 2) of the first expert."""
    return two_columns()


def without(*atoms: int) -> KeepMask:
    """The mask of one layer that drops these atoms of the first expert."""
    kept = np.ones((4, 8), bool)
    kept[0, list(atoms)] = False
    return KeepMask.from_arrays({0: kept})


def solved(
    layer: ExpertsLayer, grams: LayerGrams, *, keep: KeepMask, ridge: float | None = 0.0
) -> tuple[torch.Tensor, dict[str, object]]:
    """The new columns of the first expert (I,), and its layer's row of the report."""
    compensation = compensation_of([LayerSolver(layer, grams)], keep, ridge=ridge)
    (row,) = compensation.report.to_dict("records")
    return compensation.down_projs[0][0, 5], row


# --- by hand ----------------------------------------------------------------------


@pytest.mark.parametrize("scale", [1.0, 1e-6])
def test_a_column_takes_over_what_it_shares(layer, scale):
    """Without atom 1 the other's column 1 becomes 1 + 2 · 1/2: the error 8 → 6.

    The ridge 1/4 adds 1 to the 4 of atom 0, of both parts together. Errors are shares
    of the output, however small that is.
    """
    with torch.no_grad():
        layer.down.mul_(scale)
    grams = grams_of(COUPLED, COUPLED)
    column, row = solved(layer, grams, keep=without(1), ridge=0.25)
    expected = [scale * (1 + 2 * 2 / 5), *[0] * 7]
    assert column.tolist() == pytest.approx(expected, rel=1e-6, abs=0)
    # Of held-out tokens, fitted to the others: x = 2 / (2 + 1/2) leaves, of the output
    # 2 + 4 + 8, the error 8 - 2 · 2 x + 2 x² with x = 4/5.
    assert row == {
        "layer": 0,
        "ridge": 0.25,
        "changed": True,
        "dropped": pytest.approx(8 / 14),
        "compensated": pytest.approx((8 - 4 * 0.8 + 2 * 0.64) / 14),
        "untouched": [],
        "singular": 0,
    }


def test_weights_stay_where_held_out_tokens_say_otherwise(layer, caplog):
    """Atoms that go together in one part and against each other in the other one."""
    against = [[2.0, -1.0], [-1.0, 2.0]]
    grams = grams_of(COUPLED, against)
    column, row = solved(layer, grams, keep=without(1), ridge=None)
    assert column.tolist() == [1.0, *[0] * 7]
    assert (row["changed"], row["singular"]) == (False, 0)
    # Of the output 2 - 4 + 8 = 6.
    assert row["dropped"] == row["compensated"] == pytest.approx(8 / 6)
    assert "layer 0: on held-out tokens no ridge has a smaller error" in caplog.text
    # A ridge that was asked for is taken as it is.
    column, row = solved(layer, grams, keep=without(1), ridge=0.25)
    assert (row["changed"], row["ridge"]) == (True, 0.25)
    # x = 4/5 adds 2 · 2 x + 2 x² to the error 8.
    assert row["compensated"] == pytest.approx((8 + 4 * 0.8 + 2 * 0.64) / 6)


@pytest.mark.parametrize(
    ("products", "gone", "ridge", "error"),
    [
        (COUPLED, (), None, 0),  # the mask drops nothing
        ([[0.0, 0.0], [0.0, 0.0]], (1,), None, 0),  # no output, rather than 0 / 0
        (COUPLED, range(8), 0.0, 1),  # an expert without atoms
    ],
)
def test_where_there_is_nothing_to_solve_for(
    layer, caplog, products, gone, ridge, error
):
    """Weights stay, and there is nothing to warn of."""
    grams = grams_of(products, products)
    column, row = solved(layer, grams, keep=without(*gone), ridge=ridge)
    expected = [0 if atom in gone else w for atom, w in enumerate((1, 2, *[0] * 6))]
    assert column.tolist() == expected
    assert (row["dropped"], row["compensated"], row["singular"]) == (error, error, 0)
    assert row["changed"] == (ridge is not None)
    assert not caplog.text


def test_an_expert_needs_as_many_tokens_as_it_keeps_atoms(layer, caplog):
    """Tokens of both parts count; seven atoms stay of eight, or six."""
    for drop, tokens, changed in (((1,), 8, True), ((1,), 6, False), ((1, 2), 6, True)):
        caplog.clear()
        grams = grams_of(COUPLED, COUPLED, tokens=tokens)
        column, row = solved(layer, grams, keep=without(*drop), ridge=0.25)
        assert (column[0] > 1) == changed
        # The others keep all eight.
        others = [] if tokens == 8 else [1, 2, 3]
        assert row["untouched"] == ([] if changed else [0]) + others
        names = ", ".join(map(str, row["untouched"]))  # type: ignore[call-overload]
        assert (f"layer 0: experts {names} have fewer tokens" in caplog.text) == bool(
            row["untouched"]
        )


def test_singular_solves_are_counted(layer, caplog):
    """Two atoms that are one, and no ridge: the smallest solution shares equally."""
    with torch.no_grad():
        layer.down[0, 5, 2] = 4.0
    copies = [[2.0, 2.0, 1.0], [2.0, 2.0, 1.0], [1.0, 1.0, 2.0]]
    column, row = solved(layer, grams_of(copies, copies), keep=without(2))
    assert column.tolist() == pytest.approx([2.0, 3.0, *[0] * 6])
    assert row["singular"] == 1
    assert "layer 0: 1 of 4 solves are singular at ridge 0" in caplog.text


def test_a_singular_solve_that_does_harm_is_not_used(layer):
    """Rounded products may be those of no features: the second square below 0."""
    with torch.no_grad():
        layer.down[0, 5, 2] = 4.0
    rounded = [[1.0, 1.0, 1e-3], [1.0, 1.0 - 1e-7, -1e-3], [1e-3, -1e-3, 1.0]]
    column, row = solved(layer, grams_of(rounded, rounded), keep=without(2))
    assert column.tolist() == [1.0, 2.0, *[0] * 6]
    assert row["singular"] == 1
    column, _ = solved(layer, grams_of(rounded, rounded), keep=without(2), ridge=1e-4)
    assert column[0] > 40  # a ridge makes them those of some


def test_an_atom_that_no_token_reaches_is_left_as_it_is(layer):
    """It has no products to be pulled by, and that is not singular."""
    with torch.no_grad():
        layer.down[0, 5, 7] = 3.0
    column, row = solved(layer, grams_of(COUPLED, COUPLED), keep=without(1))
    assert column.tolist() == pytest.approx([2.0, *[0] * 6, 3.0])
    assert row["singular"] == 0


@torch.no_grad()
@pytest.mark.parametrize("written", ["without the sink", "with it"])
def test_weights_stay_where_the_loss_says_otherwise(caplog, written):
    """The first token has nearly all energy of a layer that the text does without.

    Least squares rebuilds its output from the atoms that are left, which serve all
    other tokens. Text that was written with it gains by that.
    """
    model = model_with_sink()
    model.lm_head.weight *= 5  # so that the model is sure of what it writes
    kept = np.ones((2, 4, 8), bool)
    kept[0, :, 0] = False
    keep = KeepMask.from_arrays(dict(enumerate(kept)))
    with masking(model, keep) if written == "without the sink" else nullcontext():
        new = continuations(model, START, n_new=23)
    text = CalibrationSet.from_ids(torch.cat([START, new], 1))
    fitted = fit_compensation(model, keep, text)
    assert fitted.report["dropped"][0] == pytest.approx(1, abs=0.01)
    assert bool(fitted.down_projs) == (written == "with it")
    assert fitted.report["changed"].any() == (written == "with it")
    assert ("raises the loss" in caplog.text) == (written != "with it")
    assert ("unchanged:" in describe_weights(fitted, text)) == (written != "with it")
    assert fit_compensation(model, keep, text, ridge=1.0).down_projs


# --- what is said of it -----------------------------------------------------------


def test_the_pruned_model_has_the_report_and_says_what_was_done(model):
    """It names the windows, the span, and the layers whose weights stayed."""
    keep = random_keep(model)
    done = Heard()
    options = {"span": "expert", "ridge": 0.5}
    pruned = compensate(model, keep, WINDOWS, progress=done, **options)
    fit = fit_compensation(model, keep, WINDOWS, **options)
    assert done[-1] == (8, 8)
    assert fit.settings == options
    assert list(fit.down_projs) == fit.report["layer"].tolist() == [0, 1]
    assert pruned.heapr_report.equals(fit.report)
    text = (
        "W_down compensated by least squares (span expert) on 8 windows of 12 tokens "
        f"of {WINDOWS.label}{{}}; all else sliced, otherwise unchanged"
    )
    assert pruned.heapr_weights == describe_weights(fit, WINDOWS) == text.format("")
    report = fit.report.assign(changed=[False, False])
    stayed = Compensation(fit.down_projs, report, fit.settings)
    assert describe_weights(stayed, WINDOWS) == text.format(", except in layers 0, 1")


# --- what is refused --------------------------------------------------------------


@pytest.mark.parametrize("ridge", [-1e-9, float("nan")])
def test_a_ridge_below_0_is_refused(layer, ridge):
    """Nor is what is no number taken."""
    with pytest.raises(SpecError, match=f"ridge is {ridge}, expected a number >= 0"):
        solved(layer, grams_of(COUPLED, COUPLED), keep=without(1), ridge=ridge)


def test_weights_that_cannot_be_solved_for_are_refused():
    """They are not finite, whether a token reaches them or not, or are not there."""
    model = tiny_model("qwen2_moe")
    keep, layer = random_keep(model), find_experts(model)[1]
    named = r"layers\.1\.mlp\.experts: 1 atoms .* w_down .* \(2, 6\)"
    for value in (torch.nan, torch.inf):
        layer.down.data[2, 5, 6] = value
        with pytest.raises(LayoutError, match=named):
            fit_compensation(model, keep, WINDOWS)
    layer.module.to("meta")
    with pytest.raises(LayoutError, match=r"layers\.1\.mlp\.experts is offloaded"):
        fit_compensation(model, keep, WINDOWS)
