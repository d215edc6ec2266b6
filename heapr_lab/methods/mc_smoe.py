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
from heapr_lab.methods.composed_experts import Composition, Projection, Shared
from heapr_lab.methods.composing import composition_of
from heapr_lab.methods.compression import ExpertComposition
from heapr_lab.methods.low_rank import largest_columns, truncated
from heapr_lab.methods.merging import (
    LOGIT_COSINES,
    NEVER_ROUTED,
    NOT_TRAINED,
    Groups,
    Matrices,
    aligned,
    atoms_of,
    averaged,
    groups_of,
    logit_cosines,
    merged,
    ranked,
    refuse_streamed_merge,
)
from heapr_lab.methods.method import Method, Request
from heapr_lab.models.architecture import LayerShape
from heapr_lab.models.experts import ExpertsLayer, find_experts


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
        like = atoms_of(layer.expert(first))
        experts = [_like(layer.expert(e), like) for e in group]
        return averaged(experts, [float(shares[layer.layer, e]) for e in group])

    whole = merged(request, groups, merge)
    rank, sparse = request.options["rank"], request.options["sparse"]
    return _of_low_rank(whole, request.model, rank, sparse) if rank else whole


def _sizes(request: Request) -> dict[int, tuple[int, int]]:
    """How many numbers an expert of each layer stores, before and after.

    Raises:
        SpecError: it would not be fewer with factors of the rank.
    """
    rank, sparse, sizes = request.options["rank"], request.options["sparse"], {}
    if not (0 <= sparse <= 1 and 0 <= rank <= 1) or (sparse and not rank):
        raise SpecError(
            f"sparse is {sparse} and rank {rank}: expected shares from 0 to 1, of the "
            "full rank and of the columns of what its factors leave, if there are any"
        )
    for layer, shape in request.measured.architecture.layers.items():
        before = after = shape.d_inter * shape.atom_parameters
        if rank:
            after = _stored(shape, rank, sparse)
        if after > before:
            raise SpecError(
                f"rank is {rank} and sparse {sparse}, with which an expert of layer "
                f"{layer} would store {after} numbers in place of {before}: give a "
                "smaller share of the full rank or of the columns, or rank 0 to store "
                "whole matrices"
            )
        sizes[layer] = before, after
    return sizes


def _stored(shape: LayerShape, rank: float, sparse: float) -> int:
    """The numbers that an expert stores as factors, and columns with their indices."""
    d_expert, d_inter = shape.d_expert, shape.d_inter
    width = rank_of(rank, d_inter, d_expert)
    factors = shape.n_matrices * width * (d_inter + d_expert)
    ups = (shape.n_matrices - 1) * int(sparse * d_expert) * (d_inter + 1)
    down = int(sparse * d_inter) * (d_expert + 1)
    return factors + ups + down + d_inter * shape.atom_biases


def _dominant_of(
    request: Request, frame: pd.DataFrame, sizes: dict[int, tuple[int, int]]
) -> dict[int, list[int]]:
    """The dominant experts of each layer, as many as the ratio leaves.

    Raises:
        SpecError: there would be fewer than layers, or they store too little even if
            all experts are left.
    """
    total = sum(sizes[layer][0] for layer in frame["layer"])
    budget = math.ceil((1 - request.ratio) * total)
    stored = by_dominance(frame)["layer"].map({k: size[1] for k, size in sizes.items()})
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
    """The experts of each layer that others join, `number` in all.

    They are the most used of each layer, and of the others those of the largest shares.

    Args:
        frame: columns layer and expert, the most used first.
        number: how many, at least one for each layer.
    """
    rows = by_dominance(frame).head(number)
    return {int(k): experts.tolist() for k, experts in rows.groupby("layer")["expert"]}


# --- low rank ---------------------------------------------------------------------


def rank_of(share: float, *sizes: int) -> int:
    """The rank of factors of a matrix: a share of its full rank, at least 1."""
    return max(1, int(share * min(sizes)))


def _of_low_rank(
    whole: ExpertComposition, model: nn.Module, rank: float, sparse: float
) -> ExpertComposition:
    """The same with the largest singular values of every matrix, and some columns."""
    compositions = {}
    for layer in find_experts(model):
        dense = whole.compositions.get(layer.layer) or composition_of(layer)
        factors = {
            name: _factors(p, rank, sparse) for name, p in dense.projections.items()
        }
        experts = Composition(factors["up"], factors["down"], factors.get("gate"))
        compositions[layer.layer] = experts
    return dataclasses.replace(whole, compositions=compositions)


def _factors(whole: Projection, rank: float, sparse: float) -> Projection:
    """Factors of dense matrices, and the largest columns of what these leave."""
    splits = [_split(matrix, rank, sparse) for matrix in whole.dense.tensors]
    dense, columns, left, right = (
        Shared(tuple(tensors), whole.dense.of) for tensors in zip(*splits, strict=True)
    )
    if not columns.tensors[0].numel():
        dense = columns = Shared()
    return Projection(dense, left, right, whole.bias, columns)


def _split(matrix: torch.Tensor, rank: float, sparse: float) -> list[torch.Tensor]:
    """Columns, which they are, and the two factors of a matrix (out, in)."""
    left, right = truncated(matrix, rank_of(rank, *matrix.shape))
    number, even = int(sparse * matrix.shape[1]), torch.ones_like(right[0])
    columns, index = largest_columns(matrix.double() - left @ right, even, number)
    kind = matrix.dtype
    return [columns.to(kind), index, left.to(kind), right.to(kind)]


# --- groups -----------------------------------------------------------------------


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
        "Atoms are aligned to those of the group's dominant expert. The authors' code "
        "aligns those of Switch Transformers to the first expert of the layer or of "
        "the group, and those of Mixtral not at all: there ours is an improvement.",
        "W_gate and biases are aligned, too, which the authors' experts do not have.",
        "The second stage is optional: rank is the share of the full rank that all "
        "matrices keep, with the largest singular values, and sparse the share of the "
        "columns that are kept of what these leave, those of the largest norms. The "
        "authors train both, which also decides which columns stay.",
        NEVER_ROUTED,
    ),
    options={"rank": 0.0, "sparse": 0.0},
    collectors=(LOGIT_COSINES, EXPERT_SUMS),
)
