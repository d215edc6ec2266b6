"""Tiny checkpoints in memory and streamed, and what of them is read and held."""

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from families import tiny_model, tiny_windows
from keeps import weights_of
from tiny_folder import opened, write_folder

from heapr_lab.importance.table import ImportanceTable
from heapr_lab.streaming.stream import Stream, stream_of

WINDOWS = tiny_windows(n_sequences=5, seq_len=16)
ROUNDED = {"nemotron_h", "nemotron_h_puzzle"}
"""Families that compute in float32 whatever the weights are in."""


def written(folder: Path, family: str, **sizes: Any) -> Path:
    """A tiny checkpoint in several files."""
    return write_folder(folder, tiny_model(family, **sizes), max_shard_size="5KB")


def both(folder: Path, family: str, **sizes: Any) -> tuple[Any, Any]:
    """A tiny checkpoint in memory, and streamed, in float64 on the CPU."""
    written(folder, family, **sizes)
    return opened(folder, stream=False), opened(folder, stream=True)


def stream(model: Any) -> Stream:
    """What reads the layers of a streamed model."""
    source = stream_of(model)
    assert source is not None
    return source


def weights(model: Any) -> dict[str, torch.Tensor]:
    """A copy of every stored tensor, in memory or streamed."""
    source = stream_of(model)
    return weights_of(model) if source is None else dict(source.each(torch.clone))


def resident(model: Any) -> set[int]:
    """The parts that have weights in memory: embeddings, layers, head."""
    return {
        number
        for number, part in stream(model).parts.items()
        if any(not p.is_meta for module in part.modules for p in module.parameters())
    }


def same_tables(
    table: ImportanceTable, expected: ImportanceTable, near: float = 1e-9
) -> None:
    """Every column agrees."""
    assert list(table.frame) == list(expected.frame)
    for name in expected.frame:
        column, other = (t.frame[name].to_numpy() for t in (table, expected))
        np.testing.assert_allclose(column, other, rtol=near, err_msg=name)


def free_on_disk(patch: pytest.MonkeyPatch, n_bytes: int) -> None:
    """Let the disk have so much room."""
    patch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=n_bytes))
