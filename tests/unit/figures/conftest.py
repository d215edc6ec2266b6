"""Figures are drawn without a window, and closed after each test."""

from collections.abc import Iterator

import matplotlib as mpl
import matplotlib.pyplot as plt
import pytest


@pytest.fixture(autouse=True)
def _close_figures() -> Iterator[None]:
    mpl.use("Agg")
    yield
    plt.close("all")
