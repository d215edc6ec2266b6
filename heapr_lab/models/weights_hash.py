"""A hash of a tensor that is the same on every device and changes with any value.

A tensor is read as 32-bit words, in blocks of B. Each word of a block is multiplied by
an odd 64-bit number that depends on its position, and the products are summed modulo
2^64. Each device computes this itself, in integers, so that all give the same result. A
single changed word always changes its sum, because an odd number has an inverse. With a
probability of about 2^-32 or less, several changed or exchanged words do not change it.

Shapes: n_words; B words of a block; n_blocks.
Source: multilinear hashing, Lemire and Kaser (2014), Strongly universal string hashing
is fast, section 3.
"""

import functools

import numpy as np
import torch
import torch.nn.functional as F

BLOCK = 4096
"""Words in a block."""

_AT_ONCE = 64
"""Blocks that are widened to 64 bits at once: they fit into a processor's cache."""
_AT_ONCE_ON_DEVICE = 2048
"""The same elsewhere, where 64 would take longer to launch than to add up."""


def block_sums(tensor: torch.Tensor) -> bytes:
    """The sums of all blocks of a tensor, (n_blocks,) 64-bit integers, as bytes.

    bfloat16 is read as float32 with the same values, so that a checkpoint has the same
    hash in both. All other types have different hashes.
    """
    words, shift = _words(tensor.detach())
    n_whole = len(words) // BLOCK * BLOCK
    sums = sums_on_cpu if words.device.type == "cpu" else sums_on_device
    totals = sums(words[:n_whole].view(-1, BLOCK))
    if n_whole < len(words):  # the last block is padded with zeros
        last = F.pad(words[n_whole:], (0, BLOCK - len(words) + n_whole))
        totals = np.concatenate([totals, sums(last[None])])
    return bytes((totals << shift).astype("<i8").tobytes())


def _words(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    """The tensor's words, (n_words,), and the number of bits to shift them by."""
    flat = tensor.reshape(-1)
    if flat.dtype == torch.bfloat16:
        return flat.view(torch.int16), 16
    raw = flat.view(torch.uint8)
    if raw.numel() % 4 or raw.storage_offset() % 4:
        raw = F.pad(raw, (0, -raw.numel() % 4))
    return raw.view(torch.int32), 0


def sums_on_cpu(blocks: torch.Tensor) -> np.ndarray:
    """The sum of each block, (n_blocks,), in one thread and without a copy.

    Shapes: blocks (n_blocks, B).
    """
    words = blocks.numpy()
    sums = np.empty(len(words), np.int64)
    wide = np.empty((min(_AT_ONCE, len(words)), BLOCK), np.int64)
    for start in range(0, len(words), _AT_ONCE):
        part = words[start : start + _AT_ONCE]
        products = np.multiply(part, multipliers(), out=wide[: len(part)])
        products.sum(1, out=sums[start : start + len(part)])
    return sums


def sums_on_device(blocks: torch.Tensor) -> np.ndarray:
    """As `sums_on_cpu`, on the blocks' device; only the sums leave it."""
    places = torch.from_numpy(multipliers()).to(blocks.device)
    parts = [(part.long() * places).sum(1) for part in blocks.split(_AT_ONCE_ON_DEVICE)]
    sums: np.ndarray = torch.cat(parts).cpu().numpy()
    return sums


@functools.cache
def multipliers() -> np.ndarray:
    """An odd number for each position in a block, (B,): its splitmix64."""
    z = np.arange(1, BLOCK + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((z ^ (z >> np.uint64(31))) | np.uint64(1)).view(np.int64)
