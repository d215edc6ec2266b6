"""MC-SMoE: rarely used experts join the used one whose routing is most similar."""

import math
from collections.abc import Sequence

import numpy as np
import pandas as pd
import torch

from heapr_lab.errors import SpecError
from heapr_lab.methods.collectors import EXPERT_SUMS
from heapr_lab.methods.compression import ExpertComposition
from heapr_lab.methods.merging import (
    LOGIT_COSINES,
    NEVER_ROUTED,
    NOT_TRAINED,
    Groups,
    Matrices,
    aligned,
    averaged,
    groups_of,
    logit_cosines,
    merged,
    ranked,
    refuse_streamed_merge,
)
from heapr_lab.methods.method import Method, Request
from heapr_lab.models.experts import ExpertsLayer


def _mc_smoe(request: Request) -> ExpertComposition:
    """Experts of all layers compete for being dominant by their share of tokens."""
    refuse_streamed_merge(request)
    cosines = logit_cosines(request)
    frame = ranked(request)
    leaders = dominant(frame, _n_left(request, frame))
    groups = {k: joined(cosines[k], leaders[k]) for k in cosines}
    shares = frame.set_index(["layer", "expert"])["share"]

    def merge(layer: ExpertsLayer, group: Sequence[int]) -> Matrices:
        (first,) = set(group) & set(leaders[layer.layer])
        like = layer.expert(first)
        experts = [aligned(layer.expert(e), like, mismatch) for e in group]
        return averaged(experts, [float(shares[layer.layer, e]) for e in group])

    return merged(request, groups, merge)


def _n_left(request: Request, frame: pd.DataFrame) -> int:
    """The number of different experts in all layers together.

    Raises:
        SpecError: there would be fewer than layers.
    """
    n_layers, total = frame["layer"].nunique(), len(frame)
    left = total - int(request.ratio * total)
    if left < n_layers:
        most = math.floor((1 - n_layers / total) * 1e6) / 1e6
        raise SpecError(
            f"ratio {float(request.ratio):g} would leave {left} experts in {n_layers} "
            f"layers, expected at least one in each; the largest possible ratio is "
            f"{most:g}"
        )
    return left


def dominant(frame: pd.DataFrame, number: int) -> dict[int, list[int]]:
    """By layer, the experts that others join, `number` in all.

    They are the most used of each layer, and of the others those of the largest shares.

    Args:
        frame: columns layer and expert, the most used first.
        number: how many, at least one for each layer.
    """
    first = frame.drop_duplicates("layer")
    others = frame.drop(index=first.index).head(number - len(first))
    found = pd.concat([first, others])
    return {int(k): own.tolist() for k, own in found.groupby("layer")["expert"]}


def joined(cosines: np.ndarray, leaders: Sequence[int]) -> Groups:
    """Each other expert with the leader to which its cosine (E, E) is largest."""
    nearest = np.asarray(leaders)[cosines[:, leaders].argmax(1)]
    nearest[leaders] = leaders
    return groups_of(nearest.tolist())


def mismatch(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Minus the inner products of the atoms (I, F) of two experts, (I, I).

    The order of least cost is that of the least summed squared distance.
    """
    return -(one @ other.T)


MC_SMOE = Method(
    "mc-smoe",
    "MC-SMoE: rarely used experts join the used one of the most similar routing",
    "Li et al. 2024, MC-SMoE, arXiv:2310.01334",
    "merging",
    _mc_smoe,
    deviations=(
        NOT_TRAINED,
        "The number of different experts in all layers together is exact; the authors' "
        "code has fewer where shares of tokens are equal to the threshold.",
        "Atoms are aligned to those of the group's dominant expert; the authors' code "
        "aligns all experts of a layer to its first.",
        "W_gate and biases are aligned, too, which the authors' experts do not have.",
        "Experts are merged only (M-SMoE): the second stage, low rank and structured "
        "sparsity, needs training.",
        NEVER_ROUTED,
    ),
    collectors=(LOGIT_COSINES, EXPERT_SUMS),
)
