import io
import re
import threading
import time
from io import BytesIO
from pathlib import Path
from typing import Any

import ipywidgets as ipw
import numpy as np
import pandas as pd
import pytest
from matplotlib.image import imread
from random_tables import random_table
from tiny_folder import write_text
from transformers import AutoModelForCausalLM

from heapr_lab.errors import SpecError
from heapr_lab.evaluation.perplexity import Perplexity
from heapr_lab.importance.table import ImportanceTable
from heapr_lab.panel.controls import TARGET, layer_numbers
from heapr_lab.panel.panel import Explorer, explore, layers_frame
from heapr_lab.panel.pictures import ChoicePicture
from heapr_lab.panel.session import Choice, PruningSession, Step
from heapr_lab.pruning.masks import KeepMask
from heapr_lab.pruning.savings import summed_scores
from heapr_lab.storage.files import read_frame
from heapr_lab.storage.provenance import read_provenance
from heapr_lab.workbench.workbench import Workbench

N_LAYERS, N_EXPERTS, D_INTER = 2, 2, 4
DRAW_SECONDS = 0.15


def small_table() -> ImportanceTable:
    """A table of 16 atoms."""
    return random_table(N_LAYERS, N_EXPERTS, D_INTER)


# --- the session --------------------------------------------------------------------


def test_session_selects_and_counts() -> None:
    """Half of 16 atoms go, each with 3 · 8 parameters, and FLOPs go with them."""
    session = PruningSession(small_table())
    session.choose(Choice(ratio=0.5))
    savings = session.savings()
    assert session.keep.n_removed == 8
    assert savings is not None
    row = savings.iloc[0]
    assert row.parameters_before - row.parameters_after == 8 * 24
    assert 0 < row.flops_reduction < row.routed_flops_reduction
    assert "50.0% of the atomic experts removed: 8 of 16 kept" in session.describe()


def test_session_follows_the_choice() -> None:
    """Another scope takes as much of each layer; whole experts go whole."""
    session = PruningSession(small_table())
    session.choose(Choice(ratio=0.5))
    assert session.keep.layer_ratios().nunique() == 2  # global: layer 0 gives more
    session.choose(Choice(ratio=0.5, scope="layer"))
    assert session.keep.layer_ratios().tolist() == [0.5, 0.5]
    session.choose(Choice(ratio=0.5, scope="layer", granularity="expert"))
    assert sorted(session.keep.widths().loc[0]) == [0, D_INTER]


def test_camera_fixes_the_scope() -> None:
    """Camera is compared within layers only: the session chooses that, and says so."""
    session = PruningSession(small_table())
    session.choose(Choice(ratio=0.25, estimator="camera", scope="global"))
    assert session.choice.scope == "layer"
    assert "scope is layer" in session.describe()
    session.choose(Choice(ratio=0.25))
    assert session.choice.scope == "global"
    assert session.note == ""


def test_session_offers_what_the_table_has() -> None:
    """Estimators whose columns, or whose N, are missing are not offered."""
    offered = PruningSession(small_table()).estimators
    names = {"heapr", "weighted", "shrunk", "camera", "frequency", "random"}
    assert set(offered) == names


def test_session_without_architecture() -> None:
    """A bare table still selects; of parameters it says that nothing is known."""
    table = ImportanceTable.from_frame(small_table().frame)
    session = PruningSession(table)
    assert session.savings() is None
    assert "4 of 16" not in session.describe()
    assert "12 of 16 kept" in session.describe()
    assert "no architecture" in session.describe()


def test_session_without_a_model_cannot_evaluate() -> None:
    """Evaluating a table alone is an error that says what to do."""
    with pytest.raises(SpecError, match="open_workbench"):
        PruningSession(small_table()).evaluate(("pydocs",))


def test_session_evaluates_and_collects(bench: Workbench, root: Path) -> None:
    """Points are the workbench's own numbers; the dense model is there once."""
    text = str(root / "text.txt")
    windows = bench.test_windows(text)
    session = PruningSession(bench.measure(windows), workbench=bench)
    for ratio in (0.3, 0.6, 0.3):
        session.choose(Choice(ratio=ratio))
        session.evaluate((text,))
    points = session.points.sort_values("ratio")
    assert points["ratio"].tolist() == [0.0, 0.3, 0.6]
    session.choose(Choice(ratio=0.6))
    expected = [bench.perplexity(keep, windows).nll for keep in (None, session.keep)]
    assert [points["nll"].iloc[0], points["nll"].iloc[2]] == expected
    assert points["delta_nll"].iloc[2] == expected[1] - expected[0] != 0


def test_progress_counts_up_to_the_whole(bench: Workbench, root: Path) -> None:
    """Progress runs to all windows of both models, with an estimate on the way."""
    text = str(root / "text.txt")
    session = PruningSession(bench.measure(bench.test_windows(text)), workbench=bench)
    session.choose(Choice(ratio=0.45))
    steps: list[Step] = []
    session.evaluate((text,), progress=steps.append)
    assert steps[-1].done == steps[-1].total == 2 * bench.profile.n_test
    assert [step.done for step in steps] == sorted(step.done for step in steps)
    assert steps[-1].seconds_left == 0
    assert Step("dense on x", 3, 8, 65.2).text.endswith("3 of 8, about 1:05 left")


# --- the prediction -----------------------------------------------------------------


DENSE_NLL = 3.0


def true_loss(session: PruningSession, ratio: float) -> float:
    """Δloss of the model that `foretold` makes up: a power law of summed scores."""
    keep = session.keep_of(Choice(ratio=ratio))
    return 0.5 * summed_scores(session.table, keep, "heapr") ** 1.5


@pytest.fixture
def foretold(bench: Workbench, root: Path, monkeypatch: pytest.MonkeyPatch) -> Explorer:
    """A panel of a model whose Δloss is `true_loss`, on two corpora."""
    session = PruningSession(random_table(2, 4, 16), workbench=bench)

    def perplexity(
        keep: KeepMask | None, windows: Any, *, progress: Any = None
    ) -> Perplexity:
        nll = DENSE_NLL
        if keep is not None:
            nll += 0.5 * summed_scores(session.table, keep, "heapr") ** 1.5
        return Perplexity(value=np.exp(nll), nll=nll, n_tokens=100)

    monkeypatch.setattr(bench, "perplexity", perplexity)
    write_text(root / "other.txt")
    corpora = (str(root / "text.txt"), str(root / "other.txt"))
    return Explorer(session, corpora=corpora)


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
    assert "Predicted" not in foretold.prediction.value  # it was measured
    foretold.controls.ratio.value = "0.5"
    assert "from 2 evaluated ratios: Δloss" in foretold.prediction.value
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
        found = foretold.prediction.value
        assert f"Δloss {loss:.3g} nats per token" in found
        assert f"perplexity {np.exp(DENSE_NLL + loss):,.1f}." in found
        assert "less certain" not in found
    foretold.controls.slider.value = 80
    assert "beyond them and so less certain" in foretold.prediction.value
    assert len(foretold.session.points) == 3


def test_prediction_says_how_far_off_it_may_be(foretold: Explorer) -> None:
    """With a third ratio, half of what it was, there is a range around what is said."""
    press_evaluate(foretold, 0.2, 0.4, 0.6)
    session = foretold.session
    middle = session.points["ratio"].eq(0.4)
    session.points.loc[middle, "delta_nll"] /= 2
    foretold.controls.ratio.value = "0.41"
    text = foretold.prediction.value
    loss, low, high = map(
        float, re.search(r"Δloss (\S+) \((\S+) to (\S+)\)", text).groups()
    )
    assert low * high == pytest.approx(loss**2, rel=0.02)
    # left out, the middle is foretold twice as high; the ends are further off
    assert high / loss > 2
    perplexities = re.search(r"perplexity (\S+) \((\S+) to (\S+)\)", text).groups()
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
    assert f"Predicted on {first} from 2" in foretold.prediction.value
    assert second not in foretold.prediction.value
    press_evaluate(foretold, 0.4)
    foretold.controls.ratio.value = "0.5"
    assert f"Predicted on {second} from 2" in foretold.prediction.value
    foretold.controls.scope.value = "layer"
    assert "Evaluate two ratios" in foretold.prediction.value
    foretold.controls.scope.value = "global"
    assert f"Predicted on {first} from 3" in foretold.prediction.value


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


# --- the picture --------------------------------------------------------------------


def test_picture_shows_the_mask() -> None:
    """Bars, line, cells and bins hold the mask's numbers; one mask, the same bytes.

    A cell is white where nothing stays, and has its expert's colour where all does.
    """
    table = small_table()
    picture = ChoicePicture(table)
    arrays = {0: np.zeros((2, 4), bool), 1: np.ones((2, 4), bool)}
    arrays[0][1, :3] = True
    keep = KeepMask.from_arrays(arrays)
    first = picture.draw(keep, estimator="heapr")
    bars, cells, bins = picture.figure.axes[:3]
    assert [bar.get_height() for bar in bars.patches] == [5 / 8, 0]
    assert bars.get_lines()[0].get_ydata()[0] == 5 / 16
    shown = np.asarray(cells.images[0].get_array())
    assert (shown[0, 0] == 1).all()
    np.testing.assert_allclose(1 - shown[0, 1], 0.75 * (1 - shown[1, 1]))
    counts = [stairs.get_data().values.sum() for stairs in bins.patches]
    assert counts == [16, 5]

    full = picture.draw(KeepMask.full(table), estimator="heapr")
    assert full != first
    assert imread(BytesIO(first)).std() > 0.01  # not blank
    assert picture.draw(keep, estimator="heapr") == first
    other = picture.draw(keep, estimator="random")
    assert other != first
    assert picture.draw(keep, estimator="heapr") == first


def test_the_cut_is_the_highest_score_removed() -> None:
    """Of a global choice: every score below it goes, and it is there for all scales."""
    table = small_table()
    picture = ChoicePicture(table)
    for ratio in (0.25, 0.75):
        session = PruningSession(table)
        session.choose(Choice(ratio=ratio))
        picture.draw(session.keep, estimator="heapr")
        scores = np.log10(table.score("heapr").to_numpy())
        gone = ~np.concatenate([k.ravel() for k in session.keep.arrays.values()])
        (cut,) = {float(x) for x in picture.figure.axes[2].get_lines()[0].get_xdata()}
        step = (scores.max() - scores.min()) / 79
        assert scores[gone].max() <= cut <= scores[gone].max() + 1.01 * step


def test_picture_is_quick() -> None:
    """A change takes well under 150 ms of the processor, at 48 × 128 experts too."""
    table = random_table(48, 128, 4)
    session = PruningSession(table)
    picture = ChoicePicture(table)
    picture.draw(session.keep, estimator="heapr")
    started = time.process_time()
    session.choose(Choice(ratio=0.5))
    picture.draw(session.keep, estimator="heapr")
    assert time.process_time() - started < DRAW_SECONDS


# --- the panel ----------------------------------------------------------------------


def test_panel_follows_the_slider() -> None:
    """Moving the slider moves the box, selects anew, and changes text and picture."""
    panel = explore(small_table())
    before = (panel.status.value, bytes(panel.picture.value))
    assert "4 of 16" not in before[0]
    panel.controls.slider.value = 75
    assert panel.controls.ratio.value == "0.75"
    assert panel.session.keep.n_kept == 4
    assert "4 of 16 kept" in panel.status.value
    assert 'role="status"' in panel.status.value
    assert bytes(panel.picture.value).startswith(b"\x89PNG")
    assert bytes(panel.picture.value) != before[1]
    panel.controls.ratio.value = "0.25"
    assert (panel.status.value, bytes(panel.picture.value)) == before


def test_panel_controls_reach_the_session() -> None:
    """Each chooser changes its part of the choice."""
    panel = explore(small_table())
    panel.controls.estimator.value = "random"
    panel.controls.scope.value = "layer"
    panel.controls.granularity.value = "expert"
    panel.controls.slider.value = 30
    assert panel.session.choice == Choice(0.3, "random", "layer", "expert")


def test_controls_of_structure_budget_and_floor() -> None:
    """Widths, what the ratio counts, a floor and layers that stay, as `select` has."""
    panel = explore(random_table(2, 4, 16), choice=Choice(ratio=0.3))
    controls = panel.controls
    assert controls.multiple.disabled
    controls.structure.value = "aligned"
    assert not controls.multiple.disabled
    controls.multiple.value = 4
    assert set(panel.session.keep.widths().to_numpy().ravel()) <= {0, 4, 8, 12, 16}
    controls.structure.value = "ragged"
    controls.floor.value = 3
    controls.whole.value = "1"
    assert panel.session.keep.by_layer(1).all()
    assert panel.session.keep.widths().loc[0].min() >= 3
    assert panel.session.choice.exclude_layers == (1,)
    controls.whole.value = "one"
    assert "cannot read" in panel.error.value
    controls.whole.value = ""
    controls.floor.value = 0
    controls.ratio.value = "0.5"
    controls.budget.value = "routed FLOPs (flops)"
    assert panel.error.value == ""
    saved = panel.session.savings()
    assert saved is not None
    assert 0.5 <= saved.routed_flops_reduction.iloc[0] < 0.53


def test_layers_are_read_from_text() -> None:
    """Numbers and ranges in any order."""
    assert layer_numbers(" 7, 0-2,1 ") == (0, 1, 2, 7)
    assert layer_numbers("") == ()


def within(box: Any) -> list[Any]:
    """All widgets of a panel."""
    own = list(getattr(box, "children", ()))
    return own + [widget for child in own for widget in within(child)]


def test_every_control_has_a_name() -> None:
    """All that takes a value says what it is, but for the slider beside its box."""
    panel = explore(small_table())
    boxes = (ipw.BoundedFloatText, ipw.BoundedIntText, ipw.Text, ipw.Textarea)
    kinds = (*boxes, ipw.Dropdown, ipw.SelectMultiple, ipw.Button, ipw.Checkbox)
    found = [widget for widget in within(panel) if isinstance(widget, kinds)]
    assert len(found) > 15
    assert [w for w in found if not w.description] == []
    assert panel.controls.slider.description == panel.controls.ratio.description


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


def test_numbers_stand_in_a_table() -> None:
    """What is left and saved of atoms, parameters, bytes and FLOPs."""
    panel = explore(small_table(), choice=Choice(ratio=0.5))
    (table,) = pd.read_html(io.StringIO(panel.numbers.value), index_col=0)
    assert table.loc["atomic experts"].tolist() == [16, 8, "50.0%"]
    before, after, saved = table.loc["parameters"]
    assert before - after == 8 * 24
    assert saved == f"{8 * 24 / before:.1%}"
    flops = "FLOPs per token, at 2,048 tokens of context"
    size = "bytes (an estimate, 2 for each parameter)"
    assert {size, flops, "FLOPs of the routed experts"} <= set(table.index)


def test_the_numbers_of_the_picture_are_one_click_away() -> None:
    """A row for each layer, made while it is open, and following the slider then."""
    panel = explore(random_table(2, 4, 16), choice=Choice(ratio=0.5))
    assert panel.layers.value == ""
    panel.behind.selected_index = 0
    frame = layers_frame(panel.session)
    widths = panel.session.keep.widths()
    assert frame["narrowest"].tolist() == widths.min(axis=1).tolist()
    assert frame["experts gone"].tolist() == (widths == 0).sum(axis=1).tolist()
    assert frame["busiest [× even share]"].tolist() == ["1.13", "1.13"]  # 13 / 11.5
    before = panel.layers.value
    assert all(share in before for share in frame["removed"])
    panel.controls.slider.value = 25
    assert panel.layers.value != before


# --- comparing and exporting ----------------------------------------------------------


def test_pins_are_compared_and_exported(
    panel: Explorer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two choices, one evaluated: chart, table, and files that say where from."""
    monkeypatch.chdir(tmp_path)
    tab = panel.comparison
    assert tab.export_button.disabled
    panel.controls.ratio.value = "0.25"
    tab.pin_button.click()
    panel.controls.ratio.value = "0.5"
    panel.controls.structure.value = "uniform"
    tab.pin_button.click()
    panel.evaluation.job.button.click()
    panel.evaluation.job.wait(60)
    assert [pin.label for pin in tab.pins] == ["A", "B"]
    frame = tab.frame()
    assert frame["achieved_ratio"].tolist() == [0.25, 0.5]
    (loss,) = [name for name in frame if name.startswith("Δloss ")]
    assert frame[loss].notna().tolist() == [False, True]
    assert "2 pinned. A: 25.0% removed, not evaluated; B: 50.0%" in tab.message.value
    assert bytes(tab.chart.value).startswith(b"\x89PNG")
    tab.export_button.click()
    assert "Written to comparison" in tab.exported.value
    tab.label.value = "B"
    tab.pin_button.click()  # the same again: what was written may be another
    assert "Written to" not in tab.exported.value
    written = {path.suffix for path in (tmp_path / "comparison").iterdir()}
    assert written == {".png", ".pdf", ".csv", ".md", ".tex", ".parquet"}
    assert r"\toprule" in (tmp_path / "comparison" / "comparison.tex").read_text()
    found, metadata = read_frame(tmp_path / "comparison" / "comparison.parquet")
    assert found["label"].tolist() == ["A", "B"]
    assert [pin["ratio"] for pin in metadata["pins"]] == [0.25, 0.5]
    assert metadata["importance"] == panel.session.table.metadata["spec_hash"]
    for suffix in (".png", ".pdf", ".csv", ".tex", ".parquet"):
        origin = read_provenance(tmp_path / "comparison" / f"comparison{suffix}")
        assert origin.spec_hash == metadata["importance"]
        assert [pin["label"] for pin in origin.provenance["pins"]] == ["A", "B"]
    tab.clear_button.click()
    assert tab.pins == []
    assert tab.export_button.disabled


@pytest.mark.parametrize("compensated", [True, False])
def test_the_model_is_exported(
    panel: Explorer, tmp_path: Path, compensated: bool
) -> None:
    """The folder loads again, with the mask chosen; a folder in use is refused."""
    panel.controls.ratio.value = "0.4"
    tab = panel.export
    tab.folder.value = str(tmp_path / "pruned")
    tab.compensated.value = compensated
    tab.job.button.click()
    tab.job.wait(60)
    assert tab.job.error.value == ""
    assert "AutoModelForCausalLM.from_pretrained" in tab.command.value
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "pruned")
    widths = [
        list(module.heapr_widths)
        for module in loaded.modules()
        if hasattr(module, "heapr_widths")
    ]
    assert widths == panel.session.keep.widths().to_numpy().tolist()
    manifest = (tmp_path / "pruned" / "heapr_manifest.json").read_text()
    assert ("compensated by least squares" in manifest) == compensated
    tab.job.button.click()
    tab.job.wait(60)
    assert "not empty" in tab.job.error.value
    tab.folder.value = str(tmp_path / "other")
    tab.gguf.value = True
    tab.job.button.click()
    tab.job.wait(60)
    assert "choose uniform" in tab.job.error.value
    assert not (tmp_path / "other").exists()


def test_tasks_are_evaluated_and_remembered(panel: Explorer) -> None:
    """Accuracy of both models, in the table and in words."""
    panel.controls.ratio.value = "0.4"
    panel.evaluation.corpora.value = ()
    panel.evaluation.tasks.value = panel.evaluation.tasks.options
    panel.evaluation.job.button.click()
    panel.evaluation.job.wait(60)
    assert panel.evaluation.job.error.value == ""
    points = panel.session.points
    assert points["dataset"].tolist() == [*panel.evaluation.tasks.options] * 2
    assert points["accuracy"].between(0, 1).all()
    assert "accuracy on continuation:" in panel.evaluation.message.value
    assert panel.evaluation.chart.layout.display is None
    (curve, *_) = panel.evaluation._picture.accuracy.containers[0].lines
    accuracy = points[points["estimator"].eq("heapr")]["accuracy"].astype(float)
    assert curve.get_ydata() == pytest.approx(100 * accuracy)


def test_anything_else_cannot_be_explored(tmp_path: Path) -> None:
    """A table's file can; a list cannot."""
    small_table().write(tmp_path / "table.parquet")
    assert explore(tmp_path / "table.parquet").session.keep.n_atoms == 16
    with pytest.raises(SpecError, match="cannot explore a list"):
        explore([])  # type: ignore[arg-type]


def test_panel_with_camera() -> None:
    """Camera locks the scope and says why; leaving it restores the scope."""
    panel = explore(small_table())
    panel.controls.estimator.value = "camera"
    assert (panel.controls.scope.value, panel.controls.scope.disabled) == (
        "layer",
        True,
    )
    assert "compares atoms within a layer only" in panel.status.value
    panel.controls.estimator.value = "heapr"
    assert (panel.controls.scope.value, panel.controls.scope.disabled) == (
        "global",
        False,
    )


def test_panel_shows_what_cannot_be_had() -> None:
    """A choice that cannot be had is told in the panel, and forgotten afterwards."""
    panel = explore(small_table(), choice=Choice(ratio=0.5))
    panel.controls.floor.value = 4
    assert 'role="alert"' in panel.error.value
    assert "the largest possible is 0" in panel.error.value
    assert "infeasible" in panel.status.value
    assert "ut of date" in panel.status.value
    panel.controls.floor.value = 1
    assert panel.error.value == ""
    assert "8 of 16 kept" in panel.status.value


def test_panel_of_a_table_cannot_evaluate() -> None:
    """Without a model the button is off, and text says why."""
    panel = explore(small_table())
    assert panel.evaluation.job.button.disabled
    assert "without a model" in panel.evaluation.job.text.value


def test_panel_evaluates(panel: Explorer) -> None:
    """The button measures in a thread; chart and table then hold all points."""
    panel.controls.ratio.value = "0.35"
    panel.evaluation.job.button.click()
    panel.evaluation.job.wait(60)
    assert panel.error.value == ""
    assert not panel.evaluation.job.button.disabled
    assert panel.evaluation.job.cancel_button.disabled
    first = bytes(panel.evaluation.chart.value)
    assert first.startswith(b"\x89PNG")
    assert panel.evaluation.results.value.count("<tr>") == 2  # dense and pruned

    panel.controls.ratio.value = "0.55"
    panel.evaluation.job.button.click()
    panel.evaluation.job.wait(60)
    assert bytes(panel.evaluation.chart.value) != first
    assert panel.evaluation.results.value.count("<tr>") == 3
    lines = panel.evaluation._picture.ax.get_lines()
    curve = next(line for line in lines if line.get_marker() == "o")
    points = panel.session.points
    pruned = points[points["estimator"] == "heapr"]
    losses = pruned["delta_nll"].to_numpy(dtype=float)
    assert curve.get_ydata() == pytest.approx(losses)


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


def test_panel_cancels(panel: Explorer) -> None:
    """Cancel ends the run between two batches; no point is added, and all is ready."""
    panel.controls.ratio.value = "0.85"
    reached, go_on = threading.Event(), threading.Event()

    def hold(change: Any) -> None:  # the run stands still until Cancel was pressed
        if " of " in change["new"]:
            reached.set()
            assert go_on.wait(60)

    panel.evaluation.job.text.observe(hold, names="value")
    panel.evaluation.job.button.click()
    assert reached.wait(60)
    assert (
        panel.evaluation.job.button.disabled,
        panel.evaluation.job.cancel_button.disabled,
    ) == (1, 0)
    panel.controls.ratio.value = "0.8"  # the slider stays alive meanwhile
    assert "79.7%" in panel.status.value  # 51 of 64
    panel.evaluation.job.cancel_button.click()
    go_on.set()
    panel.evaluation.job.wait(60)
    assert "cancelled" in panel.evaluation.job.text.value
    assert panel.session.points.empty
    assert not panel.evaluation.job.button.disabled


def test_panel_shows_errors(bench: Workbench, root: Path) -> None:
    """A corpus that does not exist: the message stands in the panel."""
    table = bench.measure(bench.test_windows(str(root / "text.txt")))
    panel = Explorer(
        PruningSession(table, workbench=bench), corpora=("no <such> corpus",)
    )
    panel.evaluation.job.button.click()
    panel.evaluation.job.wait(60)
    assert "no &lt;such&gt; corpus" in panel.evaluation.job.error.value
    assert 'role="alert"' in panel.evaluation.job.error.value
    assert not panel.evaluation.job.button.disabled


def test_panel_shows_what_was_not_foreseen(
    panel: Explorer, caplog: pytest.LogCaptureFixture
) -> None:
    """An error that nobody foresaw is shown with its type, and logged whole."""
    panel.session.workbench = object()  # type: ignore[assignment]
    panel.evaluation.job.button.click()
    panel.evaluation.job.wait(60)
    assert "AttributeError" in panel.evaluation.job.error.value
    assert "Traceback" in caplog.text


def test_panel_text_is_the_same_each_time() -> None:
    """What a notebook keeps of the panel names its choice and no object's number."""
    panel = explore(small_table(), choice=Choice(ratio=0.4))
    assert repr(panel).startswith("Explorer(heapr, 0.4 of the atoms, global scope")
