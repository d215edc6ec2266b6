"""Files of weights that are not what they should be: refused by name, or the same."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from families import tiny_ids
from keeps import logits_of
from safetensors.torch import load_file, save_file
from stored_tensors import INDEX, changed_tensors, tensors_in
from tiny_folder import write_model

from heapr_lab.checkpoints.save import prune_folder
from heapr_lab.errors import HeaprLabError, SpecError
from heapr_lab.models.folders import read_weights
from heapr_lab.models.loading import load_model, model_folder


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """A tiny model in several files."""
    folder = tmp_path_factory.mktemp("sources") / "moe"
    return write_model(folder, max_shard_size="12KB")


def shards(folder: Path) -> list[Path]:
    """The files of weights."""
    return sorted(folder.glob("model-*.safetensors"))


def swapped(path: Path) -> None:
    """Let two files change names."""
    one, _ = shards(path.parent)[:2]
    one.rename(path.with_name("x"))
    path.rename(one)
    path.with_name("x").rename(path)


def replaced(path: Path, make: Callable[[Path], object]) -> None:
    """Let something else have the name of a file."""
    path.unlink()
    make(path)


def of_the_future(path: Path) -> None:
    """Give a tensor a type that nobody knows yet."""
    path.write_bytes(path.read_bytes().replace(b'"F32"', b'"F99"', 1))


def outside(path: Path) -> None:
    """Let the index name a file beside the folder, which is there and whole."""
    folder = path.parent
    shutil.move(path, folder.parent / path.name)
    index = (folder / INDEX).read_text()
    (folder / INDEX).write_text(index.replace(path.name, f"../{path.name}"))


def in_two_files(path: Path) -> None:
    """Add a tensor of the first file."""
    name, tensor = next(iter(load_file(shards(path.parent)[0]).items()))
    with changed_tensors(path) as tensors:
        tensors[name] = tensor


DAMAGES: dict[str, Callable[[Path], object]] = {
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "swapped": swapped,
    "missing": Path.unlink,
    "dangling": lambda path: replaced(path, lambda p: p.symlink_to("nowhere")),
    "a folder": lambda path: replaced(path, Path.mkdir),
    "in two files": in_two_files,
    "type of the future": of_the_future,
    "outside": outside,
}
"""What is done to the second file."""
SAID = {
    "swapped": f"lacks .*, which {INDEX} expects there: their versions differ",
    "outside": r"\.\./model-00002",
    "in two files": "is in .*model-00002.* and in model-00001.* expected it once",
    "type of the future": "model-00002.*F99.*download it again",
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_files_are_named(name, source, keep, tmp_path):
    """Loading and pruning name them in one line, and pruning writes nothing."""
    message = SAID.get(name, "model-00002")
    folder = Path(shutil.copytree(source, tmp_path / "moe"))
    DAMAGES[name](shards(folder)[1])
    for attempt in (
        lambda: load_model(folder),
        lambda: model_folder(folder),
        lambda: prune_folder(folder, keep, tmp_path / "out"),
    ):
        with pytest.raises(HeaprLabError, match=message) as error:
            attempt()
        assert "\n" not in str(error.value)
    assert not list(tmp_path.glob("*out*"))


def test_links_to_files_are_files(source, keep, tmp_path):
    """Every file of the hub's cache is a link; what is written is none."""
    folder = tmp_path / "linked"
    folder.mkdir()
    for path in source.iterdir():
        (folder / path.name).symlink_to(path)
    before = {path: path.read_bytes() for path in source.iterdir()}
    model, _ = load_model(folder, device="cpu")
    ids = tiny_ids()
    assert torch.equal(logits_of(model, ids), logits_of(read_weights(source), ids))
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    for name in ("linked", "plain"):
        prune_folder(
            folder if name == "linked" else source, keep, tmp_path / f"{name}1"
        )
    for path in (tmp_path / "linked1").glob("model-*"):
        assert not path.is_symlink()
        assert path.read_bytes() == (tmp_path / "plain1" / path.name).read_bytes()
    assert {path: path.read_bytes() for path in source.iterdir()} == before


def test_a_folder_is_not_pruned_into_itself(source, keep, tmp_path):
    """Links to it and its files are refused, too; a folder below it is not."""
    folder = Path(shutil.copytree(source, tmp_path / "moe"))
    (tmp_path / "link").symlink_to(folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    for out in (folder, tmp_path / "link", folder / "config.json", folder / "x" / ".."):
        with pytest.raises(SpecError, match="exists and is not empty"):
            prune_folder(folder, keep, out)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert prune_folder(folder, keep, folder / "pruned")
    assert read_weights(folder)


def test_the_single_file_counts_where_there_are_both(source, keep, tmp_path):
    """Loading and pruning read the same one of two sets of weights."""
    folder = Path(shutil.copytree(source, tmp_path / "moe"))
    doubled = {name: tensor * 2 for name, tensor in tensors_in(folder).items()}
    save_file(doubled, folder / "model.safetensors", metadata={"format": "pt"})
    model, _ = load_model(folder, device="cpu")
    norm = "model.norm.weight"
    assert torch.equal(model.state_dict()[norm], doubled[norm])
    prune_folder(folder, keep, tmp_path / "out")
    assert torch.equal(tensors_in(tmp_path / "out")[norm], doubled[norm])
