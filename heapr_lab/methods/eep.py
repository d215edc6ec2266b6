"""EEP: evolution chooses the experts to keep, and then how the others enter them.

A layer keeps K of its E experts. Two matrices (K, E) describe the smaller layer: the
router's row k is Σ_e R_ke r_e, and the weights of expert k are Σ_e M_ke W_e. Both begin
as the rows of the identity that keep an expert as it is, and evolve from there.
"""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import nn

from heapr_lab.methods.collectors import EXPERT_SUMS
from heapr_lab.methods.composed_experts import Composition
from heapr_lab.methods.composing import dense_composition
from heapr_lab.methods.compression import ExpertComposition
from heapr_lab.methods.dropping import dropping
from heapr_lab.methods.evolution import (
    BUDGET,
    check_budget,
    evolved,
    judging_windows,
    loss,
    random_keys,
    ranked,
)
from heapr_lab.methods.expert_axes import ExpertAxis, find_expert_axes
from heapr_lab.methods.experts import n_dropped
from heapr_lab.methods.method import Method, Request
from heapr_lab.models.experts import ExpertsLayer
from heapr_lab.models.grouped_linear import accumulating_dtype

_SCALE = 0.065
"""Standard deviation of the first changes of the coefficients."""
_CROSSOVER = 0.3
"""Share of the coefficients that a new candidate changes."""

Kept = tuple[tuple[int, ...], ...]
"""The experts that each layer keeps, ascending."""


@dataclass(frozen=True, eq=False, repr=False)
class MergedByEvolution(ExpertComposition):
    """Fewer experts, with other weights and other rows of the router."""

    routers: Mapping[int, Mapping[str, torch.Tensor]] = field(default_factory=dict)
    """By layer and name, the tensors of the router, K entries each."""

    @contextlib.contextmanager
    def apply(self, model: nn.Module) -> Iterator[nn.Module]:
        """As `composing`, with the other router.

        Raises:
            SpecError: it was fitted to another model, or a mask is active.
            LayoutError: the experts cannot be replaced exactly.
        """
        axes = find_expert_axes(model)
        with super().apply(model):
            for router, made in self._pairs(axes):
                for name, tensor in made.items():  # of the narrowed router
                    router._parameters[name] = nn.Parameter(tensor, requires_grad=False)
            yield model

    def materialise(self, model: nn.Module) -> nn.Module:
        """As `compose_experts`, with the other router.

        Raises:
            SpecError: it was fitted to another model, or a mask is active.
            LayoutError: the experts cannot be replaced exactly.
        """
        small = super().materialise(model)
        names = {id(module): name for name, module in model.named_modules()}
        for router, made in self._pairs(find_expert_axes(model)):
            twin = small.get_submodule(names[id(router)])
            for name, tensor in made.items():
                twin.get_parameter(name).data.copy_(tensor)
        return small

    def _pairs(
        self, axes: list[ExpertAxis]
    ) -> list[tuple[nn.Module, Mapping[str, torch.Tensor]]]:
        """Each router, and its other tensors."""
        found = {axis.layer.layer: axis.router for axis in axes}
        return [(found[layer], own) for layer, own in self.routers.items()]


class LayerMerger:
    """Makes the router and the experts of one layer from coefficients."""

    def __init__(self, axis: ExpertAxis) -> None:
        """Nothing is copied."""
        self.layer: ExpertsLayer = axis.layer
        self._experts = [axis.layer.expert(e) for e in range(axis.layer.n_experts)]
        self._router = {
            name: getattr(module, name).detach()
            for module, name in axis.of_router().tensors
            if name in module._parameters
        }

    def router(self, coefficients: torch.Tensor) -> dict[str, torch.Tensor]:
        """The router's tensors; coefficients R (K, E)."""
        return {n: _combined(coefficients, own) for n, own in self._router.items()}

    def experts(self, coefficients: torch.Tensor) -> Composition:
        """The experts; coefficients M (K, E)."""
        names = self._experts[0]
        merged = {
            name: _combined(coefficients, torch.stack([w[name] for w in self._experts]))
            for name in names
        }
        n_kept = len(coefficients)
        return dense_composition(
            [{n: merged[n][k] for n in names} for k in range(n_kept)]
        )


def _combined(coefficients: torch.Tensor, tensors: torch.Tensor) -> torch.Tensor:
    """Σ_e C_ke T_e: coefficients (K, E) of tensors (E, …), in the type of those."""
    wide = accumulating_dtype(tensors)
    rows = tensors.reshape(len(tensors), -1).to(wide)
    mixed = coefficients.to(rows) @ rows
    return mixed.reshape(len(mixed), *tensors.shape[1:]).to(tensors.dtype)


# --- which experts ----------------------------------------------------------------


def _best_kept(
    request: Request, order: Mapping[int, tuple[int, ...]], ids: torch.Tensor
) -> dict[int, tuple[int, ...]]:
    """The experts that each layer keeps, of the sets that evolution tried."""
    shapes, model = request.measured.architecture.layers, request.model
    n_kept = [
        s.n_experts - n_dropped(s, request.ratio, layer=k) for k, s in shapes.items()
    ]
    ends = np.cumsum([len(own) for own in order.values()])[:-1]

    def decode(keys: np.ndarray) -> Kept:
        parts = zip(np.split(keys, ends), order.values(), n_kept, strict=True)
        return tuple(
            tuple(sorted(own[i] for i in np.argsort(-part, kind="stable")[:number]))
            for part, own, number in parts
        )

    def cost(kept: Kept) -> float:
        with dropping(model, dict(zip(order, kept, strict=True))):
            return loss(model, ids)

    first = np.concatenate([np.linspace(0, 1, len(own)) for own in order.values()])
    best = evolved(request, decode, cost, random_keys(request, first))
    return dict(zip(order, best, strict=True))


# --- how the others enter them ----------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Plan:
    """Where the coefficients of one layer are."""

    merger: LayerMerger
    order: tuple[int, ...]
    """The layer's experts, ranked: the columns of the coefficients."""
    kept: tuple[int, ...]

    @property
    def size(self) -> int:
        """Changes of the coefficients of both matrices."""
        return 2 * len(self.kept) * len(self.order)

    def coefficients(self, changes: np.ndarray) -> torch.Tensor:
        """R and M, (2, K, E), from their changes (size,) in the order of the ranks."""
        n_kept, n_experts = len(self.kept), len(self.order)
        rows = [self.kept.index(e) for e in self.order if e in self.kept]
        both = torch.zeros(2, n_kept, n_experts, dtype=torch.float64)
        both[:, range(n_kept), self.kept] = 1
        ranked_changes = torch.tensor(changes).reshape(both.shape)
        both[:, torch.tensor(rows)[:, None], torch.tensor(self.order)] += ranked_changes
        return both


def _made(
    request: Request,
    kept: Mapping[int, tuple[int, ...]],
    plans: list[_Plan],
    keys: bytes,
) -> MergedByEvolution:
    """The compression with the changes of coefficients that are stored in `keys`."""
    ends = np.cumsum([plan.size for plan in plans])[:-1]
    routers, experts = {}, {}
    for plan, own in zip(plans, np.split(np.frombuffer(keys), ends), strict=True):
        of_router, of_experts = plan.coefficients(own)
        number = plan.merger.layer.layer
        routers[number] = plan.merger.router(of_router)
        experts[number] = plan.merger.experts(of_experts)
    shapes = request.measured.architecture.layers
    return MergedByEvolution(request.made, experts, shapes, kept, routers=routers)


def _starts(request: Request, size: int) -> np.ndarray:
    """No change at all, and small changes of some coefficients, (population, size)."""
    rng = np.random.default_rng(request.seed)
    shape = request.options["population"], size
    starts = rng.normal(0, _SCALE, shape) * (rng.random(shape) < _CROSSOVER)
    starts[0] = 0
    return starts


def _eep(request: Request) -> MergedByEvolution:
    """The experts and coefficients of the least loss, of those tried.

    Raises:
        SpecError: an option is invalid, or too few experts would be left.
    """
    check_budget(request)
    axes = find_expert_axes(request.model)
    shapes = request.measured.architecture.layers
    gone = {k: n_dropped(s, request.ratio, layer=k) for k, s in shapes.items()}
    if not any(gone.values()):
        return MergedByEvolution(request.made, {}, shapes)
    order, ids = ranked(request), judging_windows(request)
    kept = _best_kept(request, order, ids)
    plans = [
        _Plan(LayerMerger(axis), order[number], kept[number])
        for axis in axes
        if gone[number := axis.layer.layer]
    ]

    def cost(keys: bytes) -> float:
        with _made(request, kept, plans, keys).apply(request.model):
            return loss(request.model, ids)

    keys = evolved(
        request,
        np.ndarray.tobytes,
        cost,
        _starts(request, sum(plan.size for plan in plans)),
        bounds=(-1.0, 1.0),
        recombination=_CROSSOVER,
    )
    return _made(request, kept, plans, keys)


EEP = Method(
    "eep",
    "EEP: evolution keeps experts, then merges the others into them",
    "Liu et al. 2024, EEP, arXiv:2407.00945",
    "experts",
    _eep,
    deviations=(
        "The fitness is the loss on calibration windows, not the accuracy of a task.",
        "Both phases are scipy's differential evolution with a small budget; the "
        "authors' code mutates sets and coefficients for 100 and 400 rounds.",
        "One of the first sets keeps the experts of the largest REAP scores; the "
        "others are drawn.",
        "Coefficients differ from those of the kept experts by at most 1, and begin "
        "with normal changes of 0.065 in 30 % of them.",
        "A layer that loses no expert is unchanged.",
    ),
    options=dict(BUDGET),
    collectors=(EXPERT_SUMS,),
)
