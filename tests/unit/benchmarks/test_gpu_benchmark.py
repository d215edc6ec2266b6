"""benchmarks/gpu.py: every part on a CPU with narrow models, and its time limits."""

import argparse
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

from benchmarks import gpu
from benchmarks.shapes import SHAPES, depth_within, n_parameters

SMALL = gpu.Run("cpu", small=True)
BILLIONS = {
    "DeepSeekMoE-16B": 16.4,
    "Qwen2-57B-A14B": 57.4,
    "Qwen1.5-MoE-A2.7B": 14.3,
    "Qwen3-30B-A3B": 30.5,
}
"""Parameters, as the models' cards say."""


def rows_of(part: str) -> pd.DataFrame:
    """What a part measures on narrow models."""
    return pd.DataFrame(gpu.measure(SMALL, part))


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_are_those_of_the_models(name):
    """All parameters, counted on models without weights."""
    shape = SHAPES[name]
    total = n_parameters(shape, shape.n_layers)
    assert total == pytest.approx(BILLIONS[name] * 1e9, rel=5e-3)
    assert depth_within(shape, 3 * total, bytes_each=2) == shape.n_layers
    half = depth_within(shape, total, bytes_each=2)
    assert n_parameters(shape, half) * 2 <= total < n_parameters(shape, half + 1) * 2


def test_scores_are_compared_with_float64():
    """float32 is within its tolerance of float64, and is not the same."""
    rows = rows_of("equal").set_index("case")
    assert set(rows["outcome"]) == {"passed"}
    assert rows["relative_error"]["float64"] < 1e-12
    assert 1e-9 < rows["relative_error"]["float32"] < 1e-3
    assert rows["relative_error"]["bfloat16"] > rows["relative_error"]["float32"]
    assert rows["same_kept"]["float32"] > 0.999


def test_cost_of_every_method():
    """Seconds and memory; the first layer's MLP has no experts."""
    rows = rows_of("memory:DeepSeekMoE-16B").set_index("case")
    methods = {"scores", "plain", "scores, batch 1", "two_stage", "compress"}
    assert methods <= set(rows.index)
    assert (rows[["seconds", "peak_bytes"]] > 0).all(axis=None)
    assert rows["n_layers"]["plain"] == 2
    assert rows["seconds_all_layers"]["plain"] == rows["seconds"]["plain"] * 14


def test_streamed_checkpoints_are_read_twice():
    """Each layer is read in both sweeps, and once for the identity of the weights."""
    rows = rows_of("streamed:Qwen3-30B-A3B").set_index("case")
    n_bytes = rows["checkpoint_bytes"]["written"]
    shape = SHAPES["Qwen3-30B-A3B"].narrow()
    assert n_bytes == 4 * n_parameters(shape, 2)
    assert 2 * n_bytes <= rows["bytes_read"]["scores"] <= 4 * n_bytes


def test_statistics_are_counted():
    """Experts with statistics take more calls than without."""
    rows = rows_of("accounting")
    assert set(rows["case"]) == set(SHAPES)
    assert (rows["launches"] > 0).all()
    assert rows["waits"].isna().all()
    calls = rows.pivot_table(index="case", columns="what", values="launches")
    assert (calls["experts, measured"] > calls["experts, plain"]).all()


def test_sliced_experts_are_timed():
    """Prefill of dense, masked and sliced models."""
    rows = rows_of("ragged")
    assert set(rows["mode"]) == {"prefill"}
    assert (rows["tokens_per_second"] > 0).all()
    sliced = rows[rows["method"] == "sliced"]
    assert (sliced["parameter_bytes"] == sliced["predicted_bytes"]).all()


def options(out: Path, **changes: Any) -> argparse.Namespace:
    """What the command line gives."""
    defaults = {"out": out, "device": "cpu", "small": True, "parts": "equal,tests"}
    return argparse.Namespace(**defaults | changes)


def test_a_part_that_takes_too_long_is_stopped(tmp_path, monkeypatch):
    """The next one runs, what was measured stays, and a part is not run twice.

    The tests marked gpu are found without their own conftest.py, which needs the panel.
    """
    monkeypatch.setattr(gpu, "LIMITS", {"equal": 0.5})
    rows = pd.DataFrame(gpu.run_all(options(tmp_path, minutes=5)))
    ended = rows[rows["case"] == "ended"].set_index("part")["outcome"]
    assert dict(ended) == {"equal": "stopped after 0 s", "tests": "done"}
    assert rows["n_tests"].max() >= 190
    assert rows.loc[rows["case"].eq("collected"), "device"].notna().all()
    again = pd.DataFrame(gpu.run_all(options(tmp_path, minutes=5)))
    pd.testing.assert_frame_equal(again, pd.read_csv(tmp_path / "gpu.csv"))
    assert len(again) == len(rows)


def test_no_part_begins_without_time(tmp_path):
    """Ten seconds before the end there is nothing to measure."""
    assert gpu.run_all(options(tmp_path, minutes=0.1)) == []


def test_targets_stand_beside_the_scores():
    """A line for each way of scoring, with the seconds of all layers."""
    row = {
        "part": "memory:DeepSeekMoE-16B",
        "case": "scores",
        "n_layers": 14,
        "of_layers": 28,
        "seconds_all_layers": 12.0,
        "peak_bytes": 39e9,
    }
    text = gpu.report([row, row | {"case": "plain"}])
    words = "memory:DeepSeekMoE-16B scores 14/28 12.0 39.00 <= 30 s, <= 40 GB"
    assert " ".join(text.splitlines()[1].split()) == words
    assert len(text.splitlines()) == 2


def test_memory_that_runs_out_is_a_row():
    """The other methods are still measured; any other error is raised."""

    def too_much() -> None:
        raise torch.OutOfMemoryError("of 80 GB")

    assert gpu._timed(SMALL, too_much, resident=0) == {"outcome": "out of memory"}
    with pytest.raises(ZeroDivisionError):
        gpu._timed(SMALL, lambda: 1 / 0, resident=0)
