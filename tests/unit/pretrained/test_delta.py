"""Changes of weights in three levels, five values a byte."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from heapr_lab.pretrained.delta import ternary


def test_three_levels_are_exact() -> None:
    """A matrix that has no more comes back as it was."""
    matrix = torch.tensor(
        [[0.5, -0.5, 0.0, 0.5, 0.0, 0.0], [2.0, 0, 0, -2.0, 2.0, 2.0]]
    )
    delta = ternary(matrix)
    assert torch.equal(delta.values(), matrix)
    assert delta.packed.numel() == 3  # 12 values, five a byte


def test_a_gaussian_keeps_four_fifths_of_its_energy() -> None:
    """The error is that of the best three levels."""
    matrix = torch.randn(8, 4096, generator=torch.Generator().manual_seed(0))
    error = (ternary(matrix).values() - matrix).square().sum() / matrix.square().sum()
    assert abs(float(error) - 0.19) < 0.01  # the optimum of three levels


def test_rows_of_zeros_stay_zero() -> None:
    """They have no scale."""
    assert torch.equal(ternary(torch.zeros(3, 7)).values(), torch.zeros(3, 7))


@given(st.integers(1, 5), st.integers(1, 13), st.integers(0, 99))
def test_signs_and_scale_are_those_of_the_matrix(
    rows: int, columns: int, seed: int
) -> None:
    """A byte has five values, whatever the shape."""
    matrix = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    delta = ternary(matrix)
    values = delta.values()
    assert delta.packed.numel() == -(-rows * columns // 5)
    assert bool(((values == 0) | (values.sign() == matrix.sign())).all())
    scales = delta.scale.float()[:, None].expand_as(values)
    assert torch.equal(values.abs()[values != 0], scales[values != 0])
