"""Many ratios and estimators at once, and their losses window by window."""

import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from keeps import masked_nll, window_nll
from pressing import error_of, panel_on, press
from tiny_folder import write_text

from heapr_lab.errors import SpecError
from heapr_lab.evaluation.paired import paired_difference
from heapr_lab.importance.table import ImportanceTable
from heapr_lab.panel.panel import Explorer
from heapr_lab.panel.session import PruningSession
from heapr_lab.panel.sweep import Sweep, differences, read_ratios, sweep_of
from heapr_lab.pruning.options import Selection
from heapr_lab.recipes.weights import WeightRecipe

RATIOS = (0.25, 0.5)
plain_sweep = partial(sweep_of, Selection(0.1), WeightRecipe())


@pytest.fixture
def corpora(root) -> tuple[str, str]:
    """Two texts."""
    write_text(root / "second.txt", n_texts=50)
    return str(root / "text.txt"), str(root / "second.txt")


@pytest.fixture
def swept(panel) -> Explorer:
    """A panel whose button was pressed, for two ratios and two estimators."""
    tab = panel.evaluation.sweep
    tab.ratios.value, tab.estimators.value = "25%, 0.5", ("heapr", "magnitude")
    press(tab.job)
    return panel


def quiet(*_args: Any, **_options: Any) -> None:
    """Report nothing."""


@pytest.mark.parametrize("text", ["", " , ", "0", "0.2, 0", "1.5", "0.2 0.4", "half"])
def test_ratios_that_are_none(text):
    """What is no ratio above 0 is refused."""
    with pytest.raises(SpecError, match="expected"):
        read_ratios(text)


def test_windows_are_paired(bench, session, corpora):
    """Δloss and its standard error are of the differences, window by window."""
    chosen = Selection(0.5)
    session.evaluate(corpora[:1], selection=chosen)
    row = session.points.iloc[-1]
    ids = bench.test_windows(corpora[0]).ids
    pruned = masked_nll(bench.model, ids, session.keep_of(chosen))
    change = pruned - window_nll(bench.model, ids)
    assert row["delta_nll"] == pytest.approx(float(change.mean()), rel=1e-4)
    error = float(change.std()) / math.sqrt(len(ids))
    assert row["stderr"] == pytest.approx(error, rel=1e-3)


def test_without_windows_of_the_dense_model_there_is_no_error(
    bench, session, monkeypatch
):
    """Such results were cached by earlier versions: not 0, which would be certain."""
    measured = bench.perplexity

    def without(keep: Any, *args: Any, **options: Any) -> Any:
        perplexity = measured(keep, *args, **options)
        return perplexity if keep is not None else replace(perplexity, windows=())

    monkeypatch.setattr(bench, "perplexity", without)
    session.evaluate((session.calibration.corpus,), selection=Selection(0.5))
    assert session.points["stderr"].isna().all()
    assert session.points["delta_nll"].notna().all()


def test_what_cannot_be_paired_is_refused():
    """Other windows, or none; one window has no error."""
    with pytest.raises(SpecError, match="of 2 and of 3 windows"):
        paired_difference([1.0, 2.0], [1.0, 2.0, 3.0])
    with pytest.raises(SpecError, match="of 0 and of 0"):
        paired_difference([], [])
    mean, error = paired_difference([1.5], [1.0])
    assert mean == 0.5
    assert math.isnan(error)


def test_only_what_is_missing_is_measured(session, corpora):
    """A second sweep with a further ratio and corpus measures only these."""
    first = plain_sweep(ratios=RATIOS, datasets=corpora[:1], estimators=("heapr",))
    first.run(session, report=quiet)
    assert len(session.points) == 1 + 2
    assert first.missing(session) == {}
    more = plain_sweep(ratios=(0.25, 0.75), datasets=corpora, estimators=("heapr",))
    missing = [
        (selection.ratio, [Path(name).name for name in names])
        for selection, names in more.missing(session).items()
    ]
    assert missing == [(0.25, ["second.txt"]), (0.75, ["text.txt", "second.txt"])]
    assert len(replace(more, recipe=WeightRecipe("compensated")).missing(session)) == 2


def test_a_cancelled_sweep_goes_on_where_it_was(session):
    """What is finished stays."""
    corpora = (session.calibration.corpus,)
    sweep = Sweep((Selection(0.25), Selection(0.5), Selection(0.75)), corpora)

    def stopping(done: float, *_args: Any, **_options: Any) -> None:
        if done > 1:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        sweep.run(session, report=stopping)
    assert [selection.ratio for selection in sweep.missing(session)] == [0.5, 0.75]
    seen: list[int] = []
    session.observe(lambda change: seen.append(len(change["new"])), names="points")
    sweep.run(session, report=quiet)
    assert seen == [3, 4]  # the dense model among them
    assert sweep.missing(session) == {}


def test_the_time_is_that_of_evaluations_so_far(bench, session, corpora):
    """It counts all windows of the models that are left, and making their weights."""
    sweep = Sweep((Selection(0.25), Selection(0.5)), corpora)
    session.evaluate(corpora[:1], selection=Selection(0.25))
    session.seconds_a_window = 2.0
    profile = bench.profile
    n_test = profile.n_test or 0
    dense, left = 2 * n_test, 3 * n_test
    assert sweep.seconds(session) == 2.0 * (dense + left)
    compensated = replace(sweep, recipe=WeightRecipe("compensated"))
    making = 2 * profile.n_sequences
    assert compensated.seconds(session) == 2.0 * (dense + 4 * n_test + making)


def test_the_first_estimate_is_that_of_the_scores(session):
    """A window takes a third of what it took with gradients, by its tokens."""
    table = session.table
    origin = dict(table.metadata["provenance"], seconds=96.0, resumed_at=0)
    origin["calibration"] = {"n_sequences": 8, "seq_len": 128}
    facts = dict(table.metadata, provenance=origin)
    told = ImportanceTable.from_frame(table.frame, **facts)
    fresh = PruningSession(told, workbench=session.workbench)
    assert fresh.seconds_a_window == 96 / 8 / 3 / 2  # windows of 64 tokens
    panel = panel_on(fresh, (session.calibration.corpus,))
    assert "about 16 s" in panel.evaluation.job.text.value  # 2 models on 4 windows
    del facts["provenance"]
    silent = ImportanceTable.from_frame(table.frame, **facts)
    alone = PruningSession(silent, workbench=session.workbench)
    assert alone.seconds_a_window is None


def test_tasks_and_weights_count_as_the_time_they_took(session, corpora):
    """In windows, once they were measured."""
    task, recipe = f"continuation:{corpora[0]}", WeightRecipe("compensated")
    session.tasks = (task,)
    work: Any = (task,), Selection(0.5), recipe
    guess = session.n_windows(*work)
    session.evaluate((*corpora, task), selection=Selection(0.25), recipe=recipe)
    assert session.seconds.keys() == {task, "compensated"}
    session.seconds_a_window = 2.0
    session.seconds = {task: 100.0, "compensated": 30.0}
    assert session.n_windows(*work) == 50 + 15 != guess


def test_estimators_that_compare_within_layers_have_that_scope():
    """`compress` has no estimators of its own."""
    options: Any = {"ratios": RATIOS, "datasets": ("a",)}
    options["estimators"] = ("heapr", "camera")
    sweep = plain_sweep(**options)
    assert [(pick.estimator, pick.scope, pick.ratio) for pick in sweep.selections] == [
        ("heapr", "global", 0.25), ("heapr", "global", 0.5),
        ("camera", "layer", 0.25), ("camera", "layer", 0.5),
    ]  # fmt: skip
    alone = sweep_of(Selection(0.1), WeightRecipe("compress"), **options)
    assert len(alone.selections) == 2
    for missing in ("estimators", "datasets"):
        with pytest.raises(SpecError, match="select one"):
            plain_sweep(**(options | {missing: ()}))


def test_the_button_measures_and_the_note_says_what(swept):
    """Four points of one corpus; then there is nothing left, and it says so."""
    points, tab = swept.session.points, swept.evaluation.sweep
    pruned = points[points["estimator"].ne("dense")]
    assert sorted(zip(pruned["estimator"], pruned["ratio"], strict=True)) == [
        ("heapr", 0.25), ("heapr", 0.5), ("magnitude", 0.25), ("magnitude", 0.5)
    ]  # fmt: skip
    assert "All 4 are measured" in tab.note.value
    assert "all of this is measured" in error_of(tab.job)
    swept.session.seconds_a_window = 2.0
    tab.ratios.value = "25%, 75%"
    assert "2 of 4 are left to be measured" in tab.note.value
    assert "about " in tab.note.value
    tab.ratios.value = "most"
    assert "expected a fraction" in tab.note.value
    assert "expected a fraction" in error_of(tab.job)


def test_a_sweep_keeps_the_weights_that_it_began_with(swept):
    """The switch may move meanwhile; the running job names what it measures."""
    tab, told = swept.evaluation.sweep, []

    def move(change: dict[str, Any]) -> None:
        told.append(change["new"])
        if "starting" not in change["new"]:
            swept.weights.weights.value = "compensated"

    tab.job.text.observe(move, names="value")
    tab.ratios.value, tab.estimators.value = "75%, 85%", ("heapr",)
    press(tab.job)
    points = swept.session.points.set_index("ratio")["weights"]
    assert points[[0.75, 0.85]].tolist() == ["masked", "masked"]
    assert any("0.75 of the atoms" in text and ", masked: " in text for text in told)


def test_differences_are_of_the_same_windows(swept):
    """The second estimator against the first one, at both ratios, in the table."""
    session = swept.session
    frame = differences(session)
    assert list(frame["removed"]) == [0.25, 0.5]
    losses = session.points.set_index(["estimator", "ratio"])["delta_nll"]
    for row in frame.itertuples():
        expected = losses["magnitude", row.removed] - losses["heapr", row.removed]
        assert row.difference == pytest.approx(expected, abs=1e-6)
        first, other = (
            windows
            for (chosen, _, _), windows in session.windows.items()
            if chosen is not None and chosen.ratio == row.removed
        )
        assert (row.difference, row.stderr) == paired_difference(other, first)
        text = f"{row.difference:+.4f} ± {row.stderr:.4f}"
        assert f">{text}<" in swept.evaluation.differences.value


def test_windows_of_two_texts_are_not_paired(session, root, tmp_path):
    """Once a file has another text, all is measured on that, as in a new session."""
    file = tmp_path / "eval.txt"
    file.write_text((root / "text.txt").read_text())
    for ratio in (0.25, 0.5):
        session.evaluate([str(file)], selection=Selection(ratio))
    file.write_text(file.read_text()[::-1])
    sweep = Sweep((Selection(0.5), Selection(0.5, "magnitude")), (str(file),))
    fresh = PruningSession(session.table, workbench=session.workbench)
    for one in (session, fresh):
        assert len(sweep.missing(one)) == 2
        sweep.run(one, report=quiet)
    pd.testing.assert_frame_equal(differences(session), differences(fresh))
    pd.testing.assert_frame_equal(session.points, fresh.points)
