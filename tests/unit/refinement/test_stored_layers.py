"""New weights of a streamed model's layers: a mapping that keeps one in memory."""

import gc
from pathlib import Path

import pytest
import torch

from heapr_lab.refinement.stored_layers import StoredDowns
from heapr_lab.streaming.sweep_store import SweepStore


def down(value: float) -> torch.Tensor:
    """A weight of two experts."""
    return torch.full((2, 3, 4), value, dtype=torch.float64)


@pytest.fixture(params=[0, 10**6])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> SweepStore:
    """A store in files, and one in memory."""
    return SweepStore(tmp_path, budget=request.param, durable=False)


def test_it_is_a_mapping(store: SweepStore) -> None:
    """It acts as a dict, also after a layer is given new weights."""
    downs, expected = StoredDowns(store), dict[int, torch.Tensor]()
    for number, value in ((3, 1.0), (1, 2.0), (3, 3.0), (11, 4.0), (1, 5.0)):
        downs[number] = down(value)
        expected[number] = down(value)
        assert list(downs) == list(expected)
        assert len(downs) == len(expected)
        for key, tensor in expected.items():
            assert torch.equal(downs[key], tensor)
    with pytest.raises(KeyError):
        downs[2]


def test_two_of_one_store_are_apart(store: SweepStore, tmp_path: Path) -> None:
    """Each has its own weights, and removes them alone."""
    first, second = StoredDowns(store), StoredDowns(store)
    first[0], second[0] = down(1.0), down(2.0)
    assert (first[0].unique().item(), second[0].unique().item()) == (1.0, 2.0)
    del first
    gc.collect()
    assert second._store is store
    assert len(store._memory) + len(list(tmp_path.iterdir())) == 1
    assert second[0].unique().item() == 2.0
