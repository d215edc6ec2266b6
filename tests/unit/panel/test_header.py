"""The line above the controls says what the panel is of, as it is now."""

from dataclasses import replace
from pathlib import Path

import pytest
from random_tables import random_table, small_table

from heapr_lab.importance.table import ImportanceTable
from heapr_lab.panel.header import header_facts
from heapr_lab.panel.panel import Explorer, explore
from heapr_lab.panel.session import PruningSession
from heapr_lab.text.calibration_spec import Calibration
from heapr_lab.workbench.workbench import Workbench

DRAWN = {"corpus": "ptb", "seed": 3, "n_sequences": 128, "seq_len": 2048}


def made(calibration: dict[str, object], **provenance: object) -> ImportanceTable:
    """A table that says how it was measured."""
    table = small_table()
    recorded = {"calibration": calibration, **provenance}
    facts = table.metadata | {"N": 5000, "provenance": recorded}
    return ImportanceTable.from_frame(table.frame, **facts)


def test_a_table_alone_says_so() -> None:
    """It has the name of its model, not the folder, and neither dtype nor device."""
    table = made(DRAWN, model="/a/folder/moe")
    n_parameters = table.architecture.n_parameters
    assert header_facts(PruningSession(table)) == {
        "model": f"moe, {n_parameters:,} parameters, table only",
        "importance": f"sums for {len(table.estimators)} estimators over 5,000 "
        "predicted tokens",
        "calibration": "ptb, seed 3, 128 windows × 2,048 tokens",
        "context": "2,048 tokens",
    }


def test_what_was_not_recorded_is_not_made_up() -> None:
    """The table was made from a frame; the context that is counted at is said."""
    facts = header_facts(PruningSession(random_table(2, 2, 4)))
    assert facts["model"].startswith("not recorded, ")
    assert facts["importance"].endswith("over tokens not recorded")
    assert facts["calibration"] == "not recorded"
    assert facts["context"] == "not recorded: 2,048 tokens assumed"


def test_own_text_and_merged_runs_are_named() -> None:
    """Windows that the model wrote, of all windows; each run of a merged table."""
    windows = {"corpus": "own text", "n_sequences": 32}
    facts = header_facts(PruningSession(made(DRAWN | {"joined": [windows]})))
    assert facts["calibration"].endswith("tokens, 32 of them own text")
    runs = [{"calibration": DRAWN}, {"calibration": DRAWN | {"seed": 4}}]
    facts = header_facts(PruningSession(made({}, merged=runs)))
    assert facts["calibration"] == (
        "ptb, seed 3, 128 windows × 2,048 tokens; and "
        "ptb, seed 4, 128 windows × 2,048 tokens"
    )
    assert facts["context"].startswith("not recorded")


def test_a_model_has_a_dtype_and_a_device(panel: Explorer, bench: Workbench) -> None:
    """Its size is the number of its weights."""
    facts = header_facts(panel.session)
    assert (facts["dtype"], facts["device"]) == ("float32", "cpu")
    size = sum(p.numel() for p in bench.model.parameters())
    assert facts["model"] == f"{Path(bench.name).name}, {size:,} parameters"
    assert all(text in panel.header.value for text in facts.values())


def test_the_header_follows_what_is_opened(bench: Workbench, root: Path) -> None:
    """The calibration is that of the table now, whatever it was at the start."""
    calibration = Calibration(str(root / "text.txt"), n_sequences=4, seq_len=32)
    panel = explore(bench, calibration=calibration, corpora=("ptb",), tasks=())
    assert isinstance(panel, Explorer)
    assert "text.txt, seed 0, 4 windows × 32 tokens" in panel.header.value
    other = replace(calibration, seed=5)
    panel.session.table = bench.importance(other)
    panel.files.restore(panel.files.saved())
    assert "text.txt, seed 5, 4 windows × 32 tokens" in panel.header.value


@pytest.mark.parametrize("corpus", ["<b>ptb</b>"])
def test_the_header_shows_names_as_text(corpus: str) -> None:
    """A corpus may be a file of any name."""
    panel = explore(made(DRAWN | {"corpus": corpus}))
    assert isinstance(panel, Explorer)
    assert "&lt;b&gt;ptb" in panel.header.value
