"""English text that every machine has: the docstrings of installed packages.

They are read from the sources with `ast`, so that nothing is imported or run.
"""

import ast
import contextlib
import functools
import gc
import importlib.metadata
import importlib.util
import inspect
import platform
import re
import sysconfig
import warnings
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from heapr_lab.errors import CorpusError
from heapr_lab.storage import cache

PYDOCS_PACKAGES = (
    "stdlib",
    "numpy",
    "pandas",
    "scipy",
    "matplotlib",
    "torch",
    "sklearn",
    "sympy",
    "networkx",
    "nltk",
)
"""Packages that plain `pydocs` harvests if they are installed."""

_HARVEST_RULES = 1
"""Increased whenever the same packages would give other texts."""
_MIN_DOCSTRING_CHARS = 150
_CALL_OF_DOC = re.compile(rb"doc\w*\s*\(", re.IGNORECASE)
_BLOCKS = ("body", "cases", "handlers", "orelse", "finalbody")
"""Fields of a node that statements are in, in the order of `ast.iter_fields`."""
_TEST_FOLDERS = {"test", "tests", "idlelib", "lib2to3"}


@functools.lru_cache(maxsize=4)
def harvested(package: str = "") -> tuple[tuple[str, ...], str]:
    """The docstrings of `package`, or of all `PYDOCS_PACKAGES`, and their source.

    They are harvested once for each set of versions, and cached.

    Raises:
        CorpusError: the package is not installed.
    """
    wanted = (package,) if package else PYDOCS_PACKAGES
    packages = installed(wanted)
    if not packages:
        raise CorpusError(
            f"pydocs:{package} needs the package {package!r}, which is not installed "
            f"here (or is a single module); install it (pip install {package})"
        )
    key = _key(packages)
    texts = cache.cached_json("pydocs", key, lambda: harvest(packages))
    named = ", ".join(f"{name} {version}" for name, version in key["versions"].items())
    return tuple(texts), f"docstrings of {named}"


def _key(packages: list[str]) -> dict[str, Any]:
    """The cache key of the docstrings of `packages`."""
    return {
        "rules": _HARVEST_RULES,
        "versions": {name: _version(name) for name in packages},
    }


def not_harvested() -> list[str]:
    """The installed packages whose docstrings are not in the cache yet."""
    return [
        name
        for name in installed()
        if not cache.cache_path("pydocs", _key([name]), extension="json").exists()
    ]


def installed(packages: Iterable[str] = PYDOCS_PACKAGES) -> list[str]:
    """The `packages` whose docstrings can be read on this machine."""
    return [name for name in packages if _package_root(name) is not None]


def harvest(packages: list[str]) -> list[str]:
    """Docstrings of the packages; of those with the same letters, the first.

    Each package is cached separately, so that several processes can share the work.
    """
    if len(packages) == 1:
        with _no_collection():
            return _distinct(_docstrings_of(packages[0]))
    return _distinct(text for name in packages for text in harvested(name)[0])


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Syntax trees have no cycles, and each collection looks at all of torch."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _distinct(texts: Iterable[str]) -> list[str]:
    kept: dict[str, str] = {}
    for text in texts:
        kept.setdefault(re.sub(r"[\W\d]+", "", text.lower()), text)
    return list(kept.values())


def _package_root(package: str) -> Path | None:
    if package == "stdlib":
        return Path(sysconfig.get_path("stdlib"))
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return None
    if spec is None or not spec.submodule_search_locations:
        return None  # not installed, or a single module beside many others
    return Path(spec.submodule_search_locations[0])


def _version(package: str) -> str:
    if package == "stdlib":
        return platform.python_version()
    try:
        return importlib.metadata.version(_distributions().get(package, [package])[0])
    except importlib.metadata.PackageNotFoundError as error:
        raise CorpusError(
            f"{package!r} is not an installed distribution; docstrings of the standard "
            "library are pydocs:stdlib"
        ) from error


@functools.cache
def _distributions() -> Mapping[str, list[str]]:
    return importlib.metadata.packages_distributions()  # reads all of them: 0.6 s


def _docstrings_of(package: str) -> Iterator[str]:
    """Docstrings of at least 150 characters, in the order of path and line.

    Raises:
        CorpusError: the package is not installed.
    """
    root = _package_root(package)
    if root is None:
        raise CorpusError(f"package {package!r} is not installed")
    for path in sorted(root.rglob("*.py")):
        folders = set(path.relative_to(root).parts[:-1])
        if folders & _TEST_FOLDERS or "site-packages" in folders:
            continue
        for text in docstrings_in(path):
            if len(text) >= _MIN_DOCSTRING_CHARS:
                yield text


def docstrings_in(path: Path) -> Iterator[str]:
    """Docstrings in a source file, and those that it adds by a function call."""
    source = path.read_bytes()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in other people's code
            tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return  # a template, or a file for another version of Python
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = ast.walk(tree) if _CALL_OF_DOC.search(source) else _definitions(tree)
    for node in nodes:
        if isinstance(node, documented):
            text = ast.get_docstring(node)
            if text:
                yield text
        elif isinstance(node, ast.Call) and _adds_docstring(node.func):
            values = (getattr(argument, "value", None) for argument in node.args)
            yield from (inspect.cleandoc(x) for x in values if isinstance(x, str))


def _definitions(tree: ast.AST) -> Iterator[ast.AST]:
    """Statements and the blocks they are in, in the order of `ast.walk`."""
    waiting = deque([tree])
    while waiting:
        node = waiting.popleft()
        yield node
        for block in _BLOCKS:
            waiting.extend(getattr(node, block, ()))


def _adds_docstring(function: ast.expr) -> bool:
    """Whether this is numpy's `add_newdoc`, torch's `add_docstr`, or similar."""
    name = getattr(function, "attr", getattr(function, "id", ""))
    return "doc" in name.lower()
