"""Sums and new weights of a streamed model's layers, one layer in memory at a time.

They are kept as the states of its passes are: in memory up to the budget of the model,
in files beyond it, which are removed with the objects here.
"""

import itertools
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import nn

from heapr_lab.models.experts import ExpertsLayer
from heapr_lab.refinement.activation_grams import LayerGrams, bytes_of_sums
from heapr_lab.streaming.sweep_store import SweepStore, store_beside

_numbers = itertools.count()
_Summed = tuple[ExpertsLayer, LayerGrams]


class StoredSums:
    """The sums of each layer, which are read when their turn comes."""

    def __init__(self, store: SweepStore, summed: Iterable[_Summed]) -> None:
        """Keep the sums of all layers.

        Raises:
            SpecError: a file cannot be written.
        """
        self._store, self._layers, self._span = store, list[ExpertsLayer](), ""
        for layer, grams in summed:
            self._span = grams.span
            store.put(_name(layer), {"sums": grams.sums, "tokens": grams.tokens})
            self._layers.append(layer)
            del grams  # before those of the next layer

    def __iter__(self) -> Iterator[_Summed]:
        return map(self._read, self._layers)

    def _read(self, layer: ExpertsLayer) -> _Summed:
        tensors = self._store.get(_name(layer))
        sums = tensors["sums"].to(layer.device)
        return layer, LayerGrams(self._span, sums, tensors["tokens"])


class StoredDowns(Mapping[int, torch.Tensor]):
    """W_down by layer, of which the last one that was asked for is in memory."""

    def __init__(self, store: SweepStore) -> None:
        """Nothing is kept yet; what is, leaves the store with this object."""
        self._store, self._stem = store, f"down-{next(_numbers)}-"
        self._numbers: list[int] = []
        self._last: Mapping[int, torch.Tensor] = {}
        weakref.finalize(self, store.drop, self._stem)

    def __getitem__(self, number: int) -> torch.Tensor:
        if number not in self._numbers:
            raise KeyError(number)
        last = self._last
        if number not in last:
            self._last = {}  # before the next one is read
            last = self._last = {number: self._store.get(f"{self._stem}{number}")[""]}
        return last[number]

    def __setitem__(self, number: int, down: torch.Tensor) -> None:
        self._store.put(f"{self._stem}{number}", {"": down})
        self._last = {}
        if number not in self._numbers:
            self._numbers.append(number)

    def __iter__(self) -> Iterator[int]:
        return iter(self._numbers)

    def __len__(self) -> int:
        return len(self._numbers)


NewDowns = dict[int, torch.Tensor] | StoredDowns
"""W_down by layer, to which those of further layers can be added."""


def new_downs(store: SweepStore | None) -> NewDowns:
    """A place for the W_down of all layers."""
    return {} if store is None else StoredDowns(store)


def layer_store(
    model: nn.Module, layers: Sequence[ExpertsLayer], *, span: str | None
) -> SweepStore | None:
    """Where the layers of a streamed model are kept; None if it is in memory.

    Args:
        model: any model.
        layers: all of its layers.
        span: the span of the sums that will be kept; None for new weights alone.

    Raises:
        SpecError: there is no room for what will be kept.
    """
    store = store_beside(model)
    if store is None:
        return None
    n_downs = sum(layer.module.down_proj.nbytes for layer in layers)
    n_sums = sum(bytes_of_sums(layer, span) for layer in layers) if span else 0
    what = "the sums and new weights" if span else "the new weights"
    store.check_room(n_sums + n_downs, what=f"{what} of all layers")
    return store


def _name(layer: ExpertsLayer) -> str:
    return f"sums-{layer.layer}"
