"""The changes that mutation testing makes, and how it writes down what survives."""

import ast
from pathlib import Path

import pytest
from mutation import record
from mutation.operators import mutants
from mutation.record import Survivor

SOURCE = '''
"""A module."""
import contextlib
LIMIT: int = 3

@contextlib.contextmanager
def f(a: "int" = 1, *, key=None):
    """Its docstring."""
    if a < LIMIT and not key:
        raise ValueError("wording" + str(a))
    b = [x for x in a if x]
    return g(b, last=True) | a
'''
CHANGES = [
    ("", "LIMIT: int = 3", "LIMIT: int = 4"),
    ("f", "def f(a: 'int'=1, *, key=None):", "def f(a: 'int'=2, *, key=None):"),
    ("f", "if a < LIMIT and (not key):", "if not (a < LIMIT and (not key)):"),
    ("f", "if a < LIMIT and (not key):", "if a < LIMIT or not key:"),
    ("f", "if a < LIMIT and (not key):", "if a <= LIMIT and (not key):"),
    ("f", "if a < LIMIT and (not key):", "if a < LIMIT and key:"),
    ("f", "raise ValueError('wording' + str(a))", "pass"),
    ("f", "b = [x for x in a if x]", "pass"),
    ("f", "b = [x for x in a if x]", "b = [x for x in a]"),
    ("f", "return g(b, last=True) | a", "return None"),
    ("f", "return g(b, last=True) | a", "return g(b, last=True) & a"),
    ("f", "return g(b, last=True) | a", "return g(b) | a"),
    ("f", "return g(b, last=True) | a", "return g(b, last=False) | a"),
]


def test_changes() -> None:
    """All of a small module: no docstring, annotation, decorator or message."""
    found = mutants(SOURCE)
    assert sorted(mutant.key for mutant in found) == sorted(CHANGES)
    deferred = {mutant.before for mutant in found if not mutant.deferred}
    assert deferred == {CHANGES[0][1], CHANGES[1][1]}
    for mutant in found:
        text = ast.unparse(mutant.tree(SOURCE))
        assert text != ast.unparse(ast.parse(SOURCE))
        assert mutant.after == "pass" or mutant.after in text


def test_survivors_are_read_as_they_were_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With signs that mean something in Markdown, and the reasons for them."""
    monkeypatch.setattr(record, "HERE", tmp_path)
    survivors = [
        Survivor("f", "a | b  <  c", "a & b", "rounding: 1 < 2"),
        Survivor("", "`x`", "y", ""),
    ]
    path = record.ROOT / "heapr_lab" / "wing" / "module.py"
    line = record.write(path, 10, 1, survivors)
    assert line.startswith("heapr_lab/wing/module.py: 8 of 10 mutants killed (80.0%)")
    assert record.read(path) == record.Record(1, tuple(survivors))
    assert record.read(path.with_name("other.py")) == record.Record(0, ())
