"""What several files of unit tests start from: a tiny model, a panel, a table."""

from pathlib import Path
from typing import Any

import pytest
from commands import run, text_of
from families import tiny_model
from tiny_folder import write_model, write_text, write_tokenizer
from torch import nn
from transformers import AutoTokenizer

from heapr_lab.panel.panel import Explorer
from heapr_lab.panel.session import PruningSession
from heapr_lab.text.calibration_spec import Calibration
from heapr_lab.workbench.workbench import Workbench, open_workbench


@pytest.fixture(scope="session")
def model() -> nn.Module:
    """A tiny qwen2_moe in float64: 4 experts of 8 atoms in each of 2 layers."""
    return tiny_model("qwen2_moe")


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """One token for each byte, and a special one, 0."""
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model in `moe`, and a text."""
    folder = tmp_path_factory.mktemp("unit")
    write_model(folder / "moe")
    write_text(folder / "text.txt")
    return folder


@pytest.fixture(scope="module")
def bench(root: Path) -> Workbench:
    """The tiny model on a bench."""
    return open_workbench(str(root / "moe"), profile="small")


@pytest.fixture
def panel(bench: Workbench, root: Path) -> Explorer:
    """A panel that can evaluate the masked model on the text."""
    text = str(root / "text.txt")
    table = bench.measure(bench.test_windows(text))
    calibration = Calibration(text)
    session = PruningSession(table, workbench=bench, calibration=calibration)
    panel = Explorer(session, corpora=(text,), tasks=(f"continuation:{text}",))
    panel.weights.weights.value = "unchanged"
    return panel


@pytest.fixture(scope="module")
def folder(root: Path) -> Path:
    """The model `moe`, the text `text.txt`, and a table of the model."""
    run("score", root / "moe", "--out", root / "table.parquet", *text_of(root))
    return root
