"""What is found by name: the default stands only for what is not there."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import heapr_lab
from heapr_lab import registry
from heapr_lab.errors import SpecError
from heapr_lab.models.loading import WHY_ON_DISK, load_model


@pytest.fixture
def wing(tmp_path, monkeypatch) -> Iterator[Path]:
    """A package with a module that is registered as `a part`."""
    monkeypatch.setattr(registry, "_PLACES", {"a part": "some_wing.module:part"})
    monkeypatch.syspath_prepend(tmp_path)
    folder = tmp_path / "some_wing"
    folder.mkdir()
    (folder / "__init__.py").touch()
    yield folder
    for name in ("some_wing", "some_wing.module"):
        sys.modules.pop(name, None)


def test_what_is_there_is_found(wing):
    """Whether there is a default or not."""
    (wing / "module.py").write_text("part = 3\n")
    assert registry.find("a part") == registry.find("a part", default=None) == 3


@pytest.mark.parametrize("left_out", ["module", "wing", "name"])
def test_what_is_left_out_is_the_default(wing, left_out, monkeypatch):
    """Without one, the error says what is needed, and where it was expected."""
    where = "some_wing.module"
    if left_out == "wing":
        (wing / "__init__.py").unlink()
        wing.rmdir()
    elif left_out == "name":
        monkeypatch.setattr(registry, "_PLACES", {})
        where = "not registered"
    assert registry.find("a part", default=3) == 3
    with pytest.raises(SpecError, match=rf"needs a part, .* not there \({where}\)"):
        registry.find("a part")


@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("import some_wing.nothing", ModuleNotFoundError),
        ("import some_other", ModuleNotFoundError),
        ("from pathlib import Nothing", ImportError),
        ("raise ValueError", ValueError),
        ("apart = 3", AttributeError),
    ],
)
def test_what_is_broken_is_an_error(wing, source, error):
    """Also where there is a default."""
    (wing / "module.py").write_text(f"{source}\n")
    with pytest.raises(error):
        registry.find("a part", default=None)


def test_what_registers_with_transformers_may_be_left_out(monkeypatch):
    """One that is there, and imports what is not, is an error."""
    name, module = "transformers.some", "heapr_lab.pretrained.carved"
    monkeypatch.setitem(heapr_lab._REGISTRIES, name, ("pretrained.carved",))
    monkeypatch.setitem(sys.modules, module, None)
    heapr_lab._register_with(name)
    monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "heapr_lab.pretrained.one_expert", None)
    with pytest.raises(ModuleNotFoundError, match="one_expert"):
        heapr_lab._register_with(name)


def test_a_model_is_not_loaded_into_memory_instead(monkeypatch):
    """With `stream="auto"`, where what says whether it fits cannot be imported."""
    place = registry._PLACES[WHY_ON_DISK].partition(":")[0]
    monkeypatch.delitem(sys.modules, place, raising=False)
    monkeypatch.setitem(sys.modules, "heapr_lab.models.safetensors_headers", None)
    with pytest.raises(ImportError, match="safetensors_headers"):
        load_model("lab", device="cpu")
