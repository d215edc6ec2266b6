"""The registry: our methods, and those of plug-ins that are found by entry points."""

import sys
from pathlib import Path

import pytest
from families import tiny_ids, tiny_model

from heapr_lab import methods
from heapr_lab.errors import SpecError
from heapr_lab.text.calibration import CalibrationSet

PLUGIN = '''
import numpy as np

from heapr_lab.methods.atoms import compression_of
from heapr_lab.methods.method import Method
from heapr_lab.pruning.masks import KeepMask


def first_atoms(request):
    """The first atoms of every expert go."""
    keep = {}
    for layer, shape in request.measured.architecture.layers.items():
        atoms = np.arange(shape.d_inter) >= int(request.ratio * shape.d_inter)
        keep[layer] = np.tile(atoms, (shape.n_experts, 1))
    return compression_of(request, KeepMask(keep))


FIRST = Method(NAME, "the first atoms go", "nobody, 2026", "atoms", first_atoms)
'''


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Makes a distribution with one module and one entry point importable."""

    def installed(code: str, *, value: str = "{module}:FIRST", name: str) -> None:
        module = f"plugin_{name}"
        (tmp_path / f"{module}.py").write_text(code, encoding="utf-8")
        info = tmp_path / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Name: {name}\nVersion: 1.0\n")
        entry = f"[heapr_lab.methods]\nmine = {value.format(module=module)}\n"
        (info / "entry_points.txt").write_text(entry)

    monkeypatch.syspath_prepend(str(tmp_path))
    yield installed
    for module in [name for name in sys.modules if name.startswith("plugin_")]:
        del sys.modules[module]


def test_a_plugin_is_a_method_like_ours(install) -> None:
    """It is listed, found, fitted, and prunes what it says."""
    assert "first" not in methods.names()
    install(PLUGIN.replace("NAME", '"first"'), name="firsts")
    assert methods.names()[-1] == "first"
    model = tiny_model("qwen2_moe")
    windows = CalibrationSet.from_ids(tiny_ids())
    found = methods.get("first").fit(model, windows, ratio=0.25)
    assert found.achieved_ratio == 0.25
    small = found.materialise(model)
    assert small.num_parameters() == model.num_parameters() - 2 * 4 * 2 * 3 * 16


def test_a_taken_name_is_refused(install) -> None:
    """Both distributions are named."""
    install(PLUGIN.replace("NAME", '"reap"'), name="other_reap")
    with pytest.raises(SpecError, match=r"other_reap \(mine = .*'reap', which heapr-l"):
        methods.names()


def test_two_plugins_of_one_name_are_refused(install) -> None:
    """The message names both."""
    install(PLUGIN.replace("NAME", '"first"'), name="one")
    install(PLUGIN.replace("NAME", '"first"'), name="two")
    with pytest.raises(SpecError, match=r"two \(mine.* which one \(mine"):
        methods.get("first")


@pytest.mark.parametrize(
    ("code", "value", "message"),
    [
        ("import nothing_of_that_name", "{module}:FIRST", "loaded: ModuleNotFoundErr"),
        ("FIRST = 1", "{module}:SECOND", "loaded: AttributeError"),
        ("FIRST = 1", "{module}:FIRST", "is int, expected a heapr_lab.methods.method"),
    ],
)
def test_a_broken_plugin_is_named(install, code: str, value: str, message: str) -> None:
    """With its distribution, and what to do."""
    install(code, value=value, name="broken")
    with pytest.raises(SpecError, match=rf"broken \(mine = .*{message}.*uninstall"):
        methods.names()


def test_an_unknown_name_lists_the_names() -> None:
    """Of all methods."""
    with pytest.raises(SpecError, match=r"unknown method 'naeee'; .*heapr, .*naee"):
        methods.get("naeee")
