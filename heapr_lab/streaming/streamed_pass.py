"""A pass over a streamed model: two sweeps over as many windows as there is room for.

Windows that went through both are done, as those of a pass in memory are. For the
others the layer that they have reached is kept.
"""

from collections.abc import Callable, Generator
from typing import Any

import torch

from heapr_lab.models.backend import GradientPass
from heapr_lab.progress import noted
from heapr_lab.streaming.sizes import EXTRA_STATES, state_bytes, state_of
from heapr_lab.streaming.stream import Stream
from heapr_lab.streaming.sweep_store import SweepStore, budget_of, opened
from heapr_lab.streaming.two_sweeps import TwoSweeps


def streamed_pass(
    model: Any, stream: Stream, run: GradientPass
) -> Generator[tuple[int, slice]]:
    """Measure every window that is not done.

    Yields the number of an MoE layer and the windows of which it has the gradients.

    Raises:
        SpecError: there is no room for one window.
        CacheError: the state belongs to another pass, or is damaged.
        HeaprLabError: a file cannot be written.
    """
    if run.done == len(run.ids):
        return
    folder = None if run.state is None else run.state.with_suffix(".sweeps")
    key = {"pass": run.key, "batch_size": run.batch_size}
    with opened(folder, key, budget=budget_of(stream)) as store:
        size = _windows_at_once(model, stream, run, store)
        while run.done < len(run.ids):
            windows = slice(run.done, min(run.done + size, len(run.ids)))
            store.begin(f"from-{windows.start}")
            step = _steps(stream, run, windows)
            sweeps = TwoSweeps(model, run, windows, store, step=step)
            sweeps.forward()
            yield from sweeps.backward()
            run.finish(windows.stop, save=True)
            store.drop("")


def _steps(
    stream: Stream, run: GradientPass, windows: slice
) -> Callable[[int, int], None]:
    """What is called with the sweep and the layer after each batch."""
    n_layers, n_windows = len(stream.blocks), windows.stop - windows.start
    n_calls = 2 * n_layers * -(-n_windows // run.batch_size)
    n_done = 0

    def step(sweep: int, number: int) -> None:
        nonlocal n_done
        n_done += 1
        noted(
            run.progress,
            f"sweep {sweep} of 2, layer {number + 1} of {n_layers}, "
            f"{stream.n_bytes_read / 1e9:.1f} GB read",
        )
        done = windows.start + n_windows * n_done // n_calls
        run.progress(done, len(run.ids))

    return step


def _windows_at_once(
    model: Any, stream: Stream, run: GradientPass, store: SweepStore
) -> int:
    """How many windows go through both sweeps together.

    Raises:
        SpecError: there is no room for one.
    """
    store.begin("all")
    if "windows" in store:  # the room for them is taken already
        return int(store.get("windows")["at_once"])
    n_groups = len(stream.blocks) + EXTRA_STATES
    size = fitting_windows(
        len(run.ids),
        n_bytes=run.ids.shape[1] * token_bytes(model, stream.dtype) * n_groups,
        batch_size=run.batch_size,
        store=store,
    )
    store.put("windows", {"at_once": torch.tensor(size)})
    return size


def token_bytes(model: Any, dtype: torch.dtype) -> int:
    """Bytes of what is kept of a token between two layers, at most."""
    text = model.config.get_text_config()
    return state_bytes(state_of(text.to_dict(), text.hidden_size), dtype.itemsize)


def fitting_windows(
    n_windows: int, *, n_bytes: int, batch_size: int, store: SweepStore
) -> int:
    """How many windows' states there is room for: whole batches where possible.

    Args:
        n_windows: the largest result.
        n_bytes: of the states of one window.
        batch_size: windows in a batch.
        store: of the states, which is empty.

    Raises:
        SpecError: there is none for one window.
    """
    remedy = "take shorter windows (seq_len)"
    store.check_room(n_bytes, what="the states of one window", remedy=remedy)
    fit = sum(store.room) // n_bytes
    if fit >= n_windows:
        return n_windows
    return max(fit // batch_size * batch_size, min(fit, batch_size))
