"""The tab that compares saved selections and methods, in a chart and a table."""

import itertools
import math
import string
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ipywidgets as ipw
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator, PercentFormatter

from heapr_lab.errors import HeaprLabError, SpecError
from heapr_lab.figures import save_figure, styled, write_table
from heapr_lab.figures.style import LABELS, LINE_STYLES, MARKERS, literal
from heapr_lab.importance.estimators import PER_TOKEN
from heapr_lab.panel.jobs import alert, failure, status
from heapr_lab.panel.looks import badge, beside, picture
from heapr_lab.panel.mask_diff_section import MaskDiffSection
from heapr_lab.panel.method_runs import MethodRuns
from heapr_lab.panel.passage_html import table_html
from heapr_lab.panel.pictures import drawn_png
from heapr_lab.panel.session import NotKnownError, Pin, PruningSession
from heapr_lab.pruning.masks import KeepMask
from heapr_lab.pruning.options import Selection
from heapr_lab.pruning.savings import at_context
from heapr_lab.storage import files

_NOTHING_YET = (
    "Nothing pinned yet. Pin saves the current selection; Run methods adds others."
)
_BUTTONS = {
    "Load": "show the settings of the pin that is chosen",
    "Remove": "remove the pin that is chosen",
    "Clear": "remove all pins and methods",
    "Undo": "go back to the previous pins and methods",
}
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
_N_COLORS = 7
"""Of the style."""
_SHORT = {
    "achieved_ratio": "removed",
    "parameter_reduction": "parameters saved",
    "bytes_reduction": "bytes saved",
    "flops_reduction": "FLOPs saved",
    "routed_flops_reduction": "routed FLOPs saved",
}
"""Short names of columns."""


class CompareTab(ipw.VBox):
    """Pins the current selection, runs methods, shows all of them and exports them."""

    def __init__(
        self,
        session: PruningSession,
        *,
        corpora: Sequence[str] = ("pydocs",),
        on_pins: Callable[[], None] = lambda: None,
        load: Callable[[Pin], None] = lambda _: None,
    ) -> None:
        """Lay the tab out for `session`; nothing is pinned.

        Args:
            session: whose selections and model are compared.
            corpora: on whose test splits methods can be measured, and on which the
                current selection can be calibrated instead.
            on_pins: called when there are other pins.
            load: called to show the settings of a pin.
        """
        self.session, self._on_pins, self._load = session, on_pins, load
        self.pins: list[Pin] = []
        self._before: tuple[list[Pin], list[dict[str, Any]]] = [], []
        self._numbers: dict[str, int] = {}
        """Of the looks of the rows, by their labels."""
        self.runs = MethodRuns(session, corpora=corpora, show=self._show_rows)
        self.diff = MaskDiffSection(session, corpora=corpora)
        self._build_pins()
        self._build_views()
        super().__init__(
            [
                beside(self.label, self.pin_button, *self._of_pins),
                self.runs,
                self.message,
                self.chart,
                self.table,
                beside(self.folder, self.export_button),
                self.exported,
                self.diff,
            ]
        )

    def _build_pins(self) -> None:
        self.label = ipw.Text("A", description="label", layout={"width": "200px"})
        self.pin_button = ipw.Button(
            description="Pin",
            button_style="primary",
            tooltip="save the current selection",
        )
        self.pinned = ipw.Dropdown(description="pinned", layout={"width": "200px"})
        self.load_button, self.remove_button, self.clear_button, self.undo_button = (
            ipw.Button(description=name, tooltip=said, layout={"width": "auto"})
            for name, said in _BUTTONS.items()
        )
        self.clear_button.disabled = True
        self._of_pins = (
            self.pinned,
            *(self.load_button, self.remove_button),
            *(self.clear_button, self.undo_button),
        )
        self.pin_button.on_click(self.pin)
        self.load_button.on_click(lambda _: self._load(self._chosen))
        self.remove_button.on_click(self.remove)
        self.clear_button.on_click(self.clear)
        self.undo_button.on_click(self.undo)
        self._offer_pins()

    def _build_views(self) -> None:
        self.message = ipw.HTML(status(_NOTHING_YET))
        self.chart = picture("compared", display="none", max_width="900px")
        self.table = ipw.HTML()
        self.folder = ipw.Text(
            "comparison", description="folder", continuous_update=False
        )
        self.export_button = ipw.Button(
            description="Export comparison", disabled=True,
            tooltip="write CSV, parquet, Markdown, LaTeX, PNG and PDF",
            layout={"width": "auto"},
        )  # fmt: skip
        self.exported = ipw.HTML(status(""))
        self.export_button.on_click(self._press_export)

    def pin(self, _button: ipw.Button | None = None) -> None:
        """Save the current selection; it replaces a pin of the same label."""
        label = self.label.value.strip() or _next_label(self.pins)
        try:
            pin = Pin(label, self.session.selection, self.session.recipe)
        except SpecError as error:
            self.message.value = alert(str(error))
            return
        self.show_pins([old for old in self.pins if old.label != label] + [pin])

    @property
    def _chosen(self) -> Pin:
        """The pin that is chosen in the list."""
        return self.pins[int(self.pinned.index)]

    def remove(self, _button: ipw.Button | None = None) -> None:
        """Remove the pin that is chosen in the list."""
        self.show_pins([pin for pin in self.pins if pin != self._chosen])

    def clear(self, _button: ipw.Button | None = None) -> None:
        """Remove all pins and methods."""
        self.show_pins([], rows=[])

    def undo(self, _button: ipw.Button | None = None) -> None:
        """Show the previous pins and methods; once more shows these again."""
        pins, rows = self._before
        self.show_pins(pins, rows=rows)

    def show_pins(
        self, pins: list[Pin], *, rows: list[dict[str, Any]] | None = None
    ) -> None:
        """Show these in place of the pins so far, and `rows` of methods, if given."""
        self._before = self.pins, self.runs.rows
        self.pins = pins
        self.runs.rows = self.runs.rows if rows is None else rows
        self.label.value = _next_label(pins)
        self._offer_pins()
        self.refresh()
        self._on_pins()

    def _offer_pins(self) -> None:
        """List the pins, and enable the buttons that have something to do."""
        self.pinned.options = [(pin.label, n) for n, pin in enumerate(self.pins)]
        self.undo_button.disabled = not any(self._before)
        for control in (self.pinned, self.load_button, self.remove_button):
            control.disabled = not self.pins

    def _show_rows(self) -> None:
        """Show new rows of methods, and tell of them."""
        self.refresh()
        self._on_pins()

    def refresh(self) -> None:
        """Show all pins and methods, with the evaluations made meanwhile."""
        self.exported.value = status("")  # the files are of other rows
        self.diff.offer([(pin.label, pin.selection, pin.recipe) for pin in self.pins])
        if not self.pins and not self.runs.rows:
            self._show_nothing(_NOTHING_YET)
            return
        frame = self.frame()
        self.chart.value = drawn_png(lambda: self.figure(frame))
        self.chart.layout.display = None
        found = badge() if any(map(_is_measured, frame)) else ""
        self.message.value = status(_message(frame), before=found)
        self.table.value = _html_table(frame)
        self.clear_button.disabled = self.export_button.disabled = False

    def _show_nothing(self, why: str) -> None:
        self.message.value = status(why)
        self.chart.layout.display, self.chart.value = "none", b""
        self.table.value = ""
        self.clear_button.disabled = self.export_button.disabled = True

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
            rows.append(row | _measured(self.session.points, pin))
        return pd.DataFrame([*rows, *self.runs.rows])

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
        names = ("parameter", "bytes", "flops", "routed_flops")
        row = {f"{n}_reduction": _reduction(saved, n) for n in names}
        return row | {"seq_len": int(saved["seq_len"].iloc[0])}

    def layers(self) -> pd.DataFrame:
        """Removed share of each layer, a row for each pin and layer; NaN if unknown."""
        parts = []
        for pin in self.pins:
            keep = self._known(pin) or KeepMask.full(self.session.table)
            ratios = keep.layer_ratios() + (0.0 if self._known(pin) else math.nan)
            parts.append(ratios.reset_index().assign(label=pin.label))
        return pd.concat(parts, ignore_index=True)

    @styled
    def figure(self, frame: pd.DataFrame) -> Figure:
        """Removed share by layer, and Δloss against the parameters saved.

        A row has one colour in both, and keeps it while others come and go; in the
        right one a corpus has one marker, and labels stand beside the points. Without
        pins there is only the right one.
        """
        looks = self._looks(frame["label"].tolist())
        figure = Figure(figsize=(9.0, 3.4), layout="constrained")
        *left, right = figure.subplots(1, 2 if self.pins else 1, squeeze=False)[0]
        for ax in left:
            _plot_layers(ax, self.layers(), looks)
        _plot_losses(right, frame, looks)
        handles = _handles(looks, n_pins=len(self.pins))
        title = "compared" if self.runs.rows else "pins"
        figure.legend(handles=handles, loc="outside right upper", title=title)
        return figure

    def _looks(self, labels: list[str]) -> dict[str, dict[str, Any]]:
        """Colour and line of each row: those that it had, or the first free ones."""
        old = self._numbers
        taken = {old[label] for label in labels if label in old}
        free = (number for number in itertools.count() if number not in taken)
        self._numbers = {
            label: old[label] if label in old else next(free) for label in labels
        }
        return {label: _look(number) for label, number in self._numbers.items()}

    def export(self, folder: Path | str) -> list[Path]:
        """Write the figure and the tables of all rows.

        The figure and the parquet file say where they came from.

        Returns:
            The files: PNG, PDF, CSV, Markdown, LaTeX, parquet.

        Raises:
            SpecError: nothing is pinned, and no method was run; or the folder has no
                name, or has a comparison already.
        """
        if not self.pins and not self.runs.rows:
            raise SpecError("nothing is pinned, so there is nothing to export")
        if not str(folder).strip():
            raise SpecError("the folder has no name: give one, such as comparison")
        folder, frame = Path(folder).expanduser(), self.frame()
        whole = folder / "comparison.parquet"
        if whole.exists():
            raise SpecError(f"{folder} has a comparison already: give another folder")
        shown = frame.drop(columns=_dull(frame))
        provenance = {
            "importance": self.session.table.metadata.get("spec_hash"),
            "model": (self.session.table.metadata.get("spec") or {}).get("model"),
            "pins": [
                {"label": p.label, "weights": p.recipe.text, **p.selection.to_dict()}
                for p in self.pins
            ],
            "methods": [row["label"] for row in self.runs.rows],
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


def _measured(points: pd.DataFrame, pin: Pin) -> dict[str, float]:
    """Δloss and accuracy of exactly this selection and these weights, by dataset."""
    found: dict[str, float] = {}
    for row in points.to_dict("records"):
        if (row["selection"], row["weights"]) != (pin.selection, pin.recipe.text):
            continue
        if pd.notna(row["delta_nll"]):
            found[f"Δloss {row['dataset']}"] = float(row["delta_nll"])
        if pd.notna(row["accuracy"]):
            found[f"accuracy {row['dataset']}"] = float(row["accuracy"])
    return found


def _is_loss(column: object) -> bool:
    return str(column).startswith("Δloss ")


def _is_measured(column: object) -> bool:
    return _is_loss(column) or str(column).startswith("accuracy ")


def _message(frame: pd.DataFrame) -> str:
    parts = []
    for row in frame.to_dict("records"):
        losses = [
            f"{name} {value:+.4f}"
            for name, value in row.items()
            if _is_loss(name) and pd.notna(value)
        ]
        text = ", ".join(losses) or "not evaluated"
        removed = f"{row['achieved_ratio']:.1%} removed"
        if pd.isna(row["achieved_ratio"]):
            removed = "atoms not known yet"
        parts.append(f"{row['label']}: {removed}, {text}")
    n_methods = int(frame["method"].notna().sum()) if "method" in frame else 0
    counted = [f"{len(frame) - n_methods} pinned"]
    counted += [f"{n_methods} of methods"] if n_methods else []
    return f"{', '.join(counted)}. {'; '.join(parts)}."


def _look(number: int) -> dict[str, Any]:
    """Colour and line of a row, the same in every plot; colours repeat in pale."""
    rounds, _ = divmod(number, _N_COLORS)
    line = LINE_STYLES[number % len(LINE_STYLES)]
    return {"color": f"C{number}", "ls": line, "alpha": 0.45**rounds}


def _handles(looks: Mapping[str, dict[str, Any]], *, n_pins: int) -> list[Line2D]:
    """Of the legend; methods have no line, because their layers are not drawn."""
    return [
        Line2D([], [], label=literal(label), marker="o", ms=4, **look | line)
        for number, (label, look) in enumerate(looks.items())
        for line in [{} if number < n_pins else {"ls": "none"}]
    ]


def _plot_layers(
    ax: Axes, layers: pd.DataFrame, looks: Mapping[str, dict[str, Any]]
) -> None:
    for label, rows in layers.groupby("label", sort=False):
        look = looks[str(label)] | {"marker": "o", "ms": 4, "label": str(label)}
        ax.plot(rows["layer"], rows["pruning_ratio"], **look)
    ax.set(xlabel="MoE layer [index]", ylabel=LABELS["layer_ratio"], ylim=(0, 1))
    ax.yaxis.set_major_formatter(PercentFormatter(1.0))
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))


def _plot_losses(
    ax: Axes, frame: pd.DataFrame, looks: Mapping[str, dict[str, Any]]
) -> None:
    """Δloss against the parameters saved, or the atoms removed if sizes are unknown.

    Without evaluations there are only the savings. Rows at the same place are named
    together, and the first has the largest mark, so that all are seen.
    """
    known = "parameter_reduction" in frame
    across = frame["parameter_reduction" if known else "achieved_ratio"].astype(float)
    losses = frame[list(filter(_is_loss, frame))]
    drawn = losses if len(losses.columns) else pd.DataFrame({"": 0.0}, frame.index)
    at: dict[tuple[float, float], list[str]] = {}
    for corpus, marker in zip(drawn, itertools.cycle(MARKERS), strict=False):
        for label, x, y in zip(frame["label"], across, drawn[corpus], strict=True):
            here = at.setdefault((x, y), [])
            look = looks[label] | {"ls": "none", "ms": max(4, 9 - 2 * len(here))}
            ax.plot([x], [y], marker, **look)
            here.append(literal(label))
        shown = literal(str(corpus).removeprefix("Δloss "))
        ax.plot([], [], marker, color="0.4", ls="none", label=shown or "not evaluated")
    for place, labels in at.items():
        if all(map(math.isfinite, place)):
            named = ", ".join(labels)
            ax.annotate(named, place, (6, 3), textcoords="offset points", fontsize=8)
    ax.set_xlabel("parameters saved" if known else "atomic experts removed")
    ax.xaxis.set_major_formatter(PercentFormatter(1.0))
    ax.set_ylabel(f"measured Δloss [{PER_TOKEN}] ↓")
    ax.margins(0.15)
    ax.legend(fontsize=8)


def _html_table(frame: pd.DataFrame) -> str:
    context = int(frame["seq_len"].max()) if "seq_len" in frame else None
    shown = frame.drop(columns=["seq_len", "method"], errors="ignore")
    shown = shown.drop(columns=_dull(shown))
    for name in shown.columns:
        if str(name).endswith(("_reduction", "_ratio")):
            shown[name] = shown[name].map("{:.1%}".format, na_action="ignore")
    if "multiple" in shown:
        shown["multiple"] = shown["multiple"].map("{:.0f}".format, na_action="ignore")
    short = dict(_SHORT)
    if context is not None:
        short["flops_reduction"] += f", {at_context(context)}"
    short |= {name: f"measured {name}" for name in filter(_is_measured, shown)}
    text = table_html(shown.rename(columns=short))
    note = (
        "Columns with the same default value for all pins are only in the parquet file."
    )
    return f"{text}<small>{note}</small>"


def _dull(frame: pd.DataFrame) -> list[str]:
    """The settings that have their default in all rows that have settings."""
    plain = _settings(Selection(0.0))
    return [
        name
        for name, value in plain.items()
        if name != "ratio"
        and name in frame
        and (frame[name].eq(value) | frame[name].isna()).all()
    ]
