import itertools
import re
import threading
import time
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from matplotlib.image import imread
from tiny_folder import write_model, write_text

from heapr_lab.accounting import Architecture, LayerShape
from heapr_lab.damage import summed_scores
from heapr_lab.evaluation import Perplexity
from heapr_lab.masks import KeepMask
from heapr_lab.pictures import LayerPicture
from heapr_lab.pipeline import Workbench, open_workbench
from heapr_lab.sessions import Choice, PruningSession, Step
from heapr_lab.specs import SpecError
from heapr_lab.table import ImportanceTable
from heapr_lab.widgets import PruningPanel, prune_and_evaluate

N_LAYERS, N_EXPERTS, D_INTER = 2, 2, 4
DRAW_SECONDS = 0.15


def random_table(n_layers: int, n_experts: int, d_inter: int) -> ImportanceTable:
    """A table of random sums; layer 0 has smaller scores than the others."""
    rng = np.random.default_rng(0)
    shape = LayerShape(n_experts=n_experts, d_inter=d_inter, d_expert=8)
    layers = dict.fromkeys(range(n_layers), shape)
    atoms = itertools.product(range(n_layers), range(n_experts), range(d_inter))
    frame = pd.DataFrame(atoms, columns=["layer", "expert", "atom"])
    size = len(frame)
    frame["tokens"] = 10 + frame["expert"]
    frame["sum_h2"] = rng.uniform(1, 2, size) * (1 + frame["layer"])
    for name in ("sum_g2", "sum_ph2", "max_abs_ph", "w_down_sq"):
        frame[name] = rng.uniform(1, 2, size)
    model = Architecture(10**4 + size * 24, 2, 8, layers, 5000, 16)
    return ImportanceTable.from_frame(frame, architecture=model.to_dict())


def small_table() -> ImportanceTable:
    """A table of 16 atoms."""
    return random_table(N_LAYERS, N_EXPERTS, D_INTER)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model in `moe`, and a text."""
    folder = tmp_path_factory.mktemp("widgets")
    write_model(folder / "moe")
    write_text(folder / "text.txt")
    return folder


@pytest.fixture(scope="module")
def bench(root: Path) -> Workbench:
    """The tiny model on a bench."""
    return open_workbench(str(root / "moe"), profile="small")


@pytest.fixture
def panel(bench: Workbench, root: Path) -> PruningPanel:
    """A panel that can evaluate on the text."""
    text = str(root / "text.txt")
    table = bench.measure(bench.test_windows(text))
    return PruningPanel(PruningSession(table, workbench=bench), corpora=(text,))


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
def foretold(
    bench: Workbench, root: Path, monkeypatch: pytest.MonkeyPatch
) -> PruningPanel:
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
    return PruningPanel(session, corpora=corpora)


def press_evaluate(panel: PruningPanel, *ratios: float) -> None:
    """Evaluate each ratio, as a user does."""
    for ratio in ratios:
        panel.ratio.value = ratio
        panel.evaluate_button.click()
        panel.wait(60)
        assert panel.error.value == ""


def test_prediction_appears_with_the_second_ratio(foretold: PruningPanel) -> None:
    """Before, it says what to do; evaluating the same ratio twice does not count."""
    assert "Evaluate two ratios" in foretold.prediction.value
    press_evaluate(foretold, 0.2, 0.2, 0.201)  # 25 of 128 atoms, each time
    assert "Evaluate two ratios" in foretold.prediction.value
    press_evaluate(foretold, 0.6)
    assert "from 2 evaluated ratios: Δloss" in foretold.prediction.value
    assert 'role="status"' in foretold.prediction.value


def test_prediction_follows_the_slider(
    foretold: PruningPanel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At ratios that were not evaluated it tells the truth, and evaluates nothing."""
    press_evaluate(foretold, 0.2, 0.6)
    monkeypatch.delattr(foretold.session.workbench, "perplexity")
    monkeypatch.setattr(Workbench, "perplexity", None)
    for ratio in (0.4, 0.3):
        foretold.slider.value = ratio
        loss = true_loss(foretold.session, ratio)
        found = foretold.prediction.value
        assert f"Δloss {loss:.3g} nats/token" in found
        assert f"perplexity {np.exp(DENSE_NLL + loss):,.1f}." in found
        assert "less certain" not in found
    foretold.slider.value = 0.8
    assert "beyond them and so less certain" in foretold.prediction.value
    assert len(foretold.session.points) == 3


def test_prediction_says_how_far_off_it_may_be(foretold: PruningPanel) -> None:
    """With a third ratio, half of what it was, there is a range around what is said."""
    press_evaluate(foretold, 0.2, 0.4, 0.6)
    session = foretold.session
    middle = session.points["ratio"].eq(0.4)
    session.points.loc[middle, "delta_nll"] /= 2
    foretold.ratio.value = 0.41
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


def test_prediction_is_of_each_corpus_and_choice(foretold: PruningPanel) -> None:
    """Only what was chosen alike counts, and each corpus has its own points."""
    press_evaluate(foretold, 0.2)
    foretold.corpora.value = foretold.corpora.options
    press_evaluate(foretold, 0.6)
    first, second = foretold.corpora.options
    assert f"Predicted on {first} from 2" in foretold.prediction.value
    assert second not in foretold.prediction.value
    press_evaluate(foretold, 0.4)
    assert f"Predicted on {second} from 2" in foretold.prediction.value
    foretold.scope.value = "layer"
    assert "Evaluate two ratios" in foretold.prediction.value
    foretold.scope.value = "global"
    assert f"Predicted on {first} from 3" in foretold.prediction.value


def test_prediction_says_why_there_is_none(foretold: PruningPanel) -> None:
    """Where the loss fell, there is nothing to foretell from; the panel stays whole."""
    press_evaluate(foretold, 0.2, 0.4)
    foretold.session.points["delta_nll"] *= -1
    foretold.ratio.value = 0.3
    assert "No prediction on" in foretold.prediction.value
    assert "evaluate a larger ratio" in foretold.prediction.value
    assert foretold.error.value == ""
    assert "removed" in foretold.status.value


def test_a_table_has_no_prediction() -> None:
    """Without a model nothing can be evaluated, so nothing is promised."""
    assert prune_and_evaluate(small_table()).prediction.value == ""


# --- the picture --------------------------------------------------------------------


def test_picture_shows_the_mask() -> None:
    """Bars, line and cells hold the mask's numbers; the same mask, the same bytes."""
    table = small_table()
    picture = LayerPicture(table)
    arrays = {0: np.zeros((2, 4), bool), 1: np.ones((2, 4), bool)}
    arrays[0][1, :3] = True
    first = picture.draw(KeepMask.from_arrays(arrays))
    bars, cells = picture.figure.axes[:2]
    assert [bar.get_height() for bar in bars.patches] == [5 / 8, 0]
    assert bars.get_lines()[0].get_ydata()[0] == 5 / 16
    assert cells.collections[0].get_array().tolist() == [[0, 3], [4, 4]]

    full = picture.draw(KeepMask.full(table))
    assert full != first
    assert imread(BytesIO(first)).std() > 0.01  # not blank
    assert picture.draw(KeepMask.from_arrays(arrays)) == first


def test_picture_is_quick() -> None:
    """A change takes well under 150 ms of the processor, at 48 × 128 experts too."""
    table = random_table(48, 128, 4)
    session = PruningSession(table)
    picture = LayerPicture(table)
    picture.draw(session.keep)
    started = time.process_time()
    session.choose(Choice(ratio=0.5))
    picture.draw(session.keep)
    assert time.process_time() - started < DRAW_SECONDS


# --- the panel ----------------------------------------------------------------------


def test_panel_follows_the_slider() -> None:
    """Moving the slider moves the box, selects anew, and changes text and picture."""
    panel = prune_and_evaluate(small_table())
    before = (panel.status.value, bytes(panel.picture.value))
    assert "4 of 16" not in before[0]
    panel.slider.value = 0.75
    assert panel.ratio.value == 0.75
    assert panel.session.keep.n_kept == 4
    assert "4 of 16 kept" in panel.status.value
    assert 'role="status"' in panel.status.value
    assert bytes(panel.picture.value).startswith(b"\x89PNG")
    assert bytes(panel.picture.value) != before[1]
    panel.ratio.value = 0.25
    assert (panel.status.value, bytes(panel.picture.value)) == before


def test_panel_controls_reach_the_session() -> None:
    """Each chooser changes its part of the choice."""
    panel = prune_and_evaluate(small_table())
    panel.estimator.value = "random"
    panel.scope.value = "layer"
    panel.granularity.value = "expert"
    panel.ratio.value = 0.3 + 1e-9
    assert panel.session.choice == Choice(0.3, "random", "layer", "expert")


def test_panel_with_camera() -> None:
    """Camera locks the scope and says why; leaving it restores the scope."""
    panel = prune_and_evaluate(small_table())
    panel.estimator.value = "camera"
    assert (panel.scope.value, panel.scope.disabled) == ("layer", True)
    assert "compares atoms within a layer only" in panel.status.value
    panel.estimator.value = "heapr"
    assert (panel.scope.value, panel.scope.disabled) == ("global", False)


def test_panel_shows_what_cannot_be_had() -> None:
    """A choice that cannot be had is told in the panel, and forgotten afterwards."""
    aligned = Choice(structure="aligned", multiple=None)
    panel = prune_and_evaluate(small_table(), choice=aligned)
    assert 'role="alert"' in panel.error.value
    assert "multiple" in panel.error.value
    panel.session.choose(Choice(structure="aligned", multiple=2))
    panel.ratio.value = 0.5
    assert panel.error.value == ""
    assert set(panel.session.keep.widths().to_numpy().ravel()) <= {0, 2, 4}


def test_panel_of_a_table_cannot_evaluate() -> None:
    """Without a model the button is off, and text says why."""
    panel = prune_and_evaluate(small_table())
    assert panel.evaluate_button.disabled
    assert "without a model" in panel.progress_text.value


def test_panel_evaluates(panel: PruningPanel) -> None:
    """The button measures in a thread; chart and table then hold all points."""
    panel.ratio.value = 0.35
    panel.evaluate_button.click()
    panel.wait(60)
    assert panel.error.value == ""
    assert not panel.evaluate_button.disabled
    assert panel.cancel_button.disabled
    first = bytes(panel.chart.value)
    assert first.startswith(b"\x89PNG")
    assert panel.results.value.count("<tr>") == 2  # dense and pruned

    panel.ratio.value = 0.55
    panel.evaluate_button.click()
    panel.wait(60)
    assert bytes(panel.chart.value) != first
    assert panel.results.value.count("<tr>") == 3
    lines = panel._losses.ax.get_lines()
    curve = next(line for line in lines if line.get_marker() == "o")
    points = panel.session.points
    pruned = points[points["estimator"] == "heapr"]
    assert curve.get_ydata() == pytest.approx(pruned["nll"].to_numpy(dtype=float))


def test_panel_cancels(panel: PruningPanel) -> None:
    """Cancel ends the run between two batches; no point is added, and all is ready."""
    panel.ratio.value = 0.85
    reached, go_on = threading.Event(), threading.Event()

    def hold(change: Any) -> None:  # the run stands still until Cancel was pressed
        if "window" in change["new"]:
            reached.set()
            assert go_on.wait(60)

    panel.progress_text.observe(hold, names="value")
    panel.evaluate_button.click()
    assert reached.wait(60)
    assert (panel.evaluate_button.disabled, panel.cancel_button.disabled) == (1, 0)
    panel.ratio.value = 0.8  # the slider stays alive meanwhile
    assert "79.7%" in panel.status.value  # 51 of 64
    panel.cancel_button.click()
    go_on.set()
    panel.wait(60)
    assert panel.progress_text.value == "cancelled"
    assert panel.session.points.empty
    assert not panel.evaluate_button.disabled


def test_panel_shows_errors(bench: Workbench, root: Path) -> None:
    """A corpus that does not exist: the message stands in the panel."""
    table = bench.measure(bench.test_windows(str(root / "text.txt")))
    panel = PruningPanel(
        PruningSession(table, workbench=bench), corpora=("no <such> corpus",)
    )
    panel.evaluate_button.click()
    panel.wait(60)
    assert "no &lt;such&gt; corpus" in panel.error.value
    assert 'role="alert"' in panel.error.value
    assert not panel.evaluate_button.disabled


def test_panel_shows_what_was_not_foreseen(
    panel: PruningPanel, caplog: pytest.LogCaptureFixture
) -> None:
    """An error that nobody foresaw is shown with its type, and logged whole."""
    panel.session.workbench = object()  # type: ignore[assignment]
    panel.evaluate_button.click()
    panel.wait(60)
    assert "AttributeError" in panel.error.value
    assert "Traceback" in caplog.text


def test_panel_text_is_the_same_each_time() -> None:
    """What a notebook keeps of the panel names its choice and no object's number."""
    panel = prune_and_evaluate(small_table(), choice=Choice(ratio=0.4))
    assert repr(panel).startswith("PruningPanel(ratio 0.4, heapr, scope global, atom")
