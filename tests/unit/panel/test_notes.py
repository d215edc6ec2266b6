"""What the panel is of is said above the controls; what may be overlooked, below."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from random_tables import random_table, small_table

from heapr_lab.importance.table import ImportanceTable
from heapr_lab.panel.answer import (
    cautions,
    cautions_html,
    emptied_layers,
    header_facts,
    judged_on_own,
    removed_share,
    rounded,
)
from heapr_lab.panel.opening import explore
from heapr_lab.panel.session import PruningSession
from heapr_lab.pruning.masks import KeepMask
from heapr_lab.pruning.options import Selection
from heapr_lab.text.calibration_spec import Calibration

DRAWN = {"corpus": "ptb", "seed": 3, "n_sequences": 128, "seq_len": 2048}


def made(calibration: dict[str, object], **provenance: object) -> ImportanceTable:
    """A table that says how it was measured."""
    table = small_table()
    recorded = {"calibration": calibration, **provenance}
    facts = table.metadata | {"N": 5000, "provenance": recorded}
    return ImportanceTable.from_frame(table.frame, **facts)


def test_a_table_alone_says_so():
    """It has the name of its model, not the folder, and neither dtype nor device."""
    table = made(DRAWN, model="/a/folder/moe")
    n_parameters = table.architecture.n_parameters
    assert header_facts(PruningSession(table)) == {
        "model": f"moe, {n_parameters:,} parameters, table only",
        "importance": f"sums for {len(table.estimators)} estimators over 5,000 "
        "predicted tokens",
        "calibration": "ptb, seed 3, 128 windows × 2,048 tokens",
    }


def test_what_was_not_recorded_is_not_made_up():
    """The table was made from a frame."""
    facts = header_facts(PruningSession(random_table(2, 2, 4)))
    assert facts["model"].startswith("not recorded, ")
    assert facts["importance"].endswith("over tokens not recorded")
    assert facts["calibration"] == "not recorded"
    merged = made(DRAWN, merged=[{"calibration": DRAWN}] * 2)  # as earlier versions did
    assert header_facts(PruningSession(merged))["calibration"] == "not recorded"


def test_own_text_is_named():
    """Windows that the model wrote, of all windows."""
    windows = {"corpus": "own text", "n_sequences": 32}
    facts = header_facts(PruningSession(made(DRAWN | {"joined": [windows]})))
    assert facts["calibration"].endswith("tokens, 32 of them own text")


def test_a_model_has_a_dtype_and_a_device(panel, bench):
    """Its size is the number of its weights."""
    facts = header_facts(panel.session)
    assert (facts["dtype"], facts["device"]) == ("float32", "cpu")
    size = sum(p.numel() for p in bench.model.parameters())
    assert facts["model"] == f"{Path(bench.name).name}, {size:,} parameters"
    assert all(text in panel.header.value for text in facts.values())


def test_the_header_follows_what_is_opened(bench, root):
    """The calibration is that of the table now, whatever it was at the start."""
    calibration = Calibration(str(root / "text.txt"), n_sequences=4, seq_len=32)
    panel = explore(bench, calibration=calibration, corpora=(), tasks=())
    assert "text.txt, seed 0, 4 windows × 32 tokens" in panel.header.value
    other = replace(calibration, seed=5)
    panel.session.table = bench.importance(other)
    panel.files.restore(panel.files.saved())
    assert "text.txt, seed 5, 4 windows × 32 tokens" in panel.header.value


def test_the_header_shows_names_as_text():
    """A corpus may be a file of any name."""
    panel = explore(made(DRAWN | {"corpus": "<b>ptb</b>"}))
    assert "&lt;b&gt;ptb" in panel.header.value


# --- cautions ---------------------------------------------------------------------


def mask(*layers: list[list[int]]) -> KeepMask:
    """A mask of layers 0, 2, 4, ..., each a row of kept atoms for each expert."""
    arrays = {2 * n: np.array(rows, dtype=bool) for n, rows in enumerate(layers)}
    return KeepMask.from_arrays(arrays)


def test_layers_that_lose_everything_are_named():
    """Their index in the model is given, for one or several."""
    half, none = [[1, 0], [0, 0]], [[0, 0], [0, 0]]
    assert emptied_layers(mask(half, half)) == ""
    assert emptied_layers(mask(half, none)).startswith("Layer 2 loses all")
    assert emptied_layers(mask(none, half, none)).startswith("Layers 0, 4 lose all")


@pytest.mark.parametrize(
    ("selection", "removed", "said"),
    [
        (Selection(0.6), 0.6, ""),
        (Selection(0.6), 0.61, ""),  # a point is not mentioned
        (Selection(0.6), None, ""),
        (
            Selection(0.6, structure="uniform", multiple=16),
            2 / 3,
            "Asked for 60.0% of the atoms, 66.7% are removed.",
        ),
        (
            Selection(0.6, granularity="expert", of="model"),
            0.75,
            "Asked for 60.0% of the parameters (model), 75.0% are removed.",
        ),
    ],
)
def test_asked_and_removed_are_both_said(selection, removed, said):
    """They are if they differ by more than a point."""
    assert rounded(selection, removed) == said


def test_removed_is_counted_as_the_ratio_is():
    """Both count atoms or parameters."""
    keep = mask([[1, 0, 0, 0]])
    row = {"parameter_reduction": 0.5}
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
def test_judging_on_the_calibration_s_text_is_said(corpora, corpus, said):
    """It is said only if nothing else was evaluated; a mixture is all of its parts."""
    text = judged_on_own(corpora, Calibration(corpus))
    assert bool(text) is said
    assert not said or corpus in text


def test_cautions_follow_the_controls():
    """They come with a selection and go with it, and when it is infeasible."""
    panel = explore(random_table(2, 4, 3), selection=Selection(0.25))
    assert panel.cautions.value == ""
    panel.controls.structure.value = "uniform"
    panel.controls.ratio.value = "60%"
    message = "Asked for 60.0% of the atoms, 66.7% are removed"
    assert message in panel.cautions.value
    assert panel.cautions.value.count('role="status"') == 1
    assert len(cautions(panel.session)) == panel.cautions.value.count("⚠")
    panel.controls.ratio.value = "90"
    assert panel.cautions.value == ""
    assert cautions_html(["<b>"]).count("&lt;b&gt;") == 1
