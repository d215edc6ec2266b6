"""The hash of weights sees every change, and is the same wherever the tensor lies."""

import numpy as np
import pytest
import torch
from devices import GPU
from families import tiny_model

from heapr_lab.models import weights_hash
from heapr_lab.models.identity import model_identity
from heapr_lab.models.weights_hash import BLOCK, block_sums, multipliers


def sums_one_by_one(words: list[int]) -> bytes:
    """The slow twin: Python's integers, modulo 2^64."""
    odd = [int(number) for number in multipliers()]
    starts = range(0, len(words), BLOCK)
    blocks = [words[start : start + BLOCK] for start in starts]
    sums = [sum(o * w for o, w in zip(odd, b, strict=False)) % 2**64 for b in blocks]
    return b"".join(total.to_bytes(8, "little") for total in sums)


@pytest.mark.parametrize("n", [0, 1, BLOCK - 1, BLOCK, 2 * BLOCK + 3])
def test_sums_are_those_of_exact_integers(n):
    """Sums of whole blocks, of a last one that is not whole, and of none."""
    values = torch.randn(n)
    words = values.view(torch.int32).tolist()
    assert block_sums(values) == sums_one_by_one(words)


@pytest.mark.parametrize("dtype", ["float16", "float64", "uint8", "int64", "bool"])
def test_every_type_is_read_as_its_bytes(dtype):
    """The number of bytes may be odd, or a view may begin at an odd one."""
    values = (torch.randn(1003) * 9).to(getattr(torch, dtype))
    for tensor in (values, values[1:]):
        raw = tensor.numpy().tobytes()
        raw += b"\0" * (-len(raw) % 4)
        words = np.frombuffer(raw, "<i4").tolist()
        assert block_sums(tensor) == sums_one_by_one(words)


def test_bfloat16_is_the_float32_of_the_same_values():
    """A checkpoint in bfloat16 has one hash in both; rounding changes it."""
    values = torch.randn(3, 5, 700)
    half = values.bfloat16()
    assert block_sums(half) == block_sums(half.float())
    assert block_sums(half) != block_sums(values)


def test_devices_add_up_the_same():
    """What a GPU computes, computed here: the two ways agree to the bit."""
    for dtype in (torch.float32, torch.bfloat16):
        words, _ = weights_hash._words(torch.randn(70 * BLOCK).to(dtype))
        blocks = words.view(-1, BLOCK)
        ours, theirs = (
            sums(blocks)
            for sums in (weights_hash.sums_on_cpu, weights_hash.sums_on_device)
        )
        assert np.array_equal(ours, theirs)


@pytest.mark.gpu
def test_a_gpu_gives_the_same_hash():
    """For a model that lies there, and for a tensor larger than what is widened."""
    model = tiny_model("qwen3_moe", dtype=torch.bfloat16)
    here = model_identity(model)
    assert model_identity(model.to(GPU)) == here
    values = torch.randn(70 * BLOCK + 5)
    assert block_sums(values.to(GPU)) == block_sums(values)


def test_no_two_places_can_be_swapped_unseen():
    """Two words differ by less than 2^33, so that the numbers of places may not agree.

    (o_i - o_j)(w_i - w_j) is 0 modulo 2^64 only if 2^33 divides o_i - o_j. Nor can one
    word change unseen, as an odd number has an inverse.
    """
    assert len(np.unique(multipliers() & np.int64(2**33 - 1))) == BLOCK
    assert (multipliers() & 1).all()
