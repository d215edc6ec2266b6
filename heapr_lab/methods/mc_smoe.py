"""MC-SMoE: rarely used experts join the used one whose routing is most similar."""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import pandas as pd
import torch
from torch import nn

from heapr_lab.errors import SpecError
from heapr_lab.methods.collectors import EXPERT_SUMS
from heapr_lab.methods.compression import ExpertComposition
from heapr_lab.methods.low_rank import truncated
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
from heapr_lab.models.composed_experts import Composition, Projection, Shared
from heapr_lab.models.experts import ExpertsLayer, find_experts
from heapr_lab.pruning.composing import composition_of


def _mc_smoe(request: Request) -> ExpertComposition:
    """Experts of all layers compete for being dominant by their share of tokens."""
    refuse_streamed_merge(request)
    sizes = _sizes(request)
    cosines = logit_cosines(request)
    frame = ranked(request)
    leaders = _dominant_of(request, frame, sizes)
    groups = {k: joined(cosines[k], leaders[k]) for k in cosines}
    shares = frame.set_index(["layer", "expert"])["share"]

    def merge(layer: ExpertsLayer, group: Sequence[int]) -> Matrices:
        (first,) = set(group) & set(leaders[layer.layer])
        like = layer.expert(first)
        experts = [aligned(layer.expert(e), like, mismatch) for e in group]
        return averaged(experts, [float(shares[layer.layer, e]) for e in group])

    found = merged(request, groups, merge)
    rank = request.options["rank"]
    return _of_low_rank(found, request.model, rank) if rank else found


def _sizes(request: Request) -> dict[int, tuple[int, int]]:
    """By layer, the numbers that an expert of its stores, before and after.

    Raises:
        SpecError: it would not be fewer with factors of the rank.
    """
    rank, found = request.options["rank"], {}
    for layer, shape in request.measured.architecture.layers.items():
        before = after = shape.d_inter * shape.atom_parameters
        if rank:
            width = rank_of(rank, shape.d_inter, shape.d_expert)
            factors = shape.n_matrices * width * (shape.d_inter + shape.d_expert)
            after = factors + shape.d_inter * shape.atom_biases
        if not 0 <= rank <= 1 or after > before:
            raise SpecError(
                f"rank is {rank}, with which an expert of layer {layer} would store "
                f"{after} numbers in place of {before}: give a smaller share of the "
                "full rank, or 0 to store whole matrices"
            )
        found[layer] = before, after
    return found


def _dominant_of(
    request: Request, frame: pd.DataFrame, sizes: dict[int, tuple[int, int]]
) -> dict[int, list[int]]:
    """By layer, as many dominant experts as the ratio leaves.

    Raises:
        SpecError: there would be fewer than layers, or they store too little even if
            all experts are left.
    """
    total = sum(sizes[layer][0] for layer in frame["layer"])
    budget = math.ceil((1 - request.ratio) * total)
    stored = by_dominance(frame)["layer"].map({k: own[1] for k, own in sizes.items()})
    sums = stored.cumsum().to_numpy()
    number, n_layers = int(np.searchsorted(sums, budget)) + 1, len(sizes)
    if number > len(frame):
        alone = 1 - sums[-1] / total
        raise SpecError(
            f"rank {request.options['rank']} alone removes {alone:.4f} of the experts' "
            f"parameters, more than ratio {float(request.ratio):g}: give a larger "
            "rank, or 0"
        )
    if number < n_layers:
        most = math.floor((1 - sums[n_layers - 1] / total) * 1e6) / 1e6
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
    """By layer, the experts that others join, `number` in all.

    They are the most used of each layer, and of the others those of the largest shares.

    Args:
        frame: columns layer and expert, the most used first.
        number: how many, at least one for each layer.
    """
    found = by_dominance(frame).head(number)
    return {int(k): own.tolist() for k, own in found.groupby("layer")["expert"]}


# --- low rank ---------------------------------------------------------------------


def rank_of(share: float, *sizes: int) -> int:
    """The rank of factors of a matrix: a share of its full rank, at least 1."""
    return max(1, int(share * min(sizes)))


def _of_low_rank(
    found: ExpertComposition, model: nn.Module, rank: float
) -> ExpertComposition:
    """The same with the largest singular values of every matrix only, as factors."""
    compositions = {}
    for layer in find_experts(model):
        own = found.compositions.get(layer.layer) or composition_of(layer)
        parts = {
            name: _factors(part.dense, part.bias, rank)
            for name, part in own.projections.items()
        }
        compositions[layer.layer] = Composition(**parts)
    return dataclasses.replace(found, compositions=compositions)


def _factors(dense: Shared, bias: Shared, rank: float) -> Projection:
    pairs = [
        [factor.to(own.dtype) for factor in truncated(own, rank_of(rank, *own.shape))]
        for own in dense.tensors
    ]
    left, right = (Shared(tuple(own), dense.of) for own in zip(*pairs, strict=True))
    return Projection(left=left, right=right, bias=bias)


# --- groups -----------------------------------------------------------------------


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
        "The second stage is optional: rank is the share of the full rank that all "
        "matrices keep, with the largest singular values. The authors add a part with "
        "structured sparsity, which they train.",
        NEVER_ROUTED,
    ),
    options={"rank": 0.0},
    collectors=(LOGIT_COSINES, EXPERT_SUMS),
)
