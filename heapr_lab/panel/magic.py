"""What `%load_ext heapr_lab` adds to IPython: figures in cells, and `%heapr`.

Importing this needs no torch; `%heapr` does.
"""

from collections.abc import Mapping
from typing import Any

from heapr_lab.errors import SpecError

_MAGIC = "heapr"
_INLINE = {None, "inline", "module://matplotlib_inline.backend_inline"}
_USAGE = "%heapr lab, %heapr importance.parquet, or %heapr NAME of a table or workbench"


def load(ipython: Any) -> None:
    """Register `%heapr`, and in a kernel show figures in cells by default."""

    def explore_line(line: str) -> Any:
        """Explore a model, a table of `heapr-lab score`, or a variable."""
        from heapr_lab.panel.opening import explore

        return explore(source_of(line, ipython.user_ns))

    ipython.register_magic_function(explore_line, "line", _MAGIC)
    if getattr(ipython, "kernel", None) is not None and _undecided():
        # A preset inline backend has not yet set how IPython shows figures.
        ipython.run_line_magic("matplotlib", "inline")


def unload(ipython: Any) -> None:
    """Remove `%heapr`; the way figures are shown does not change."""
    ipython.magics_manager.magics["line"].pop(_MAGIC, None)


def source_of(line: str, variables: Mapping[str, Any]) -> Any:
    """The argument of `%heapr`: a variable, else the name of a model or a file.

    Args:
        line: one name or path, with or without quotes.
        variables: the variables of the notebook.

    Raises:
        SpecError: the line is empty.

    Example:
        >>> source_of("table", {"table": 7}), source_of("'a b.parquet'", {})
        (7, 'a b.parquet')
    """
    name = line.strip().strip("'\"")
    if not name:
        raise SpecError(f"%heapr needs an argument: {_USAGE}")
    return variables.get(name, name)


def _undecided() -> bool:
    import matplotlib as mpl

    return mpl.get_backend(auto_select=False) in _INLINE
