"""What may be overlooked is said, and nothing is said where there is nothing."""

import numpy as np
import pandas as pd
import pytest
from random_tables import random_table

from heapr_lab.panel.cautions import (
    cautions,
    cautions_html,
    emptied_experts,
    emptied_layers,
    judged_on_own,
    removed_share,
    rounded,
)
from heapr_lab.panel.panel import Explorer, explore
from heapr_lab.pruning.masks import KeepMask
from heapr_lab.pruning.options import Selection
from heapr_lab.text.calibration_spec import Calibration


def mask(*layers: list[list[int]]) -> KeepMask:
    """A mask of layers 0, 2, 4, ..., each a row of kept atoms for each expert."""
    arrays = {2 * n: np.array(rows, dtype=bool) for n, rows in enumerate(layers)}
    return KeepMask.from_arrays(arrays)


def test_layers_that_lose_everything_are_named() -> None:
    """Their index in the model is given, for one or several."""
    half, none = [[1, 0], [0, 0]], [[0, 0], [0, 0]]
    assert emptied_layers(mask(half, half)) == ""
    assert emptied_layers(mask(half, none)).startswith("Layer 2 loses all")
    assert emptied_layers(mask(none, half, none)).startswith("Layers 0, 4 lose all")


def test_experts_that_lose_everything_are_counted() -> None:
    """The layers may have different sizes."""
    assert emptied_experts(mask([[1, 0], [0, 1]])) == ""
    keep = mask([[1, 0], [0, 0]], [[1, 1], [1, 0]])
    assert emptied_experts(keep) == "1 of 4 experts loses all atoms."
    assert emptied_experts(mask([[0], [0]], [[1, 1]])).startswith("2 of 3 experts lose")


@pytest.mark.parametrize(
    ("selection", "removed", "said"),
    [
        (Selection(0.6), 0.6, ""),
        (Selection(0.6), 0.61, ""),  # a point is not mentioned
        (Selection(0.6), None, ""),
        (
            Selection(0.6, structure="uniform", multiple=16),
            2 / 3,
            "Asked for 60.0% of the atoms, 66.7% are removed: widths of the structure "
            "uniform are rounded down to a multiple of 16.",
        ),
        (
            Selection(0.6, granularity="expert", of="model"),
            0.75,
            "Asked for 60.0% of the parameters (model), 75.0% are removed: experts are "
            "pruned whole.",
        ),
        (
            Selection(0.6, scope="layer", exclude_layers=(0,)),
            0.3,
            "Asked for 60.0% of the atoms, 30.0% are removed: with the scope layer no "
            "other layer makes up for those not pruned.",
        ),
    ],
)
def test_asked_and_removed_are_both_said(
    selection: Selection, removed: float | None, said: str
) -> None:
    """They are if they differ by more than a point, with the reason."""
    assert rounded(selection, removed) == said


def test_removed_is_counted_as_the_ratio_is() -> None:
    """Both count atoms or parameters."""
    keep = mask([[1, 0, 0, 0]])
    row = pd.DataFrame({"parameter_reduction": [0.5]})
    for unit, share in {"atoms": 0.75, "model": 0.5}.items():
        removed = removed_share(Selection(0.5, of=unit), keep, row)
        assert removed == pytest.approx(share)
    assert removed_share(Selection(0.5, of="model"), keep, None) is None
    assert removed_share(Selection(0.5), keep, None) == 0.75


@pytest.mark.parametrize(
    ("corpora", "corpus", "said"),
    [
        (["ptb"], "ptb", True),
        ([], "ptb", False),
        (["ptb", "pydocs"], "ptb", False),
        (["pydocs"], "ptb", False),
        (["ptb"], "0.5*ptb + 0.5*pydocs", True),
        (["ptb", "pydocs"], "0.5*ptb + 0.5*pydocs", True),
        (["ptb", "wikitext2"], "0.5*ptb + 0.5*pydocs", False),
    ],
)
def test_judging_on_the_calibration_s_text_is_said(
    corpora: list[str], corpus: str, said: bool
) -> None:
    """It is said only if nothing else was evaluated; a mixture is all of its parts."""
    text = judged_on_own(corpora, Calibration(corpus))
    assert bool(text) is said
    assert not said or corpus in text


def test_cautions_follow_the_controls() -> None:
    """They come with a selection and go with it, and when it is infeasible."""
    panel = explore(random_table(2, 4, 3), selection=Selection(0.25))
    assert isinstance(panel, Explorer)
    assert panel.cautions.value == ""
    panel.controls.structure.value = "uniform"
    panel.controls.ratio.value = "60%"
    message = "Asked for 60.0% of the atoms, 66.7% are removed"
    assert message in panel.cautions.value
    assert panel.cautions.value.count('role="status"') == 1
    panel.controls.structure.value = "ragged"
    panel.controls.ratio.value = "90%"
    gone = (panel.session.keep.widths() == 0).sum().sum()
    assert f"{gone} of 8 experts lose all atoms" in panel.cautions.value
    assert len(cautions(panel.session)) == panel.cautions.value.count("⚠")
    panel.controls.ratio.value = "90"
    assert panel.cautions.value == ""
    assert cautions_html(["<b>"]).count("&lt;b&gt;") == 1
