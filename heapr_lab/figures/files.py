"""Figures and tables as files: the same input gives the same bytes."""

import io
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from heapr_lab.figures.style import styled
from heapr_lab.storage.files import replacing
from heapr_lab.storage.hashing import canonical_json


@styled
def save_figure(
    figure: Figure, stem: str | Path, *, provenance: dict[str, Any]
) -> list[Path]:
    """Write `figure` as `stem`.png and `stem`.pdf and return the two paths.

    The files contain no date and no version, so that equal figures give equal bytes.
    `provenance` is the Description of the PNG, where `read_provenance` reads it, and
    the Keywords of the PDF.

    Args:
        figure: the figure to write; its layout is fixed.
        stem: path without a suffix; its folder is created.
        provenance: plain data that says where the numbers come from.
    """
    title, text = Path(stem).name, canonical_json(provenance)
    metadata = {
        "png": {"Description": text, "Title": title, "Software": None},
        "pdf": {
            "Keywords": text,
            "Title": title,
            "Creator": "heapr-lab",
            "Producer": None,
            "CreationDate": None,
        },
    }
    figure.draw_without_rendering()
    figure.set_layout_engine("none")  # a second layout may differ in the last bits
    contents = {}
    for suffix, fields in metadata.items():
        buffer = io.BytesIO()
        figure.savefig(buffer, format=suffix, metadata=fields)
        contents[suffix] = buffer.getvalue()
    return write_files(stem, contents)


def draw_files(
    data: pd.DataFrame,
    figure_of: Callable[[pd.DataFrame], Figure],
    stem: Path,
    *,
    table_of: Callable[[pd.DataFrame], pd.DataFrame] | None = None,
    provenance: dict[str, Any],
) -> list[Path]:
    """Draw `data` and write the figure, the rows, and the table, if it has one.

    Args:
        data: what the figure and the table are made from.
        figure_of: draws it.
        stem: path of the figure without a suffix; the rows are in `data/` beside it.
        table_of: makes the table for readers.
        provenance: plain data that says where the numbers come from.

    Returns:
        The paths of figure (png, pdf), rows (csv) and table (csv, md).
    """
    figure, rows = figure_of(data), rows_text(data).encode()
    written = save_figure(figure, stem, provenance=provenance | {"figure": stem.name})
    plt.close(figure)
    written += write_files(stem.parent / "data" / stem.name, {"csv": rows})
    if table_of is not None:
        written += write_table(table_of(data), stem.with_name(f"{stem.name}_table"))
    return written


def write_table(frame: pd.DataFrame, stem: str | Path) -> list[Path]:
    """Write `frame` as `stem`.csv and `stem`.md and return the paths.

    The CSV file has every digit. The Markdown file is for readers: about four
    significant digits, a dash for a missing value.

    Args:
        frame: the table; its index is not written.
        stem: path without a suffix; its folder is created.
    """
    texts = {"csv": rows_text(frame), "md": table_markdown(frame)}
    return write_files(stem, {name: text.encode() for name, text in texts.items()})


def write_files(stem: str | Path, contents: Mapping[str, bytes]) -> list[Path]:
    """Write `contents`, by suffix, to files beside each other and return their paths.

    Args:
        stem: path without a suffix; its folder is created.
        contents: what each file contains; the suffixes are without a dot.
    """
    stem = Path(stem)
    paths = [stem.with_name(f"{stem.name}.{suffix}") for suffix in contents]
    for path, content in zip(paths, contents.values(), strict=True):
        with replacing(path) as temporary:
            temporary.write_bytes(content)
    return paths


def rows_text(frame: pd.DataFrame) -> str:
    """`frame` as CSV with every digit and without the index."""
    text: str = frame.to_csv(index=False, lineterminator="\n")
    return text


def table_markdown(frame: pd.DataFrame) -> str:
    """`frame` as a GitHub table, with numbers right-aligned."""
    numeric = [pd.api.types.is_numeric_dtype(dtype) for dtype in frame.dtypes]
    rules = ["---:" if right else "---" for right in numeric]
    columns = [format_column(frame[column]) for column in frame.columns]
    lines = [map(str, frame.columns), rules, *zip(*columns, strict=True)]
    escaped = [[cell.replace("|", r"\|") for cell in line] for line in lines]
    return "".join(f"| {' | '.join(line)} |\n" for line in escaped)


def format_column(values: pd.Series) -> list[str]:
    """`values` as text: the same number of decimals for all, a dash if missing.

    The median has four significant digits; whole numbers have no decimals.

    Example:
        >>> format_column(pd.Series([28.3149, 9.5, float("nan")]))
        ['28.31', '9.50', '—']
    """
    if not pd.api.types.is_float_dtype(values.dtype):
        return ["—" if pd.isna(value) else str(value) for value in values]
    sizes = values.abs()[values.abs().gt(0) & np.isfinite(values)]
    # 100 * 0.3 counts as a whole number
    if sizes.empty or np.allclose(sizes, sizes.round(), rtol=1e-12):
        decimals = 0
    else:
        decimals = min(8, max(0, 3 - math.floor(math.log10(sizes.median()))))
    return ["—" if pd.isna(value) else f"{value:.{decimals}f}" for value in values]
