"""Methods by name, and one of a user's own, as docs/comparing.md has it."""

from typing import Any

import pytest
from families import tiny_model, tiny_windows
from fences import fence
from keeps import logits_of
from oracles.token_by_token import matrices
from tiny_folder import write_model, write_text

from heapr_lab import methods
from heapr_lab.errors import SpecError
from heapr_lab.models.experts import find_experts

PAGE = "docs/comparing.md"


def test_every_method_is_found_by_its_name():
    """In the order of the file that describes them."""
    assert [methods.get(name).name for name in methods.names()] == [*methods.DESCRIBED]


def test_the_method_of_the_page_is_one_like_ours():
    """It is fitted, drops what it says, by a loop over experts, and is applied."""
    page: dict[str, Any] = {}
    exec(compile(fence(PAGE, "python own"), PAGE, "exec"), page)
    model = tiny_model("qwen2_moe")
    windows = tiny_windows()
    dropping = page["METHOD"].fit(model, windows, ratio=0.25)
    assert dropping.achieved_ratio == 0.25
    for layer in find_experts(model):
        down_projs = [matrices(layer.module, e)["W_down"] for e in range(4)]
        norms = [float(down.detach().norm()) for down in down_projs]
        assert {0, 1, 2, 3} - {*dropping.kept[layer.layer]} == {norms.index(min(norms))}
    small = dropping.materialise(model)
    assert small.num_parameters() < model.num_parameters()
    with dropping.apply(model):
        assert (logits_of(small, windows.ids) == logits_of(model, windows.ids)).all()


def test_the_python_of_the_page_runs(tmp_path, monkeypatch, capsys):
    """On a tiny model: both methods are fitted and applied, the second is saved."""
    folder, text = write_model(tmp_path / "moe"), write_text(tmp_path / "text.txt")
    code = fence(PAGE, "python use")
    code = code.replace('"lab"', repr(str(folder))).replace('"pydocs"', repr(str(text)))
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "comparing.md", "exec"), {})
    assert capsys.readouterr().out.startswith("reap 0.25 (")
    assert (tmp_path / "smaller" / "model.safetensors").exists()


def test_an_unknown_name_lists_the_names():
    """The message lists all methods."""
    with pytest.raises(SpecError, match=r"unknown method 'naeee'; .*heapr, .*naee"):
        methods.get("naeee")


def test_defaults_are_those_of_the_authors():
    """Of their code or, of CAMERA-P, of their script; `most_windows` is ours."""
    search = {"population": 12, "generations": 4, "survivors": 4}
    moves = {"most_moves": 1, "largest_move": 2, "most_windows": 8}
    expected = {
        "ream": {"group_size": 16, "batch_size": 8},
        "evoesap": search | moves,
        "camera-p": {"alpha": 0.9},
    }
    assert {name: methods.get(name).completed({}) for name in expected} == expected
