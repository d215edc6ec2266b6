"""The model card of a pruned checkpoint, made from its manifest."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData
from jinja2 import Template

from heapr_lab.checkpoints.provenance import read_provenance
from heapr_lab.errors import CacheError
from heapr_lab.models.folders import is_native, read_config
from heapr_lab.pruning.savings import at_context

_CARD = Path(__file__).with_name("card.md.j2")


def card(manifest: Mapping[str, Any], *, source: Path, native: bool = True) -> str:
    """The card as Markdown, with the hub's front matter.

    Args:
        manifest: the manifest of the checkpoint.
        source: folder of the dense model, whose licence is copied.
        native: whether transformers has a class for the architecture.
    """
    name, wrapped = manifest["base_model"], "pruned" in manifest
    header = ModelCardData(
        base_model=name or None,
        license=_licence_of(source),
        library_name="transformers",
        tags=["mixture-of-experts", "pruning", "heapr"],
        pipeline_tag="image-text-to-text" if wrapped else "text-generation",
    )
    selection = manifest["selection"]
    shown = ("estimator", "scope", "granularity", "ratio", "of", "multiple")
    template = Template(
        _CARD.read_text("utf-8"), trim_blocks=True, keep_trailing_newline=True
    )
    text: str = template.render(
        header=header.to_yaml(),
        manifest=manifest,
        estimator=selection.get("estimator"),
        settings=[f"{k} {selection[k]}" for k in shown if selection.get(k) is not None],
        size=_bytes(manifest),
        change=_change,
        number=_number,
        at_context=at_context,
        stock=_is_stock(manifest),
        native=native,
        model_class=_class_of(manifest),
    )
    return text


def _is_stock(manifest: Mapping[str, Any]) -> bool:
    """Whether a checkpoint is an ordinary one of its architecture."""
    return manifest["structure"] == "uniform" or "stock" in manifest


def loading_code(folder: Path) -> str:
    """The lines of Python that load the pruned checkpoint in a folder.

    Raises:
        CacheError: its manifest is damaged.
        SpecError: its configuration is.
    """
    manifest = read_provenance(folder)
    if not isinstance(manifest.get("structure"), str):
        raise CacheError(
            f"the manifest in {folder} names no structure: take the one that was "
            "written with the weights"
        )
    name = _class_of(manifest)
    plain = _is_stock(manifest) and is_native(read_config(folder))
    lines = [] if plain else ["import heapr_lab"]
    lines += [f"from transformers import {name}", ""]
    path = json.dumps(str(folder), ensure_ascii=False)  # quotes in it are escaped
    return "\n".join([*lines, f"model = {name}.from_pretrained({path})"])


def _class_of(manifest: Mapping[str, Any]) -> str:
    """The class of transformers that loads the whole of a checkpoint."""
    return (
        "AutoModelForMultimodalLM" if "pruned" in manifest else "AutoModelForCausalLM"
    )


def _licence_of(source: Path) -> str | None:
    """The licence in the base model's card, if it is on this machine and has one."""
    path = source / "README.md"
    if not (source / "config.json").is_file() or not path.is_file():
        return None
    licence = ModelCard.load(path, ignore_metadata_errors=True).data.license
    return licence if isinstance(licence, str) else None


def _bytes(manifest: Mapping[str, Any]) -> str:
    after, before = sum(manifest["files"].values()), manifest.get("bytes_before")
    if not before:
        return f"{after:,} bytes"
    sizes = {"bytes_before": before, "bytes_after": after}
    return f"{_change(sizes, 'bytes')} bytes"


def _change(saved: Mapping[str, float], name: str) -> str:
    before, after = saved[f"{name}_before"], saved[f"{name}_after"]
    change = f"{after / before - 1:+.1%}".replace("-", "−")
    return f"{before:,.0f} → {after:,.0f} ({change})"


def _number(value: float | None, sign: str = "") -> str:
    return "—" if value is None else f"{value:{sign}.4f}"
