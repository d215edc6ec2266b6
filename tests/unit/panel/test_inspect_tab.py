"""The views of a text, read back as HTML, and the tab, without a browser."""

import re
import subprocess
import sys
import threading
from typing import Any

import ipywidgets as ipw
import numpy as np
import pandas as pd
import pytest
from tiny_folder import write_model, write_text

from heapr_lab.evaluation.passages import read_passage, token_losses
from heapr_lab.evaluation.routing import routing
from heapr_lab.importance.table import ImportanceTable
from heapr_lab.panel import inspect_tab, passage_html
from heapr_lab.panel.inspect_tab import InspectTab, nearest_the_cut
from heapr_lab.panel.jobs import Job
from heapr_lab.panel.passage_html import (
    contexts_html,
    continuations_html,
    losses_html,
    routing_html,
)
from heapr_lab.panel.session import Choice, PruningSession
from heapr_lab.pruning.masks import KeepMask
from heapr_lab.workbench.settings import Setting
from heapr_lab.workbench.workbench import Workbench, open_workbench

PRUNED = "half of <it>"
LEAST_TEXT_CONTRAST = 4.5
LEAST_LINE_CONTRAST = 3.0
"""WCAG 2.2, AA: text, and graphics that carry a meaning."""


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> PruningSession:
    """A tiny model on a bench, measured on a text, half of it pruned."""
    folder = tmp_path_factory.mktemp("reading")
    write_model(folder / "moe")
    write_text(folder / "text.txt", n_texts=60)
    bench = open_workbench(str(folder / "moe"), profile="small")
    setting = Setting(0.0, calibration=str(folder / "text.txt"))
    table = bench.importance(setting)
    return PruningSession(table, workbench=bench, setting=setting)


@pytest.fixture
def tab(session: PruningSession) -> InspectTab:
    """The tab with a short text."""
    session.choose(Choice(ratio=0.5))
    tab = InspectTab(session)
    tab.text.value = "the <b>other</b> & 漢"
    tab.n_tokens.value = 5
    return tab


def bench_of(tab: InspectTab) -> Workbench:
    """The tab's workbench."""
    assert tab.session.workbench is not None
    return tab.session.workbench


def press(job: Job) -> None:
    """Press a button and see that it went well."""
    job.button.click()
    job.wait(60)
    assert job.error.value == ""
    assert not job.running


def losses(*changes: float, tokens: str = "abcdefghijklmnop") -> pd.DataFrame:
    """A frame of `token_losses` whose tokens cost 1 nat, and so much more pruned."""
    change = np.array([np.nan, *changes])
    columns = {"dense_nll": 1 + 0 * change, "pruned_nll": 1 + change}
    texts = list(tokens[: len(change)])
    frame = pd.DataFrame({"position": range(len(change)), "token": texts, **columns})
    return frame.assign(delta_nll=change)


def span_of(page: str, position: int) -> str:
    """The span of the token at a position."""
    return re.search(rf'<span [^>]*title="position {position}: [^<]*</span>', page)[0]


def cells(page: str) -> list[list[str]]:
    """The texts of the cells of all tables, row by row."""
    rows = re.findall(r"<tr>(<td.*?)</tr>", page, re.DOTALL)
    found = [re.findall(r"<td[^>]*>(.*?)</td>", row, re.DOTALL) for row in rows]
    return [[re.sub("<[^>]*>", "", cell) for cell in row] for row in found]


# --- the loss of each token ---------------------------------------------------------


def test_losses_are_told_in_text() -> None:
    """Totals are those of the predicted tokens, and each token says its own numbers."""
    page = losses_html(losses(0.6, 2.5, -0.7, 0.0), pruned=PRUNED)
    # (0.6 + 2.5 - 0.7 + 0) / 4 = 0.6; e = 2.7, e^1.6 = 5.0
    assert "Dense 1.000, pruned 1.600, Δ +0.600 nats per token over 4" in page
    assert "perplexity 2.7 → 5.0" in page
    assert "0.5 nats or more, 2 of them are worse and 1 better" in page
    assert "half of &lt;it&gt;" in page
    assert 'role="status"' in page
    assert "Δ +2.50 nats (dense 1.00, pruned 3.50)" in span_of(page, 2)
    assert "no loss: nothing stands before it" in page


def test_changes_differ_by_more_than_colour() -> None:
    """Worse has a solid line, better a dotted one, thicker with every step."""
    page = losses_html(losses(0.05, 0.2, 0.7, 3.0, -0.2, -0.7, -3.0), pruned=PRUNED)
    styles = [re.search('style="(.*?)"', span_of(page, n))[1] for n in range(1, 8)]
    lines = [re.search(r"border-bottom:(\dpx \w+)", style) for style in styles]
    assert [line and line[1] for line in lines] == [
        None, "1px solid", "2px solid", "3px solid",
        "1px dotted", "2px dotted", "3px dotted",
    ]  # fmt: skip
    assert styles[0] == ""
    assert len(set(styles)) == 7


def test_the_ten_hurt_most() -> None:
    """The largest rises, largest first, with the text before; no falls among them."""
    page = losses_html(losses(*np.linspace(-0.3, 1.1, 15)), pruned=PRUNED)
    rows = cells(page)
    assert [int(row[0]) for row in rows] == list(range(15, 5, -1))
    assert rows[0] == ["15", "+1.100", "1.000", "2.100", "jklmnop"]
    better = losses_html(losses(-1.0, 0.0), pruned=PRUNED)
    assert cells(better) == []
    assert "No token is worse off" in better


def test_text_is_escaped_and_seen() -> None:
    """Markup is shown as it is; breaks and parts of characters have a sign."""
    page = losses_html(losses(9, 9, 9, tokens="<&\n>"), pruned=PRUNED)
    for shown in ("&lt;", "&amp;", "↵\n", "&gt;"):
        assert f">{shown}</span>" in page
    empty = losses(9).assign(token=["a", ""])
    assert ">▯</span>" in losses_html(empty, pruned=PRUNED)


def contrast(color: np.ndarray, other: np.ndarray) -> float:
    """The contrast of two colours (3,) in 0 to 255, as WCAG defines it."""
    light = []
    for values in (color / 255, other / 255):
        linear = np.where(
            values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4
        )
        light.append(float(linear @ [0.2126, 0.7152, 0.0722]) + 0.05)
    return max(light) / min(light)


@pytest.mark.parametrize(("paper", "ink"), [(255, 33), (17, 255)])
@pytest.mark.parametrize("color", [passage_html._WORSE, passage_html._BETTER])
def test_contrast_in_both_themes(paper: int, ink: int, color: str) -> None:
    """On light and on dark the text can be read on every step, and lines be seen."""
    pure = np.array([int(part) for part in color.split(",")], float)
    white = np.full(3, float(paper))
    assert contrast(pure, white) >= LEAST_LINE_CONTRAST
    for opacity in passage_html._OPACITY:
        ground = opacity * pure + (1 - opacity) * white
        assert contrast(np.full(3, float(ink)), ground) >= LEAST_TEXT_CONTRAST


# --- the other views ----------------------------------------------------------------


def written(*ids: int) -> pd.DataFrame:
    """A frame of `continue_text`; the text of a token is its id in letters."""
    texts = [f"{chr(97 + token)}<" for token in ids]
    return pd.DataFrame({"step": range(len(ids)), "token_id": ids, "token": texts})


def marked(page: str) -> list[str]:
    """What is marked."""
    return [re.sub("<[^>]*>", "", part) for part in re.findall("<mark.*?</mark>", page)]


def test_the_first_difference_is_marked() -> None:
    """In both columns; what follows is not marked, and text says how many agree."""
    page = continuations_html(
        "a & b", written(0, 1, 2, 3), written(0, 1, 4, 3), pruned=PRUNED
    )
    assert marked(page) == ["c&lt;", "e&lt;"]
    assert "The same for 2 tokens" in page
    assert page.count("a &amp; b") == 2
    assert "Masked: half of &lt;it&gt;" in page


def test_continuations_that_agree_or_end() -> None:
    """No mark where they are the same; where one ends before the other it says so."""
    same = continuations_html("a", written(0, 1), written(0, 1), pruned=PRUNED)
    assert marked(same) == []
    assert "Both models write the same 2 tokens" in same
    shorter = continuations_html("a", written(0, 1), written(0), pruned=PRUNED)
    assert marked(shorter) == ["b&lt;"]
    assert shorter.count("(ends here)") == 1


def test_routing_is_told_in_text() -> None:
    """The experts of the token with what is left of them; each atom kept or pruned."""
    keep = KeepMask.from_arrays({3: [[True, True], [True, False], [False, False]]})
    columns = ["layer", "position", "token", "expert", "p"]
    routes = [
        (3, 0, "<", 2, 1.0),
        (3, 1, "b", 0, 0.5), (3, 1, "b", 1, 0.25),
        (4, 1, "b", 9, 1.0),
    ]  # fmt: skip
    names = ["expert", "atom", "h", "p", "w_down_norm", "contribution", "share"]
    atoms = [(1, 0, -2.0, 0.25, 1.0, 0.5, 0.4), (1, 1, 1.0, 0.25, 1.0, 0.25, 0.2)]
    page = routing_html(
        pd.DataFrame(routes, columns=columns),
        pd.DataFrame(atoms, columns=names),
        keep=keep,
        layer=3,
        position=1,
        pruned=PRUNED,
    )
    # (0.5 · 0 + 0.25 · ½) / 0.75
    assert "2 experts serve the token" in page
    assert "16.7% of their atoms are pruned" in page
    assert cells(page) == [
        ["0", "0.5000", "100.0% ", "2 of 2"],
        ["1", "0.2500", "50.0% ", "1 of 2"],
        ["1", "0", "-2", "0.5", "40.0%", "✓ kept"],
        ["1", "1", "+1", "0.25", "20.0%", "✗ pruned"],
    ]
    assert marked(page) == ["b"]
    assert 'title="position 0">&lt;</span>' in page


def test_contexts_are_told_in_text() -> None:
    """Each with its numbers and place, the token marked; none is told too."""
    columns = ["window", "position", "h", "p", "before", "token", "after"]
    frame = pd.DataFrame([(2, 7, -1.5, 0.25, "a\n", "<b>", "")], columns=columns)
    page = contexts_html(frame, told="atom 4 & more")
    assert cells(page) == [["-1.5", "0.250", "2:7", "a↵&lt;b&gt;"]]
    assert marked(page) == ["&lt;b&gt;"]
    assert "atom 4 &amp; more" in page
    assert "None of the tokens" in contexts_html(frame[:0], told="atom 4")


def test_nearest_the_cut() -> None:
    """The removed atoms of the highest scores, as sorting them all finds them."""
    rng = np.random.default_rng(0)
    keys = pd.MultiIndex.from_product([[1, 4], range(3), range(5)]).to_frame(
        index=False
    )
    keys.columns = ["layer", "expert", "atom"]
    sums = {"tokens": 1, "sum_h2": 1.0, "sum_g2": rng.random(30)}
    table = ImportanceTable.from_frame(keys.assign(**sums))
    kept = rng.random((2, 3, 5)) < 0.5
    keep = KeepMask.from_arrays({1: kept[0], 4: kept[1]})
    every = keys.assign(score=table.score("heapr"))[~kept.ravel()]
    expected = every.sort_values("score", ascending=False).head(6)
    found = nearest_the_cut(table, keep, estimator="heapr", n=6)
    pd.testing.assert_frame_equal(
        found, expected.reset_index(drop=True), check_dtype=False
    )
    all_of_them = nearest_the_cut(table, keep, estimator="heapr", n=99)
    assert len(all_of_them) == keep.n_removed
    assert nearest_the_cut(table, KeepMask.full(table), estimator="heapr").empty


# --- the tab ------------------------------------------------------------------------


def controls_of(widget: ipw.Widget) -> list[ipw.Widget]:
    """What can be set or pressed, however deep."""
    inside = [
        own for child in getattr(widget, "children", ()) for own in controls_of(child)
    ]
    named = (
        ipw.Button,
        ipw.Textarea,
        ipw.BoundedIntText,
        ipw.Dropdown,
        ipw.FloatProgress,
    )
    return [widget, *inside] if isinstance(widget, named) else inside


def test_every_control_has_a_name(tab: InspectTab) -> None:
    """A screen reader can say what each is, and no two that are set have one name."""
    controls = controls_of(tab)
    assert len(controls) == 8 + 3 * 4  # what is set; a job has two buttons and a bar
    assert all(control.description for control in controls)
    settings = [c.description for c in controls if isinstance(c, ipw.BoundedIntText)]
    assert len(set(settings)) == len(settings) == 6


def test_tab_of_a_table_alone(session: PruningSession) -> None:
    """Without a model there is nothing to press, and text says what is needed."""
    tab = InspectTab(PruningSession(session.table))
    tab.refresh()
    assert controls_of(tab) == []
    assert "open_workbench" in tab.children[0].value
    assert 'role="status"' in tab.children[0].value


def test_tab_can_be_printed(tab: InspectTab) -> None:
    """No name of the tab stands in the way of one of ipywidgets'."""
    assert "InspectTab" in repr(tab)


def test_importing_needs_no_torch() -> None:
    """A table is explored where torch is not installed."""
    code = "import sys, heapr_lab.panel.inspect_tab; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_tab_generates(tab: InspectTab) -> None:
    """Dense and pruned side by side, from the text as it was read."""
    press(tab.generate)
    assert tab.continuations is not None
    dense, pruned = tab.continuations
    assert len(dense) == len(pruned) == 5
    assert dense["token_id"].tolist() != pruned["token_id"].tolist()
    page = tab.generated.value
    assert page.count("the &lt;b&gt;other&lt;/b&gt; &amp; 漢") == 2
    assert "50.0% of the atoms removed" in page
    assert len(marked(page)) == 2


def test_tab_compares(tab: InspectTab) -> None:
    """The numbers are those of the traces, for the choice at the time of pressing."""
    bench = bench_of(tab)
    passage = read_passage(bench.model, bench.tokenizer, text=tab.text.value)
    for ratio in (0.5, 0.25):
        tab.session.choose(Choice(ratio=ratio))
        press(tab.compare)
        expected = token_losses(bench.model, passage, keep=tab.session.keep)
        pd.testing.assert_frame_equal(tab.losses, expected)
        assert f"{ratio:.1%} of the atoms removed" in tab.compared.value
        worst = expected["delta_nll"].max()
        assert cells(tab.compared.value)[0][1] == f"{worst:+.3f}"


def test_tab_shows_routing(tab: InspectTab) -> None:
    """Of the token and the layer that were asked for."""
    bench = bench_of(tab)
    tab.layer.value, tab.position.value = 1, 6
    press(tab.route)
    passage = read_passage(bench.model, bench.tokenizer, text=tab.text.value)
    pd.testing.assert_frame_equal(tab.routes, routing(bench.model, passage))
    own = tab.routes.query("layer == 1 and position == 6")
    rows = cells(tab.routed.value)
    assert [int(row[0]) for row in rows[:2]] == own["expert"].tolist()
    assert [int(row[1]) for row in rows[2:]] == tab.atoms["atom"].tolist()
    assert marked(tab.routed.value) == [passage.tokens[6].replace("<", "&lt;")]


def test_positions_are_those_of_the_text(tab: InspectTab) -> None:
    """A position beyond the end cannot be chosen; a longer text has more of them."""
    tab.text.value = "abcdef"
    tab.position.value = 99
    assert tab.position.value == 5
    tab.text.value = "abcdef" * 3
    tab.position.value = 99
    assert tab.position.value == 17
    tab.text.value = ""
    assert tab.position.value == 0


def test_tab_shows_contexts(tab: InspectTab) -> None:
    """Of the atom nearest the cut, on the windows that were calibrated on."""
    keep = tab.session.keep
    assert tab.nearest.value == ()
    tab.nearest.index = 1
    best = nearest_the_cut(tab.session.table, keep, estimator="heapr").iloc[0]
    boxes = tab.atom_layer.value, tab.expert.value, tab.atom.value
    assert boxes == (best["layer"], best["expert"], best["atom"])
    press(tab.show_contexts)
    assert tab.contexts is not None
    assert len(cells(tab.contexts_view.value)) == len(tab.contexts) > 0
    windows = bench_of(tab).calibration_set(tab.session.setting).ids
    for row in tab.contexts.itertuples():
        token = bench_of(tab).tokenizer.decode(windows[row.window, row.position])
        assert row.token == token
    assert ": pruned." in tab.contexts_view.value
    assert "8 windows" in tab.contexts_view.value


def test_atoms_follow_the_choice(tab: InspectTab) -> None:
    """Another choice has other atoms near its cut; none, and one that fails, say so."""
    before = tab.nearest.options
    assert len(before) == 1 + 20
    tab.session.choose(Choice(ratio=0.8))
    tab.refresh()
    assert tab.nearest.options != before
    tab.session.choose(Choice(ratio=0.0))
    tab.refresh()
    assert [name for name, _ in tab.nearest.options] == ["none: nothing is pruned"]
    tab.session.choose(Choice(structure="aligned"))
    tab.refresh()
    assert tab.nearest.value == ()
    assert "multiple" in tab.note.value
    tab.session.choose(Choice(ratio=0.5))
    tab.refresh()
    assert tab.note.value == ""
    assert tab.nearest.options == before


def test_long_texts_are_clipped(
    tab: InspectTab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is not read is told: the end of a text, the beginning of a prompt."""
    monkeypatch.setattr(inspect_tab, "_LONGEST", 10)
    tab.text.value = "abcdefghijklmnop"
    press(tab.compare)
    assert "6 tokens at its end are left out" in tab.compared.value
    press(tab.generate)
    assert "11 tokens at its beginning are left out" in tab.generated.value
    assert "lmnop" in tab.generated.value


@pytest.mark.parametrize("name", ["generate", "compare", "route"])
def test_errors_stand_in_the_tab(tab: InspectTab, name: str) -> None:
    """No text: the message is an alert below the button, which works again."""
    job = getattr(tab, name)
    tab.text.value = ""
    job.button.click()
    job.wait(60)
    assert 'role="alert"' in job.error.value
    assert "no tokens" in job.error.value
    assert not job.button.disabled


def test_an_atom_that_is_not_there(tab: InspectTab) -> None:
    """A choice that cannot be had is an alert as well."""
    tab.session.choose(Choice(structure="aligned"))
    tab.show_contexts.button.click()
    tab.show_contexts.wait(60)
    assert "multiple" in tab.show_contexts.error.value


@pytest.mark.parametrize(
    ("name", "view"),
    [
        ("generate", "generated"),
        ("compare", "compared"),
        ("route", "routed"),
        ("show_contexts", "contexts_view"),
    ],
)
def test_cancel(tab: InspectTab, name: str, view: str) -> None:
    """Each ends at its next report; nothing is shown, and all is ready again."""
    job = getattr(tab, name)
    reached, go_on = threading.Event(), threading.Event()

    def hold(change: Any) -> None:  # the work stands still until Cancel was pressed
        if "starting" not in change["new"] and not reached.is_set():
            reached.set()
            assert go_on.wait(60)

    job.text.observe(hold, names="value")
    job.button.click()
    assert reached.wait(60)
    job.cancel_button.click()
    go_on.set()
    job.wait(60)
    assert "cancelled" in job.text.value
    assert job.error.value == ""
    assert getattr(tab, view).value == ""
    assert not job.button.disabled


def test_two_at_once(tab: InspectTab) -> None:
    """Comparing while generating gives what each gives alone."""
    press(tab.generate)
    press(tab.compare)
    alone = tab.generated.value, tab.compared.value
    tab.n_tokens.value = 5
    for _ in range(3):
        for shown in (tab.generated, tab.compared):
            shown.show("", None)
        tab.generate.button.click()
        tab.compare.button.click()
        tab.generate.wait(60)
        tab.compare.wait(60)
        assert (tab.generated.value, tab.compared.value) == alone
