"""Tables whose heapr scores are given, what a selection keeps, and counted models."""

from typing import Any

import numpy as np
import pandas as pd

from heapr_lab import ImportanceTable, select
from heapr_lab.models.architecture import Architecture, LayerShape

ONE_LAYER = Architecture(
    n_parameters=100,
    bytes_per_parameter=2,
    d_model=4,
    layers={5: LayerShape(n_experts=2, d_inter=2, d_expert=4, top_k=1)},
    other_weights_per_token=10,
    attention_width=3,
)
"""Two gated experts of two atoms; an atom has 12 parameters and costs 24 operations.

A token goes to one expert.
"""
TWO_KINDS = Architecture(
    n_parameters=1000,
    bytes_per_parameter=2,
    d_model=4,
    layers={
        1: LayerShape(n_experts=2, d_inter=3, d_expert=4, top_k=1),
        3: LayerShape(
            n_experts=2, d_inter=2, d_expert=5, n_matrices=2, atom_biases=1, top_k=2
        ),
    },
    other_weights_per_token=100,
    attention_width=10,
)
"""Layer 1: gated, d_expert 4: an atom has 12 parameters and costs 24 operations.

Layer 3: no gate, 1 bias an atom, d_expert 5: 11 parameters and 20 operations.
"""


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
