"""The tab that compares saved selections and methods, in a chart and a table."""

import itertools
import math
import string
from pathlib import Path
from typing import Any

import ipywidgets as ipw
import pandas as pd
from matplotlib.figure import Figure

from heapr_lab.errors import HeaprLabError, SpecError
from heapr_lab.figures import save_figure, write_table
from heapr_lab.panel.looks import (
    beside,
    button,
    failure,
    line,
    one_of,
    picture,
    status,
    table_html,
)
from heapr_lab.panel.method_runs import MethodRuns
from heapr_lab.panel.pictures import NARROWEST, drawn_png, figure_compared
from heapr_lab.panel.session import (
    LOSS,
    NotKnownError,
    Pin,
    PruningSession,
    without_losses,
)
from heapr_lab.pruning.masks import KeepMask
from heapr_lab.pruning.options import Selection
from heapr_lab.pruning.savings import at_context
from heapr_lab.storage import files
from heapr_lab.storage.paths import path_of

_NOTHING_YET = (
    "Nothing pinned yet. Pin saves the current selection; Run methods adds others."
)
_NO_CONTROL = "estimator_options"
"""The setting of a selection that has no control."""
_REDUCED = {
    "parameter": "parameters",
    "bytes": "bytes",
    "flops": "FLOPs",
    "routed_flops": "routed FLOPs",
}
"""What is saved, and as text."""


class CompareTab(ipw.VBox):
    """Pins the current selection, runs methods, shows all of them and exports them."""

    def __init__(self, session: PruningSession) -> None:
        """Lay the tab out for `session`; nothing is pinned."""
        self.session = session
        self._before: tuple[list[Pin], list[dict[str, Any]]] = [], []
        self._texts_before = session.texts
        self._numbers: dict[str, int] = {}
        """The numbers of the looks of the rows, by their labels."""
        self.runs = MethodRuns(session)
        self._build_pins()
        self._build_views()
        super().__init__(
            [
                beside(
                    *(self.label, self.pin_button, self.pinned, self.load_button),
                    *(self.remove_button, self.clear_button, self.undo_button),
                ),
                self.runs,
                self.message,
                self.chart,
                self.table,
                beside(self.folder, self.export_button),
                self.exported,
            ]
        )
        self.show_pins([], session.method_rows)
        session.observe(self.refresh, names=["points", "method_rows"])

    def _build_pins(self) -> None:
        self.label = ipw.Text("A", description="label", layout={"width": "200px"})
        self.pin_button = button("Pin", self.pin, primary=True)
        self.pinned = one_of("pinned", width="200px")
        self.load_button = button("Load")
        self.remove_button = button("Remove", self.remove)
        self.clear_button = button("Clear", self.clear)
        self.undo_button = button("Undo", self.undo)

    def _build_views(self) -> None:
        self.message = ipw.HTML(status(_NOTHING_YET))
        self.chart = picture("compared", display="none", max_width="100%")
        self._width = NARROWEST
        self.table = ipw.HTML()
        self.folder = line("folder", "comparison")
        self.export_button = button("Export comparison", self._press_export)
        self.exported = ipw.HTML(status(""))

    def pin(self, _button: ipw.Button | None = None) -> None:
        """Save the current selection; it replaces a pin of the same label."""
        label = self.label.value.strip() or _next_label(self.pins)
        try:
            pin = Pin(label, self.session.selection, self.session.recipe)
        except SpecError as error:
            self.message.value = failure(error)
            return
        others = [old for old in self.pins if old.label != label]
        self._replace([*others, pin], self.session.method_rows)

    @property
    def pins(self) -> list[Pin]:
        """The pins, which are the values of the list."""
        return [pin for _, pin in self.pinned.options]

    def remove(self, _button: ipw.Button | None = None) -> None:
        """Remove the pin that is chosen in the list."""
        others = [pin for pin in self.pins if pin != self.pinned.value]
        self._replace(others, self.session.method_rows)

    def clear(self, _button: ipw.Button | None = None) -> None:
        """Remove all pins and methods."""
        self._replace([], [])

    def undo(self, _button: ipw.Button | None = None) -> None:
        """Bring back what was last removed or replaced; what was added since stays.

        If that has the label of what comes back, once more brings it back in turn. Rows
        of a text that has changed since do not come back.
        """
        pins, rows = self._before
        self._before = [], []
        texts, before = self.session.texts, self._texts_before
        others = [name for name in texts if before.get(name) != texts[name]]
        rows = without_losses(rows, others)
        pinned, run = {pin.label for pin in pins}, {row["label"] for row in rows}
        self._replace(
            pins + [pin for pin in self.pins if pin.label not in pinned],
            rows + [row for row in self.session.method_rows if row["label"] not in run],
        )

    def _replace(self, pins: list[Pin], rows: list[dict[str, Any]]) -> None:
        """Show these; if anything is no longer shown, Undo brings it back."""
        before, old = self._before, (self.pins, self.session.method_rows)
        stay = all(pin in pins for pin in old[0]) and all(row in rows for row in old[1])
        if not stay:
            self._texts_before = self.session.texts
        self.show_pins(pins, rows, before=before if stay else old)

    def show_pins(
        self,
        pins: list[Pin],
        rows: list[dict[str, Any]],
        *,
        before: tuple[list[Pin], list[dict[str, Any]]] = ([], []),
    ) -> None:
        """Show these pins and rows of methods, and no others; Undo shows `before`."""
        self.pinned.options = [(pin.label, pin) for pin in pins]
        self.pinned.index = 0 if pins else None  # it stays None by itself
        self.session.method_rows, self._before = rows, before
        self.label.value = _next_label(pins)
        self.undo_button.disabled = not any(before)
        for control in (self.pinned, self.load_button, self.remove_button):
            control.disabled = not pins
        self.refresh()

    def widen(self, width: int) -> None:
        """Draw the chart so many pixels wide from now on."""
        self._width = width
        self.refresh()

    def refresh(self, _change: Any = None) -> None:
        """Show all pins and methods, with the evaluations made meanwhile."""
        self.exported.value = status("")  # the files are of other rows
        empty = not self.pins and not self.session.method_rows
        self.clear_button.disabled = self.export_button.disabled = empty
        self.chart.layout.display = "none" if empty else None
        if empty:
            self.message.value, self.table.value = status(_NOTHING_YET), ""
            return
        frame = self.frame()
        self.chart.value = drawn_png(lambda: self.figure(frame), self._width)
        self.message.value = status(_message(frame))
        self.table.value = _html_table(frame)

    def frame(self) -> pd.DataFrame:
        """One row for each pin: its selection, its savings and its losses.

        Evaluations add columns `Δloss CORPUS` (nats per token, of the pruned model) and
        `accuracy TASK`; FLOPs are counted at `seq_len` tokens. Rows of methods, which
        come last, have `method`, its ratio, savings and losses.
        """
        rows: list[dict[str, Any]] = []
        for pin in self.pins:
            row = {"label": pin.label, **_settings(pin.selection)}
            row |= {"weights": pin.recipe.text, "achieved_ratio": math.nan}
            keep = self._known(pin)
            if keep is not None:
                row |= {"achieved_ratio": keep.achieved_ratio, **self._saved(keep)}
            points = self.session.points_for(pin.selection, pin.recipe.text)
            rows.append(row | _measured(points))
        return pd.DataFrame([*rows, *self.session.method_rows])

    def _known(self, pin: Pin) -> KeepMask | None:
        """The mask of a pin; None if its weights choose it and were not made."""
        try:
            return self.session.keep_of(pin.selection, pin.recipe)
        except NotKnownError:
            return None

    def _saved(self, keep: KeepMask) -> dict[str, Any]:
        saved = self.session.savings_of(keep)
        if saved is None:
            return {}
        saved["bytes_reduction"] = 1 - saved["bytes_after"] / saved["bytes_before"]
        names = *(f"{name}_reduction" for name in _REDUCED), "seq_len"
        return {name: saved[name] for name in names}

    def layers(self) -> dict[str, pd.Series]:
        """Removed share of each layer, by the label of a pin; NaN if unknown."""
        unknown = KeepMask.full(self.session.table).layer_ratios() + math.nan
        ratios = {}
        for pin in self.pins:
            keep = self._known(pin)
            ratios[pin.label] = unknown if keep is None else keep.layer_ratios()
        return ratios

    def figure(self, frame: pd.DataFrame) -> Figure:
        """The chart of the rows of `frame`, as `figure_compared` draws it.

        A row keeps its look while others come and go.
        """
        labels, old = frame["label"].tolist(), self._numbers
        taken = {old[label] for label in labels if label in old}
        free = (number for number in itertools.count() if number not in taken)
        self._numbers = {
            label: old[label] if label in old else next(free) for label in labels
        }
        return figure_compared(frame, self.layers(), numbers=self._numbers)

    def export(self, folder: Path | str) -> list[Path]:
        """Write the figure and the tables of all rows.

        The figure and the parquet file say where they came from.

        Returns:
            The files: PNG, PDF, CSV, Markdown, parquet.

        Raises:
            SpecError: nothing is pinned, and no method was run; or the folder has no
                name, or has a comparison already.
        """
        if not self.pins and not self.session.method_rows:
            raise SpecError("nothing is pinned, so there is nothing to export")
        if not str(folder).strip():
            raise SpecError("the folder has no name: give one, such as comparison")
        folder, frame = path_of(folder), self.frame()
        whole = folder / "comparison.parquet"
        if whole.exists():
            raise SpecError(f"{folder} has a comparison already: give another folder")
        shown = frame.drop(columns=dull(frame))
        provenance = {
            "importance": self.session.table.metadata.get("spec_hash"),
            "model": (self.session.table.metadata.get("spec") or {}).get("model"),
            "pins": [
                {"label": p.label, "weights": p.recipe.text, **p.selection.to_dict()}
                for p in self.pins
            ],
            "methods": [row["label"] for row in self.session.method_rows],
        }
        folder.mkdir(parents=True, exist_ok=True)
        paths = save_figure(
            self.figure(frame), folder / "comparison", provenance=provenance
        )
        paths += write_table(shown, folder / "comparison")
        files.write_frame(whole, frame, {"kind": "comparison", **provenance})
        return [*paths, whole]

    def _press_export(self, _button: ipw.Button) -> None:
        try:
            paths = self.export(self.folder.value)
        except (HeaprLabError, OSError) as error:
            self.exported.value = failure(error)
        else:
            names = ", ".join(path.name for path in paths)
            self.exported.value = status(f"Written to {self.folder.value}: {names}")


def _settings(selection: Selection) -> dict[str, Any]:
    """The settings of a selection that have a control, as a row of a table."""
    row = {k: v for k, v in selection.to_dict().items() if k != _NO_CONTROL}
    return row | {"exclude_layers": ", ".join(map(str, selection.exclude_layers))}


def _next_label(pins: list[Pin]) -> str:
    used = {pin.label for pin in pins}
    free = (letter for letter in string.ascii_uppercase if letter not in used)
    return next(free, f"pin {len(pins) + 1}")


def _measured(points: pd.DataFrame) -> dict[str, float]:
    """Δloss and accuracy by dataset."""
    columns: dict[str, float] = {}
    for row in points.itertuples():
        if pd.notna(row.delta_nll):
            columns[f"{LOSS}{row.dataset}"] = float(row.delta_nll)
        if pd.notna(row.accuracy):
            columns[f"accuracy {row.dataset}"] = float(row.accuracy)
    return columns


def _is_measured(column: object) -> bool:
    return str(column).startswith((LOSS, "accuracy "))


def _message(frame: pd.DataFrame) -> str:
    """How many rows are of pins, and of methods."""
    n_methods = int(frame["method"].notna().sum()) if "method" in frame else 0
    counted = [f"{len(frame) - n_methods} pinned"]
    counted += [f"{n_methods} of methods"] if n_methods else []
    return f"{', '.join(counted)}."


def _html_table(frame: pd.DataFrame) -> str:
    context = int(frame["seq_len"].max()) if "seq_len" in frame else None
    shown = frame.drop(columns=["seq_len", "method"], errors="ignore")
    shown = shown.drop(columns=dull(shown))
    for name in shown.columns:
        if str(name).endswith(("_reduction", "_ratio")):
            shown[name] = shown[name].map("{:.1%}".format, na_action="ignore")
    if "multiple" in shown:
        shown["multiple"] = shown["multiple"].map("{:.0f}".format, na_action="ignore")
    short = {f"{name}_reduction": f"{text} saved" for name, text in _REDUCED.items()}
    short["achieved_ratio"] = "removed"
    if context is not None:
        short["flops_reduction"] += f", {at_context(context)}"
    short |= {name: f"measured {name}" for name in filter(_is_measured, shown)}
    text = table_html(shown.rename(columns=short))
    note = (
        "Columns with the same default value for all pins are only in the parquet file."
    )
    return f"{text}<small>{note}</small>"


def dull(frame: pd.DataFrame) -> list[str]:
    """The settings that have their default in all rows that have settings."""
    plain = _settings(Selection(0.0))
    return [
        name
        for name, value in plain.items()
        if name != "ratio"
        and name in frame
        and (frame[name].eq(value) | frame[name].isna()).all()
    ]
