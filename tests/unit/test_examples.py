"""The examples in docstrings give what they say."""

import doctest
import importlib

import pytest
from house import PACKAGE

MODULES = sorted(
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
    for path in PACKAGE.rglob("*.py")
    if ">>> " in path.read_text(encoding="utf-8")
)


@pytest.mark.parametrize("name", MODULES)
def test_examples(name, tmp_path, monkeypatch):
    """Of every module that has some; in an empty folder."""
    monkeypatch.chdir(tmp_path)
    assert not doctest.testmod(importlib.import_module(name)).failed
