"""What the panel predicts from the ratios that were evaluated."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from random_tables import random_table, small_table
from tiny_folder import write_text

from heapr_lab.evaluation.perplexity import Perplexity
from heapr_lab.panel.controls import TARGET
from heapr_lab.panel.looks import badge
from heapr_lab.panel.panel import Explorer, explore
from heapr_lab.panel.session import PruningSession
from heapr_lab.pruning.masks import KeepMask
from heapr_lab.pruning.options import Selection
from heapr_lab.pruning.savings import summed_scores
from heapr_lab.workbench.workbench import Workbench

DENSE_NLL = 3.0


def true_loss(session: PruningSession, ratio: float) -> float:
    """Δloss of the model that `foretold` makes up: a power law of summed scores."""
    keep = session.keep_of(Selection(ratio=ratio))
    return 0.5 * summed_scores(session.table, keep, "heapr") ** 1.5


@pytest.fixture
def foretold(bench: Workbench, root: Path, monkeypatch: pytest.MonkeyPatch) -> Explorer:
    """A panel of a model whose Δloss is `true_loss`, on two corpora."""
    session = PruningSession(random_table(2, 4, 16), workbench=bench)

    def perplexity(
        keep: KeepMask | None, windows: Any, *, downs: Any, progress: Any = None
    ) -> Perplexity:
        assert downs is None
        nll = DENSE_NLL
        if keep is not None:
            nll += 0.5 * summed_scores(session.table, keep, "heapr") ** 1.5
        return Perplexity(value=np.exp(nll), nll=nll, n_tokens=100)

    monkeypatch.setattr(bench, "perplexity", perplexity)
    write_text(root / "other.txt")
    corpora = (str(root / "text.txt"), str(root / "other.txt"))
    panel = Explorer(session, corpora=corpora)
    panel.weights.weights.value = "unchanged"
    return panel


def test_a_target_offers_the_evaluations_it_needs(foretold: Explorer) -> None:
    """One button, only while they are missing; then the ratio is that of the target."""
    job, corpus = foretold.foretell, foretold.evaluation.corpora.value[0]
    assert job.layout.display == "none"
    foretold.controls.rise.value = 0.01
    foretold.controls.budget.value = TARGET
    assert f"no prediction on {corpus} yet" in foretold.error.value
    assert job.layout.display is None
    job.button.click()
    job.wait(60)
    assert (job.error.value, foretold.error.value) == ("", "")
    assert job.layout.display == "none"
    pruned = foretold.session.points.query("estimator != 'dense'")
    assert pruned["ratio"].tolist() == [0.2, 0.4]
    assert set(pruned["dataset"]) == {corpus}
    assert f"predicted Δloss on {corpus} is at most 0.01 nats" in foretold.status.value
    ratio = foretold.session.selection.ratio
    assert true_loss(foretold.session, ratio) <= 0.0101
    foretold.controls.scope.value = "layer"
    assert job.layout.display is None
    foretold.controls.budget.value = "atoms"
    assert job.layout.display == "none"
    assert "at most" not in foretold.status.value


def number_of(panel: Explorer, name: str) -> str:
    """The number of the pruned model in the row that begins with `name`."""
    return next(row[2] for row in panel._numbers if row[0].startswith(name))


def has_row(panel: Explorer, name: str) -> bool:
    """Whether a row of numbers begins with `name`."""
    return any(row[0].startswith(name) for row in panel._numbers)


def press_evaluate(panel: Explorer, *ratios: float) -> None:
    """Evaluate each ratio, as a user does."""
    for ratio in ratios:
        panel.controls.ratio.value = str(ratio)
        panel.evaluation.job.button.click()
        panel.evaluation.job.wait(60)
        assert panel.error.value == ""


def test_prediction_appears_with_the_second_ratio(foretold: Explorer) -> None:
    """Before, it says what to do; evaluating the same ratio twice does not count."""
    assert "Evaluate two ratios" in foretold.prediction.value
    press_evaluate(foretold, 0.2, 0.2, 0.201)  # 25 of 128 atoms, each time
    assert "Evaluate two ratios" in foretold.prediction.value
    press_evaluate(foretold, 0.6)
    assert not has_row(foretold, "predicted")  # it was measured
    foretold.controls.ratio.value = "0.5"
    assert has_row(foretold, "predicted Δloss")
    assert foretold.session.prediction_note() == ""
    assert 'role="status"' in foretold.prediction.value


def test_prediction_follows_the_slider(
    foretold: Explorer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At ratios that were not evaluated it tells the truth, and evaluates nothing."""
    press_evaluate(foretold, 0.2, 0.6)
    monkeypatch.delattr(foretold.session.workbench, "perplexity")
    monkeypatch.setattr(Workbench, "perplexity", None)
    for ratio in (0.4, 0.3):
        foretold.controls.slider.value = round(100 * ratio)
        loss = true_loss(foretold.session, ratio)
        assert number_of(foretold, "predicted Δloss") == f"{loss:.3g}"
        perplexity = number_of(foretold, "predicted perplexity")
        assert perplexity == f"{np.exp(DENSE_NLL + loss):,.1f}"
        assert "less certain" not in foretold.cautions.value
    foretold.controls.slider.value = 80
    assert "so less certain" in foretold.cautions.value
    assert len(foretold.session.points) == 3


def test_prediction_says_how_far_off_it_may_be(foretold: Explorer) -> None:
    """With a third ratio, half of what it was, there is a range around what is said."""
    press_evaluate(foretold, 0.2, 0.4, 0.6)
    session = foretold.session
    middle = session.points["ratio"].eq(0.4)
    session.points.loc[middle, "delta_nll"] /= 2
    foretold.controls.ratio.value = "0.41"
    span = re.compile(r"(\S+) \((\S+) to (\S+)\)")
    found = span.fullmatch(number_of(foretold, "predicted Δloss"))
    loss, low, high = map(float, found.groups())  # type: ignore[union-attr]
    assert low * high == pytest.approx(loss**2, rel=0.02)
    # left out, the middle is foretold twice as high; the ends are further off
    assert high / loss > 2
    found = span.fullmatch(number_of(foretold, "predicted perplexity"))
    perplexities = found.groups()  # type: ignore[union-attr]
    expected = np.exp(DENSE_NLL + np.array([loss, low, high]))
    assert [float(p.replace(",", "")) for p in perplexities] == pytest.approx(
        expected, rel=0.02
    )


def test_prediction_is_of_each_corpus_and_choice(foretold: Explorer) -> None:
    """Only what was chosen alike counts, and each corpus has its own points."""
    press_evaluate(foretold, 0.2)
    foretold.evaluation.corpora.value = foretold.evaluation.corpora.options
    press_evaluate(foretold, 0.6)
    first, second = foretold.evaluation.corpora.options
    foretold.controls.ratio.value = "0.5"
    assert has_row(foretold, f"predicted Δloss on {first}")
    assert not has_row(foretold, f"predicted Δloss on {second}")
    press_evaluate(foretold, 0.4)
    foretold.controls.ratio.value = "0.5"
    assert has_row(foretold, f"predicted Δloss on {second}")
    foretold.controls.scope.value = "layer"
    assert "Evaluate two ratios" in foretold.prediction.value
    foretold.controls.scope.value = "global"
    assert has_row(foretold, f"predicted Δloss on {first}")


def test_prediction_says_why_there_is_none(foretold: Explorer) -> None:
    """Where the loss fell, there is nothing to foretell from; the panel stays whole."""
    press_evaluate(foretold, 0.2, 0.4)
    foretold.session.points["delta_nll"] *= -1
    foretold.controls.ratio.value = "0.3"
    assert "No prediction on" in foretold.prediction.value
    assert "evaluate a larger ratio" in foretold.prediction.value
    assert foretold.error.value == ""
    assert "removed" in foretold.status.value


def test_a_table_has_no_prediction() -> None:
    """Without a model nothing can be evaluated, so nothing is promised."""
    assert explore(small_table()).prediction.value == ""


def test_a_target_loss_sets_the_ratio(foretold: Explorer) -> None:
    """Solved from predictions; before there are any, it says what to do."""
    foretold.controls.budget.value = TARGET
    assert "no prediction" in foretold.error.value
    foretold.controls.budget.value = "atoms"
    press_evaluate(foretold, 0.2, 0.6)
    wanted = true_loss(foretold.session, 0.4)
    foretold.controls.budget.value = TARGET
    assert foretold.controls.ratio.disabled
    foretold.controls.rise.value = wanted * 1.001
    ratio = float(foretold.controls.ratio.value)
    assert ratio == pytest.approx(0.4, abs=0.011)
    assert true_loss(foretold.session, ratio) <= wanted * 1.01
    foretold.controls.rise.value = 0.0
    assert foretold.controls.ratio.value == "0"


def test_measured_and_predicted_are_told_apart_by_words(foretold: Explorer) -> None:
    """Beside each number; the borders differ as well, and no colour does."""
    press_evaluate(foretold, 0.2, 0.6)
    assert f"{badge('measured')} Δloss on" in foretold.numbers.value
    assert ">predicted<" not in foretold.numbers.value
    assert f"{badge('measured')} Last point" in foretold.evaluation.message.value
    foretold.controls.ratio.value = "0.4"
    assert f"{badge('predicted')} Δloss on" in foretold.numbers.value
    assert ">measured<" not in foretold.numbers.value
    foretold.comparison.pin_button.click()
    assert ">measured<" not in foretold.comparison.message.value
    press_evaluate(foretold, 0.4)
    assert badge("measured") in foretold.comparison.message.value
    assert ">measured Δloss" in foretold.comparison.table.value
    assert "color" not in badge("measured") + badge("predicted")
    assert "solid" in badge("measured")
    assert "dashed" in badge("predicted")


def test_a_target_is_solved_anew_for_other_corpora_and_points(
    foretold: Explorer,
) -> None:
    """The ratio is of the corpus that is named, and of all evaluations."""
    tab, session = foretold.evaluation, foretold.session
    first, other = tab.corpora.options
    press_evaluate(foretold, 0.2, 0.6)
    foretold.controls.budget.value = TARGET
    rise = foretold.controls.rise.value = true_loss(session, 0.4)
    assert foretold.error.value == ""
    tab.corpora.value = (other,)
    assert f"no prediction on {other}" in foretold.error.value
    tab.corpora.value = (first,)
    assert foretold.error.value == ""
    tab.job.button.click()
    tab.job.wait(60)
    assert tab.job.error.value == ""
    solved = session.ratio_for_predicted_loss(rise, first)
    assert float(foretold.controls.ratio.value) == solved


def test_the_chart_predicts_what_is_chosen_while_it_is_seen(foretold: Explorer) -> None:
    """Another scope has no points, so no dotted line; the ratio alone changes none."""
    press_evaluate(foretold, 0.2, 0.6)
    foretold.tabs.selected_index = 1

    def predicted() -> list[str]:
        lines = foretold.evaluation._picture.ax.get_lines()
        return [line.get_label() for line in lines if "predicted" in line.get_label()]

    assert len(predicted()) == 1
    drawn = bytes(foretold.evaluation.chart.value)
    foretold.controls.ratio.value = "0.4"
    assert bytes(foretold.evaluation.chart.value) == drawn
    foretold.controls.scope.value = "layer"
    assert predicted() == []
    assert bytes(foretold.evaluation.chart.value) != drawn
    foretold.controls.scope.value = "global"
    assert len(predicted()) == 1
    foretold.controls.ratio.value = "40"  # nothing is chosen
    assert predicted() == []


def test_a_target_is_solved_anew_for_other_weights(foretold: Explorer) -> None:
    """A ratio solved for masked weights is not shown as one of compensated ones."""
    press_evaluate(foretold, 0.2, 0.6)
    foretold.controls.budget.value = TARGET
    foretold.controls.rise.value = true_loss(foretold.session, 0.4)
    solved = foretold.controls.ratio.value
    assert foretold.error.value == ""
    foretold.weights.weights.value = "compensated"
    assert "no prediction" in foretold.error.value
    assert "infeasible" in foretold.status.value
    foretold.weights.weights.value = "unchanged"
    assert foretold.error.value == ""
    assert foretold.controls.ratio.value == solved
