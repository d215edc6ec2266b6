"""environment.yml says in conda's language what pyproject.toml says in pip's."""

import importlib.metadata
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from rattler import MatchSpec, Version, VersionSpec

ROOT = Path(__file__).resolve().parents[2]
CONDA_NAMES = {
    "torch": "pytorch",
    "matplotlib": "matplotlib-base",
    "playwright": "playwright-python",
}
PIP_NAMES = {conda: pip for pip, conda in CONDA_NAMES.items()}


def project() -> dict[str, Any]:
    """The [project] table of pyproject.toml."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        return dict(tomllib.load(file)["project"])


def environment() -> dict[str, Any]:
    """The content of environment.yml."""
    return dict(yaml.safe_load((ROOT / "environment.yml").read_text("utf-8")))


def conda_lines() -> list[str]:
    """The conda part of its dependencies."""
    return [line for line in environment()["dependencies"] if isinstance(line, str)]


def conda_bounds() -> dict[str, str]:
    """Conda name to bounds; strictly parsed, so that a typing slip is an error."""
    specs = [MatchSpec(line, strict=True) for line in conda_lines()]
    return {spec.name.normalized: bounds(str(spec.version or "")) for spec in specs}


def bounds(text: str) -> str:
    """Version bounds in one order, the star of "anything" left out."""
    return ",".join(sorted(text.replace(" ", "").replace("*", "").split(",")))


def test_the_same_names_and_bounds():
    """Every dependency and test tool stands in both files with the same bounds."""
    settings = project()
    lines = settings["dependencies"] + settings["optional-dependencies"]["test"]
    requirements = [Requirement(line) for line in lines]
    expected = {
        CONDA_NAMES.get(item.name, item.name): bounds(str(item.specifier))
        for item in requirements
    }
    expected["python"] = bounds(settings["requires-python"])
    expected["pip"] = ""
    assert conda_bounds() == expected


def test_no_name_stands_twice():
    """Each package is asked for once."""
    assert len(conda_bounds()) == len(conda_lines())


def test_only_conda_forge_and_only_this_project_from_pip():
    """Nothing is taken from another channel, and pip installs this project alone."""
    content = environment()
    assert content["channels"] == ["conda-forge"]
    pip_parts = [part for part in content["dependencies"] if isinstance(part, dict)]
    assert pip_parts == [{"pip": ["-e ."]}]
    assert set(content) == {"name", "channels", "dependencies"}
    assert content["name"] == project()["name"]


@pytest.mark.parametrize("name", sorted(set(conda_bounds()) - {"python", "pip"}))
def test_what_is_installed_satisfies_condas_bounds(name):
    """The versions these tests run with are inside the bounds, read as conda does."""
    installed = importlib.metadata.version(PIP_NAMES.get(name, name))
    release = Version(installed.partition("+")[0])
    assert VersionSpec(conda_bounds()[name]).matches(release)


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
    settings = project()
    extras = settings["optional-dependencies"]
    requirements = settings["dependencies"] + extras["test"] + extras["docs"]
    for item in map(Requirement, requirements):
        assert pins[re.sub(r"[-_.]+", "-", item.name).lower()] in item.specifier


def test_what_a_wheel_has_is_all_that_the_package_is():
    """Each file that is no code is named by a pattern of its package."""
    package = ROOT / "heapr_lab"
    with (ROOT / "pyproject.toml").open("rb") as file:
        patterns = tomllib.load(file)["tool"]["setuptools"]["package-data"]
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
