"""What several files of unit tests start from: a tiny model and its table."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from commands import run, text_of
from families import tiny_model
from keeps import random_keep
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from tiny_folder import write_model, write_text
from torch import nn

from heapr_lab import KeepMask, Workbench, open_workbench
from heapr_lab.models.folders import read_weights
from heapr_lab.panel import pictures


@pytest.fixture(autouse=True, scope="session")
def one_layout() -> Iterator[None]:
    """Pictures of one size are laid out once, which is half of opening a panel."""
    layouts = {}
    settle = pictures._settle

    def settled(figure: Figure) -> FigureCanvasAgg:
        size = tuple(figure.get_size_inches())
        if size not in layouts:
            canvas = settle(figure)
            layouts[size] = [ax.get_position() for ax in figure.axes]
            return canvas
        figure.set_layout_engine("none")
        for ax, box in zip(figure.axes, layouts[size], strict=True):
            ax.set_position(box)
        return FigureCanvasAgg(figure)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pictures, "_settle", settled)
        yield


@pytest.fixture(scope="session")
def model() -> nn.Module:
    """A tiny qwen2_moe in float64: 4 experts of 8 atoms in each of 2 layers."""
    return tiny_model("qwen2_moe")


@pytest.fixture(scope="session")
def root(tmp_path_factory) -> Path:
    """A tiny model in `moe`, and a text."""
    folder = tmp_path_factory.mktemp("unit")
    write_model(folder / "moe")
    write_text(folder / "text.txt")
    return folder


@pytest.fixture(scope="session")
def source(root) -> Path:
    """The folder of the tiny model, which nothing changes."""
    return root / "moe"


@pytest.fixture
def keep(source) -> KeepMask:
    """The atoms of it that stay."""
    return random_keep(read_weights(source))


@pytest.fixture(scope="module")
def bench(source) -> Workbench:
    """The tiny model on a bench."""
    return open_workbench(str(source), profile="small")


@pytest.fixture(scope="session")
def folder(root) -> Path:
    """The model `moe`, the text `text.txt`, and a table of the model."""
    run("score", root / "moe", "--out", root / "table.parquet", *text_of(root))
    return root
