"""MoE families of transformers that are refused by name, each with its reason.

A family that is neither here nor proven by a test fails
`tests/unit/models/test_every_family.py`.
"""

from typing import Any

from heapr_lab.errors import LayoutError

_OWN_EXPERTS = (
    "its experts do not go through transformers' experts interface, so that they can "
    "be neither measured nor masked"
)
_IN_SINGLE = (
    "parts of it compute in float32 only, so that it cannot be compared with a "
    "reference in float64"
)
REFUSED = {
    "beam": "its gating computes in float32 whatever the type of the weights, so that "
    "it cannot be compared with a reference in float64",
    "dbrx": _OWN_EXPERTS,
    "diffusion_gemma": "it is a diffusion model, and has no likelihood of the next "
    "token",
    "ernie4_5_vl_moe": "each of its layers has a second set of experts, for images, "
    "which text does not reach and whose tensors are in one list with those of the "
    "first",
    "inkling2": _IN_SINGLE,
    "inkling2_text": _IN_SINGLE,
    "inkling2_loop": _IN_SINGLE,
    "inkling2_loop_text": _IN_SINGLE,
    "llama4": _OWN_EXPERTS,
    "llama4_text": _OWN_EXPERTS,
    "mistral4": "transformers has no causal language model of it alone; inside a "
    "mistral3 checkpoint, as it is published, it is supported",
    "openai_privacy_filter": "it labels tokens, and has no head of a causal language "
    "model",
    "qwen3_omni_moe": "the class of the whole checkpoint has no forward pass, and its "
    "talker has experts of its own; a checkpoint of the thinker alone "
    "(qwen3_omni_moe_thinker) can be pruned",
    "zaya": "tokens that skip the experts are handed to expert 0 with weight 0, "
    "and would be counted as its own",
}
"""Model types, and why their experts cannot be measured, masked and sliced exactly."""


def refuse_by_name(config: Any) -> None:
    """Check that the model type of a configuration is none of those refused.

    Raises:
        LayoutError: it is; the message says why.
    """
    model_type = getattr(config, "model_type", None)
    if model_type in REFUSED:
        raise LayoutError(
            f"model_type {model_type!r} is not supported: {REFUSED[model_type]}; "
            "expected one of the families in docs/families.md"
        )
