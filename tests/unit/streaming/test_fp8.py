"""FP8 numbers in blocks, against a loop over blocks."""

import pytest
import torch
from quantised_folder import of_each_weight, scales_of

from heapr_lab.models.formats import block_of
from heapr_lab.streaming.quantisation import dequantised, quantised

BLOCK = 4, 3


def weights(*shape: int) -> torch.Tensor:
    """Random numbers of bfloat16, of which one block is zero, in float32."""
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    numbers[..., :4, :3] = 0
    return numbers.bfloat16().float()


@pytest.mark.parametrize("powers", [False, True])
@pytest.mark.parametrize("shape", [(1, 8, 9), (2, 10, 7)])
def test_each_block_has_its_scale(shape, powers):
    """The largest number of a block becomes 448, or up to half of it; each is near."""
    tensor = weights(*shape)
    numbers, scales = quantised(tensor, BLOCK, powers=powers)
    assert numbers.dtype == torch.float8_e4m3fn
    values = dequantised(numbers, scales, BLOCK)
    for matrix, scale, value in zip(tensor, scales, values, strict=True):
        ratio, least = scales_of(matrix, BLOCK) / scale, 0.5 if powers else 0.9999
        assert ((ratio <= 1.0001) & (ratio > least) | (ratio == 0)).all()
        each = of_each_weight(scale, matrix.shape, BLOCK)
        apart = (value - matrix).abs()
        assert (apart <= matrix.abs() / 16 * 1.0001 + each / 1024).all()
    if powers:
        assert torch.equal(scales.log2().round(), scales.log2())


@pytest.mark.parametrize(
    ("kind", "powers"),
    [(torch.bfloat16, False), (torch.float32, True), (torch.float32, False)],
)
def test_what_is_dequantised_to_bfloat16_and_back(kind, powers):
    """The same values, if scales are of bfloat16 or powers of two; else near ones.

    A third time nothing changes, whatever the scales.
    """
    numbers, scales = quantised(weights(64, 60), BLOCK, kind, powers=powers)
    assert scales.dtype == kind
    wide = dequantised(numbers, scales, BLOCK)
    again, new_scales = quantised(wide.bfloat16(), BLOCK, kind, powers=powers)
    values = dequantised(again, new_scales, BLOCK)
    if kind == torch.bfloat16 or powers:
        assert torch.equal(values, wide)
    if not powers:  # of which half the scale may have twice the numbers
        assert torch.equal(again.float(), numbers.float())
    torch.testing.assert_close(values, wide, rtol=2**-8, atol=0)
    third = quantised(values.bfloat16(), BLOCK, kind, powers=powers)
    assert torch.equal(dequantised(*third, BLOCK), values)


def test_blocks_that_are_quantised_again():
    """Blocks of a size, whose inputs are quantised when they are known."""
    known = {"weight_block_size": [128, 64]}
    assert block_of(known) == (128, 64)
    assert block_of(known | {"activation_scheme": "static"}) is None
    assert block_of({"weight_block_size": None}) is None
    assert block_of({}) is None
