"""Each estimator is the expression that it says it is, on numbers done by hand."""

import numpy as np
import pandas as pd
import pytest
import torch

from heapr_lab.errors import SpecError
from heapr_lab.importance.columns import SUMS
from heapr_lab.importance.estimators import (
    ESTIMATORS,
    PER_ROUTED_TOKEN,
    PER_TOKEN,
    complete_options,
    score,
)
from heapr_lab.models.moments import SUMS as MOMENTS
from heapr_lab.models.moments import one_by_one
from heapr_lab.refinement.compress import COMPENSATED

# One expert with T = 2 routed tokens of N = 4 predicted ones, one expert with none.
FRAME = pd.DataFrame(
    {
        "layer": [0, 0],
        "expert": [0, 1],
        "atom": [0, 0],
        "tokens": [2, 0],
        "sum_h2": [10.0, 0.0],
        "sum_g2": [4.0, 0.0],
        "sum_hg": [1.0, 0.0],
        "sum_hg2": [6.0, 0.0],
        "sum_ph2": [2.0, 0.0],
        "max_abs_ph": [3.0, 0.0],
        "w_down_sq": [5.0, 7.0],
        "w_up_sq": [1.0, 2.0],
        "w_gate_sq": [0.5, 0.25],
        "elimination": [1.5, 0.0],
    }
)
N = {"N": 4}


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        ("heapr", [0.5 * 10 / 2 * 4 / 2, 0]),  # ½ · 5 · 2
        ("heapr_total", [0.5 * 10 * 4 / 2 / 4, 0]),  # ½ · 40 / 2 / 4
        ("fisher", [0.5 * 6 / 4, 0]),
        ("camera", [5 * (0.1 * 2 + 0.9 * 3**2), 0]),
        ("magnitude", [5 + 1 + 0.5, 7 + 2 + 0.25]),
        ("frequency", [2, 0]),
    ],
)
def test_score_by_hand(estimator, expected):
    """A routed atom scores the formula; one without tokens 0, or its squared norms."""
    assert score(FRAME, N, estimator=estimator) == pytest.approx(expected)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_unrouted_scores_zero(estimator):
    """Without routed tokens a second-order score is 0 whatever the sums hold."""
    sums = ("sum_h2", "sum_g2", "sum_hg", "sum_hg2", "sum_ph2", "elimination")
    stale = FRAME.assign(**dict.fromkeys(sums, 1.0))
    routed, unrouted = score(stale, N, estimator=estimator)
    assert routed != 0
    assert (unrouted != 0) == (estimator in {"camera", "magnitude", "random"})


def test_scores_of_small_types_are_computed_in_float64():
    """The product of two float32 sums may be larger than a float32."""
    sums = FRAME.assign(
        sum_h2=np.array([1e30, 0], np.float32), sum_g2=np.array([1e30, 0], np.float32)
    )
    scores = score(sums, N, estimator="heapr_total")
    assert scores.dtype == np.float64
    assert scores == pytest.approx([0.5 * 1e60 / 2 / 4, 0.0])


def test_a_massive_token_without_gradient_moves_no_mask_of_fisher():
    """One token of 1000 has 1000 times the norm: HEAPr's order becomes its order."""
    generator = torch.Generator().manual_seed(0)
    h, g = (torch.randn(1000, 16, generator=generator).double() for _ in range(2))
    h *= torch.linspace(1, 3, 16)
    massive = h.clone()
    massive[0] = 1000 * torch.randn(16, generator=generator)
    g[0] *= 1e-6
    frames = []
    for hidden in (h, massive):
        sums, _ = one_by_one(hidden, g, torch.ones(1000).double(), torch.tensor([1000]))
        named = zip(MOMENTS, sums[:, 0].numpy(), strict=True)
        frames.append(pd.DataFrame(dict(named)).assign(tokens=1000))
    without, with_it = (score(f, {"N": 1000}, estimator="fisher") for f in frames)
    assert with_it == pytest.approx(without, rel=1e-2)
    assert with_it.argsort().tolist() == without.argsort().tolist()
    heapr = score(frames[1], {"N": 1000}, estimator="heapr")
    alone = massive[0].square().numpy() * g.square().sum(0).numpy()
    assert np.corrcoef(heapr, alone)[0, 1] > 0.999
    assert next(iter(COMPENSATED)) == "fisher + compensation"


def test_magnitude_without_gates():
    """A model without gates scores by two norms; a lost gate column is an error."""
    frame = FRAME.drop(columns="w_gate_sq")
    layers = {"0": {"n_matrices": 2}}
    plain = score(frame, {"architecture": {"layers": layers}}, estimator="magnitude")
    assert plain.tolist() == [6.0, 9.0]
    gated = {"architecture": {"layers": {"0": {"n_matrices": 3}}}}
    with pytest.raises(SpecError, match="needs column w_gate_sq"):
        score(frame, gated, estimator="magnitude")


def test_scores_that_are_not_finite_are_refused():
    """Columns are finite in a table, but their product may overflow."""
    frame = pd.DataFrame({"layer": 1, "expert": 2, "atom": range(4), "tokens": 1.0})
    sums = {"sum_h2": [1, 1, 1e300, 1e300], "sum_g2": 1e300}
    message = r"2 'heapr' scores are not finite.* first at .* \(1, 2, 2\); collect"
    with pytest.raises(SpecError, match=message):
        score(frame.assign(**sums), {})


def test_unknown_names_are_errors():
    """Unknown estimators and options are named."""
    with pytest.raises(
        SpecError, match=r"estimator must be one of 'heapr', .*, got 'snip'"
    ):
        score(FRAME, N, estimator="snip")
    with pytest.raises(SpecError, match="'heapr' has no option alpha; it has none"):
        score(FRAME, N, options={"alpha": 0.5})


def test_options_are_checked_and_settled():
    """Values come back as the numbers that formulas take; what is out of range not."""
    assert complete_options("camera", {}) == {"alpha": 0.9}
    assert complete_options("random", {}) == {"seed": 0}
    alpha = complete_options("camera", {"alpha": np.float32(1)})["alpha"]
    assert (alpha, type(alpha)) == (1.0, float)
    seed = complete_options("random", {"seed": np.int64(2**40)})["seed"]
    assert (seed, type(seed)) == (2**40, int)
    for value in (-0.1, 2, "0.5", np.nan):
        message = rf"alpha must be a number in \[0, 1\], got {value!r}"
        with pytest.raises(SpecError, match=message):
            complete_options("camera", {"alpha": value})
    for seed in (-1, 1.0, None):
        message = f"seed must be a whole number from 0, got {seed}"
        with pytest.raises(SpecError, match=message):
            complete_options("random", {"seed": seed})


def test_needs_are_what_a_formula_reads():
    """Each column that is needed is missed by name, and no other is read.

    So is the number of predicted tokens.
    """
    for name, estimator in ESTIMATORS.items():
        needed = [*estimator.needs, *estimator.needs_of_gated]
        only = FRAME[needed] if needed else FRAME[["layer"]]
        assert np.isfinite(score(only, N, estimator=name)).all()
        for column in estimator.needs:
            with pytest.raises(SpecError, match=f"needs column {column};"):
                score(FRAME.drop(columns=column), N, estimator=name)
        if estimator.per_predicted_token:
            with pytest.raises(SpecError, match="number of predicted tokens"):
                score(FRAME, {}, estimator=name)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_units_say_what_a_score_is_divided_by(estimator):
    """Half the predicted tokens, or the same text twice: scores do as the unit says."""
    unit = ESTIMATORS[estimator].unit
    once = score(FRAME, N, estimator=estimator)
    fewer = score(FRAME, {"N": 2}, estimator=estimator)
    as_written = ESTIMATORS[estimator].extra_pass
    by_token = unit == PER_TOKEN and not as_written
    assert fewer == pytest.approx((2 if by_token else 1) * once)
    sums = {name: 2 * FRAME[name] for name in SUMS if name in FRAME}
    twice = score(FRAME.assign(**sums), {"N": 8}, estimator=estimator)
    if unit in (PER_TOKEN, PER_ROUTED_TOKEN):
        assert twice == pytest.approx(once)
    elif unit == "tokens":
        assert twice == pytest.approx(2 * once)
