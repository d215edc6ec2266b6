"""MC-SMoE: rarely used experts join the used one whose routing is most similar."""

import math
from collections.abc import Sequence

import numpy as np
import pandas as pd
import torch

from heapr_lab.errors import SpecError
from heapr_lab.methods.collectors import EXPERT_SUMS
from heapr_lab.methods.composed_experts import Matrices
from heapr_lab.methods.compression import ExpertComposition
from heapr_lab.methods.merging import (
    LOGIT_COSINES,
    Groups,
    aligned,
    atoms_of,
    averaged,
    groups_of,
    logit_cosines,
    merged,
    ranked,
)
from heapr_lab.methods.method import Request, ours
from heapr_lab.models.experts import ExpertsLayer


def _mc_smoe(request: Request) -> ExpertComposition:
    """Experts of all layers compete for being dominant by their share of tokens."""
    cosines = logit_cosines(request)
    frame = ranked(request)
    leaders = _dominant_of(request, frame)
    groups = {k: joined(cosines[k], leaders[k]) for k in cosines}
    shares = frame.set_index(["layer", "expert"])["share"]

    def merge(layer: ExpertsLayer, group: Sequence[int]) -> Matrices:
        (first,) = set(group) & set(leaders[layer.layer])
        like = atoms_of(layer.expert(first))
        experts = [_like(layer.expert(e), like) for e in group]
        return averaged(experts, [float(shares[layer.layer, e]) for e in group])

    return merged(request, groups, merge)


def _dominant_of(request: Request, frame: pd.DataFrame) -> dict[int, list[int]]:
    """The dominant experts of each layer, as many as the ratio leaves.

    Raises:
        SpecError: there would be fewer than layers.
    """
    layers = request.shapes
    sizes = {k: shape.d_inter * shape.atom_parameters for k, shape in layers.items()}
    sums = by_dominance(frame)["layer"].map(sizes).cumsum().to_numpy()
    budget = math.ceil((1 - request.ratio) * int(sums[-1]))
    number, n_layers = int(np.searchsorted(sums, budget)) + 1, len(sizes)
    if number < n_layers:
        most = math.floor((1 - sums[n_layers - 1] / sums[-1]) * 1e6) / 1e6
        raise SpecError(
            f"ratio {float(request.ratio):g} would leave {number} experts in "
            f"{n_layers} layers, expected at least one in each; the largest possible "
            f"ratio is {most:g}"
        )
    return dominant(frame, number)


def by_dominance(frame: pd.DataFrame) -> pd.DataFrame:
    """The most used expert of each layer, then all others.

    Args:
        frame: columns layer and expert, the most used first.
    """
    first = frame.drop_duplicates("layer")
    return pd.concat([first, frame.drop(index=first.index)])


def dominant(frame: pd.DataFrame, number: int) -> dict[int, list[int]]:
    """The experts of each layer that others join, `number` in all.

    They are the most used of each layer, and of the others those of the largest shares.

    Args:
        frame: columns layer and expert, the most used first.
        number: how many, at least one for each layer.
    """
    rows = by_dominance(frame).head(number)
    return {int(k): experts.tolist() for k, experts in rows.groupby("layer")["expert"]}


def joined(cosines: np.ndarray, leaders: Sequence[int]) -> Groups:
    """Each other expert with the leader to which its cosine (E, E) is largest."""
    nearest = np.asarray(leaders)[cosines[:, leaders].argmax(1)]
    nearest[leaders] = leaders
    return groups_of(nearest.tolist())


def _like(matrices: Matrices, atoms: torch.Tensor) -> Matrices:
    """The same expert with its atoms in the order of the least squared distances.

    As their lengths are given, that is the order of the largest inner products with
    `atoms` (I, F).
    """
    return aligned(matrices, -(atoms @ atoms_of(matrices).T))


MC_SMOE = ours("mc-smoe", _mc_smoe, LOGIT_COSINES, EXPERT_SUMS)
