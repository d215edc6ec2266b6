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
    """In files, and in memory."""
    return SweepStore(tmp_path, budget=request.param, durable=False)


def test_it_is_a_mapping(store: SweepStore) -> None:
    """As a dict is, also after a layer is given new weights, or taken away."""
    found, wanted = StoredDowns(store), dict[int, torch.Tensor]()
    for number, value in ((3, 1.0), (1, 2.0), (3, 3.0), (11, 4.0), (1, 5.0)):
        found[number] = down(value)
        wanted[number] = down(value)
        assert list(found) == list(wanted)
        assert len(found) == len(wanted)
        for key, own in wanted.items():
            assert torch.equal(found[key], own)
    for number in (3, 1):
        del found[number]
        del wanted[number]
        with pytest.raises(KeyError):
            found[number]
    found[3] = wanted[3] = down(6.0)
    assert list(found) == list(wanted)
    assert all(torch.equal(found[key], own) for key, own in wanted.items())
    with pytest.raises(KeyError):
        del found[1]


def test_two_of_one_store_are_apart(store: SweepStore, tmp_path: Path) -> None:
    """Each has its own weights, and removes them alone."""
    one, two = StoredDowns(store), StoredDowns(store)
    one[0], two[0] = down(1.0), down(2.0)
    assert (one[0].unique().item(), two[0].unique().item()) == (1.0, 2.0)
    del one
    gc.collect()
    assert two._store is store
    assert len(store._memory) + len(list(tmp_path.iterdir())) == 1
    assert two[0].unique().item() == 2.0
