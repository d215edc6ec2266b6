"""Models are timed in turns, so that a slow minute counts for all of them."""

import numpy as np
from families import tiny_ids, tiny_model

from benchmarks.latency import in_turns, seconds_of


def test_a_prefill_and_decoding_are_timed() -> None:
    """The seconds of a batch of prompts."""
    model = tiny_model("qwen2_moe").eval()
    seconds = [seconds_of(model, tiny_ids(), n_steps=n_steps) for n_steps in (0, 2)]
    assert np.min(seconds) > 0


def test_runs_take_turns_after_a_warm_up() -> None:
    """Another run is first in each round; the first round is not written down."""
    order: list[str] = []

    def run(name: str) -> float:
        order.append(name)
        return float(len(order))

    times = in_turns([lambda: run("a"), lambda: run("b")], n_rounds=2)
    assert order == ["a", "b", "b", "a", "a", "b"]
    assert times == [[4, 5], [3, 6]]
