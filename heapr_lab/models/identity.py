"""The identity of a model: its weights, and all else that changes its numbers.

Masks and replacements of W_down in this thread's context, autocast, hooks on modules,
and how many experts a router takes change the results of a model but not its weights. A
cache of results has to include them in its key, or to refuse them.
"""

import contextlib
import copy
import functools
import hashlib
import json
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from heapr_lab.errors import HeaprLabError, SpecError
from heapr_lab.models.backend import backend_of
from heapr_lab.models.folders import skeleton_of
from heapr_lab.models.hooks import Edit, edits_of
from heapr_lab.models.modes import unexchanged

_KNOWN = ("accelerate", "heapr_lab", "torch", "transformers")
"""Packages whose hooks only observe, or are part of how the model runs."""
_HOOKS = (
    "_forward_pre_hooks",
    "_forward_hooks",
    "_backward_pre_hooks",
    "_backward_hooks",
)
_ROUTING = {
    *("top_k", "num_experts_per_tok", "n_group", "topk_group"),
    *("norm_topk_prob", "routed_scaling_factor"),
}
"""Attributes of modules that say how tokens are routed, and are easily changed."""
_Attributes = dict[tuple[str, str], dict[str, str]]
"""By name and class of a module, those of `_ROUTING` that it has."""
_built: dict[str, _Attributes] = {}
"""Those of a model as it is built, by configuration."""


def identity_in_force(model: nn.Module) -> dict[str, str]:
    """`model_identity` of the model in this context.

    If this context masks atoms or replaces W_down, the entry `active` is a digest of
    the changes, so that results are never mistaken for those of the dense model.

    Raises:
        SpecError: autocast is on or there are foreign hooks, which have no digest.
    """
    refuse_autocast(model)
    _refuse_hooks(model)
    active = _digest(edits_of(model))
    identity: dict[str, str] = model_identity(model)
    return identity if active is None else identity | {"active": active}


def refuse_disturbed(model: nn.Module, *, remedy: str) -> None:
    """Check that nothing but the weights determines the model's results here.

    Args:
        model: the model.
        remedy: for the message: how to get the result of the masked model.

    Raises:
        SpecError: a mask, a replacement of W_down, autocast or a hook is active, or
            another thread has exchanged modules.
    """
    with unexchanged(model):
        refuse_autocast(model)
        _refuse_hooks(model)
    edits = {name: edit for name, edit in edits_of(model).items() if _changes(edit)}
    if edits:
        raise SpecError(
            f"a mask is active here, around this call: it edits {len(edits)} layers "
            f"({', '.join(edits)}), expected the unmasked model; leave the masking() "
            f"block, and {remedy}"
        )


def weights_state(model: nn.Module) -> str:
    """A cheap digest that changes with weights, configuration and routing.

    It is meaningless in another process.
    """
    settings = repr((architecture_identity(model), _attributes(model)))
    digest = hashlib.sha256(settings.encode()).hexdigest()
    return digest + backend_of(model).state(model)


def check_unchanged(model: nn.Module, state: str) -> None:
    """Check that `weights_state` of the model is still `state`.

    Raises:
        HeaprLabError: it is not, so that the result belongs to no single model.
    """
    if weights_state(model) != state:
        raise HeaprLabError(
            "the weights of the model changed while it was running, as when another "
            "thread trains or loads it, so the result is invalid; run it again"
        )


def refuse_autocast(model: nn.Module) -> None:
    """Check that the model runs in the dtype that it was loaded in.

    Raises:
        SpecError: autocast is on for the type of device that the weights are on.
    """
    for kind in {parameter.device.type for parameter in model.parameters()}:
        if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
            dtype = str(torch.get_autocast_dtype(kind)).removeprefix("torch.")
            raise SpecError(
                f"autocast to {dtype} is on, so the numbers would not be those of the "
                "weights' own dtype; leave the torch.autocast block, or load the model "
                f"with dtype={dtype!r}"
            )


def _refuse_hooks(model: nn.Module) -> None:
    for name, module in model.named_modules():
        for hook in _hooks(module):
            if _package(hook) not in _KNOWN:
                raise SpecError(
                    f"module {name or 'model'!r} has a hook, {_name(hook)}, which may "
                    "change what is measured and is not part of the model's identity; "
                    "remove it (handle.remove()) and run again"
                )


def _hooks(module: nn.Module) -> Iterator[Any]:
    for kind in _HOOKS:
        for hook in list(getattr(module, kind).values()):
            yield hook.func if isinstance(hook, functools.partial) else hook


def _package(hook: Any) -> str:
    return str(getattr(hook, "__module__", None)).partition(".")[0]


def _name(hook: Any) -> str:
    return str(getattr(hook, "__qualname__", type(hook).__qualname__))


def _changes(edit: Edit) -> bool:
    return edit.down is not None or not bool((edit.keep == 1).all())


def _digest(edits: dict[str, Edit]) -> str | None:
    """SHA-256 of the changes in `edits`, by module; None if there are none."""
    sha = hashlib.sha256()
    changing = {name: edit for name, edit in edits.items() if _changes(edit)}
    for name, edit in sorted(changing.items()):
        sha.update(repr((name, tuple(edit.keep.shape))).encode())
        sha.update(edit.keep.double().cpu().numpy().tobytes())
        down = edit.new_down
        if down is not None:
            words = down.detach().cpu().contiguous().view(torch.uint8)
            sha.update(words.numpy().tobytes())
    return sha.hexdigest() if changing else None


WEIGHTS_VERSION = "v2:"
"""Prefix of a hash of weights; older hashes, without it, sampled the values."""


def model_identity(model: Any) -> dict[str, str]:
    """The identity of a model, which is the same on every device.

    `weights` hashes every value of every parameter and stored buffer (such as a
    router's bias correction), with its name and shape; see `weights_hash`. `dtype` is
    part of the identity because numbers depend on it, and so is `routing` where it is
    not that of a model that is built from the configuration.

    Raises:
        SpecError: another thread has exchanged modules.
        LayoutError: weights are offloaded.
    """
    with unexchanged(model):
        return {
            **architecture_identity(model),
            **_altered(model),
            "weights": WEIGHTS_VERSION + backend_of(model).fingerprint(model),
            "dtype": str(next(model.parameters()).dtype).removeprefix("torch."),
        }


def architecture_identity(model: Any) -> dict[str, str]:
    """The part of `model_identity` that does not depend on the weights."""
    config = model.config.get_text_config().to_dict()
    volatile = {"transformers_version", "dtype", "torch_dtype"}
    kept = {
        key: value
        for key, value in config.items()
        if key not in volatile and not key.startswith("_")
    }
    text = json.dumps(kept, sort_keys=True, default=str)
    return {
        "class": type(model).__name__,
        "config": hashlib.sha256(text.encode()).hexdigest(),
    }


def _attributes(model: nn.Module) -> _Attributes:
    """How each module routes, of those that do."""
    every = {
        (name, type(module).__name__): {
            key: repr(vars(module)[key]) for key in _ROUTING & vars(module).keys()
        }
        for name, module in model.named_modules()
    }
    return {place: attributes for place, attributes in every.items() if attributes}


def _altered(model: Any) -> dict[str, str]:
    """A digest of the routing that differs from that of the model as it is built."""
    key = repr((type(model), model.config.to_dict()))
    if key not in _built:
        config = copy.deepcopy(model.config)
        config.dtype = torch.float32  # torch's default, which is that of all threads
        with contextlib.suppress(HeaprLabError):  # of a class of its own
            _built[key] = _attributes(skeleton_of(config))
    before = _built.get(key, {})
    altered = [
        (place, sorted(attributes.items() - before[place].items()))
        for place, attributes in _attributes(model).items()
        if before.get(place, attributes) != attributes
    ]
    digest = hashlib.sha256(repr(altered).encode()).hexdigest()
    return {"routing": digest} if altered else {}
