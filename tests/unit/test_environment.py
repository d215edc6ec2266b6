"""environment.yml says in conda's language what pyproject.toml says in pip's."""

import re
import tomllib
from pathlib import Path
from typing import Any

import yaml
from packaging.requirements import Requirement
from rattler import MatchSpec

ROOT = Path(__file__).resolve().parents[2]
CONDA_NAMES = {
    "torch": "pytorch",
    "matplotlib": "matplotlib-base",
    "playwright": "playwright-python",
}


def described(table: str) -> dict[str, Any]:
    """A table of pyproject.toml."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        return dict(tomllib.load(file)[table])


def environment() -> dict[str, Any]:
    """The content of environment.yml."""
    return dict(yaml.safe_load((ROOT / "environment.yml").read_text("utf-8")))


def conda_bounds() -> list[tuple[str, str]]:
    """Conda names and bounds; strictly parsed, so that a typing slip is an error."""
    lines = [line for line in environment()["dependencies"] if isinstance(line, str)]
    specs = [MatchSpec(line, strict=True) for line in lines]
    return [(spec.name.normalized, bounds(str(spec.version or ""))) for spec in specs]


def bounds(text: str) -> str:
    """Version bounds in one order, the star of "anything" left out."""
    return ",".join(sorted(text.replace(" ", "").replace("*", "").split(",")))


def test_the_same_names_and_bounds():
    """Every dependency and test tool stands in both files, once in each."""
    settings = described("project")
    lines = settings["dependencies"] + settings["optional-dependencies"]["test"]
    requirements = [Requirement(line) for line in lines]
    expected = {
        CONDA_NAMES.get(item.name, item.name): bounds(str(item.specifier))
        for item in requirements
    }
    expected["python"] = bounds(settings["requires-python"])
    expected["pip"] = ""
    assert sorted(conda_bounds()) == sorted(expected.items())


def test_only_conda_forge_and_only_this_project_from_pip():
    """Nothing is taken from another channel, and pip installs this project alone."""
    content = environment()
    assert content["channels"] == ["conda-forge"]
    pip_parts = [part for part in content["dependencies"] if isinstance(part, dict)]
    assert pip_parts == [{"pip": ["-e ."]}]
    assert set(content) == {"name", "channels", "dependencies"}
    assert content["name"] == described("project")["name"]


def test_constraints_pin_what_the_project_asks_for():
    """Each dependency has an exact pin inside its bounds, and no hash, url or build."""
    text = (ROOT / "constraints.txt").read_text("utf-8")
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    pattern = re.compile(r"[A-Za-z0-9._-]+==[A-Za-z0-9.]+")
    assert [line for line in lines if not pattern.fullmatch(line)] == []
    pins = {
        re.sub(r"[-_.]+", "-", name).lower(): version
        for name, _, version in (line.partition("==") for line in lines)
    }
    settings = described("project")
    extras = settings["optional-dependencies"]
    requirements = settings["dependencies"] + extras["test"] + extras["docs"]
    for item in map(Requirement, requirements):
        assert pins[re.sub(r"[-_.]+", "-", item.name).lower()] in item.specifier


def test_what_a_wheel_has_is_all_that_the_package_is():
    """Each file that is no code is named by a pattern of its package."""
    package = ROOT / "heapr_lab"
    patterns = described("tool")["setuptools"]["package-data"]
    named = {
        path
        for name, globs in patterns.items()
        for pattern in globs
        for path in (ROOT / name.replace(".", "/")).glob(pattern)
    }
    data = {
        path
        for path in package.rglob("*")
        if path.is_file() and path.suffix not in {".py", ".pyc"}
    }
    assert data - named == {package / "README.md"}
