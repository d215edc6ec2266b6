"""What notebooks show for the objects people get: readable, escaped, in any theme."""

import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pandas as pd
import pytest
import torch
from families import tiny_model

import heapr_lab
from heapr_lab.evaluation.perplexity import Divergence, Perplexity
from heapr_lab.importance.table import ImportanceTable
from heapr_lab.methods.compression import AtomCompression, Made
from heapr_lab.methods.method import Method
from heapr_lab.pruning.masks import KeepMask
from heapr_lab.pruning.options import Selection
from heapr_lab.streaming.plan import plan
from heapr_lab.text.calibration import CalibrationSet
from heapr_lab.text.calibration_spec import Calibration
from heapr_lab.text.corpora import Corpus
from heapr_lab.workbench.settings import PROFILES, Setting
from heapr_lab.workbench.workbench import Workbench

QWEN3 = Path(__file__).parents[1] / "data/shapes/Qwen3-30B-A3B"
NASTY = "<script>alert('&')</script>"
_ROWS = {"layer": [0, 0], "expert": [0, 0], "atom": [0, 1], "sum_hg2": [2.0, 6]}


@pytest.fixture(scope="module")
def cards() -> list[tuple[Any, list[str]]]:
    """An object of each class with a card, and what it must say."""
    settings = {"scope": "global", "granularity": "atom", "structure": "ragged"}
    keep = KeepMask.from_arrays({0: [[True, False]]}, estimator=NASTY, **settings)
    return [
        (keep, ["50.00%", "1 of 2"]),
        (ImportanceTable.from_frame(pd.DataFrame(_ROWS), N=1234), ["1,234", "2"]),
        (Selection(0.25, min_atoms=3), ["0.25 of the atoms", "at least 3"]),
    ]


def colours(style: str) -> list[str]:
    """Colours in a style that no variable of the theme stands before."""
    plain = re.sub(r"var\((?:[^()]|\([^()]*\))*\)", "", style)
    properties = [part.split(":", 1) for part in plain.split(";") if ":" in part]
    return [
        value
        for name, value in properties
        if re.search("color|background|border$", name)
        and re.search(r"#|rgb|hsl|\b(black|white|gr[ae]y|red|blue|green)\b", value)
    ]


def test_a_card_is_well_formed_escaped_and_of_any_theme(cards):
    """Key numbers are said, markup in names is text, no colour ignores the theme."""
    for value, facts in cards:
        name = type(value).__name__
        page = ElementTree.fromstring(value._repr_html_())
        text = " ".join(page.itertext())
        assert [number for number in facts if number not in text] == [], name
        tags = {element.tag for element in page.iter()}
        assert tags <= {"div", "strong", "table", "tr", "td", "span"}, name
        styles = [element.get("style", "") for element in page.iter()]
        assert [c for style in styles for c in colours(style)] == [], name


def test_a_repr_is_short(cards):
    """One line that begins with the class, of every public class but the error."""
    keep = cards[0][0]
    values = [
        *(value for value, _ in cards),
        CalibrationSet(torch.zeros(3, 5, dtype=torch.long), {"corpus": NASTY}),
        Calibration(NASTY, 8, seed=1),
        Setting(0.25, calibration=NASTY),
        Perplexity(20.1, 3.0, 4321),
        Divergence(0.0123, 0.99, 4321),
        Corpus(NASTY, "test", ("ab", "c"), NASTY),
        Workbench(tiny_model("mixtral"), None, name=NASTY, profile=PROFILES["small"]),
        plan(QWEN3, memory="80GB"),
        Method("mine", NASTY, "Nobody 2026", "atoms", print, ("Never run.",)),
        AtomCompression(Made(NASTY, 0.25, 7, {"alpha": 2}), keep, {0: 12}),
    ]
    for value in values:
        line = repr(value)
        assert line.startswith(f"{type(value).__name__}(")
        assert len(line) < 300
        assert "\n" not in line
        assert " object at 0x" not in line
    public = [getattr(heapr_lab, name) for name in heapr_lab.__all__]
    classes = {value.__name__ for value in public if isinstance(value, type)}
    known = {base.__name__ for value in values for base in type(value).__mro__}
    assert classes - known == {"HeaprLabError"}
