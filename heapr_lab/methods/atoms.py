"""Methods that remove single atoms, by scores of the importance table.

`ratio` is a share of all routed atoms, of each layer's, or of each expert's; it is
rounded down to whole atoms of the group, except where whole experts are removed, whose
number is the smallest that reaches it.
"""

from collections.abc import Callable
from typing import Any

from heapr_lab.methods.compression import AtomCompression
from heapr_lab.methods.method import Method, Request
from heapr_lab.pruning.masks import KeepMask
from heapr_lab.pruning.options import Selection
from heapr_lab.pruning.selection import select
from heapr_lab.pruning.surgery import ReplacedDownProj
from heapr_lab.refinement.compress import fit_compression

_HEAPR = "Li et al. 2026, HEAPr, ICLR"
_ONE_PASS = (
    "Ḡ is not formed: mean eᵀ Ḡ e equals mean h² · mean (∂ℓ/∂h)², so that one pass is "
    "enough.",
    "An expert without tokens scores 0, and its atoms go first. In the authors' code "
    "they score −1 and go first, too, where the family's loop skips such experts; "
    "where it calls them with no token, they score 0/0, which sorts highest: all of "
    "them are kept.",
    "The model is in eval mode, so auxiliary router losses, which the authors' code "
    "adds in training mode, have no part in the gradient.",
)


def compression_of(
    request: Request, keep: KeepMask, down_projs: ReplacedDownProj | None = None
) -> AtomCompression:
    """The compression that keeps the atoms of `keep`."""
    layers = request.measured.architecture.layers
    sizes = {layer: shape.atom_parameters for layer, shape in layers.items()}
    return AtomCompression(request.made, keep, sizes, down_projs)


def _selecting(**fields: Any) -> Callable[[Request], AtomCompression]:
    """The rule that selects as `Selection(ratio, **fields)` does."""

    def rule(request: Request) -> AtomCompression:
        table = request.measured.table(request.progress)
        selection = Selection(request.ratio, **fields)  # type: ignore[arg-type]
        return compression_of(request, select(table, selection))

    return rule


def _random(request: Request) -> AtomCompression:
    """Atoms with the lowest of uniform numbers that `seed` draws."""
    return _selecting(estimator="random", estimator_options={"seed": request.seed})(
        request
    )


def _compress(request: Request) -> AtomCompression:
    """A mask with compensation, or HEAPr's where held-out windows see no gain."""
    compression = fit_compression(
        request.model,
        request.calibration,
        Selection(request.ratio),  # type: ignore[arg-type]
        fitted=request.measured.fitted,
        progress=request.progress,
    )
    return compression_of(request, compression.keep, compression.down_projs)


ATOMS = (
    Method(
        "heapr",
        "HEAPr-G: second-order score, ranked over all layers",
        _HEAPR,
        "atoms",
        _selecting(),
        deviations=_ONE_PASS,
    ),
    Method(
        "heapr-l",
        "HEAPr-L: second-order score, ranked within each layer",
        _HEAPR,
        "atoms",
        _selecting(scope="layer"),
        deviations=_ONE_PASS,
    ),
    Method(
        "heapr-expert",
        "expert-level HEAPr: whole experts by the sum of their atoms' scores",
        _HEAPR,
        "atoms",
        _selecting(granularity="expert"),
        deviations=(
            *_ONE_PASS,
            "Removed experts keep their router rows and return 0, as atoms do; "
            "experts are ranked over all layers.",
        ),
    ),
    Method(
        "magnitude",
        "control: the norm of the atom's weights, ranked over all layers",
        "Han et al. 2015, arXiv:1506.02626",
        "atoms",
        _selecting(estimator="magnitude"),
        deviations=("Whole atoms, not single weights; nothing is trained afterwards.",),
    ),
    Method(
        "random",
        "control: atoms drawn at random",
        "a control of this project",
        "atoms",
        _random,
    ),
    Method(
        "compress",
        "ours: a compensated mask, where held-out windows are in favour",
        "this project (heapr_lab.refinement.compress)",
        "atoms",
        _compress,
        deviations=(
            "The second of every four windows is held out, so the result depends on "
            "the order of the windows.",
        ),
        version=3,
    ),
)
"""The methods of this module."""
