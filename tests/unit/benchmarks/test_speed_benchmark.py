"""benchmarks/speed.py: what it counts."""

from typing import Any

from benchmarks import speed


def test_bytes_of_sliced_models() -> None:
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
