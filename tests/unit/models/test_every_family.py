"""Every MoE family of the installed transformers is proven, or refused by name."""

import functools
import os
import re
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
import transformers
from families import FAMILIES, WRAPPERS, config_of, tiny_model, tiny_windows
from tiny_folder import write_folder
from transformers.models.auto import configuration_auto, modeling_auto

from benchmarks.readme import fill_blocks
from heapr_lab import collect_statistics, load_model
from heapr_lab.errors import LayoutError
from heapr_lab.models.folders import build
from heapr_lab.models.formats import REFUSED
from heapr_lab.storage import paths

PAGE = paths.project_dir() / "docs" / "families.md"
HEADS: tuple[Mapping[str, object], ...] = (
    modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    modeling_auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
    modeling_auto.MODEL_MAPPING_NAMES,
)
"""Model types by what they are loaded as, the first that has one of a module counts."""
OWN = {
    "deepseek": "DeepseekForCausalLM",
    "nemotron_h_puzzle": "NemotronHPuzzleForCausalLM",
}
"""Families that are not in transformers."""
PINS = (paths.project_dir() / "constraints.txt").read_text("utf-8").splitlines()
of_the_pinned = pytest.mark.skipif(
    f"transformers=={transformers.__version__}" not in PINS,
    reason="the lists are those of the transformers in constraints.txt",
)
OTHERS = ("dbrx", "llama4", "llama4_text", "mistral3", "kimi_k25", "internvl")
"""Types without the experts interface, or around another module's language model."""


def modules() -> list[str]:
    """Modules of transformers whose modelling code uses the experts interface."""
    folder = Path(configuration_auto.__file__).parent.parent
    return sorted(
        path.parent.name
        for path in folder.glob("*/modeling_*.py")
        if "@use_experts_implementation" in path.read_text("utf-8")
    )


def types_of(module: str) -> dict[str, str]:
    """Model types of a module that are loaded as language models, with their classes.

    Those of its parts (vision, audio, …) are not among them.
    """
    special = configuration_auto.SPECIAL_MODEL_TYPE_TO_MODULE_NAME
    names = [
        name
        for name in configuration_auto.CONFIG_MAPPING_NAMES
        if special.get(name, name.replace("-", "_")) == module
    ]
    language = HEADS[:3]
    types = {n: str(h[n]) for h in reversed(language) for n in names if n in h}
    others = ({n: str(h[n]) for n in names if n in h} for h in HEADS[3:])
    return types or next(filter(None, others), {})


@functools.cache
def classes() -> dict[str, str]:
    """Every model type, and the class that it is loaded as, of any module."""
    types = dict(OWN)
    for module in modules():
        types |= types_of(module)
    heads = {n: str(cls) for head in reversed(HEADS[:3]) for n, cls in head.items()}
    shared = set(types.values())
    return types | {n: cls for n, cls in heads.items() if n in OTHERS or cls in shared}


def table() -> str:
    """The table in docs/families.md, a row for each model type."""
    rows = [("model type", "class", "status", "where, or why not"), ("---",) * 4]
    for name, cls in sorted(classes().items()):
        if name in REFUSED:
            rows.append((f"`{name}`", f"`{cls}`", "refused", REFUSED[name]))
            continue
        proof = "test_wrappers.py" if name in WRAPPERS else "test_families.py"
        rows.append((f"`{name}`", f"`{cls}`", "proven", f"`tests/oracle/{proof}`"))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def test_every_module_has_a_model_type():
    """None is left out of the list because of its name."""
    assert [name for name in modules() if not types_of(name)] == []
    assert len(modules()) >= 64


def test_every_family_is_proven_or_refused():
    """A family that transformers gains is in neither list, and fails here."""
    proven = FAMILIES.keys() | WRAPPERS.keys()
    assert sorted(classes().keys() - proven - REFUSED.keys()) == []
    assert sorted(proven & REFUSED.keys()) == []
    assert min(map(len, REFUSED.values())) > 20


@of_the_pinned
def test_every_family_listed_is_there():
    """None is listed that transformers does not have, or no longer has."""
    listed = FAMILIES.keys() | WRAPPERS.keys() | REFUSED.keys()
    assert sorted(listed - classes().keys()) == []


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_the_refused_are_refused_by_name(name, tmp_path):
    """config.json alone is enough, before any weight is read; the reason is given."""
    config = config_of(name)
    config.save_pretrained(tmp_path)
    message = f"model_type {name!r} is not supported: {REFUSED[name]}"
    for attempt in (lambda: load_model(tmp_path, device="cpu"), lambda: build(config)):
        with pytest.raises(LayoutError, match=re.escape(message)):
            attempt()


def test_own_experts_are_refused():
    """A model that was loaded elsewhere is refused with the same sentence."""
    sizes = {"intermediate_size_mlp": 8, "num_experts_per_tok": 1}
    model = tiny_model("llama4_text", dtype=torch.float32, **sizes)
    with pytest.raises(LayoutError, match=r"'llama4_text'.*transformers' experts in"):
        collect_statistics(model, tiny_windows())


@of_the_pinned
def test_the_page_has_every_family():
    """HEAPR_UPDATE_README=1 writes the table anew."""
    listed = {"table": f"\n{table()}\n"}
    if os.environ.get("HEAPR_UPDATE_README") == "1":
        fill_blocks(PAGE, listed)
    assert f"<!-- table -->{listed['table']}<!-- end -->" in PAGE.read_text("utf-8")


def test_a_second_table_of_embeddings_is_not_streamed(tmp_path):
    """Its tensors belong to no part, and were written with other values."""
    sizes = {"hidden_size_per_layer_input": 4, "vocab_size_per_layer_input": 8}
    write_folder(tmp_path, tiny_model("gemma4_text", **sizes))
    with pytest.raises(
        LayoutError, match=r"gemma4_text\) cannot be streamed: it has a"
    ):
        load_model(tmp_path, device="cpu", stream=True)
