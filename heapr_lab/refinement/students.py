"""The sliced experts of a pruned model, beside the dense ones that they learn from."""

from torch import nn

from heapr_lab.errors import SpecError
from heapr_lab.models.experts import find_experts
from heapr_lab.models.ragged_experts import RaggedExperts


def sliced_experts(model: nn.Module) -> dict[str, RaggedExperts]:
    """The sliced experts of `model` by their names, in order."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, RaggedExperts)
    }


def students_of(pruned: nn.Module, dense: nn.Module) -> dict[str, RaggedExperts]:
    """The sliced experts of `pruned` by their names, which are those of `dense`.

    Raises:
        SpecError: it has none, or was not made from `dense`.
    """
    found = sliced_experts(pruned)
    expected = {layer.name: layer.n_experts for layer in find_experts(dense)}
    if {name: len(own.heapr_widths) for name, own in found.items()} != expected:
        raise SpecError(
            f"this {type(pruned).__name__} has {len(found)} layers of sliced experts, "
            f"expected those of the dense {type(dense).__name__}, {len(expected)}: "
            "give a model that heapr_lab.prune, compensate or compress made from it"
        )
    return found
