"""Which experts of a token are skipped, by hand."""

import itertools

import torch

from heapr_lab.methods.skipping import (
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


def test_the_lesser_is_skipped_and_an_equal_one_is_not() -> None:
    """An expert goes below the threshold of its rank; the median itself stays."""
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
            {int(e) for e in experts[where]}
            for experts, where in zip(INDEX[:, order], gone, strict=True)
        ]
        assert numbers == [{2}, {2}, {2}, set()]


def test_weights_of_zero_are_left_as_they_are() -> None:
    """A token whose weights are all 0 skips nothing, and nothing is divided by 0."""
    zero = torch.zeros(1, 3)
    gone = skipped(INDEX[:1], zero, (0.9, 0.9))
    assert not gone.any()
    assert torch.equal(scaled(zero, gone), zero)
    assert median_ratios(zero) == (1.0, 1.0)
