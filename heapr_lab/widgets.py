"""The pruning panel: a slider that prunes at once, a button that evaluates.

Stock ipywidgets over a `PruningSession`, pictures as PNG bytes. Whatever is cheap
follows every move of the slider, a prediction of the loss too once two ratios were
evaluated; the model runs only on the button, in a thread, and can be stopped.
"""

import html
import logging
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import ipywidgets as ipw

from heapr_lab.pictures import LayerPicture, LossPicture
from heapr_lab.sessions import Choice, PruningSession, Step
from heapr_lab.specs import HeaprLabError
from heapr_lab.table import ImportanceTable

if TYPE_CHECKING:
    from heapr_lab.pipeline import Workbench

logger = logging.getLogger(__name__)

_LARGEST_RATIO: Final = 0.99
_CAPTION = (
    "Left: removed share of each layer; dashed, of all layers together. "
    "Right: atomic experts that stay in each expert; a dot's area is its load."
)
_SHOWN = ["dataset", "estimator", "scope", "granularity", "achieved_ratio"]
_MEASURED = ["nll", "delta_nll", "perplexity"]


class _CancelledError(Exception):
    """Raised by the progress callback to end an evaluation."""


class PruningPanel(ipw.VBox):
    """A `PruningSession` to be moved by hand.

    Attributes:
        session: what is shown; its `points` hold everything that was evaluated.
    """

    def __init__(
        self, session: PruningSession, *, corpora: Sequence[str] = ("pydocs",)
    ) -> None:
        """Lay the panel out and show the session's choice.

        Args:
            session: what to show.
            corpora: on whose test splits perplexity can be measured.
        """
        self.session = session
        self._build_controls(corpora)
        self._build_views()
        self._layers = LayerPicture(session.table)
        self._losses = LossPicture()
        self._cancel = threading.Event()
        self._worker: threading.Thread | None = None
        self._showing = False
        super().__init__(self._rows())
        self._connect()
        self._refresh()

    def __repr__(self) -> str:
        # What a notebook shows where no kernel runs: text that is always the same.
        choice = self.session.choice
        return (
            f"PruningPanel(ratio {choice.ratio:g}, {choice.estimator}, scope "
            f"{choice.scope}, {choice.granularity}; run the notebook to use it)"
        )

    # --- layout -----------------------------------------------------------------

    def _build_controls(self, corpora: Sequence[str]) -> None:
        choice = self.session.choice
        limits = {"min": 0.0, "max": _LARGEST_RATIO, "step": 0.01}
        self.slider = ipw.FloatSlider(
            choice.ratio, description="ratio", readout=False, **limits
        )
        # The slider has no name that a screen reader could say; the box has.
        self.ratio = ipw.BoundedFloatText(
            choice.ratio, description="ratio", layout={"width": "170px"}, **limits
        )
        ipw.link((self.slider, "value"), (self.ratio, "value"))
        self.estimator = _dropdown(
            "estimator", self.session.estimators, choice.estimator
        )
        self.scope = _dropdown("scope", ("global", "layer"), choice.scope)
        self.granularity = _dropdown(
            "granularity", ("atom", "expert"), choice.granularity
        )
        self.corpora = ipw.SelectMultiple(
            options=list(corpora),
            value=list(corpora)[:1],
            rows=min(4, max(2, len(corpora))),
            description="corpora",
        )
        self.evaluate_button = ipw.Button(
            description="Evaluate",
            button_style="primary",
            tooltip="measure perplexity of the dense and the pruned model",
        )
        self.cancel_button = ipw.Button(description="Cancel", disabled=True)
        self._wished_scope = choice.scope

    def _build_views(self) -> None:
        self.status = ipw.HTML()
        self.prediction = ipw.HTML()
        self.error = ipw.HTML()
        self.picture = ipw.Image(format="png")
        self.bar = ipw.FloatProgress(min=0.0, max=1.0, description="progress")
        self.bar.layout.visibility = "hidden"
        self.progress_text = ipw.HTML()
        self.chart = ipw.Image(format="png", layout={"display": "none"})
        self.results = ipw.HTML()

    def _rows(self) -> list[ipw.Widget]:
        controls = [
            ipw.HBox([self.slider, self.ratio]),
            ipw.HBox([self.estimator, self.scope, self.granularity]),
        ]
        buttons = ipw.VBox([self.evaluate_button, self.cancel_button])
        progress = ipw.VBox([self.bar, self.progress_text])
        return [
            *controls,
            self.status,
            self.prediction,
            self.error,
            self.picture,
            ipw.HTML(f"<small>{html.escape(_CAPTION)}</small>"),
            ipw.HBox([self.corpora, buttons, progress]),
            self.chart,
            self.results,
        ]

    def _connect(self) -> None:
        for control in (self.ratio, self.estimator, self.scope, self.granularity):
            control.observe(self._refresh, names="value")
        self.evaluate_button.on_click(self.evaluate)
        self.cancel_button.on_click(self.cancel)
        if self.session.workbench is None:
            self.evaluate_button.disabled = True
            self.progress_text.value = "a table without a model cannot be evaluated"

    # --- what follows the slider --------------------------------------------------

    def _refresh(self, change: Any = None) -> None:
        """Select, count and draw what the controls say."""
        if self._showing:  # the panel itself moved a control
            return
        if change is not None and change["owner"] is self.scope:
            self._wished_scope = change["new"]
        try:
            self._show(self._chosen())
        except Exception as error:  # an observer's exception is seen by nobody
            self._fail(error)
            self.status.value = _status("This choice cannot be had.")
            self.prediction.value = ""

    def _chosen(self) -> Choice:
        return Choice(
            # A slider's steps add up to 0.30000000000000004.
            ratio=round(self.ratio.value, 6),
            estimator=self.estimator.value,
            scope=self._wished_scope,
            granularity=self.granularity.value,
            structure=self.session.choice.structure,
            multiple=self.session.choice.multiple,
        )

    def _show(self, choice: Choice) -> None:
        self.session.choose(choice)
        self._showing = True
        try:
            self.scope.value = self.session.choice.scope
            self.scope.disabled = self.session.scope_is_fixed
        finally:
            self._showing = False
        picture = self._layers.draw(self.session.keep)
        self.status.value = _status(self.session.describe())
        self.picture.value = picture
        self._show_prediction()
        self.error.value = ""

    def _show_prediction(self) -> None:
        """Say what the choice will cost, where there is a model to evaluate."""
        if self.session.workbench is not None:
            self.prediction.value = _status(self.session.describe_prediction())

    # --- what the button starts ---------------------------------------------------

    def evaluate(self, _button: Any = None) -> None:
        """Measure the current choice in a thread; what the button does."""
        if self._worker is not None and self._worker.is_alive():
            return
        self._cancel.clear()
        self._set_running(True)
        arguments = (tuple(self.corpora.value), self.session.choice)
        self._worker = threading.Thread(target=self._run, args=arguments, daemon=True)
        self._worker.start()

    def cancel(self, _button: Any = None) -> None:
        """End a running evaluation after its current batch."""
        self._cancel.set()
        self.cancel_button.disabled = True

    def wait(self, timeout: float | None = None) -> None:
        """Return when no evaluation is running, or after `timeout` seconds."""
        if self._worker is not None:
            self._worker.join(timeout)

    def _run(self, corpora: Sequence[str], choice: Choice) -> None:
        message = ""
        try:
            self.session.evaluate(corpora, choice=choice, progress=self._on_step)
            self._show_points()
            self._show_prediction()
        except _CancelledError:
            message = "cancelled"
        except Exception as error:  # a thread's exception is seen by nobody
            self._fail(error)
        finally:
            self._set_running(False, message)

    def _on_step(self, step: Step) -> None:
        if self._cancel.is_set():
            raise _CancelledError
        self.bar.value = step.done / step.total
        self.progress_text.value = html.escape(step.text)

    def _show_points(self) -> None:
        points = self.session.points
        self.chart.value = self._losses.draw(points)
        self.chart.layout.display = None
        table = points[[*_SHOWN, *_MEASURED]].assign(
            achieved_ratio=points["achieved_ratio"].map("{:.1%}".format)
        )
        self.results.value = table.to_html(
            index=False, border=0, float_format="{:.4f}".format
        )

    def _set_running(self, running: bool, message: str = "") -> None:
        if running:
            self.error.value = ""
            self.bar.value = 0.0
        self.bar.layout.visibility = "visible" if running else "hidden"
        self.progress_text.value = "starting" if running else message
        self.evaluate_button.disabled = running
        self.cancel_button.disabled = not running

    def _fail(self, error: Exception) -> None:
        expected = isinstance(error, HeaprLabError)
        if not expected:
            logger.error("the panel caught an error", exc_info=error)
        text = str(error) if expected else f"{type(error).__name__}: {error}"
        color = "var(--jp-error-color1, #b00020)"
        self.error.value = (
            f'<div role="alert" style="color:{color}">{html.escape(text)}</div>'
        )


def prune_and_evaluate(
    source: "Workbench | ImportanceTable",
    *,
    corpora: Sequence[str] = ("pydocs",),
    choice: Choice | None = None,
) -> PruningPanel:
    """The panel of a model on its workbench, or of a table alone.

    Args:
        source: a workbench, whose importance is measured if it is not yet; or a
            table, with which everything but evaluating works.
        corpora: on whose test splits perplexity can be measured.
        choice: what to show first.

    Example:
        >>> prune_and_evaluate(open_workbench("lab"))  # doctest: +SKIP
    """
    if isinstance(source, ImportanceTable):
        session = PruningSession(source)
    else:
        session = PruningSession(source.importance(), workbench=source)
    session.choose(choice or session.choice)
    return PruningPanel(session, corpora=corpora)


def _dropdown(name: str, options: Sequence[str], value: str) -> ipw.Dropdown:
    chosen = value if value in options else options[0]
    return ipw.Dropdown(
        options=list(options),
        value=chosen,
        description=name,
        layout={"width": "240px"},
    )


def _status(text: str) -> str:
    return f'<div role="status" aria-live="polite">{html.escape(text)}</div>'
