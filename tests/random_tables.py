"""Importance tables of random sums, without a model."""

import itertools

import numpy as np
import pandas as pd

from heapr_lab.importance.table import ImportanceTable
from heapr_lab.models.architecture import Architecture, LayerShape

N_LAYERS, N_EXPERTS, D_INTER = 2, 2, 4
"""The shape of the table that is small enough to count its atoms by hand."""


def random_table(n_layers: int, n_experts: int, d_inter: int) -> ImportanceTable:
    """A table of random sums; layer 0 has smaller scores than the others."""
    rng = np.random.default_rng(0)
    shape = LayerShape(n_experts=n_experts, d_inter=d_inter, d_expert=8)
    layers = dict.fromkeys(range(n_layers), shape)
    atoms = itertools.product(range(n_layers), range(n_experts), range(d_inter))
    frame = pd.DataFrame(atoms, columns=["layer", "expert", "atom"])
    size = len(frame)
    frame["tokens"] = 10 + frame["expert"]
    frame["sum_h2"] = rng.uniform(1, 2, size) * (1 + frame["layer"])
    for name in ("sum_g2", "sum_ph2", "max_abs_ph", "w_down_sq"):
        frame[name] = rng.uniform(1, 2, size)
    model = Architecture(10**4 + size * 24, 2, 8, layers, 5000, 16)
    return ImportanceTable.from_frame(frame, architecture=model.to_dict())


def small_table() -> ImportanceTable:
    """A table of 16 atoms."""
    return random_table(N_LAYERS, N_EXPERTS, D_INTER)
