"""A pruned model that is pushed to a hub is loaded from it again."""

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from families import tiny_ids, tiny_model
from huggingface_hub import CommitOperationAdd, ModelCard
from keeps import logits_of, random_keep
from transformers import AutoModelForCausalLM

from heapr_lab.checkpoints.save import save_pruned
from heapr_lab.pruning.surgery import prune

pytestmark = pytest.mark.oracle


class LocalHub:
    """A hub whose repositories are folders."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def create_repo(self, repo_id: str, **_options: Any) -> Any:
        """Make the folder."""
        (self.root / repo_id).mkdir(parents=True)
        return SimpleNamespace(repo_id=repo_id)

    def create_commit(
        self, *, repo_id: str, operations: list[CommitOperationAdd], **_options: Any
    ) -> None:
        """Copy the files."""
        for operation in operations:
            target = self.root / repo_id / operation.path_in_repo
            shutil.copyfile(operation.path_or_fileobj, target)


def test_pushed_to_a_hub_it_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`push_to_hub` uploads weights, configuration and code."""
    dense = tiny_model("qwen2_moe", dtype=torch.float32)
    save_pruned(prune(dense, random_keep(dense)), tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="float32")
    monkeypatch.setattr("transformers.utils.hub.hf_api", lambda: LocalHub(tmp_path))
    monkeypatch.setattr(
        "transformers.utils.hub.create_and_tag_model_card",
        lambda *_args, **_options: ModelCard("---\nlicense: mit\n---\n"),
    )
    ids = tiny_ids()
    model.push_to_hub("me/pruned")
    again = AutoModelForCausalLM.from_pretrained(
        tmp_path / "me" / "pruned", dtype="float32"
    )
    assert torch.equal(logits_of(again, ids), logits_of(model, ids))
    assert (tmp_path / "me" / "pruned" / "modeling_heapr.py").is_file()
