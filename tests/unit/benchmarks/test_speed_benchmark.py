"""benchmarks/speed.py: what it counts; models are timed in turns (latency.py).

A slow minute counts for all of them.
"""

from typing import Any

import numpy as np
from families import tiny_ids, tiny_model

from benchmarks import speed
from benchmarks.latency import in_turns, seconds_of


def test_bytes_of_sliced_models():
    """A sliced model takes less than a masked or dense one."""
    model: Any = speed.build_model(speed.QUICK, "cpu")
    keeps = {r: speed.ragged_mask(speed.QUICK, r) for r in speed.RATIOS}
    sizes = {
        (method.name, method.ratio): speed.storage_bytes(method.model)
        for method in speed.build_methods(model, keeps)
    }
    for ratio in speed.RATIOS:
        assert (sizes["sliced", ratio] < sizes["masked", ratio]) == (ratio > 0)
    assert sizes["masked", 0.4] == sizes["dense_eager", 0.0]


# --- times ------------------------------------------------------------------------


def test_a_prefill_and_decoding_are_timed():
    """The seconds of a batch of prompts."""
    model = tiny_model("qwen2_moe").eval()
    seconds = [seconds_of(model, tiny_ids(), n_steps=n_steps) for n_steps in (0, 2)]
    assert np.min(seconds) > 0


def test_runs_take_turns_after_a_warm_up():
    """Another run is first in each round; the first round is not written down."""
    order: list[str] = []

    def run(name: str) -> float:
        order.append(name)
        return float(len(order))

    times = in_turns([lambda: run("a"), lambda: run("b")], n_rounds=2)
    assert order == ["a", "b", "b", "a", "a", "b"]
    assert times == [[4, 5], [3, 6]]
