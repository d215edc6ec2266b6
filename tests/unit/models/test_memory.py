"""Batches are halved where memory runs out, and what is computed is the same."""

import gc
import weakref
from unittest.mock import Mock

import numpy as np
import pandas as pd
import pytest
import torch
from families import tiny_model, tiny_windows
from room import FULL, room_for

from heapr_lab import HeaprLabError, collect_statistics
from heapr_lab.models.memory import halving_batches, in_batches, is_out_of_memory


def test_sizes_are_halved_and_said(model, caplog):
    """10, 5, 2, 1: a line for each, and then an error that says what to do."""
    never = Mock(side_effect=FULL)
    with pytest.raises(HeaprLabError, match="one window needs more") as info:
        halving_batches(never, 10, model=model)
    assert [call.args for call in never.mock_calls] == [(10,), (5,), (2,), (1,)]
    assert isinstance(info.value.__cause__, torch.OutOfMemoryError)
    assert [record.args[1] for record in caplog.records] == [5, 2, 1]
    assert caplog.messages[0] == "out of memory on cpu: batch size now 5"


def test_tensors_of_a_failed_try_are_gone_before_the_next(model):
    """Tensors in circles are gone, too: what they hold would be missing then."""
    held: list[weakref.ref[torch.Tensor]] = []

    def run(size: int) -> None:
        assert [ref() for ref in held] == [None] * len(held)
        tensor = torch.zeros(size)
        circle = [tensor]
        circle.append(circle)  # type: ignore[arg-type]
        held.append(weakref.ref(tensor))
        if size > 1:
            raise MemoryError

    gc.disable()
    try:
        halving_batches(run, 8, model=model)
    finally:
        gc.enable()
    assert len(held) == 4


def test_other_errors_are_not_tried_again(model):
    """They are raised as they are, at once."""
    wrong = Mock(side_effect=RuntimeError("shapes do not match"))
    with pytest.raises(RuntimeError, match="shapes do not match"):
        halving_batches(wrong, 8, model=model)
    wrong.assert_called_once_with(8)


def test_a_real_shortage_is_recognised():
    """The allocators of this machine report it."""
    for ask in (lambda: torch.empty(2**58), lambda: np.empty(2**50)):
        with pytest.raises((RuntimeError, MemoryError)) as info:
            ask()
        assert is_out_of_memory(info.value)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("HIP out of memory"), True),
        (RuntimeError("MPS backend out of memory (MPS allocated: 8 GB)"), True),
        (RuntimeError("DefaultCPUAllocator: not enough memory: you tried"), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (HeaprLabError("non-finite gradients"), False),
    ],
)
def test_shortages_elsewhere(error, expected):
    """Errors of other devices and systems, and what only sounds like a shortage."""
    assert is_out_of_memory(error) == expected


def test_the_first_batch_is_that_of_the_device(model):
    """It is that of the model's device, whatever else there is; at least one window.

    One that was asked for is not made smaller: what does not fit is an error.
    """
    sizes: list[int] = []
    for shape in ((50, 9), (5, 9), (5, 101)):
        in_batches(sizes.append, model, torch.zeros(shape), None, on_cpu=100)
    assert sizes == [11, 5, 1]
    elsewhere = tiny_model("qwen2_moe").to("meta")  # offloaded: it runs from the CPU
    in_batches(sizes.append, elsewhere, torch.zeros(50, 9), None, on_cpu=100)
    assert sizes[-1] == 11
    full = Mock(side_effect=FULL)
    with pytest.raises(torch.OutOfMemoryError):
        in_batches(full, model, torch.zeros(50, 9), 2, on_cpu=100)
    full.assert_called_once_with(2)


def test_statistics_are_measured_with_smaller_batches(model):
    """The whole pass anew, in each of its sums; the table says with which batches."""
    windows = tiny_windows(n_sequences=7)
    expected = collect_statistics(model, windows, batch_size=2)
    with room_for(2) as sizes:
        table = collect_statistics(model, windows)
    assert sizes == [7, 3, *[1] * 7]
    pd.testing.assert_frame_equal(table.frame, expected.frame, rtol=1e-9)
    assert table.metadata["provenance"]["batch_size"] == 1
