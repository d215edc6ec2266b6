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


Shown = dict[str, tuple[Any, list[str]]]
"""By the name of its class, an object and what its card must say."""


@pytest.fixture(scope="module")
def shown() -> Shown:
    """An object of each class."""
    settings = {"scope": "global", "granularity": "atom", "structure": "ragged"}
    keep = KeepMask.from_arrays({0: [[True, False]]}, estimator=NASTY, **settings)
    windows = CalibrationSet(
        torch.zeros(3, 5, dtype=torch.long), {"corpus": NASTY, "seed": 7}
    )
    bench = Workbench(
        tiny_model("mixtral"), None, name=NASTY, profile=PROFILES["small"]
    )
    cards: list[tuple[Any, list[str]]] = [
        (keep, ["50.00%", "1 of 2"]),
        (ImportanceTable.from_frame(pd.DataFrame(_ROWS), N=1234), ["1,234", "2"]),
        (windows, ["3 of 5 tokens", "12", "7"]),
        (Corpus(NASTY, "test", ("ab", "c"), NASTY), ["test", "2", "3"]),
        (Perplexity(20.1, 3.0, 4321), ["20.1", "3.0000", "4,321"]),
        (Divergence(0.0123, 0.99, 4321), ["0.0123", "99.00%", "4,321"]),
        (Selection(0.25, min_atoms=3), ["0.25 of the atoms", "at least 3"]),
        (Calibration(NASTY, 8, seed=1), [NASTY, "8", "1"]),
        (Setting(0.25, calibration=NASTY), ["0.25", "heapr", "global"]),
        (bench, ["small: 8 calibration windows of 64 tokens", "Mixtral"]),
        (plan(QWEN3, memory="80GB"), ["30.5 B", "6,144", "80 GB are free"]),
        (
            Method("mine", NASTY, "Nobody 2026", "atoms", print, ("Never run.",)),
            ["mine", "Nobody 2026", "Never run."],
        ),
        (
            AtomCompression(Made(NASTY, 0.25, 7, {"alpha": 2}), keep, {0: 12}),
            ["0.25", "0.5", "alpha=2", "7"],
        ),
    ]
    return {type(value).__name__: (value, facts) for value, facts in cards}


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


def test_a_card_is_well_formed_escaped_and_of_any_theme(shown):
    """Key numbers are said, markup in names is text, no colour ignores the theme."""
    for name, (value, facts) in shown.items():
        page = ElementTree.fromstring(value._repr_html_())
        text = " ".join(page.itertext())
        assert [number for number in facts if number not in text] == [], name
        tags = {element.tag for element in page.iter()}
        assert tags <= {"div", "strong", "table", "tr", "td", "span"}, name
        styles = [element.get("style", "") for element in page.iter()]
        assert [c for style in styles for c in colours(style)] == [], name


def test_a_repr_is_short(shown):
    """One line that begins with the class."""
    for name, (value, _) in shown.items():
        line = repr(value)
        assert line.startswith(f"{name}(")
        assert len(line) < 300
        assert "\n" not in line
        assert " object at 0x" not in line


def test_every_public_class_is_shown(shown):
    """Every public name that is a class, errors aside."""
    public = [getattr(heapr_lab, name) for name in heapr_lab.__all__]
    classes = {value.__name__ for value in public if isinstance(value, type)}
    abstract = {
        base.__name__ for value, _ in shown.values() for base in type(value).__bases__
    }
    assert classes - set(shown) - abstract == {"HeaprLabError"}
