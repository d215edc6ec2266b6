"""The four numbers at the top, what each is of, and what is seen first."""

import io
import math
from dataclasses import replace

import pandas as pd
import pytest
from pressing import evaluate, press
from random_tables import small_table

from heapr_lab.panel.answer import Answer, answers, answers_html, compact
from heapr_lab.panel.looks import STALE
from heapr_lab.panel.opening import explore
from heapr_lab.pruning.options import Selection
from heapr_lab.recipes.weights import DEFAULT, METHODS


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0"), (999.6, "1.00 k"), (12_345, "12.3 k"), (99_960, "100 k"),
        (999_600_000, "1.00 G"), (4.5e14, "450 T"), (2e15, "2.00 P"),
    ],
)  # fmt: skip
def test_numbers_are_short(number, text):
    """Three digits, whatever their size."""
    assert compact(number) == text


def test_sizes_are_known_of_a_table_alone():
    """They say what they are of; losses need a model, and are not numbers."""
    panel = explore(small_table(), selection=Selection(0.5))
    parameters, size, perplexity, accuracy = answers(panel.session)
    assert size.of == "an estimate, 2 for each parameter"
    (table,) = pd.read_html(io.StringIO(panel.numbers.value), index_col=0)
    assert table.loc["atomic experts"].tolist() == [16, 8, "50.0%"]
    before, after, share = table.loc["parameters"]
    assert before - after == 8 * 24
    assert parameters.change == f"−{share}" == f"−{8 * 24 / before:.1%}"
    flops = "FLOPs per token, at 2,048 tokens of context"
    assert {f"bytes ({size.of})", flops, "FLOPs of the routed experts"} <= set(
        table.index
    )
    assert {perplexity, accuracy} == {
        Answer("perplexity", "", "", "needs a model"),
        Answer("accuracy", "", "", "needs a model"),
    }


def test_losses_say_what_they_are_of(panel, bench):
    """Measured, with an interval; grey and named where it is of another ratio.

    A task is no text that loss is judged on: the caution stands.
    """
    tab, session = panel.evaluation, panel.session
    assert [answer.of for answer in answers(session)[2:]] == [
        "not measured yet: Evaluate"
    ] * 2
    tab.tasks.value = tab.tasks.options
    evaluate(panel, "0.25")
    caution = "Perplexity was only measured on what was calibrated on"
    assert caution in tab.cautions.value
    assert "accuracy on continuation:" in tab.message.value
    perplexity, accuracy = answers(session)[2:]
    dense, pruned = session.points[session.points["nll"].notna()].itertuples()
    assert perplexity.values == f"{dense.perplexity:,.1f} → {pruned.perplexity:,.1f}"
    assert f"± {pruned.stderr:.3f}" in perplexity.change
    length, windows = bench.profile.seq_len, bench.test_windows(tab.corpora.value[0])
    amount = f"{windows.n_sequences} windows × {length} tokens"
    assert perplexity.of == f"measured on {amount} of {tab.corpora.value[0]}"
    assert panel.answers.value.count("(± one standard error)") == 2
    before, after = session.points[session.points["accuracy"].notna()].itertuples()
    assert (
        accuracy.values == f"{100 * before.accuracy:.1f} → {100 * after.accuracy:.1f}"
    )
    spread = 100 * math.hypot(before.stderr, after.stderr)
    assert accuracy.change.endswith(f"± {spread:.1f}")
    # Item by item, where answers of both are known: +1, 0, 0 and -1.
    text = session.texts[before.dataset]
    for point, right in ((before, (0, 1, 0, 1)), (after, (1, 1, 0, 0))):
        session.windows[point.selection, point.weights, text] = right
    assert answers(session)[3].change.endswith(f"± {100 * math.sqrt(2 / 3 / 4):.1f}")
    assert STALE not in panel.answers.value
    panel.controls.ratio.value = "0.5"
    other = answers(session)[2]
    assert other.values == perplexity.values
    assert (other.stale, other.of) == (
        True,
        f"measured for 0.25, on {amount} of {tab.corpora.value[0]}",
    )
    assert answers(session)[3].of.startswith("measured for 0.25, on continuation")
    assert panel.answers.value.count(STALE) == 2
    panel.controls.scope.value = "layer"
    assert "for 0.25, heapr, global" in answers(session)[2].of
    assert answers_html(answers(session)) == panel.answers.value


def test_the_masked_model_is_the_first_answer(panel):
    """It stands, grey and named, while other weights are made; then they replace it."""
    shown: list[str] = []
    panel.answers.observe(lambda change: shown.append(change["new"]), names="value")
    panel.weights.weights.value = "compensated"
    panel.controls.ratio.value = "0.5"
    panel.session.seconds_a_window = 2.0
    panel.evaluation.foresee()
    assert "about " in panel.evaluation.job.text.value
    bars: list[float] = []
    job = panel.evaluation.job
    job.bar.observe(lambda change: bars.append(change["new"]), names="value")
    press(job)
    first = next(text for text in shown if "masked, not yet compensated" in text)
    assert STALE in first
    assert STALE not in panel.answers.value
    assert sorted(panel.session.points["weights"]) == ["compensated", "dense", "masked"]
    assert bars == sorted(bars)
    assert bars[-1] == 1.0


def test_what_is_advanced_is_open_where_it_is_used():
    """Otherwise it is one line, as are the sections of Inspect."""
    by_layer = Selection(0.5, scope="layer")
    for selection, index in ((None, None), (Selection(0.5), None), (by_layer, 0)):
        panel = explore(small_table(), selection=selection)
        assert panel.advanced.selected_index == index
    panel = explore(small_table())
    panel.weights.show(replace(METHODS[DEFAULT].recipe, own_text=0.6))
    panel.show_again()
    assert panel.advanced.selected_index == 0


def test_pictures_are_as_wide_as_the_panel():
    """In steps of a hundred pixels, and not while it is narrow or hidden."""
    panel = explore(small_table())
    panel.comparison.pin_button.click()
    for width, drawn in ((1650, 1600), (700, 1100), (2500, 2000)):
        panel.in_page.width = width
        for image in (panel.picture, panel.comparison.chart):
            assert int.from_bytes(image.value[16:20]) == drawn
