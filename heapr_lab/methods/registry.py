"""Every method by name: those of this package, and those that plug-ins add."""

from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from types import MappingProxyType

from heapr_lab.errors import SpecError
from heapr_lab.methods import GROUP
from heapr_lab.methods.atoms import ATOMS
from heapr_lab.methods.camera import CAMERA
from heapr_lab.methods.d2_moe import D2_MOE
from heapr_lab.methods.evoesap import EVOESAP
from heapr_lab.methods.experts import EXPERTS
from heapr_lab.methods.low_rank import SVD
from heapr_lab.methods.mc_smoe import MC_SMOE
from heapr_lab.methods.merging import HC_SMOE, RANDOM_GROUPS
from heapr_lab.methods.method import Method
from heapr_lab.methods.moe_i2 import MOE_I2
from heapr_lab.methods.moe_pruner import MOE_PRUNER
from heapr_lab.methods.moe_svd import MOE_SVD
from heapr_lab.methods.mone import MONE
from heapr_lab.methods.naee import NAEE
from heapr_lab.methods.ream import REAM
from heapr_lab.methods.sub_moe import SUB_MOE

_OURS = (
    *ATOMS,
    CAMERA,
    *EXPERTS,
    NAEE,
    MONE,
    EVOESAP,
    MOE_I2,
    HC_SMOE,
    MC_SMOE,
    SUB_MOE,
    REAM,
    RANDOM_GROUPS,
    SVD,
    D2_MOE,
    MOE_SVD,
    MOE_PRUNER,
)


def found() -> Mapping[str, Method]:
    """The methods by name, ours first.

    Raises:
        SpecError: a plug-in cannot be loaded, is no `Method`, or its name is taken (the
            distribution is named).
    """
    methods = {method.name: method for method in _OURS}
    made_by = dict.fromkeys(methods, "heapr-lab")
    for entry in sorted(entry_points(group=GROUP), key=_place):
        method = _loaded(entry)
        if method.name in methods:
            raise SpecError(
                f"{_place(entry)} adds a method called {method.name!r}, which "
                f"{made_by[method.name]} has already: give it another name, or "
                "uninstall one of them"
            )
        methods[method.name] = method
        made_by[method.name] = _place(entry)
    return MappingProxyType(methods)


def _place(entry: EntryPoint) -> str:
    """What an entry is called in messages: its distribution, name and object."""
    package = "a package without a name" if entry.dist is None else entry.dist.name
    return f"{package} ({entry.name} = {entry.value})"


def _loaded(entry: EntryPoint) -> Method:
    """The method of a plug-in.

    Raises:
        SpecError: it cannot be loaded, or is no `Method`.
    """
    try:
        method = entry.load()
    except (Exception, SystemExit) as error:
        raise SpecError(
            f"the method of {_place(entry)} cannot be loaded: {type(error).__name__}: "
            f"{error}; update or uninstall that package"
        ) from error
    if not isinstance(method, Method):
        raise SpecError(
            f"{_place(entry)} is {type(method).__name__}, expected a "
            "heapr_lab.methods.method.Method; update or uninstall that package"
        )
    return method
