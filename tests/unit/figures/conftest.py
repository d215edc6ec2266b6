"""Figures are drawn without a window, and closed after each test."""

from collections.abc import Iterator

import matplotlib as mpl
import matplotlib.pyplot as plt
import pandas as pd
import pytest
from figure_rows import evaluation_rows, saving_rows


@pytest.fixture(autouse=True)
def _close_figures() -> Iterator[None]:
    mpl.use("Agg")
    yield
    plt.close("all")


@pytest.fixture
def results() -> pd.DataFrame:
    """Perplexity 20 · (1 + harm · ratio) and accuracy 0.5 · (1 − harm · ratio)."""
    return evaluation_rows()


@pytest.fixture
def savings() -> pd.DataFrame:
    """0.75 of the model is routed; atoms save 0.4 of their ratio in FLOPs."""
    return saving_rows()
