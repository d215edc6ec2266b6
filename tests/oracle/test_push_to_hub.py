"""A pruned model that is pushed to a hub is loaded from it again."""

import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from families import tiny_ids, tiny_model
from huggingface_hub import CommitOperationAdd, ModelCard
from huggingface_hub.utils import filter_repo_objects
from keeps import logits_of, random_keep, widths_keep
from tiny_folder import write_model
from transformers import AutoModelForCausalLM

from heapr_lab.checkpoints.save import save_pruned
from heapr_lab.models.loading import load_model
from heapr_lab.pruning.surgery import prune
from heapr_lab.storage import paths

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

    def upload_folder(
        self, *, repo_id: str, folder_path: str, allow_patterns: list[str]
    ) -> None:
        """Copy the files whose names match."""
        names = [path.name for path in Path(folder_path).iterdir()]
        for name in filter_repo_objects(names, allow_patterns=allow_patterns):
            shutil.copyfile(Path(folder_path) / name, self.root / repo_id / name)


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


def publish_code() -> str:
    """The cell of docs/checkpoints.md that uploads the folder `pruned`."""
    text = (paths.project_dir() / "docs" / "checkpoints.md").read_text("utf-8")
    (code,) = re.findall(r"```python\n(from huggingface_hub.*?)```", text, re.DOTALL)
    return str(code)


@pytest.mark.parametrize("structure", ["ragged", "uniform"])
def test_the_upload_of_the_docs(
    structure: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every file of a checkpoint and nothing else; the card is what the hub needs."""
    source = write_model(tmp_path / "dense")
    (source / "README.md").write_text("---\nlicense: apache-2.0\n---\n")
    model, tokenizer = load_model(source, device="cpu")
    ragged = structure == "ragged"
    keep = random_keep(model) if ragged else widths_keep(model, 4, structure=structure)
    out = tmp_path / "pruned"
    save_pruned(
        prune(model, keep), out, tokenizer=tokenizer, base="someone/a-moe",
        source=source, max_shard_size="8KB",
    )  # fmt: skip
    (out / "LICENSE").write_text("Apache")
    files = {path.name for path in out.iterdir()}
    (out / "notes.txt").write_text("mine")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.HfApi", lambda: LocalHub(tmp_path))
    exec(publish_code(), {})
    pushed = tmp_path / "me" / "my-moe-pruned"
    assert {path.name for path in pushed.iterdir()} == files
    again, _ = load_model(pushed, device="cpu")
    assert torch.equal(
        logits_of(again, tiny_ids()), logits_of(prune(model, keep), tiny_ids())
    )
    data = ModelCard.load(pushed / "README.md").data
    assert (data.base_model, data.license) == ("someone/a-moe", "apache-2.0")
    assert data.library_name == "transformers"
    assert set(data.tags or ()) >= {"mixture-of-experts", "pruning", "heapr"}
    for name in ("README.md", "heapr_manifest.json", "config.json"):
        assert str(tmp_path) not in (pushed / name).read_text("utf-8")
