"""Give the functions of a loaded module the code of a changed one."""

import gc
import importlib.machinery
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any


def codes(code: CodeType) -> Iterator[CodeType]:
    """The code of a module, and of all that is defined in it."""
    yield code
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from codes(inner)


def functions_in(path: Path) -> list[FunctionType]:
    """All functions that exist in this process and are written in a file."""
    return [
        function
        for function in gc.get_objects()
        if isinstance(function, FunctionType)
        and function.__code__.co_filename == str(path)
    ]


def exchange(functions: Sequence[FunctionType], changed: CodeType) -> bool:
    """Give functions their code in a changed module; whether that was possible."""
    new = {(code.co_qualname, code.co_firstlineno): code for code in codes(changed)}
    for function in functions:
        code = function.__code__
        other = new.get((code.co_qualname, code.co_firstlineno), code)
        if other.co_freevars != code.co_freevars:
            return False
        function.__code__ = other
    return True


def imports_changed(changed: CodeType) -> None:
    """Let the import of a module find this code in the place of its file."""
    loader = importlib.machinery.SourceFileLoader
    found = loader.get_code

    def get_code(self: Any, name: str) -> CodeType | None:
        return changed if self.path == changed.co_filename else found(self, name)

    loader.get_code = get_code
