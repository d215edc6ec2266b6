"""Dense layers divided into experts, without training."""

import itertools

import numpy as np
import pytest
import torch
from carved_models import D_VOCAB, dense_model
from keeps import weights_of

from benchmarks.lab_model.carving import _assigned, carve
from heapr_lab.errors import SpecError
from heapr_lab.pretrained.carved import Layout

_IDS = torch.randint(D_VOCAB, (4, 40), generator=torch.Generator().manual_seed(3))


def test_a_carving_of_a_dense_model():
    """Each neuron has one place, the same each time, and the model is as before.

    Experts taken at random would have the share of energy that is active.
    """
    dense, layout = dense_model(), Layout.named("s4e5x4k3")
    before = weights_of(dense)
    one, two = (carve(dense, _IDS, layout) for _ in range(2))
    for carving, other in zip(one, two, strict=True):
        assert sorted(carving.order.tolist()) == list(range(layout.d_ff))
        assert carving.router.shape == (5, 16)
        assert carving.bias.shape == (5,)
        assert carving.captured > (4 + 3 * 4) / 24
        assert torch.equal(carving.order, other.order)
        assert torch.equal(carving.router, other.router)
    torch.testing.assert_close(weights_of(dense), before, rtol=0, atol=0)
    assert not any(module._forward_hooks for module in dense.modules())


def test_more_active_experts_capture_more():
    """They capture everything where all are active."""
    dense = dense_model()
    captured = [
        np.mean([layer.captured for layer in carve(dense, _IDS, Layout.named(name))])
        for name in ("s4e5x4k1", "s4e5x4k3", "s4e5x4k5")
    ]
    assert captured[0] < captured[1] < captured[2]
    assert captured[2] == pytest.approx(1, abs=1e-5)


def test_a_layout_of_another_size_is_refused():
    """Both sizes are named."""
    with pytest.raises(SpecError, match="s4e4x4k2 has 20 neurons, the layers 24"):
        carve(dense_model(), _IDS, Layout.named("s4e4x4k2"))


def test_places_are_kept_and_the_sum_is_near_the_largest():
    """Compared with all assignments of eight rows."""
    gain = torch.rand(8, 3, generator=torch.Generator().manual_seed(0))
    sizes = [2, 3, 3]
    assignment = _assigned(gain, sizes)
    assert np.bincount(assignment, minlength=3).tolist() == sizes

    def total(parts: tuple[int, ...]) -> float:
        return float(sum(gain[row, part] for row, part in enumerate(parts)))

    everything = set(itertools.permutations([0, 0, 1, 1, 1, 2, 2, 2]))
    assert total(tuple(assignment)) > 0.97 * max(map(total, everything))
