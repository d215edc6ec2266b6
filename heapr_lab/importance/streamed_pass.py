"""A pass over a streamed model: two sweeps over as many windows as there is room for.

Shapes: E n_experts, I d_inter.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from heapr_lab.errors import SpecError
from heapr_lab.importance.sweep_store import SweepStore, budget_of, opened
from heapr_lab.importance.two_sweeps import TwoSweeps
from heapr_lab.models.experts import NORMS, ExpertsLayer
from heapr_lab.models.hooks import Probe
from heapr_lab.models.streamed import Stream, stream_of
from heapr_lab.progress import Progress, noted

EXTRA_STATES = 3
"""Kept besides the outputs of all layers: the first inputs, and two gradients."""

Norms = dict[int, dict[str, torch.Tensor]]


@dataclass(kw_only=True, eq=False)
class StreamedPass:
    """A pass that is interrupted and resumed at a layer."""

    model: nn.Module
    layers: Sequence[ExpertsLayer]
    ids: torch.Tensor
    """Of all windows, (B, L)."""
    first: int
    """Number of the first window, by which next tokens are drawn."""
    batch_size: int
    sampled: bool
    """Whether the next tokens are drawn from the model's predictions."""
    state: Path | None
    """A folder for what is finished; without it nothing is resumed."""
    key: str
    progress: Progress | None

    def run(
        self, probes: dict[int, Probe], check: Callable[[int, slice], None]
    ) -> Norms:
        """Measure every window; returns the squared norms of the atoms' weights.

        Args:
            probes: of each layer; they have all sums at the end.
            check: called after each batch in a layer with its number and its windows.

        Raises:
            SpecError: there is no room for one window, or a file cannot be written.
            CacheError: the state belongs to another pass, or is damaged.
        """
        norms: Norms = {}
        key = {"pass": self.key, "batch_size": self.batch_size}
        with opened(self.state, key, budget=budget_of(self._stream)) as store:
            size = self._windows_at_once(store)
            for first in range(0, len(self.ids), size):
                store.begin(f"from-{first}")
                if "done" not in store:
                    norms |= self._measure(first, size, store, probes, check)
                    store.put("done", _sums(probes) | _named(norms))
                    for finished in ("out-", "grad-", "back-", "layer-"):
                        store.drop(finished)
                else:
                    norms |= _recalled(store.get("done"), probes)
        return {n: {k: own[k] for k in NORMS if k in own} for n, own in norms.items()}

    def _measure(
        self,
        first: int,
        size: int,
        store: SweepStore,
        probes: dict[int, Probe],
        check: Callable[[int, slice], None],
    ) -> Norms:
        ids, start = self.ids[first : first + size], self.first + first
        sweeps = TwoSweeps(
            self.model,
            self.layers,
            ids.split(self.batch_size),
            store,
            seeds=range(start, start + len(ids)) if self.sampled else None,
            step=self._steps(first, size),
        )
        norms = sweeps.forward()
        for number, index in sweeps.backward(probes):
            start = first + index * self.batch_size
            stop = min(start + self.batch_size, first + len(ids))
            check(number, slice(start, stop))
        return norms

    def _steps(self, first: int, size: int) -> Callable[[int, int], None]:
        """What is called with the sweep and the layer after each batch."""
        n_layers = len(self._stream.blocks)
        per_window = 2 * n_layers
        n_windows = min(size, len(self.ids) - first)
        n_calls = per_window * -(-n_windows // self.batch_size)
        n_done = 0

        def step(sweep: int, number: int) -> None:
            nonlocal n_done
            n_done += 1
            if self.progress is not None:
                read = self._stream.n_bytes_read / 1e9
                noted(
                    self.progress,
                    f"sweep {sweep} of 2, layer {number + 1} of {n_layers}, "
                    f"{read:.1f} GB read",
                )
                self.progress(first + n_windows * n_done // n_calls, len(self.ids))

        return step

    @property
    def _stream(self) -> Stream:
        stream = stream_of(self.model)
        assert stream is not None
        return stream

    def _windows_at_once(self, store: SweepStore) -> int:
        """How many windows go through both sweeps together.

        Raises:
            SpecError: there is no room for one.
        """
        store.begin("all")
        if "windows" in store:  # the room for them is taken already
            return int(store.get("windows")["at_once"])
        size = fitting_windows(
            len(self.ids),
            n_bytes=self._bytes_of_window,
            batch_size=self.batch_size,
            budget=0 if self.state is not None else budget_of(self._stream),
            store=store,
        )
        store.put("windows", {"at_once": torch.tensor(size)})
        return size

    @property
    def _bytes_of_window(self) -> int:
        config = self.model.config.get_text_config()  # type: ignore[operator, union-attr]
        n_groups = len(self._stream.blocks) + EXTRA_STATES
        itemsize = self._stream.dtype.itemsize
        return int(self.ids.shape[1] * config.hidden_size * itemsize * n_groups)


def fitting_windows(
    n_windows: int, *, n_bytes: int, batch_size: int, budget: int, store: SweepStore
) -> int:
    """How many windows' states there is room for: whole batches where possible.

    Args:
        n_windows: the largest result.
        n_bytes: of the states of one window.
        batch_size: windows in a batch.
        budget: bytes in memory.
        store: with files for the others.

    Raises:
        SpecError: not even those of one window do.
    """
    fit = (budget + store.free) // n_bytes
    if fit < 1:
        raise SpecError(
            f"the states of one window need {n_bytes / 1e9:.1f} GB; there are "
            f"{budget / 1e9:.1f} GB of host memory for them and "
            f"{store.free / 1e9:.1f} GB on the disk of {store.folder}: free "
            "some, raise host_memory, or take shorter windows (seq_len)"
        )
    if fit >= n_windows:
        return n_windows
    return max(fit // batch_size * batch_size, min(fit, batch_size))


def _sums(probes: dict[int, Probe]) -> dict[str, torch.Tensor]:
    return {
        f"sums.{number}.{name}": tensor
        for number, probe in probes.items()
        for name, tensor in probe.moments.state().items()
    }


def _named(norms: Norms) -> dict[str, torch.Tensor]:
    return {
        f"norms.{number}.{name}": tensor
        for number, own in norms.items()
        for name, tensor in own.items()
    }


def _recalled(group: dict[str, torch.Tensor], probes: dict[int, Probe]) -> Norms:
    """Give the probes the sums in `group`; returns the norms in it."""
    found: dict[str, dict[int, dict[str, torch.Tensor]]] = {"sums": {}, "norms": {}}
    for name, tensor in group.items():
        kind, number, own = name.split(".")
        found[kind].setdefault(int(number), {})[own] = tensor
    for layer, sums in found["sums"].items():
        probes[layer].moments.load_state(sums)
    return found["norms"]
