"""Which experts of a token are skipped, by hand."""

import itertools

import pytest
import torch

from heapr_lab.errors import SpecError
from heapr_lab.methods.skipping import (
    check_thresholds,
    median_ratios,
    scaled,
    skipped,
)

INDEX = torch.tensor([[0, 1, 2], [2, 0, 1], [1, 2, 0], [0, 1, 2]])
WEIGHTS = torch.tensor(
    [[0.5, 0.2, 0.1], [0.1, 0.8, 0.4], [0.25, 0.25, 0.5], [0.2, 0.2, 0.2]],
    dtype=torch.float64,
)
"""Ratios of ranks 2 and 3: (0.4, 0.2), (0.5, 0.125), (0.5, 0.5), (1, 1)."""


def test_medians_of_each_rank() -> None:
    """Of an even number, the mean of the two in the middle."""
    assert median_ratios(WEIGHTS) == pytest.approx((0.5, 0.35))
    assert median_ratios(WEIGHTS[:3]) == pytest.approx((0.5, 0.2))
    assert median_ratios(WEIGHTS[:, :1]) == ()
    low = WEIGHTS.to(torch.bfloat16)
    assert median_ratios(low) == pytest.approx((0.5, 0.35), rel=1e-2)


def test_the_lesser_is_skipped_and_an_equal_one_is_not() -> None:
    """Below its own rank's threshold; the median itself stays."""
    gone = skipped(INDEX, WEIGHTS, (0.5, 0.35))
    assert gone.tolist() == [
        [False, True, True],
        [True, False, False],
        [False, False, False],
        [False, False, False],
    ]
    weights = scaled(WEIGHTS, gone)
    expected = WEIGHTS.clone()
    expected[0] = torch.tensor([0.8, 0, 0])
    expected[1] = torch.tensor([0, 1.3 * 0.8 / 1.2, 1.3 * 0.4 / 1.2])
    torch.testing.assert_close(weights, expected)
    assert torch.equal(weights[2:], WEIGHTS[2:])


def test_of_two_equal_ones_the_later_number_has_the_later_rank() -> None:
    """In every order of the slots the same experts are skipped."""
    thresholds = (0.4, 0.6)
    for order in itertools.permutations(range(3)):
        gone = skipped(INDEX[:, order], WEIGHTS[:, order], thresholds)
        numbers = [
            {int(e) for e in own[where]}
            for own, where in zip(INDEX[:, order], gone, strict=True)
        ]
        assert numbers == [{2}, {2}, {2}, set()]


def test_weights_of_zero_are_left_as_they_are() -> None:
    """A token whose weights are all 0 skips nothing, and nothing is divided by 0."""
    zero = torch.zeros(1, 3)
    gone = skipped(INDEX[:1], zero, (0.9, 0.9))
    assert not gone.any()
    assert torch.equal(scaled(zero, gone), zero)
    assert median_ratios(zero) == (1.0, 1.0)


@pytest.mark.parametrize("wrong", [(), (0.5,), (0.5, 0.2, 0.1), (1.1, 0), (0.5, "x")])
def test_other_thresholds_are_refused(wrong: tuple[object, ...]) -> None:
    """One for each of three experts but the best."""
    check_thresholds((1, 0.0), 3)
    with pytest.raises(SpecError, match="expected 2 numbers from 0 to 1"):
        check_thresholds(wrong, 3)
    with pytest.raises(SpecError):
        check_thresholds((float("nan"), 0.5), 3)
