"""What would be wrong in a repository of the hub is found before it is pushed."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from keeps import random_keep, widths_keep
from safetensors.torch import load_file, save_file
from tiny_folder import write_model
from typer.testing import CliRunner

from heapr_lab import hub
from heapr_lab.checkpoints import hub_checks, publish
from heapr_lab.checkpoints.folder import checksums_in
from heapr_lab.checkpoints.hub_checks import CODE, findings
from heapr_lab.checkpoints.save import MANIFEST_FILE, save_pruned
from heapr_lab.cli.app import app
from heapr_lab.errors import SpecError
from heapr_lab.models.loading import load_model
from heapr_lab.pruning.surgery import prune

pytestmark = pytest.mark.oracle

BASE = "someone/a-moe"
FACTS = {"perplexity": {"ptb": (10.0, 11.0)}}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Makes a checkpoint of a structure or format, once, as the hub needs it."""
    root = tmp_path_factory.mktemp("published")
    source = write_model(root / "dense")
    (source / "README.md").write_text("---\nlicense: apache-2.0\n---\n")
    model, tokenizer = load_model(source, device="cpu")

    def make(kind: str) -> Path:
        folder = root / kind
        if not folder.exists():
            ragged = kind in {"ragged", "less-is-moe"}
            keep = (
                random_keep(model) if ragged else widths_keep(model, 4, structure=kind)
            )
            save_pruned(
                prune(model, keep), folder, tokenizer=tokenizer, base=BASE,
                source=source, facts=FACTS, max_shard_size="8KB",
                format="less-is-moe" if kind == "less-is-moe" else "heapr",
            )  # fmt: skip
            (folder / "LICENSE").write_text("Apache")
        return folder

    return make


@pytest.fixture
def copy(written: Callable[[str], Path], tmp_path: Path) -> Path:
    """A ragged checkpoint that can be broken."""
    return Path(shutil.copytree(written("ragged"), tmp_path / "copy"))


def said(folder: Path, check: str, *, load: bool = False) -> str:
    """What one check says, a line for each finding."""
    found = [f for f in findings(folder, load=load) if f.check == check]
    assert found, f"no check is named {check}"
    return "\n".join(map(str, found))


@pytest.mark.parametrize("kind", ["ragged", "per_layer", "uniform", "less-is-moe"])
def test_what_prune_writes_is_ready(written: Callable[[str], Path], kind: str) -> None:
    """Every check is passed, and it loads in a new process as its card says."""
    found = list(findings(written(kind)))
    assert {one.check for one in found} == set(hub_checks._CHECKS)
    assert [str(one) for one in found if one.level != "ok"] == []
    loaded = [one.text for one in found if one.check == "loads"]
    alone = kind in {"ragged", "per_layer"}
    assert len(loaded) == 1 + alone
    assert any("without heapr_lab" in text for text in loaded) == alone


def _edit(name: str, change: Callable[[Any], Any]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        plain = json.loads((folder / name).read_text())
        change(plain)
        (folder / name).write_text(json.dumps(plain))

    return edit


def _replace(name: str, old: str, new: str) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        text = (folder / name).read_text()
        assert old in text
        (folder / name).write_text(text.replace(old, new))

    return edit


def _first(folder: Path) -> Path:
    return min(folder.glob("*.safetensors"))


def _spoil(folder: Path) -> None:
    tensors = load_file(_first(folder))
    name = min(tensors)
    tensors[name] = tensors[name] + 1
    save_file(tensors, _first(folder), metadata={"format": "pt"})


def _hide(folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    plain = json.loads(index.read_text())
    places = plain["weight_map"]
    several = [n for n in places if list(places.values()).count(places[n]) > 1]
    del places[several[0]]
    index.write_text(json.dumps(plain))


INDEX = "model.safetensors.index.json"
BROKEN: list[tuple[Callable[[Path], Any], str, str]] = [
    (lambda f: (f / "optimizer.pt").touch(), "files", "runs code when it is read"),
    (lambda f: (f / ".partial-1").touch(), "files", "error    files: .partial-1"),
    (lambda f: (f / "__pycache__").mkdir(), "files", "error    files: __pycache__"),
    (lambda f: (f / "notes.txt").touch(), "files", "error    files: notes.txt"),
    (lambda f: _first(f).unlink(), "weights", "there is no such file beside it"),
    (_hide, "weights", "which is in a file beside it"),
    (lambda f: shutil.copy(_first(f), f / "x.safetensors"), "weights", "not name"),
    (lambda f: (f / INDEX).unlink(), "weights", "neither model.safetensors nor"),
    (_spoil, "checksums", "is not the file that heapr_manifest.json"),
    (lambda f: (f / MANIFEST_FILE).unlink(), "checksums", "error"),
    (lambda f: (f / "config.json").unlink(), "config", "error"),
    (lambda f: (f / "tokenizer.json").unlink(), "config", "there is no tokenizer"),
    (_replace(CODE, "import copy", "import  copy"), "code", "warning"),
    (lambda f: (f / "README.md").unlink(), "card", "no README.md with front matter"),
    (lambda f: (f / "README.md").write_text("# hello"), "card", "no README.md with"),
    (lambda f: (f / "README.md").write_bytes(b"---\xff\n---\n"), "card", "error"),
    (lambda f: (f / "README.md").write_text("---\na: [\n---\n"), "card", "error"),
    (lambda f: (f / MANIFEST_FILE).write_text("{"), "card", "error"),
    (_replace("README.md", "license: apache-2.0\n", ""), "card", "names no license"),
    (_replace("README.md", f"base_model: {BASE}\n", ""), "card", "no base_model"),
    (_replace("README.md", f"base_model: {BASE}", "base_model: lab"), "card", "'lab'"),
    (_replace("README.md", "- pruning\n", ""), "card", "no tags pruning"),
    (_replace("README.md", "library_name: transformers", "library_name: x"), "card",
     "library_name 'x'"),
    (_edit(MANIFEST_FILE, lambda m: m.pop("perplexity")), "card", "nothing was meas"),
    (lambda f: (f / "LICENSE").unlink(), "licence", "is not on this machine"),
    (lambda f: _edit("config.json", lambda c: c.update(_name_or_path=str(f)))(f),
     "private", "config.json names a folder of this machine"),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(BROKEN)))
def test_each_check_finds_what_it_is_for(copy: Path, number: int) -> None:
    """And said nothing of it before."""
    break_it, check, text = BROKEN[number]
    before = said(copy, check)
    assert text not in before
    break_it(copy)
    assert text in said(copy, check)


def test_the_licence_of_the_base_comes_along(
    copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the base model is in the hub's cache."""
    (copy / "LICENSE").unlink()
    theirs = tmp_path / "LICENSE.txt"
    cached = {(BASE, "LICENSE.txt"): str(theirs)}
    monkeypatch.setattr(
        hub_checks, "try_to_load_from_cache", lambda *asked: cached.get(asked)
    )
    assert f"{BASE} has LICENSE.txt, the checkpoint has none" in said(copy, "licence")


def test_what_does_not_load_is_found(copy: Path) -> None:
    """With the last line of what the process said."""
    _edit("config.json", lambda c: c.update(num_attention_heads=3))(copy)
    assert "it does not load" in said(copy, "loads", load=True)


def _lose(folder: Path, name: str) -> None:
    """Remove a tensor from file, index and manifest, as if there had been none."""
    index = folder / INDEX
    plain = json.loads(index.read_text())
    path = folder / plain["weight_map"].pop(name)
    index.write_text(json.dumps(plain))
    tensors = load_file(path)
    del tensors[name]
    path.unlink()
    if tensors:
        save_file(tensors, path, metadata={"format": "pt"})
    _edit(MANIFEST_FILE, lambda m: m.update(sha256=checksums_in(folder)))(folder)


def test_a_missing_tensor_is_found(
    written: Callable[[str], Path], tmp_path: Path
) -> None:
    """Also where transformers would initialise it at random and say nothing."""
    folder = Path(shutil.copytree(written("uniform"), tmp_path / "copy"))
    _lose(folder, "lm_head.weight")
    for check in ("weights", "checksums"):
        assert "error" not in said(folder, check)
    found = said(folder, "loads", load=True)
    assert "error" in found
    assert "lm_head.weight" in found


def test_values_that_are_no_numbers_are_found(copy: Path) -> None:
    """A file may be whole and useless."""
    for path in copy.glob("*.safetensors"):
        tensors = load_file(path)
        for name in tensors:
            if name.endswith("norm.weight"):
                tensors[name] = torch.full_like(tensors[name], torch.nan)
        save_file(tensors, path, metadata={"format": "pt"})
    assert "its logits are not finite" in said(copy, "loads", load=True)


def test_code_of_somebody_else_is_not_run(copy: Path) -> None:
    """Not even to check it."""
    (copy / CODE).write_text("raise SystemExit('run')")
    assert "without heapr_lab" not in said(copy, "loads", load=True)


def test_what_is_too_large_is_not_loaded(
    copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is said, with both sizes."""
    monkeypatch.setattr(hub_checks, "free_memory", lambda _: 1000)
    assert "warning  loads: not loaded: it needs" in said(copy, "loads", load=True)


# --- pushing --------------------------------------------------------------------------


class Api:
    """A hub that keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, Any]] = []

    def create_repo(self, repo_id: str, **options: Any) -> None:
        """Keep it."""
        self.asked.append((repo_id, options))

    def upload_folder(self, **options: Any) -> Any:
        """Keep it."""
        self.asked.append(("upload", options))
        return SimpleNamespace(commit_url="https://hub/commit/1")


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> Api:
    """A hub that answers."""
    monkeypatch.setattr(hub, "answers", lambda: True)
    return Api()


def test_a_repository_is_private_unless_asked(copy: Path, api: Api) -> None:
    """And gets the folder, once it was checked."""
    where = publish.publish(copy, "me/moe", load=False, api=lambda: api)
    assert where == "https://hub/commit/1"
    assert api.asked[0] == ("me/moe", {"private": True, "exist_ok": True})
    assert api.asked[1][1]["folder_path"] == copy
    assert api.asked[1][1]["repo_id"] == "me/moe"
    publish.publish(copy, "me/moe", load=False, public=True, api=lambda: api)
    assert api.asked[2][1]["private"] is False


def test_nothing_is_pushed_while_a_check_fails(copy: Path, api: Api) -> None:
    """The first is named."""
    (copy / "optimizer.pt").touch()
    with pytest.raises(SpecError, match=r"1 of the checks failed.*optimizer\.pt"):
        publish.publish(copy, "me/moe", load=False, api=lambda: api)
    assert api.asked == []


@pytest.mark.parametrize("name", ["moe", "a/b/c", "me/", "me/a--b", "me/ moe"])
def test_a_name_that_the_hub_would_refuse(copy: Path, api: Api, name: str) -> None:
    """Before anything is checked."""
    with pytest.raises(SpecError, match=r"name of a repository|has no owner"):
        publish.publish(copy, name, load=False, api=lambda: api)
    assert api.asked == []


def test_a_hub_that_refuses_is_said(copy: Path, api: Api) -> None:
    """With what to do."""

    def refuse(**_options: Any) -> None:
        raise OSError("401 Unauthorized")

    api.upload_folder = refuse  # type: ignore[method-assign]
    with pytest.raises(SpecError, match=r"401 Unauthorized.*hf auth login"):
        publish.publish(copy, "me/moe", load=False, api=lambda: api)


def test_command(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line for each check, the same as JSON, and 2 if one fails."""
    monkeypatch.setattr(hub, "answers", lambda: False)
    asked = ["publish", str(copy), "--repo", "me/moe", "--no-load"]
    done = CliRunner().invoke(app, [*asked, "--dry-run"])
    assert done.exit_code == 0, done.output
    assert "ok       weights: " in done.stdout
    done = CliRunner().invoke(app, asked)
    assert (done.exit_code, "hub cannot be reached" in done.output) == (2, True)
    (copy / "notes.txt").touch()
    done = CliRunner().invoke(app, [*asked, "--dry-run", "--json"])
    assert done.exit_code == 2
    checks = json.loads(done.stdout)["checks"]
    wrong = [one for one in checks if one["level"] == "error"]
    assert [one["check"] for one in wrong] == ["files"]
