"""SVD of every matrix of every expert on its own, the control of low rank."""

from collections.abc import Mapping

from heapr_lab.methods.composed_experts import Composition
from heapr_lab.methods.composing import composition_of
from heapr_lab.methods.compression import ExpertComposition
from heapr_lab.methods.low_rank import (
    MOMENTS,
    Moments,
    composition,
    compression_of,
    factored,
    matrices,
    ranks_of,
    refuse_unmade,
    truncated,
)
from heapr_lab.methods.method import Method, Request
from heapr_lab.models.experts import ExpertsLayer, find_experts


def _svd(request: Request) -> ExpertComposition:
    """The same ranks for all experts of a layer."""
    refuse_unmade(request)
    if not request.ratio:
        return compression_of(request)
    shapes = request.measured.architecture.layers
    ranks = {k: ranks_of(shape, request.ratio, layer=k) for k, shape in shapes.items()}
    moments: Mapping[int, Moments] = {}
    if request.options["whiten"]:
        moments = request.measured.collected(MOMENTS, request.progress)
    compositions = {
        layer.layer: _composition(layer, ranks[layer.layer], moments.get(layer.layer))
        for layer in find_experts(request.model)
    }
    return compression_of(request, compositions)


def _composition(
    layer: ExpertsLayer, ranks: Mapping[str, int], moments: Moments | None
) -> Composition:
    """The layer's experts with truncated matrices; dense where factors cost as much."""
    projections = dict(composition_of(layer).projections)
    unit, dense = layer.d_expert + layer.d_inter, layer.d_expert * layer.d_inter
    for name, rank in ranks.items():
        if rank * unit < dense:
            moment = None if moments is None else moments.of(name)
            factors = truncated(matrices(layer, name), rank, moment)
            projections[name] = factored(layer, factors)
    return composition(layer, projections)


SVD = Method(
    "svd",
    "SVD of each matrix of each expert, whitened by its inputs",
    "Eckart and Young 1936, doi:10.1007/BF02288367; whitened as in Wang et al. 2024, "
    "SVD-LLM, arXiv:2403.12378",
    "low rank",
    _svd,
    deviations=(
        "A control that no paper proposes for experts as such.",
        "The outputs for the tokens routed to the expert change least, as in SVD-LLM, "
        "but layers are not treated one after the other, and no weights are updated "
        "afterwards. With whiten=false it is the plain SVD of the weights.",
        "Nothing is removed at ratio 0; above it, every matrix is decomposed, unless "
        "its factors would cost as much as it does.",
        "An expert that no calibration token reaches is decomposed without whitening.",
    ),
    options={"whiten": True},
    collectors=(MOMENTS,),
    version=2,
)
