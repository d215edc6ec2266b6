"""Tables whose heapr scores are given, and what a selection keeps of them."""

from typing import Any

import numpy as np
import pandas as pd

from heapr_lab import ImportanceTable, select


def make_table(
    scores: dict[int, Any], *, extra: dict[str, Any] | None = None, **metadata: Any
) -> ImportanceTable:
    """A table whose heapr scores are `scores`, {layer: (n_experts, d_inter)}."""
    frames = []
    for layer, values in scores.items():
        array = np.array(values, dtype=np.float64)
        expert, atom = np.indices(array.shape)
        keys = {"layer": layer, "expert": expert.ravel(), "atom": atom.ravel()}
        # ½ · 2/1 · g²/1 is g².
        sums = {"tokens": 1, "sum_h2": 2.0, "sum_g2": array.ravel()}
        frames.append(pd.DataFrame({**keys, **sums}))
    frame = pd.concat(frames, ignore_index=True).assign(**(extra or {}))
    return ImportanceTable.from_frame(frame, **metadata)


TWO_LAYERS = {0: [[1, 8, 3, 4], [5, 6, 7, 2]], 1: [[9, 10, 11, 12], [13, 14, 15, 16]]}


def kept(table: ImportanceTable, **settings: Any) -> dict[int, list[list[int]]]:
    """What stays as 0 and 1, by layer."""
    keep = select(table, **settings)
    return {layer: keep.by_layer(layer).astype(int).tolist() for layer in keep.layers}
