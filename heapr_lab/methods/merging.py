"""Methods that merge experts, and what REAM has in common with them.

The experts of a group are replaced by one. The router stays as it is, so each expert of
the group is that one, whose matrices are stored once. Experts are in a group if their
mean outputs are near (HC-SMoE), if rarely used ones are routed to like a used one
(MC-SMoE), if their outputs have large cosines (Sub-MoE), or at random, as a control.

Shapes: E n_experts, I d_inter, D d_expert; T tokens of all windows; F numbers of each
atom; f an expert's output before its routing weight.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import pandas as pd
import torch
from scipy.cluster.hierarchy import cut_tree, linkage
from scipy.optimize import linear_sum_assignment
from torch import nn
from torch.nn.functional import normalize

from heapr_lab.errors import HeaprLabError, LayoutError, SpecError
from heapr_lab.methods.collectors import (
    ROWS_AT_ONCE,
    activations,
    expert_output,
    expert_sums,
)
from heapr_lab.methods.composing import Matrices
from heapr_lab.methods.compression import ExpertComposition
from heapr_lab.methods.expert_axes import expert_axis
from heapr_lab.methods.experts import routed_anew
from heapr_lab.methods.method import Request, ours
from heapr_lab.models.architecture import LayerShape, expert_shares
from heapr_lab.models.experts import ExpertsLayer, find_experts
from heapr_lab.models.ragged_experts import normalises
from heapr_lab.refinement.expert_calls import ExpertCalls

Groups = Sequence[Sequence[int]]
"""The experts of each group of a layer."""
Merge = Callable[[ExpertsLayer, Sequence[int]], Matrices]
"""What a group of experts of a layer becomes."""
_MOST_ROUNDS = 100
"""Rounds of k-means."""
_TOKENS_AT_ONCE = 512

# --- what is measured -------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class MeanOutputs:
    """Means of each expert's output over all tokens of the layer, in float64.

    A token counts for every expert, whether or not it is routed there.
    """

    plain: torch.Tensor
    """The mean of f, (E, D)."""
    gated: torch.Tensor | None
    """The mean of f times the softmax of the router's logits, (E, D); None where the
    logits cannot be computed from the experts' inputs."""


def mean_outputs(model: nn.Module, calls: ExpertCalls) -> MeanOutputs:
    """The mean outputs of a layer's experts on all of its tokens."""
    n_experts = calls.layer.n_experts
    logits = router_logits(model, calls)
    weights = torch.ones(2, n_experts, len(calls.output), dtype=torch.float64)
    if logits is not None:
        weights[1] = logits.softmax(1).T.cpu()
    sums = torch.stack(
        [
            _summed_outputs(calls, expert, weights[:, expert])
            for expert in range(n_experts)
        ],
        dim=1,
    )
    plain, gated = sums / len(calls.output)
    return MeanOutputs(plain, None if logits is None else gated)


def _summed_outputs(
    calls: ExpertCalls, expert: int, weights: torch.Tensor
) -> torch.Tensor:
    """Sums of an expert's outputs over all tokens with weights (n, T), (n, D).

    W_down is linear: unless a norm follows, it is applied to sums of activations. In
    float64.
    """
    layer = calls.layer
    normed = normalises(layer.module)
    run = expert_output if normed else activations
    total = torch.zeros(1, dtype=torch.float64)
    parts = (tensor.split(ROWS_AT_ONCE) for tensor in (calls.hidden_states, weights.T))
    for x, some in zip(*parts, strict=True):
        rows = run(layer, expert, x)
        rows = rows.to(torch.promote_types(rows.dtype, torch.float32))
        total = total + (some.T.to(rows) @ rows).double().cpu()
    if normed:
        return total
    sums = total @ layer.down[expert].double().cpu().T
    if layer.down_bias is not None:
        sums += weights.sum(1, keepdim=True) * layer.down_bias[expert].double().cpu()
    return sums


def router_logits(model: nn.Module, calls: ExpertCalls) -> torch.Tensor | None:
    """The router's logits of every token, (T, E), in float64.

    None where the router cannot be run on the experts' inputs.
    """
    try:
        logits, _, _ = routed_anew(expert_axis(model, calls.layer).router, calls)
    except HeaprLabError:
        return None
    fits = logits.shape[1:] == (calls.layer.n_experts,)
    return logits.double() if fits else None


def cosines_of_logits(model: nn.Module, calls: ExpertCalls) -> np.ndarray | None:
    """Cosines between the columns (T,) of the router's logits of a layer, (E, E).

    None where these cannot be computed from the experts' inputs.
    """
    logits = router_logits(model, calls)
    if logits is None:
        return None
    units = logits / logits.norm(dim=0).clamp_min(torch.finfo(logits.dtype).tiny)
    cosines: np.ndarray = (units.T @ units).cpu().numpy()
    return cosines


def logit_cosines(request: Request) -> dict[int, np.ndarray]:
    """The cosines between experts' router logits over all tokens, (E, E), by layer.

    Raises:
        LayoutError: a layer's router cannot be run on the experts' inputs.
    """
    cosines = request.measured.collected(cosines_of_logits, request.progress)
    for layer, table in cosines.items():
        if table is None:
            raise LayoutError(
                f"the router of layer {layer} does not give, from the inputs of the "
                f"experts, the experts that tokens were routed to: {request.method} "
                "needs its logits; use hc-smoe or sub-moe-like"
            )
    return cosines


def ranked(request: Request) -> pd.DataFrame:
    """The rows of `Measurements.experts`, those of the most used experts first.

    Ties go by the summed routing weight, then by the norm of the weights, so that the
    numbers of experts do not matter. With the columns `share`, of its layer's routed
    tokens, and `norm`, Σ w² of the expert.
    """
    frame = request.measured.experts(request.progress)
    shares = expert_shares(frame, request.shapes)
    norms = [
        sum(squares.double().sum(1).cpu() for squares in layer.squared_norms().values())
        for layer in find_experts(request.model)
    ]
    frame = frame.assign(
        share=np.concatenate([shares[k] for k in sorted(shares)]),
        norm=np.concatenate(norms),
    )
    order = ["share", "sum_p", "norm"]
    return frame.sort_values(order, ascending=False, kind="stable")


# --- groups -----------------------------------------------------------------------


def n_groups(shape: LayerShape, ratio: Fraction) -> int:
    """The number of different experts that a layer is left with: E − ⌊ratio · E⌋."""
    return shape.n_experts - int(ratio * shape.n_experts)


def groups_of(labels: Sequence[int]) -> Groups:
    """The experts with equal labels, each group ascending, in order of its first."""
    numbers = list(labels)
    return [
        [expert for expert, number in enumerate(numbers) if number == label]
        for label in dict.fromkeys(numbers)
    ]


def merged(
    request: Request, groups: Mapping[int, Groups], merge: Merge
) -> ExpertComposition:
    """The compression in which each group of experts is what `merge` makes of it.

    Layers in which every expert is a group of its own are unchanged, as are such
    experts elsewhere.

    Raises:
        SpecError: the model is streamed.
    """
    compositions = {}
    for layer in find_experts(request.model):
        partition = groups[layer.layer]
        if len(partition) < layer.n_experts:
            new: dict[int, Matrices] = {}
            for group in partition:
                new |= dict.fromkeys(group, merge_group(layer, group, merge))
            compositions[layer.layer] = [new[e] for e in range(layer.n_experts)]
    return request.composed(compositions)


def merge_group(layer: ExpertsLayer, group: Sequence[int], merge: Merge) -> Matrices:
    """The matrices of a group; a single expert's are its own."""
    return layer.expert(group[0]) if len(group) == 1 else merge(layer, group)


# --- averages ---------------------------------------------------------------------


def averaged(matrices: Sequence[Matrices], weights: Sequence[float]) -> Matrices:
    """The weighted mean of experts, matrix by matrix; the plain one if all weigh 0."""
    total = sum(weights)
    shares = [w / total if total else 1 / len(weights) for w in weights]
    return {
        name: _weighted([m[name] for m in matrices], shares) for name in matrices[0]
    }


def _weighted(tensors: Sequence[torch.Tensor], shares: Sequence[float]) -> torch.Tensor:
    wide = torch.promote_types(tensors[0].dtype, torch.float32)
    total = torch.zeros_like(tensors[0], dtype=wide)
    for tensor, share in zip(tensors, shares, strict=True):
        total += share * tensor.to(wide)
    return total.to(tensors[0].dtype)


def merged_by_frequency(
    request: Request, groups: dict[int, Groups]
) -> ExpertComposition:
    """Each group becomes the mean of its experts, weighted by their routed tokens."""
    tokens = request.measured.tokens(request.progress)

    def merge(layer: ExpertsLayer, group: Sequence[int]) -> Matrices:
        counts = [float(tokens[layer.layer][expert]) for expert in group]
        return averaged([layer.expert(expert) for expert in group], counts)

    return merged(request, groups, merge)


def atoms_of(matrices: Matrices) -> torch.Tensor:
    """All weights of each atom of an expert, (I, F), in float64.

    They are its rows of W_gate and W_up, their biases, and its column of W_down.
    """
    down = {"down": matrices["down"].T}
    rows = {name: w for name, w in matrices.items() if not name.startswith("down")}
    blocks = [w if w.dim() == 2 else w[:, None] for w in (rows | down).values()]
    return torch.cat([block.double() for block in blocks], dim=1)


def aligned(matrices: Matrices, costs: torch.Tensor) -> Matrices:
    """The same expert, with its atoms in the order of the least summed cost.

    Args:
        matrices: the matrices of the expert.
        costs: the cost of its atom j in place i, (I, I).
    """
    places = linear_sum_assignment(costs.cpu().numpy())[1]
    order = torch.from_numpy(places).to(matrices["up"].device)
    return {name: _permuted(name, tensor, order) for name, tensor in matrices.items()}


def _permuted(name: str, tensor: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    if name == "down_bias":
        return tensor
    return tensor[:, order] if name == "down" else tensor[order]


# --- HC-SMoE ----------------------------------------------------------------------


def average_linkage(features: torch.Tensor, number: int) -> Groups:
    """`number` groups of the rows of `features`, joined by their mean distance.

    Beginning with single rows, the two groups are joined between whose rows the mean
    Euclidean distance is least.

    Shapes: features (E, F).

    Example:
        >>> rows = torch.tensor([[0.0], [5.0], [1.0], [7.0]])
        >>> average_linkage(rows, 2)
        [[0, 2], [1, 3]]
    """
    if number == len(features):
        return [[expert] for expert in range(number)]
    tree = linkage(features.double().numpy(), method="average")
    return groups_of(cut_tree(tree, n_clusters=number)[:, 0].tolist())


def _hc_smoe(request: Request) -> ExpertComposition:
    """Each layer's experts are joined by their mean outputs on all of its tokens."""
    outputs = request.measured.collected(mean_outputs, request.progress)
    groups = {
        layer: average_linkage(outputs[layer].plain, n_groups(shape, request.ratio))
        for layer, shape in request.shapes.items()
    }
    return merged_by_frequency(request, groups)


ours("hc-smoe", _hc_smoe, mean_outputs)


# --- the control ------------------------------------------------------------------


def drawn(n_experts: int, number: int, rng: np.random.Generator) -> Groups:
    """`number` groups of experts: so many begin one each, the others join any of them.

    Example:
        >>> sorted(map(len, drawn(4, 3, np.random.default_rng(0))))
        [1, 1, 2]
    """
    labels = rng.permutation(n_experts)
    joining = labels >= number
    labels[joining] = rng.integers(number, size=joining.sum())
    return groups_of(labels.tolist())


def _random_groups(request: Request) -> ExpertComposition:
    """Groups that `seed` draws, as many in each layer as other methods make."""
    rng = np.random.default_rng(request.seed)
    groups = {
        layer: drawn(shape.n_experts, n_groups(shape, request.ratio), rng)
        for layer, shape in request.shapes.items()
    }
    return merged_by_frequency(request, groups)


ours("random-groups", _random_groups)


# --- MC-SMoE ----------------------------------------------------------------------


def _mc_smoe(request: Request) -> ExpertComposition:
    """Experts of all layers compete for being dominant by their share of tokens."""
    cosines = logit_cosines(request)
    frame = ranked(request)
    leaders = _dominant_of(request, frame)
    groups = {k: joined(cosines[k], leaders[k]) for k in cosines}
    shares = frame.set_index(["layer", "expert"])["share"]

    def merge(layer: ExpertsLayer, group: Sequence[int]) -> Matrices:
        (first,) = set(group) & set(leaders[layer.layer])
        like = atoms_of(layer.expert(first))  # (I, F)
        # As the lengths of atoms are given, the squared distances are least where the
        # inner products are largest.
        experts = [
            aligned(expert, -(like @ atoms_of(expert).T))
            for expert in map(layer.expert, group)
        ]
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


ours("mc-smoe", _mc_smoe, cosines_of_logits, expert_sums)


# --- Sub-MoE ----------------------------------------------------------------------
#
# Sub-MoE factors the matrices of a group side by side, [W₁ … Wₙ] = U Σ [V₁ … Vₙ], and
# takes W = U Σ · Σᵢ fᵢ Vᵢ with the experts' frequencies fᵢ. With all singular values
# that is Σᵢ fᵢ · U Σ Vᵢ = Σᵢ fᵢ Wᵢ, the weighted mean, which is what is computed here.


def cosines_of_outputs(_model: nn.Module, calls: ExpertCalls) -> np.ndarray:
    """The cosine of the outputs of each two experts of a layer for a token, (E, E).

    It is the mean over all tokens of the layer.
    """
    layer = calls.layer
    total = torch.zeros(layer.n_experts, layer.n_experts, dtype=torch.float64)
    for x in calls.hidden_states.split(_TOKENS_AT_ONCE):
        outputs = [expert_output(layer, e, x) for e in range(layer.n_experts)]
        wide = torch.promote_types(x.dtype, torch.float32)
        units = normalize(torch.stack(outputs).to(wide), dim=2).flatten(1)  # (E, n D)
        total += (units @ units.T).double().cpu()
    cosines: np.ndarray = total.numpy() / len(calls.hidden_states)
    return cosines


def _sub_moe(request: Request) -> ExpertComposition:
    """Each layer's experts are grouped by the cosines of their outputs."""
    cosines = request.measured.collected(cosines_of_outputs, request.progress)
    rng, groups = np.random.default_rng(request.seed), {}
    order = ranked(request).groupby("layer")["expert"].agg(list)
    for layer, shape in request.shapes.items():
        experts = order[layer]  # so that the numbers of experts do not matter
        near = cosines[layer][np.ix_(experts, experts)]
        clusters = k_means(near, n_groups(shape, request.ratio), rng)
        labels = {experts[e]: i for i, group in enumerate(clusters) for e in group}
        groups[layer] = groups_of([labels[e] for e in range(shape.n_experts)])
    return merged_by_frequency(request, groups)


def k_means(cosines: np.ndarray, number: int, rng: np.random.Generator) -> Groups:
    """`number` groups of vectors of length 1 with these inner products (E, E).

    Begins with k-means++, and ends when nothing moves or a group would become empty.

    Example:
        >>> rows = np.array([[1.0, 0.0], [0.0, 1.0], [0.1, 1.0], [1.0, 0.1]])
        >>> rows /= np.linalg.norm(rows, axis=1, keepdims=True)
        >>> k_means(rows @ rows.T, 2, np.random.default_rng(0))
        [[0, 3], [1, 2]]
    """
    first = seeds(cosines, number, rng)
    labels = cosines[:, first].argmax(1)
    labels[first] = np.arange(number)
    for _ in range(_MOST_ROUNDS):
        members = np.eye(number)[labels] / np.bincount(labels)
        to_means = cosines @ members  # (E, number)
        squares = (members * to_means).sum(0)
        moved = (squares - 2 * to_means).argmin(1)
        if len(set(moved.tolist())) < number or (moved == labels).all():
            break
        labels = moved
    return groups_of(labels.tolist())


def seeds(cosines: np.ndarray, number: int, rng: np.random.Generator) -> list[int]:
    """The first centres of k-means++: each drawn by its squared distance to those."""
    centres = [int(rng.integers(len(cosines)))]
    while len(centres) < number:
        far = np.maximum(1 - cosines[:, centres].max(1), 0)
        far[centres] = 0
        if not far.any():
            far = np.isin(np.arange(len(far)), centres, invert=True).astype(float)
        centres.append(int(rng.choice(len(far), p=far / far.sum())))
    return centres


ours("sub-moe-like", _sub_moe, cosines_of_outputs, expert_sums)
