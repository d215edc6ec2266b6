"""What two masks remove, in the tab that compares: against Python sets."""

import base64
import re
from dataclasses import replace
from pathlib import Path

import pytest
from html_text import cells, marked
from matplotlib import pyplot as plt
from pressing import cancel, failed, press, stale
from random_tables import random_table
from tiny_folder import write_text

from heapr_lab.inspection.activations import top_contexts
from heapr_lab.inspection.mask_diff import ScoredMask, overlap_text, ranks
from heapr_lab.panel.mask_diff_section import MaskDiffSection
from heapr_lab.panel.panel import Explorer, explore
from heapr_lab.panel.session import PruningSession
from heapr_lab.pruning.masks import KeepMask
from heapr_lab.pruning.options import Selection
from heapr_lab.recipes.weights import MASKED, WeightRecipe
from heapr_lab.text.calibration_spec import Calibration
from heapr_lab.workbench.workbench import Workbench

HALF = Selection(0.5)
Atom = tuple[int, int, int]


@pytest.fixture(scope="module")
def corpora(root: Path) -> tuple[str, str, str]:
    """Three texts, of which no other test reads the second; the last is missing."""
    names = root / "one.txt", root / "other.txt"
    write_text(names[0], n_texts=60)
    words = " ".join(f"{number} in a section" for number in range(2000))
    names[1].write_text(words, encoding="utf-8")
    return str(names[0]), str(names[1]), str(root / "missing.txt")


@pytest.fixture
def session(bench: Workbench, corpora: tuple[str, str, str]) -> PruningSession:
    """The tiny model measured on the first text, half of it pruned."""
    calibration = Calibration(corpora[0])
    table = bench.importance(calibration)
    state = PruningSession(table, workbench=bench, calibration=calibration)
    state.choose(HALF)
    return state


@pytest.fixture
def section(session: PruningSession, corpora: tuple[str, str, str]) -> MaskDiffSection:
    """The section with one pin."""
    view = MaskDiffSection(session, corpora=corpora)
    view.offer([("A <b>", Selection(0.25), WeightRecipe())])
    return view


def removed(keep: KeepMask) -> set[Atom]:
    """The atoms that a mask removes."""
    return {
        (layer, expert, atom)
        for layer in keep.layers
        for expert, row in enumerate(keep.by_layer(layer))
        for atom, kept in enumerate(row)
        if not kept
    }


def atoms_shown(section: MaskDiffSection) -> list[list[str]]:
    """The rows of the table of single atoms."""
    return [row for row in cells(section.compare.value) if len(row) == 8]


def test_a_pin_and_the_current_selection(section: MaskDiffSection) -> None:
    """The atoms of one alone, the one that the other needs most first."""
    section.b.value = "pin A <b>"
    press(section.compare)
    table = section.session.table
    a = ScoredMask.select("current selection", table, HALF)
    b = ScoredMask.select("pin A <b>", table, Selection(0.25))
    only = removed(a.keep) - removed(b.keep)
    assert removed(b.keep) < removed(a.keep)  # of the same scores
    rank = dict(zip(_keys(a.keep), ranks(a, b)[1], strict=True))
    expected = sorted(only, key=lambda atom: -rank[atom])[:20]
    rows = atoms_shown(section)
    assert [tuple(map(int, row[:3])) for row in rows] == expected
    assert {row[3] for row in rows} == {"current selection"}
    assert rows[0][7] == f"{rank[expected[0]]:.1%}"
    page = section.compare.value
    text = overlap_text(a, b).replace("<", "&lt;").replace(">", "&gt;")
    assert text in page
    assert "pin A &lt;b&gt;" in page
    assert "<b>" not in page.replace("<b style", "")
    assert section.alone is not None
    assert len(section.alone) == len(only)
    assert "calibrated on" not in page


def test_masks_that_weights_choose_are_compared_once_they_are_known(
    section: MaskDiffSection,
) -> None:
    """The switch and a pin choose masks; the switch makes the result old only then."""
    section.b.value = "pin A <b>"
    press(section.compare)
    section.session.recipe = WeightRecipe("compensated")
    section.check()
    assert not stale(section.compare)
    section.session.recipe = WeightRecipe("compress")
    section.check()
    assert stale(section.compare)
    assert "not known yet" in failed(section.compare)
    section.session.recipe = MASKED
    section.offer([("A <b>", Selection(0.25), WeightRecipe("compress"))])
    assert "not known yet" in failed(section.compare)
    chosen = section.session.keep_of(Selection(0.4, "random"))
    section.session._chosen[Selection(0.25), WeightRecipe("compress")] = chosen
    press(section.compare)
    a = section.session.keep
    assert section.alone is not None
    assert len(section.alone) == len(removed(a) ^ removed(chosen))


def _keys(keep: KeepMask) -> list[Atom]:
    return [
        (layer, expert, atom)
        for layer, (n_experts, d_inter) in keep.shapes().items()
        for expert in range(n_experts)
        for atom in range(d_inter)
    ]


def test_another_corpus_is_measured(
    section: MaskDiffSection, corpora: tuple[str, str, str], bench: Workbench
) -> None:
    """The mask is that of its own table, and the layers are those of both masks."""
    name = f"current selection, on {corpora[1]}"
    section.b.value = name
    steps: list[str] = []
    section.compare.text.observe(lambda change: steps.append(change["new"]), "value")
    press(section.compare)
    assert any("window: 8 of 8" in step for step in steps)
    a = section.session.keep
    calibration = replace(section.session.calibration, corpus=corpora[1])
    b = ScoredMask.select(name, bench.importance(calibration), HALF)
    assert removed(a) != removed(b.keep)
    by_layer = [row for row in cells(section.compare.value) if len(row) == 7]
    assert [int(row[4]) for row in by_layer] == [
        sum(atom[0] == layer for atom in removed(a) & removed(b.keep))
        for layer in a.layers
    ]
    shown = {tuple(map(int, row[:3])) for row in atoms_shown(section)}
    assert shown <= removed(a) ^ removed(b.keep)
    assert f"names no corpus is calibrated on {corpora[0]}" in section.compare.value


def test_the_picture_is_in_the_page_and_in_no_notebook(
    section: MaskDiffSection,
) -> None:
    """A PNG with words in its place, which pyplot does not know of."""
    section.b.value = "pin A <b>"
    before = plt.get_fignums()
    press(section.compare)
    match = re.search(
        r'<img class="heapr-picture" alt="Left: [^"]+" [^>]*base64,([^"]+)"',
        section.compare.value,
    )
    assert match is not None
    assert base64.b64decode(match[1]).startswith(b"\x89PNG")
    assert plt.get_fignums() == before


def test_contexts_of_an_atom(
    section: MaskDiffSection, corpora: tuple[str, str, str], bench: Workbench
) -> None:
    """They are searched where the mask that keeps the atom was calibrated."""
    section.b.value = f"current selection, on {corpora[1]}"
    press(section.compare)
    assert section.alone is not None
    rows = section.alone.head(20)
    assert len(section.atom.options) == len(rows)
    for side, corpus in (("a", corpora[1]), ("b", corpora[0])):
        number = rows["removed_by"].tolist().index(side)
        section.atom.index = number
        press(section.show_contexts)
        row = rows.iloc[number]
        place = {name: int(row[name]) for name in ("layer", "expert", "atom")}
        calibration = replace(section.session.calibration, corpus=corpus)
        windows = bench.calibration_set(calibration)
        expected = top_contexts(
            bench.model, windows, tokenizer=bench.tokenizer, **place
        )
        assert section.contexts is not None
        assert section.contexts["h"].tolist() == expected["h"].tolist()
        page = section.show_contexts.value
        assert len(marked(page)) == len(expected)
        assert f"8 windows of {windows.label}" in page
        assert place["layer"] == int(re.findall(r"Layer (\d+)", page)[0])
        assert not stale(section.show_contexts)
    section.atom.index = 0 if section.atom.index else 1
    assert stale(section.show_contexts)
    assert not stale(section.compare)


def test_results_go_out_of_date(section: MaskDiffSection) -> None:
    """The selection, a list, or a pin of the same name ages them; they come back."""
    section.b.value = "pin A <b>"
    press(section.compare)
    press(section.show_contexts)
    shown = section.compare, section.show_contexts
    assert not any(map(stale, shown))
    section.session.choose(Selection(0.6))
    section.check()
    assert all(map(stale, shown))
    section.session.choose(HALF)
    section.check()
    assert not any(map(stale, shown))
    section.offer([("A <b>", Selection(0.3), WeightRecipe())])
    assert section.b.value == "pin A <b>"
    assert all(map(stale, shown))
    section.offer(
        [("A <b>", Selection(0.25), WeightRecipe()), ("B", HALF, WeightRecipe())]
    )
    assert not any(map(stale, shown))
    section.a.value = "pin B"
    assert all(map(stale, shown))


def test_a_pin_of_the_same_mask_is_all_in_common(section: MaskDiffSection) -> None:
    """No atom is offered, and text says so in place of the table."""
    section.offer([("A", HALF, WeightRecipe())])
    section.b.value = "pin A"
    press(section.compare)
    assert "removes 100.0% of" in section.compare.value
    assert "Both remove the same atoms" in section.compare.value
    assert section.atom.options == (("none: both remove the same", None),)
    assert "no atom is chosen" in failed(section.show_contexts)


def test_an_error_leaves_no_result(
    section: MaskDiffSection, corpora: tuple[str, str, str]
) -> None:
    """What was shown is gone, with the atoms and their contexts."""
    section.b.value = "pin A <b>"
    press(section.compare)
    press(section.show_contexts)
    section.b.value = f"current selection, on {corpora[2]}"
    assert "missing.txt" in failed(section.compare)
    assert section.compare.value == section.show_contexts.value == ""
    assert section.sides is section.alone is section.contexts is None
    assert section.atom.options == (("none yet: compare two masks", None),)
    assert section.atom.label == "none yet: compare two masks"
    assert "compare two masks" in failed(section.show_contexts)
    section.b.value = section.a.value
    assert "choose two" in failed(section.compare)
    section.session.reject(ValueError("too much"))
    section.b.value = "pin A <b>"
    assert "too much" in failed(section.compare)


def test_cancel_in_the_middle_of_a_corpus(
    section: MaskDiffSection, corpora: tuple[str, str, str], root: Path
) -> None:
    """Nothing is shown, and a second press measures and shows it."""
    fresh = root / "fresh.txt"
    write_text(fresh, n_texts=90)
    section._corpora = (*corpora, str(fresh))
    section.offer([])
    section.b.value = f"current selection, on {fresh}"
    cancel(section.compare, ": window: ")
    assert section.compare.value == ""
    press(section.compare)
    assert atoms_shown(section)


# --- in the panel -------------------------------------------------------------------


def test_the_panel_keeps_it_up_to_date(panel: Explorer) -> None:
    """Pins are offered when they are made, and the ratio makes the result old."""
    tab = panel.comparison
    panel.tabs.selected_index = 3
    assert tab.diff.a.options == tab.diff.b.options == ("current selection",)
    tab.pin()
    panel.controls.ratio.value = "0.5"
    assert tab.diff.a.options == ("current selection", "pin A")
    tab.diff.b.value = "pin A"
    press(tab.diff.compare)
    assert not stale(tab.diff.compare)
    panel.controls.ratio.value = "0.6"
    assert stale(tab.diff.compare)
    panel.controls.ratio.value = "0.5"
    assert not stale(tab.diff.compare)
    tab.clear()
    assert tab.diff.b.value == "current selection"
    assert stale(tab.diff.compare)


def test_a_table_alone_compares_pins() -> None:
    """There are no contexts, which need a model, and no other corpora."""
    panel = explore(random_table(2, 4, 16))
    assert isinstance(panel, Explorer)
    tab = panel.comparison
    tab.pin()
    panel.controls.ratio.value = "0.5"
    tab.diff.b.value = "pin A"
    assert tab.diff.a.options == ("current selection", "pin A")
    press(tab.diff.compare)
    assert len(atoms_shown(tab.diff)) == 20
    assert tab.diff.show_contexts not in tab.diff.children
