"""The model card of a pruned checkpoint, made from its manifest."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from heapr_lab.checkpoints.provenance import read_provenance
from heapr_lab.errors import CacheError
from heapr_lab.models.folders import is_native, read_config
from heapr_lab.pruning.savings import at_context

_CARD = """---
{header}
---

# {base}, pruned by {percent:.0%}

{kept:,} of the {atoms:,} atomic experts of `{base}` are kept (an atomic expert is a row
of W_gate and of W_up with the corresponding column of W_down), selected by {selected}.

| | |
|---|---|
{rows}
{held_out}
## Use

{use}

`heapr_keep.parquet` has the mask, one row for each atomic expert of the base model, and
`heapr_manifest.json` records how the checkpoint was made.
"""

_STOCK = """It is an ordinary checkpoint of its architecture, with narrower experts: it
loads in transformers and in every engine that supports the architecture.

```python
model = AutoModelForCausalLM.from_pretrained(folder)
```"""

_WITH_HEAPR_LAB = """With heapr_lab:

```python
import heapr_lab
model = AutoModelForCausalLM.from_pretrained(folder)
```"""

_OWN_STOCK = f"""It is an ordinary checkpoint of its architecture, with narrower
experts, for every engine that supports the architecture. transformers has no class for
it.
{_WITH_HEAPR_LAB}"""

_WIDTHS = "Experts have different widths, which `config.json` lists."

_RAGGED = f"""{_WIDTHS} {_WITH_HEAPR_LAB}

Without it, transformers can run the one module that is needed, which is in the folder:

```python
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
```"""

_OWN_RAGGED = f"""{_WIDTHS} transformers has no class for the architecture.
{_WITH_HEAPR_LAB}"""

_USE = {
    (True, True): _STOCK,
    (True, False): _OWN_STOCK,
    (False, True): _RAGGED,
    (False, False): _OWN_RAGGED,
}
"""The section for a uniform structure or not, a class in transformers or not."""


def card(manifest: Mapping[str, Any], *, source: Path, native: bool = True) -> str:
    """The card as Markdown, with the hub's front matter.

    Args:
        manifest: the manifest of the checkpoint.
        source: folder of the dense model, whose licence is copied.
        native: whether transformers has a class for the architecture.
    """
    name = manifest["base_model"] or "a model without a name"
    stock, wrapped = _is_stock(manifest), "pruned" in manifest
    header = ModelCardData(
        base_model=name if manifest["base_model"] else None,
        license=_licence_of(source),
        library_name="transformers",
        tags=["mixture-of-experts", "pruning", "heapr"],
        pipeline_tag="image-text-to-text" if wrapped else "text-generation",
    )
    use = _USE[stock, native].replace("AutoModelForCausalLM", _class_of(manifest))
    return _CARD.format(
        header=header.to_yaml(),
        base=name,
        percent=1 - manifest["atoms_kept"] / manifest["atoms"],
        kept=manifest["atoms_kept"],
        atoms=manifest["atoms"],
        selected=_selected_by(manifest),
        rows="\n".join(f"| {key} | {value} |" for key, value in _rows(manifest)),
        held_out=_held_out(manifest.get("held_out", [])),
        use=use,
    )


def _is_stock(manifest: Mapping[str, Any]) -> bool:
    """Whether a checkpoint is an ordinary one of its architecture."""
    return manifest["structure"] == "uniform" or "stock" in manifest


def _selected_by(manifest: Mapping[str, Any]) -> str:
    estimator = manifest["selection"].get("estimator")
    if estimator is None and "compression" in manifest:
        return f"the\nmethod `{manifest['compression']['method']}` of heapr_lab"
    if estimator is None:
        return "a\nmask given by hand"
    if estimator != "heapr":
        return f"the\nscore `{estimator}` of heapr_lab"
    return "HEAPr's\nsecond-order importance of each (Li et al., ICLR 2026)"


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


_HELD_OUT = """
## On held-out calibration windows

All were fitted to three of every four windows. On half of the others the difference to
HEAPr decided: it has to be in favour by two standard errors. The loss of what was
chosen is of the rest; HEAPr's mask, where it is chosen, is of all windows. ± is one
standard error.

| nats per token | decided by | ± | Δ loss | against HEAPr | ± | |
|---|---|---|---|---|---|---|
{rows}
"""


def _held_out(report: Sequence[Mapping[str, Any]]) -> str:
    """The section on the report of `compress`; empty if there is none."""
    if not report:
        return ""
    rows = [
        f"| {row['made']} | {_number(row['deciding'], '+')} "
        f"| {_number(row['deciding_stderr'])} | {_number(row['delta_nll'], '+')} "
        f"| {_number(row['against_paper'], '+')} | {_number(row['stderr'])} "
        f"| {'chosen' if row['chosen'] else ''} |"
        for row in report
    ]
    return _HELD_OUT.format(rows="\n".join(rows))


def _number(value: float | None, sign: str = "") -> str:
    return "—" if value is None else f"{value:{sign}.4f}"


def _licence_of(source: Path) -> str | None:
    """The licence in the base model's card, if it is on this machine and has one."""
    path = source / "README.md"
    if not (source / "config.json").is_file() or not path.is_file():
        return None
    licence = ModelCard.load(path, ignore_metadata_errors=True).data.license
    return licence if isinstance(licence, str) else None


def _rows(manifest: Mapping[str, Any]) -> list[tuple[str, str]]:
    selection = manifest["selection"]
    shown = ("estimator", "scope", "granularity", "ratio", "of", "multiple")
    settings = ", ".join(
        f"{key} {selection[key]}" for key in shown if selection.get(key) is not None
    )
    rows = [
        ("base model", manifest["base_model"] or "unknown"),
        ("revision", manifest["base_revision"] or "not recorded"),
        ("selection", settings or "a mask given by hand"),
        ("structure", manifest["structure"]),
        ("calibration", manifest.get("calibration", "not recorded")),
        ("weights", manifest["weights"]),
        ("tokenizer", manifest["tokenizer"]),
    ]
    extras = ("pruned", "processor", "kept", "also pruned", "dropped", "padded")
    rows += [(key, manifest[key]) for key in extras if key in manifest]
    saved = manifest.get("savings")
    if saved:
        rows.append(("parameters", _change(saved, "parameters")))
        part = " of the language model" if "pruned" in manifest else ""
        per_token = f"FLOPs per token, {at_context(saved['seq_len'])}{part}"
        rows.append((per_token, _change(saved, "flops")))
    rows.append(("size of the files", _bytes(manifest)))
    measured = manifest.get("perplexity", {})
    for corpus, (before, after) in measured.items():
        name = f"perplexity of these weights, {corpus}"
        rows.append((name, f"{before:.2f} → {after:.2f}"))
    if not measured:
        rows.append(("perplexity", "not measured"))
    rows.append(("reloaded", manifest.get("reloaded", "not checked")))
    return rows


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
