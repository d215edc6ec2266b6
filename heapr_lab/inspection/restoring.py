"""Measured attribution: the loss with one layer or expert restored, and without it.

The model is run again for each part: with the part kept whole while all others are
pruned (what restoring it gains), and with only the part pruned (what its removal alone
costs). Parts interact, so neither adds up to Δloss; `attribution` has shares that do.

Units: nats per predicted token.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from torch import nn

from heapr_lab.errors import SpecError
from heapr_lab.evaluation.perplexity import evaluate_perplexity
from heapr_lab.models.experts import find_experts
from heapr_lab.progress import Parts, Progress
from heapr_lab.pruning.masks import KeepMask
from heapr_lab.pruning.surgery import keeps_of, masking
from heapr_lab.text.calibration import token_windows

_Part = tuple[int, int | None]
"""A layer, and one of its experts or None for all of them."""


@dataclass(frozen=True, eq=False)
class Restored:
    """The losses of a pruned model whose parts are restored one at a time."""

    frame: pd.DataFrame
    """Columns layer, expert (of a layer's experts only), n_removed (atoms of the part),
    restored_delta (loss of the model pruned but for the part, minus dense), alone_delta
    (loss of the model with only the part pruned, minus dense), tokens (predicted ones,
    over which losses are averaged)."""
    dense_nll: float
    pruned_nll: float

    @property
    def delta_nll(self) -> float:
        """The loss of the pruned model minus that of the dense one."""
        return self.pruned_nll - self.dense_nll


def n_runs(
    keep: KeepMask, *, layer: int | None = None, experts: Iterable[int] | None = None
) -> int:
    """The runs over all windows that `restored` makes with the same arguments.

    Two runs for each part of which something is removed, and two for dense and pruned.

    Raises:
        SpecError: there is no such layer or expert.
    """
    parts = _parts(keep, layer, experts)
    return 2 + 2 * sum(_n_removed(keep, part) > 0 for part in parts)


def restored(
    model: nn.Module,
    keep: KeepMask,
    ids: Any,
    *,
    layer: int | None = None,
    experts: Iterable[int] | None = None,
    batch_size: int | None = None,
    progress: Progress | None = None,
) -> Restored:
    """Δloss as each layer is restored alone, and as it is pruned alone.

    Args:
        model: the dense model; its weights are not changed.
        keep: the kept atoms of the pruned model.
        ids: token ids in non-overlapping windows, (n_windows, seq_len).
        layer: a layer whose experts are restored instead, one at a time.
        experts: its experts to restore; by default all.
        batch_size: windows per forward pass; by default as many as fit in memory.
        progress: called with (windows done, windows of all `n_runs` runs); what it
            raises ends the work.

    Raises:
        SpecError: `keep` is of another model, there is no such layer or expert, or the
            ids or the batch size are invalid.
    """
    keeps_of(find_experts(model), keep)
    windows = token_windows(ids)
    parts = _parts(keep, layer, experts)
    total = n_runs(keep, layer=layer, experts=[e for _, e in parts if e is not None])
    steps = Parts(total * len(windows), progress)

    def loss(mask: KeepMask) -> float:
        with masking(model, mask):
            perplexity = evaluate_perplexity(
                model, windows, batch_size=batch_size, progress=steps
            )
        steps.end(len(windows))
        return perplexity.nll

    dense, pruned = loss(KeepMask.full(keep)), loss(keep)
    rows = []
    for part in parts:
        changed = _n_removed(keep, part)
        back, alone = pruned, dense
        if changed:
            back, alone = (loss(mask) for mask in _masks(keep, part))
        rows.append((*part, changed, back - dense, alone - dense))
    names = ["layer", "expert", "n_removed", "restored_delta", "alone_delta"]
    frame = pd.DataFrame(rows, columns=names)
    frame["tokens"] = windows.shape[0] * (windows.shape[1] - 1)
    named = frame if layer is not None else frame.drop(columns="expert")
    return Restored(named, dense, pruned)


def _parts(
    keep: KeepMask, layer: int | None, experts: Iterable[int] | None
) -> Sequence[_Part]:
    if layer is None:
        return [(number, None) for number in keep.layers]
    n_experts = len(keep.by_layer(layer))
    chosen = list(range(n_experts) if experts is None else experts)
    outside = [expert for expert in chosen if not 0 <= expert < n_experts]
    if outside:
        raise SpecError(
            f"layer {layer} has no expert {outside[0]}, expected 0 to {n_experts - 1}"
        )
    return [(layer, expert) for expert in chosen]


def _n_removed(keep: KeepMask, part: _Part) -> int:
    layer, expert = part
    kept = keep.by_layer(layer)
    return int(np.count_nonzero(~(kept if expert is None else kept[expert])))


def _masks(keep: KeepMask, part: _Part) -> Iterator[KeepMask]:
    """The mask that keeps the part as well, and the one that prunes only the part."""
    layer, expert = part
    index = slice(None) if expert is None else expert
    full = KeepMask.full(keep).arrays
    for outside, inside in ((keep.arrays, full), (full, keep.arrays)):
        mixed = outside[layer].copy()
        mixed[index] = inside[layer][index]
        yield KeepMask({**outside, layer: mixed})
