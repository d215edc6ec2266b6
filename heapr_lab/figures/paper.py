"""The numbers published in the paper, and their label in our figures."""

import sysconfig
from pathlib import Path

import numpy as np
import pandas as pd

from heapr_lab.errors import SpecError
from heapr_lab.tasks.paper_tasks import PAPER_TASKS

_PACKAGE = Path(__file__).parents[1]
_FOLDERS = (
    _PACKAGE.parent / "data" / "paper",
    # where a wheel installs them (pyproject.toml, tool.setuptools.data-files)
    Path(sysconfig.get_path("data")) / "share" / "heapr_lab" / "paper",
)


def paper_table(name: str) -> pd.DataFrame:
    """One of the tables of the paper, as published.

    Args:
        name: `main_results`, `global_vs_layer`, `granularity`, `cost`,
            `calibration_sizes` or `boundary`.

    Returns:
        The CSV file as a frame; a dash in the paper is NaN.

    Raises:
        SpecError: there is no such table.
    """
    for folder in _FOLDERS:
        path = folder / f"{name}.csv"
        if path.is_file():
            return pd.read_csv(path)
    names = sorted({path.stem for folder in _FOLDERS for path in folder.glob("*.csv")})
    raise SpecError(
        f"no table {name!r} in {[str(folder) for folder in _FOLDERS]}: found "
        f"{names or 'no CSV file'}. Use the name of one of those."
    )


def paper_label(model: str, name: str) -> str:
    """Legend label of the paper's points of the curve `name`, for `model`."""
    short = model.removesuffix("-Base").removesuffix("-Chat")
    return f"paper: {name}, {short} (not comparable: other model and data)"


def short_name(model: str) -> str:
    """The family of one of the paper's models, as it stands beside its points."""
    return model.partition("MoE")[0].removesuffix("-")


def plain_name(method: str) -> str:
    """The name of a method without what differs between the paper's and ours.

    Example:
        >>> plain_name("D^2-MoE"), plain_name("moe-i2-like")
        ('d2moe', 'moei2')
    """
    letters = "".join(letter for letter in method.lower() if letter.isalnum())
    return letters.removesuffix("like")


def paper_dense(model: str) -> pd.Series:
    """The unpruned model's published WikiText-2 perplexity and mean task accuracy.

    Returns:
        Series with `perplexity` and `accuracy` (a fraction; the mean of the seven
        tasks, as the paper prints them to two digits).
    """
    table = paper_table("main_results")
    row = table[table["model"].eq(model) & table["method"].eq("Original")].iloc[0]
    return pd.Series(
        {
            "perplexity": float(row["wikitext2_ppl"]),
            "accuracy": float(np.mean([row[task] for task in PAPER_TASKS])),
        }
    )
