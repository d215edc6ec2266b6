"""The tab that compares saved selections, in a chart and a table to export."""

import itertools
import string
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ipywidgets as ipw
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator, PercentFormatter

from heapr_lab.errors import HeaprLabError, SpecError
from heapr_lab.figures import rows_text, save_figure, styled, write_table
from heapr_lab.figures.style import LABELS, LINE_STYLES, MARKERS
from heapr_lab.importance.estimators import PER_TOKEN
from heapr_lab.panel.jobs import alert, status
from heapr_lab.panel.passage_html import table_html
from heapr_lab.panel.pictures import drawn_png
from heapr_lab.panel.session import PruningSession
from heapr_lab.pruning.options import Selection
from heapr_lab.pruning.savings import at_context
from heapr_lab.storage import files
from heapr_lab.storage.provenance import rows_digest

_NOTHING_YET = "Nothing pinned yet. Pin saves the current selection."
_SET_BY_CONTROLS = (
    "ratio",
    "estimator",
    "scope",
    "granularity",
    "structure",
    "multiple",
    "of",
    "min_atoms",
)
_SHORT = {
    "achieved_ratio": "removed",
    "parameter_reduction": "parameters saved",
    "bytes_reduction": "bytes saved",
    "flops_reduction": "FLOPs saved",
    "routed_flops_reduction": "routed FLOPs saved",
}
"""Short names of columns."""


@dataclass(frozen=True)
class Pin:
    """A selection saved for comparison."""

    label: str
    selection: Selection


class CompareTab(ipw.VBox):
    """Pins the current selection, shows all pins and exports them."""

    def __init__(self, session: PruningSession) -> None:
        """Lay the tab out for `session`; nothing is pinned."""
        self.session = session
        self.pins: list[Pin] = []
        self.label = ipw.Text("A", description="label", layout={"width": "200px"})
        self.pin_button = ipw.Button(
            description="Pin",
            button_style="primary",
            tooltip="save the current selection",
        )
        self.clear_button = ipw.Button(
            description="Clear", tooltip="remove all pins", disabled=True
        )
        self.message = ipw.HTML(status(_NOTHING_YET))
        self.chart = ipw.Image(
            format="png", layout={"display": "none", "max_width": "900px"}
        )
        self.table = ipw.HTML()
        self.folder = ipw.Text(
            "comparison", description="folder", continuous_update=False,
            tooltip="of the files, relative to the notebook's folder",
        )  # fmt: skip
        self.export_button = ipw.Button(
            description="Export comparison", disabled=True,
            tooltip="CSV, parquet, Markdown, LaTeX, PNG and PDF",
            layout={"width": "auto"},
        )  # fmt: skip
        self.exported = ipw.HTML(status(""))
        self.pin_button.on_click(self.pin)
        self.clear_button.on_click(self.clear)
        self.export_button.on_click(self._press_export)
        wrap = {"flex_flow": "row wrap"}
        super().__init__(
            [
                ipw.HBox([self.label, self.pin_button, self.clear_button], layout=wrap),
                self.message,
                self.chart,
                self.table,
                ipw.HBox([self.folder, self.export_button], layout=wrap),
                self.exported,
            ]
        )

    def pin(self, _button: ipw.Button | None = None) -> None:
        """Save the current selection; it replaces a pin of the same label."""
        label = self.label.value.strip() or _next_label(self.pins)
        try:
            pin = Pin(label, self.session.selection)
        except SpecError as error:
            self.message.value = alert(str(error))
            return
        self._pinned([old for old in self.pins if old.label != label] + [pin])

    def clear(self, _button: ipw.Button | None = None) -> None:
        """Remove all pins."""
        self._pinned([])

    def _pinned(self, pins: list[Pin]) -> None:
        self.pins = pins
        self.exported.value = status("")  # the files are of other pins
        self.label.value = _next_label(pins)
        self.refresh()

    def refresh(self) -> None:
        """Show all pins, with the evaluations made meanwhile."""
        self.clear_button.disabled = self.export_button.disabled = not self.pins
        self.chart.layout.display = None if self.pins else "none"
        if not self.pins:
            self.message.value = status(_NOTHING_YET)
            self.table.value = ""
            return
        frame = self.frame()
        self.chart.value = drawn_png(lambda: self.figure(frame))
        self.message.value = status(_message(frame))
        self.table.value = _html_table(frame)

    def frame(self) -> pd.DataFrame:
        """One row for each pin: its selection, its savings and its losses.

        Evaluations add columns `Δloss CORPUS` (nats per token, of the masked model) and
        `accuracy TASK`; FLOPs are counted at `seq_len` tokens.
        """
        rows = []
        for pin in self.pins:
            keep = self.session.keep_of(pin.selection)
            row = {"label": pin.label, **_settings(pin.selection)}
            row["achieved_ratio"] = keep.achieved_ratio
            saved = self.session.savings_of(keep)
            if saved is not None:
                names = ("parameter", "bytes", "flops", "routed_flops")
                row |= {f"{n}_reduction": _reduction(saved, n) for n in names}
                row["seq_len"] = int(saved["seq_len"].iloc[0])
            rows.append(row | _measured(self.session.points, pin.selection))
        return pd.DataFrame(rows)

    def layers(self) -> pd.DataFrame:
        """Removed share of each layer, a row for each pin and layer."""
        parts = []
        for pin in self.pins:
            ratios = self.session.keep_of(pin.selection).layer_ratios()
            parts.append(ratios.reset_index().assign(label=pin.label))
        return pd.concat(parts, ignore_index=True)

    @styled
    def figure(self, frame: pd.DataFrame) -> Figure:
        """Removed share by layer, and Δloss against parameters saved.

        A pin has one colour in both; in the right one a corpus has one marker.
        """
        figure = Figure(figsize=(9.0, 3.4), layout="constrained")
        left, right = figure.subplots(1, 2)
        _plot_layers(left, self.layers())
        _plot_losses(right, frame)
        handles = _pin_handles([pin.label for pin in self.pins])
        figure.legend(handles=handles, loc="outside right upper", title="pins")
        return figure

    def export(self, folder: Path | str) -> list[Path]:
        """Write the figure and the tables of all pins, with their provenance.

        Returns:
            The files: PNG, PDF, CSV, Markdown, LaTeX, parquet.

        Raises:
            SpecError: nothing is pinned.
        """
        if not self.pins:
            raise SpecError("nothing is pinned, so there is nothing to export")
        folder, frame = Path(folder), self.frame()
        provenance = {
            "importance": self.session.table.metadata.get("spec_hash"),
            "model": (self.session.table.metadata.get("spec") or {}).get("model"),
            "pins": [{"label": p.label, **p.selection.to_dict()} for p in self.pins],
            "data": rows_digest(rows_text(frame)),
        }
        folder.mkdir(parents=True, exist_ok=True)
        paths = save_figure(
            self.figure(frame), folder / "comparison", provenance=provenance
        )
        paths += write_table(frame, folder / "comparison", provenance=provenance)
        whole = folder / "comparison.parquet"
        files.write_frame(whole, frame, {"kind": "comparison", **provenance})
        return [*paths, whole]

    def _press_export(self, _button: ipw.Button) -> None:
        try:
            paths = self.export(self.folder.value)
        except (HeaprLabError, OSError) as error:
            self.exported.value = alert(str(error))
        else:
            names = ", ".join(path.name for path in paths)
            self.exported.value = status(f"Written to {self.folder.value}: {names}")


def _settings(selection: Selection) -> dict[str, Any]:
    """The settings of a selection that have a control, as a row of a table."""
    row = {name: getattr(selection, name) for name in _SET_BY_CONTROLS}
    excluded = ", ".join(map(str, selection.exclude_layers))
    return row | {"exclude_layers": excluded}


def _next_label(pins: list[Pin]) -> str:
    used = {pin.label for pin in pins}
    free = (letter for letter in string.ascii_uppercase if letter not in used)
    return next(free, f"pin {len(pins) + 1}")


def _reduction(saved: pd.DataFrame, name: str) -> float:
    row = saved.iloc[0]
    if name == "bytes":
        return 1 - float(row["bytes_after"]) / float(row["bytes_before"])
    return float(row[f"{name}_reduction"])


def _measured(points: pd.DataFrame, selection: Selection) -> dict[str, float]:
    """Δloss and accuracy of exactly this selection, by dataset."""
    found: dict[str, float] = {}
    for row in points.to_dict("records"):
        if row["selection"] != selection:
            continue
        if pd.notna(row["delta_nll"]):
            found[f"Δloss {row['dataset']}"] = float(row["delta_nll"])
        if pd.notna(row["accuracy"]):
            found[f"accuracy {row['dataset']}"] = float(row["accuracy"])
    return found


def _message(frame: pd.DataFrame) -> str:
    parts = []
    for row in frame.to_dict("records"):
        losses = [
            f"{name} {value:+.4f}"
            for name, value in row.items()
            if str(name).startswith("Δloss ") and pd.notna(value)
        ]
        text = ", ".join(losses) or "not evaluated"
        parts.append(f"{row['label']}: {row['achieved_ratio']:.1%} removed, {text}")
    return f"{len(frame)} pinned. {'; '.join(parts)}."


def _pin_look(number: int) -> dict[str, Any]:
    """Colour and line of a pin, the same in every plot."""
    return {"color": f"C{number}", "ls": LINE_STYLES[number % len(LINE_STYLES)]}


def _pin_handles(labels: list[str]) -> list[Line2D]:
    return [
        Line2D([], [], label=label, marker="o", ms=4, **_pin_look(number))
        for number, label in enumerate(labels)
    ]


def _plot_layers(ax: Axes, layers: pd.DataFrame) -> None:
    for number, (label, rows) in enumerate(layers.groupby("label", sort=False)):
        look = _pin_look(number) | {"marker": "o", "ms": 4, "label": str(label)}
        ax.plot(rows["layer"], rows["pruning_ratio"], **look)
    ax.set(xlabel="MoE layer [index]", ylabel=LABELS["layer_ratio"], ylim=(0, 1))
    ax.yaxis.set_major_formatter(PercentFormatter(1.0))
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))


def _plot_losses(ax: Axes, frame: pd.DataFrame) -> None:
    """Δloss against the savings; without evaluations, only the savings."""
    names = [str(name) for name in frame.columns if str(name).startswith("Δloss ")]
    saved = "parameter_reduction" if "parameter_reduction" in frame else None
    across = frame[saved or "achieved_ratio"]
    drawn = frame[names] if names else pd.DataFrame({"": 0.0}, index=frame.index)
    for corpus, marker in zip(drawn, itertools.cycle(MARKERS), strict=False):
        for number, (x, y) in enumerate(zip(across, drawn[corpus], strict=True)):
            ax.plot([x], [y], marker, color=_pin_look(number)["color"], ls="none")
        shown = corpus.removeprefix("Δloss ")
        ax.plot([], [], marker, color="0.4", ls="none", label=shown or "_nolegend_")
    ax.set_xlabel("parameters saved" if saved else "atomic experts removed")
    ax.xaxis.set_major_formatter(PercentFormatter(1.0))
    ax.set_ylabel(f"Δloss, masked [{PER_TOKEN}] ↓" if names else "not evaluated yet")
    ax.margins(0.15)
    if names:
        ax.legend(fontsize=8)


def _html_table(frame: pd.DataFrame) -> str:
    shown = frame.copy()
    multiples = shown["multiple"].astype("Int64").astype(object)
    shown["multiple"] = multiples.where(multiples.notna(), "–")
    for name in shown.columns:
        if str(name).endswith(("_reduction", "_ratio")):
            shown[name] = shown[name].map("{:.1%}".format)
    # As displayed: no layers are an empty text, no multiple is a dash.
    plain = _settings(Selection(0.0)) | {"multiple": "–"}
    dull = [
        name
        for name, value in plain.items()
        if name != "ratio" and shown[name].eq(value).all()
    ]
    context = int(shown.pop("seq_len").iloc[0]) if "seq_len" in shown else None
    short = dict(_SHORT)
    if context is not None:
        short["flops_reduction"] += f", {at_context(context)}"
    text = table_html(shown.drop(columns=dull).rename(columns=short))
    note = (
        "Columns that have the same default value for all pins are only in the files."
    )
    return f"{text}<small>{note}</small>"
