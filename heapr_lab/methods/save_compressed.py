"""Write a model with fewer or other experts, as an ordinary checkpoint if possible."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from heapr_lab.checkpoints.folder import checksums_in, new_folder, save_tokenizer
from heapr_lab.checkpoints.model_card import licence_of
from heapr_lab.checkpoints.provenance import MANIFEST_FILE
from heapr_lab.checkpoints.stored_type import in_dtype, stored_dtype
from heapr_lab.errors import SpecError
from heapr_lab.methods.composed_experts import composed_experts
from heapr_lab.methods.composed_files import attach_composed
from heapr_lab.storage import files

MANIFEST_VERSION = 1
_CARD = """---
{header}
---

# {base}, compressed{by}

{what}

{loading}
`heapr_manifest.json` records how it was made.
"""
_STOCK = """It is an ordinary checkpoint of its architecture: transformers and engines
load it as such."""
_COMPOSED = """It loads with heapr_lab installed: `import heapr_lab`, then transformers'
`AutoModelForCausalLM.from_pretrained`."""


def save_compressed(
    model: Any,
    folder: Path | str,
    *,
    tokenizer: Any = None,
    base: str | None = None,
    facts: Mapping[str, Any] | None = None,
    max_shard_size: str = "5GB",
) -> Path:
    """Write a model of `drop_experts` or `compose_experts`, with manifest and card.

    If the family's configuration can express it, it is an ordinary checkpoint, which
    `AutoModelForCausalLM.from_pretrained(folder)` loads without heapr_lab where
    transformers has a class for the family. Otherwise (layers keep different numbers of
    experts, or experts share matrices or have factors) it does after `import
    heapr_lab`. Weights are in the type of the dense model's files, if these are on this
    machine.

    Args:
        model: the compressed model; it may have been trained since.
        folder: a new folder.
        tokenizer: the tokenizer to save; by default that of the dense model.
        base: name of the dense model; by default where it was loaded from.
        facts: plain data for the manifest, such as the `method` that was used.
        max_shard_size: largest size of a safetensors file.

    Returns:
        `folder`.

    Raises:
        SpecError: `model` was made by neither; or `folder` is not empty or not
            writable.
        CacheError: the files changed while they were written.
    """
    base = base or model.config._name_or_path
    kept = _kept_by(model)
    in_config = kept is None or getattr(model, "heapr_experts_in_config", False)
    n_kept = {} if in_config else model.heapr_n_experts
    stock = in_config and not composed_experts(model)
    if not stock:
        attach_composed(model, n_kept)
    model = in_dtype(model, stored_dtype(model))
    with new_folder(Path(folder)) as partial:
        model.save_pretrained(partial, max_shard_size=max_shard_size)
        manifest = {
            "format_version": MANIFEST_VERSION,
            "method": None,
            "base_model": Path(base).name if Path(base).is_dir() else base,
            "architecture": (model.config.architectures or [None])[0],
            "stock": stock,
            "experts_kept": None if kept is None else _plain(kept),
            "tokenizer": save_tokenizer(partial, tokenizer, base=base),
            **dict(facts or {}),
            "sha256": checksums_in(partial),
        }
        files.write_json(partial / MANIFEST_FILE, manifest)
        (partial / "README.md").write_text(
            _card(manifest, Path(base)), encoding="utf-8"
        )
    return Path(folder)


def _kept_by(model: Any) -> dict[int, tuple[int, ...]] | None:
    """The kept experts of each layer of `model`; None if it has all.

    Raises:
        SpecError: it is not a compressed model.
    """
    kept: dict[int, tuple[int, ...]] | None = getattr(model, "heapr_experts", None)
    if kept is None and not hasattr(model, "heapr_composed_layers"):
        raise SpecError(
            f"this {type(model).__name__} does not say which experts it has: expected "
            "a model that drop_experts or compose_experts returned"
        )
    return kept


def _plain(kept: Mapping[int, Sequence[int]]) -> dict[str, list[int]]:
    return {str(layer): list(experts) for layer, experts in kept.items()}


def _card(manifest: Mapping[str, Any], source: Path) -> str:
    name, method = manifest["base_model"], manifest["method"]
    header = ModelCardData(
        base_model=name or None,
        license=licence_of(source),
        library_name="transformers",
        tags=["mixture-of-experts", "pruning"],
        pipeline_tag="text-generation",
    )
    text = _CARD.format(
        header=header.to_yaml(),
        base=name or "a model without a name",
        by=f" by the method `{method}`" if method else "",
        what=_what(manifest),
        loading=_STOCK if manifest["stock"] else _COMPOSED,
    )
    return str(ModelCard(text))


def _what(manifest: Mapping[str, Any]) -> str:
    """Which experts there are."""
    kept = manifest["experts_kept"]
    if kept is None:
        return "Routed experts have other weights; all else is unchanged."
    numbers = sorted({len(experts) for experts in kept.values()})
    count = f"{numbers[0]}" if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]}"
    return (
        f"Each of the {len(kept)} MoE layers has {count} of its experts, with their "
        "rows of the router."
    )
