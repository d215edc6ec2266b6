"""What `benchmarks/README.md` says of learned widths is what was measured."""

import pandas as pd
import pytest

from benchmarks.machine import RESULTS

LAB = ("lab", "fine", "unbalanced", "upcycled")
WIKITEXT2 = ["delta_nll wikitext2", "stderr wikitext2"]


@pytest.fixture(scope="module")
def measured() -> pd.DataFrame:
    """Every row, by model, scores, epochs, and whether it is compensated."""
    rows = pd.read_csv(RESULTS / "learned_widths.csv")
    return rows.set_index(["model", "scores", "epochs", "compensated"]).sort_index()


@pytest.mark.parametrize("scores", ["fisher", "heapr"])
def test_compensation_saves_more_on_smolmoe(
    measured: pd.DataFrame, scores: str
) -> None:
    """The learned mask loses more than the other compensated, and breaks with it."""
    losses = measured["delta_nll wikitext2"]["smolmoe"][scores]
    assert losses[0, True] < losses[2, False] < losses[0, False] < losses[2, True]


@pytest.mark.parametrize("model", LAB)
def test_it_is_level_with_elimination_on_lab_models(
    measured: pd.DataFrame, model: str
) -> None:
    """Both compensated, the difference is within the sum of two standard errors."""
    eliminated, error = measured.loc[(model, "elimination", 0, True), WIKITEXT2]
    learned, other = measured.loc[(model, "fisher", 2, True), WIKITEXT2]
    assert abs(learned - eliminated) <= 2 * (error + other)
