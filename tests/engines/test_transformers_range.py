"""Scored, pruned, saved and loaded with whichever transformers is installed.

`make test-engines` runs it with the version that vLLM brings and with the lowest that
pyproject.toml allows; `make tests` has the pinned one, in `tests/oracle/`.
"""

import os
from typing import Any

import pytest
import torch
import transformers
from families import tiny_ids, tiny_model
from keeps import logits_of
from stored_tensors import tensors_in
from transformers import AutoModelForCausalLM

from heapr_lab.checkpoints.save import prune_folder, save_pruned
from heapr_lab.importance.collect import collect_statistics
from heapr_lab.pruning.masks import KeepMask
from heapr_lab.pruning.selection import select
from heapr_lab.pruning.surgery import masking, prune
from heapr_lab.text.calibration import CalibrationSet

pytestmark = [
    pytest.mark.engine,
    pytest.mark.filterwarnings("ignore:.*not associated with a value"),
]

IDS = tiny_ids()
FAMILIES = (
    "qwen2_moe", "qwen3_moe", "mixtral", "olmoe", "deepseek", "deepseek_v2",
    "deepseek_v3", "gpt_oss", "granitemoe", "nemotron_h",
)  # fmt: skip


WIDTHS: dict[str, Any] = {"moe_intermediate_size": 16, "intermediate_size": 16}


def scored_mask(model: torch.nn.Module, structure: str) -> KeepMask:
    """The mask that keeps the half of the atoms with the highest scores."""
    table = collect_statistics(model, CalibrationSet.from_ids(IDS))
    assert (table.score("heapr") > 0).mean() > 0.5
    more = {} if structure == "ragged" else {"multiple": 8}
    return select(table, ratio=0.5, structure=structure, **more)


def test_it_is_the_version_that_was_asked_for():
    """Else another one could be tested in its place."""
    version = os.environ.get("HEAPR_TRANSFORMERS", transformers.__version__)
    assert transformers.__version__ == version


@pytest.mark.parametrize("structure", ["ragged", "per_layer", "uniform"])
@pytest.mark.parametrize("family", FAMILIES)
def test_round_trip(family, structure, tmp_path):
    """Logits of the masked model in float32, loaded from files in bfloat16."""
    model = tiny_model(family, dtype=torch.bfloat16, **WIDTHS).float()
    keep = scored_mask(model, structure)
    with masking(model, keep):
        expected = logits_of(model, IDS)
    saved = save_pruned(prune(model.bfloat16(), keep), tmp_path / "saved")
    loaded = AutoModelForCausalLM.from_pretrained(saved, dtype="float32")
    torch.testing.assert_close(logits_of(loaded, IDS), expected, rtol=0, atol=1e-5)
    assert {p.dtype for p in loaded.parameters()} == {torch.float32}


@pytest.mark.parametrize("structure", ["ragged", "uniform"])
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "deepseek_v3"])
def test_a_pruned_folder_has_the_same_tensors(family, structure, tmp_path):
    """With the names of the published checkpoints, in both ways of writing them."""
    model = tiny_model(family, dtype=torch.float32, **WIDTHS)
    model.save_pretrained(tmp_path / "base")
    keep = scored_mask(model, structure)
    prune_folder(tmp_path / "base", keep, tmp_path / "sliced")
    save_pruned(prune(model, keep), tmp_path / "saved")
    sliced, saved, base = (
        tensors_in(tmp_path / name) for name in ("sliced", "saved", "base")
    )
    assert sliced.keys() == saved.keys() == base.keys()
    assert all(torch.equal(sliced[name], saved[name]) for name in saved)
