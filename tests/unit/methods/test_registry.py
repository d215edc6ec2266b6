"""The registry: our methods, and those of plug-ins that are found by entry points."""

import sys
import tomllib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from commands import run
from families import tiny_model, tiny_windows
from fences import fence
from oracles.token_by_token import matrices
from tiny_folder import write_model, write_text

from heapr_lab import methods
from heapr_lab.errors import SpecError
from heapr_lab.models.experts import find_experts

Install = Callable[..., None]
PAGE = "docs/comparing.md"
PLUGIN = fence(PAGE, "python plugin")
"""The whole file of the example."""
TAKEN = "smallest, options={'ratio': 1.0}"
"""A rule and an option that `fit` has as an argument."""


def called(name: str) -> str:
    """The example with another name of its method."""
    assert PLUGIN.count('"smallest"') == 1
    return PLUGIN.replace('"smallest"', f'"{name}"')


def with_rule(rule: str) -> str:
    """The example with another rule."""
    assert PLUGIN.count('"experts", smallest\n') == 1
    code = PLUGIN.replace('"experts", smallest\n', f'"experts", {rule}\n')
    return f"import sys\n{code}"


@pytest.fixture
def install(tmp_path, monkeypatch) -> Iterator[Install]:
    """Makes a distribution with one module and one entry point importable."""

    def installed(code: str, *, name: str) -> None:
        module = f"plugin_{name}"
        (tmp_path / f"{module}.py").write_text(code, encoding="utf-8")
        info = tmp_path / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Name: {name}\nVersion: 1.0\n")
        entry = f"[heapr_lab.methods]\nmine = {module}:METHOD\n"
        (info / "entry_points.txt").write_text(entry)

    monkeypatch.syspath_prepend(str(tmp_path))
    yield installed
    for module in [name for name in sys.modules if name.startswith("plugin_")]:
        del sys.modules[module]


def test_the_example_of_the_page_is_a_method_like_ours(install):
    """It is listed, found, fitted, and drops what it says, by a loop over experts."""
    assert methods.names() == tuple(methods.DESCRIBED)
    install(PLUGIN, name="mine")
    assert methods.names()[-1] == "smallest"
    assert "smallest (experts): experts by the norm" in run("compare", "--list")
    model = tiny_model("qwen2_moe")
    windows = tiny_windows()
    dropping: Any = methods.get("smallest").fit(model, windows, ratio=0.25)
    assert dropping.achieved_ratio == 0.25
    for layer in find_experts(model):
        down_projs = [matrices(layer.module, e)["W_down"] for e in range(4)]
        norms = [float(down.detach().norm()) for down in down_projs]
        assert {0, 1, 2, 3} - {*dropping.kept[layer.layer]} == {norms.index(min(norms))}
    assert dropping.materialise(model).num_parameters() < model.num_parameters()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("heapr", "0/0, which sorts highest"),
        ("reap", "since March 2026 by default renormalised"),
        ("mone", "updates them batch by batch"),
        ("evoesap", "in their code one is enough"),
        ("mc-smoe", "Mixtral not at all: there ours is an improvement"),
        ("sub-moe-like", "could not be obtained. REAP's repository has"),
        ("sub-moe-like", "reshapes V in place of dividing it"),
        ("moe-svd-like", "could not be obtained"),
        ("moe-svd-like", "This is in the method's favour"),
        ("d2-moe", "shifts the labels for a model that shifts them itself"),
        ("camera-p", "in their code it is 1 by default"),
    ],
)
def test_what_differs_from_the_authors_is_stated(name, words):
    """What was seen by running their code beside ours, or why that was not possible."""
    assert words in " ".join(methods.get(name).deviations)


def test_the_entry_point_of_the_page_is_the_one_that_is_read():
    """It stands as in the pyproject.toml of a plug-in."""
    text = fence(PAGE, "toml")
    assert tomllib.loads(text)["project"]["entry-points"] == {
        methods.GROUP: {"smallest": "my_package:METHOD"}
    }


def test_the_python_of_the_page_runs(tmp_path, monkeypatch, capsys):
    """On a tiny model: both methods are fitted, applied and saved."""
    folder, text = write_model(tmp_path / "moe"), write_text(tmp_path / "text.txt")
    code = fence(PAGE, "python use")
    code = code.replace('"lab"', repr(str(folder))).replace('"pydocs"', repr(str(text)))
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "comparing.md", "exec"), {})
    assert capsys.readouterr().out.startswith("reap 0.25 (")
    for name in ("reap", "camera-p"):
        assert (tmp_path / f"smaller-{name}" / "model.safetensors").exists()


def test_a_taken_name_is_refused(install):
    """Both distributions are named."""
    install(called("reap"), name="other_reap")
    with pytest.raises(SpecError, match=r"other_reap \(mine = .*'reap', which heapr-l"):
        methods.names()


def test_two_plugins_of_one_name_are_refused(install):
    """The message names both."""
    install(called("first"), name="one")
    install(called("first"), name="two")
    with pytest.raises(SpecError, match=r"two \(mine.* which one \(mine"):
        methods.get("first")


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import nothing_of_that_name", "loaded: ModuleNotFoundErr"),
        ("SECOND = 1", "loaded: AttributeError"),
        ("METHOD = 1", "is int, expected a heapr_lab.methods.method"),
        ("METHOD = None", "is NoneType, expected a heapr_lab"),
        ("raise SystemExit(3)", "loaded: SystemExit: 3"),
        (called("Smallest"), "is called 'Smallest', expected lower"),
        (with_rule(TAKEN), "has an option ratio, which is an"),
    ],
)
def test_a_broken_plugin_is_named(install, code, message):
    """The message names the distribution, and says what to do."""
    install(code, name="broken")
    with pytest.raises(SpecError, match=rf"broken \(mine = .*{message}.*uninstall"):
        methods.names()


@pytest.mark.parametrize(
    ("rule", "said"),
    [("lambda _: None", "returned NoneType, expected"), ("sys.exit", "end Python")],
)
def test_a_rule_that_finds_nothing_is_named(install, rule, said):
    """The method of a plug-in returned nothing, or wanted to leave."""
    install(with_rule(rule), name="empty")
    windows = tiny_windows()
    with pytest.raises(SpecError, match=rf"'smallest' .*{said}"):
        methods.get("smallest").fit(tiny_model("qwen2_moe"), windows, ratio=0.25)


def test_an_unknown_name_lists_the_names():
    """The message lists all methods."""
    with pytest.raises(SpecError, match=r"unknown method 'naeee'; .*heapr, .*naee"):
        methods.get("naeee")
