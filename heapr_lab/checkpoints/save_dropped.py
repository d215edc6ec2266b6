"""Write a model without some of its experts: an ordinary checkpoint of its family."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from heapr_lab.checkpoints.folder import checksums_in, new_folder, save_tokenizer
from heapr_lab.checkpoints.model_card import licence_of
from heapr_lab.errors import SpecError
from heapr_lab.models.experts import find_experts
from heapr_lab.storage import files
from heapr_lab.storage.provenance import MANIFEST_FILE

MANIFEST_VERSION = 1

_CARD = """---
{header}
---

# {base}, with {kept} experts in each layer

Each of the {layers} MoE layers of `{base}` has {kept} of its experts, with their rows
of the router{chosen}. Weights are otherwise unchanged. It is an ordinary checkpoint of
its architecture: transformers and engines load it as such.
`heapr_manifest.json` records which experts were kept, and how they were chosen.
"""


def save_dropped(
    model: Any,
    folder: Path | str,
    *,
    tokenizer: Any = None,
    base: str | None = None,
    facts: Mapping[str, Any] | None = None,
    max_shard_size: str = "5GB",
) -> Path:
    """Write a model of `drop_experts` with tokenizer, manifest and card.

    `AutoModelForCausalLM.from_pretrained(folder)` loads it, without heapr_lab where
    transformers has a class for the family. All layers must keep equally many experts;
    other models cannot be expressed by a checkpoint yet.

    Args:
        model: a model that `drop_experts` returned; it may have been trained since.
        folder: a new folder.
        tokenizer: the tokenizer to save; by default that of the dense model.
        base: name of the dense model; by default where it was loaded from.
        facts: plain data for the manifest, such as the `method` that chose experts.
        max_shard_size: largest size of a safetensors file.

    Returns:
        `folder`.

    Raises:
        SpecError: layers keep different numbers of experts, or the configuration of
            the family cannot express their number; `folder` is not empty or not
            writable; or `model` was not made by `drop_experts`.
        CacheError: the files changed while they were written.
    """
    kept = _kept_by(model)
    base = base or model.config._name_or_path
    facts = dict(facts or {})
    with new_folder(Path(folder)) as partial:
        model.save_pretrained(partial, max_shard_size=max_shard_size)
        manifest = {
            "format_version": MANIFEST_VERSION,
            "method": None,
            "base_model": Path(base).name if Path(base).is_dir() else base,
            "architecture": (model.config.architectures or [None])[0],
            "experts_kept": {str(layer): list(own) for layer, own in kept.items()},
            "tokenizer": save_tokenizer(partial, tokenizer, base=base),
            **facts,
            "sha256": checksums_in(partial),
        }
        files.write_json(partial / MANIFEST_FILE, manifest)
        (partial / "README.md").write_text(
            _card(manifest, Path(base)), encoding="utf-8"
        )
    return Path(folder)


def _kept_by(model: Any) -> dict[int, tuple[int, ...]]:
    """The kept experts of each layer of `model`.

    Raises:
        SpecError: a configuration of the family cannot express them.
    """
    kept: dict[int, tuple[int, ...]] | None = getattr(model, "heapr_experts", None)
    if kept is None:
        raise SpecError(
            f"this {type(model).__name__} does not say which experts it has: expected "
            "a model that drop_experts returned"
        )
    numbers = sorted({len(own) for own in kept.values()})
    if len(numbers) > 1:
        raise SpecError(
            f"layers keep {numbers[0]} to {numbers[-1]} experts, and a checkpoint has "
            "one number for all: this is not expressible yet; keep equally many in "
            "each layer"
        )
    if not getattr(model, "heapr_experts_in_config", False):
        raise SpecError(
            f"{type(model.config).__name__} cannot express {numbers[0]} experts in "
            f"each of the layers {[layer.layer for layer in find_experts(model)]} with "
            "all else unchanged: this is not expressible yet"
        )
    return kept


def _card(manifest: Mapping[str, Any], source: Path) -> str:
    name, method = manifest["base_model"], manifest["method"]
    header = ModelCardData(
        base_model=name or None,
        license=licence_of(source),
        library_name="transformers",
        tags=["mixture-of-experts", "pruning"],
        pipeline_tag="text-generation",
    )
    kept = manifest["experts_kept"]
    text = _CARD.format(
        header=header.to_yaml(),
        base=name or "a model without a name",
        kept=len(next(iter(kept.values()))),
        layers=len(kept),
        chosen=f", chosen by the method `{method}`" if method else "",
    )
    return str(ModelCard(text))
