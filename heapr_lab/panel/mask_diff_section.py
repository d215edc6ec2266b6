"""The section that shows what two masks remove: together, alone, and beside chance.

The masks are selected by `heapr_lab.inspection.mask_diff`. Importing this needs no
torch.
"""

import html
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import ipywidgets as ipw
import pandas as pd
from matplotlib.figure import Figure

from heapr_lab.errors import SpecError
from heapr_lab.figures import figure_mask_diff, mask_diff_data
from heapr_lab.importance.columns import KEYS
from heapr_lab.inspection.mask_diff import (
    ScoredMask,
    overlap,
    overlap_text,
    rank_agreement,
    removed_by_one,
)
from heapr_lab.panel.atom_contexts import find_contexts, place_text
from heapr_lab.panel.controls import offer
from heapr_lab.panel.jobs import Report, ResultJob
from heapr_lab.panel.looks import (
    PICTURE,
    columns_html,
    image_html,
    numbers,
    one_of,
    status,
)
from heapr_lab.panel.pictures import drawn_png
from heapr_lab.panel.session import PruningSession
from heapr_lab.pruning.options import Selection
from heapr_lab.recipes.weights import MASKED, WeightRecipe
from heapr_lab.text.calibration_spec import Calibration

_N_ATOMS: Final = 20
"""Atoms that are shown and offered: the first of those that only one removes."""
_CURRENT: Final = "current selection"
_NOT_SINGLE: Final = (
    "Not only single atoms are removed here, but whole experts or steps of a width: "
    "chance varies more than its ± says."
)
_NO_ATOM: Final = "none yet: compare two masks"
_ALT: Final = (
    "Left: what both remove of each layer and what only one does, beside chance. "
    "Right: every atom at its ranks in both. The tables below have the numbers."
)


@dataclass(frozen=True)
class Side:
    """What one of the two masks is selected by."""

    label: str
    """Its name in texts and pictures."""
    selection: Selection
    calibration: Calibration | None
    """What it is measured on; None if that is the session's table."""
    recipe: WeightRecipe
    """How its weights are made, which may choose the mask."""


class MaskDiffSection(ipw.VBox):
    """Two lists of masks, a button that compares them, and the contexts of an atom.

    Attributes:
        sides: the masks that were compared last, and `alone`, the atoms that only one
            of them removes; None before, and after an error.
        contexts: the last result of `activations.top_contexts`.
    """

    sides: tuple[Side, Side] | None = None
    alone: pd.DataFrame | None = None
    contexts: pd.DataFrame | None = None

    def __init__(self, session: PruningSession, *, corpora: Sequence[str]) -> None:
        """Lay the section out; nothing is pinned.

        Args:
            session: it has the current selection, the table, and the model, if any.
            corpora: the current selection can be calibrated on them instead.
        """
        self.session = session
        self._corpora = corpora
        self._pins: dict[str, tuple[Selection, WeightRecipe]] = {}
        self._build_masks()
        self._build_contexts()
        widgets = [self.a, self.b, self.compare]
        if session.workbench is not None:
            widgets += [self.atom, self.show_contexts]
        super().__init__([ipw.HTML("<h3>What two masks remove</h3>"), *widgets])
        self.offer([])
        for control in (self.a, self.b):
            control.observe(self.check, names="value")

    def _build_masks(self) -> None:
        self.a, self.b = (one_of(f"mask {name}", width="460px") for name in "AB")
        self.compare = ResultJob(
            "Compare masks",
            self._compared,
            asked=self._asked,
            of=lambda: f"{self.a.value} and {self.b.value}",
            tooltip="which atoms both remove and which only one; measures a corpus "
            "that the model was not measured on yet",
        )

    def _build_contexts(self) -> None:
        nothing = [(_NO_ATOM, None)]
        self.atom = one_of("atom that only one removes", nothing, width="560px")
        # Named unlike the button of the Inspect tab.
        self.show_contexts = ResultJob(
            "Find contexts",
            self._contexts,
            asked=self._asked,
            controls=(self.atom,),
            of=lambda: self.atom.label or "",
            tooltip="where the atom is most active, in the calibration corpus of the "
            "mask that keeps it",
        )

    # --- what can be compared -------------------------------------------------------

    def offer(self, pins: Sequence[tuple[str, Selection, WeightRecipe]]) -> None:
        """Offer these pins, (label, selection, recipe), in place of those so far."""
        self._pins = {f"pin {label}": (one, recipe) for label, one, recipe in pins}
        names = (_CURRENT, *self._pins, *self._calibrations())
        for box, first in ((self.a, 0), (self.b, 1)):
            if box.options != names:
                offer(box, names, first=first)
        self.check()

    def check(self, _change: Any = None) -> None:
        """Mark the results that are out of date."""
        self.compare.check()
        self.show_contexts.check()

    def _calibrations(self) -> dict[str, Calibration]:
        """The other corpora, by their names in the lists; none without a model."""
        calibration = self.session.calibration
        if self.session.workbench is None or self.session.recipe.chooses:
            return {}
        return {
            f"{_CURRENT}, on {corpus}": replace(calibration, corpus=corpus)
            for corpus in self._corpora
            if corpus != calibration.corpus
        }

    def _asked(self) -> tuple[Side, Side]:
        """The chosen masks.

        Raises:
            SpecError: one is the current selection, which is infeasible.
        """
        return self._side(self.a.value), self._side(self.b.value)

    def _side(self, name: str) -> Side:
        if name in self._pins:
            selection, recipe = self._pins[name]
        else:
            selection, recipe = self.session.selection, self.session.recipe
        recipe = recipe if recipe.chooses else MASKED
        return Side(name, selection, self._calibrations().get(name), recipe)

    def _note(self, sides: Sequence[Side]) -> str:
        """What else the numbers need to be understood; often empty."""
        notes = []
        if any(side.calibration is not None for side in sides):
            corpus = self.session.calibration.corpus
            notes.append(f"What names no corpus is calibrated on {corpus}.")
        if any(
            side.selection.granularity != "atom" or side.selection.structure != "ragged"
            for side in sides
        ):
            notes.append(_NOT_SINGLE)
        return " ".join(notes)

    # --- what the buttons start -----------------------------------------------------

    def _compared(self, report: Report, *sides: Side) -> str:
        self._forget()
        if sides[0] == sides[1]:
            raise SpecError(
                f"masks A and B are both {sides[0].label!r}: choose two; Pin saves the "
                "current selection as another one"
            )
        a, b = (self._mask(side, report) for side in sides)
        report(0, 1, "comparing")
        alone = removed_by_one(a, b)
        view = mask_diff_html(a, b, alone, note=self._note(sides))
        self.sides, self.alone = (sides[0], sides[1]), alone
        self._offer_atoms(alone)
        return view

    def _forget(self) -> None:
        """Take away what else is shown of the last masks."""
        self.show_contexts.clear()
        self.sides = self.alone = self.contexts = None
        offer(self.atom, [(_NO_ATOM, None)])

    def _mask(self, side: Side, report: Report) -> ScoredMask:
        """The mask of one side; it is measured unless that is in the cache."""
        table, bench = self.session.table, self.session.workbench
        if side.calibration is not None and bench is not None:

            def measuring(done: int, total: int) -> None:
                report(done, total, f"{side.label}: window")

            windows = bench.calibration_set(side.calibration, progress=measuring)
            bench.measure(windows, progress=measuring)
            report(0, 1, f"{side.label}: scores")
            table = bench.importance(
                side.calibration, estimator=side.selection.estimator
            )
        mask = ScoredMask.select(side.label, table, side.selection)
        if side.calibration is None:
            keep = self.session.keep_of(side.selection, side.recipe)
            mask = replace(mask, keep=keep)
        return mask

    def _offer_atoms(self, alone: pd.DataFrame) -> None:
        """Offer the first atoms; the value of each is its row in `alone`."""
        shown = alone[list(KEYS)].head(_N_ATOMS).to_dict("records")
        options = [(place_text(place), row) for row, place in enumerate(shown)]
        offer(self.atom, options or [("none: both remove the same", None)])

    def _contexts(self, report: Report, _a: Side, _b: Side, number: int | None) -> str:
        sides, alone, bench = self.sides, self.alone, self.session.workbench
        if number is None or sides is None or alone is None or bench is None:
            raise SpecError("no atom is chosen: compare two masks that differ first")
        row = alone.iloc[number]
        place = {name: int(row[name]) for name in KEYS}
        removes, keeps = sides if row["removed_by"] == "a" else sides[::-1]
        self.contexts, view = find_contexts(
            bench,
            keeps.calibration or self.session.calibration,
            place,
            report,
            said=f"removed by {removes.label}, kept by {keeps.label}",
        )
        return view


# --- the view -------------------------------------------------------------------------


def mask_diff_html(
    a: ScoredMask, b: ScoredMask, alone: pd.DataFrame, *, note: str
) -> str:
    """A sentence, the picture, the layers as a table, and the first of `alone`.

    Args:
        a: a mask with its scores.
        b: another of the same model.
        alone: what only one removes, as `removed_by_one` has it.
        note: what else to say of the picture.

    Raises:
        SpecError: the masks are of different models.
    """
    text = " ".join(filter(None, (overlap_text(a, b), note)))
    return f"{status(text)}{_picture(a, b)}{_layers(a, b)}{_atoms(a, b, alone)}"


def _picture(a: ScoredMask, b: ScoredMask) -> str:
    data = mask_diff_data(a, b)
    # Not one of pyplot, which a notebook would show below its next cell.
    empty = Figure(figsize=(10.0, 4.4), layout="constrained")
    png = drawn_png(lambda: figure_mask_diff(data, figure=empty))
    return image_html(png, _ALT, css=PICTURE)


def _layers(a: ScoredMask, b: ScoredMask) -> str:
    frame = overlap(a.keep, b.keep).merge(rank_agreement(a, b).drop(columns="n_atoms"))
    chance = zip(frame["expected"], frame["sd"], strict=True)
    columns = {
        "layer": frame["layer"],
        "atoms": numbers(frame["n_atoms"], ","),
        f"removed by {a.label}": numbers(frame["removed_a"], ","),
        f"removed by {b.label}": numbers(frame["removed_b"], ","),
        "by both": numbers(frame["both"], ","),
        "by both, chance": [f"{mean:,.1f} ± {sd:,.1f}" for mean, sd in chance],
        "Spearman ρ of the scores": numbers(frame["spearman"], "+.2f"),
    }
    caption = "Atoms that each layer loses; chance is its mean ± standard deviation"
    return columns_html(caption, columns)


def _atoms(a: ScoredMask, b: ScoredMask, alone: pd.DataFrame) -> str:
    if alone.empty:
        return "<p>Both remove the same atoms.</p>"
    labels = {"a": html.escape(a.label), "b": html.escape(b.label)}
    shown = alone.head(_N_ATOMS)
    columns = {
        **{name: shown[name] for name in KEYS},
        "removed only by": shown["removed_by"].map(labels),
        f"score, {a.label}": numbers(shown["score_a"], ".3g"),
        f"score, {b.label}": numbers(shown["score_b"], ".3g"),
        f"rank, {a.label}": numbers(shown["rank_a"], ".1%"),
        f"rank, {b.label}": numbers(shown["rank_b"], ".1%"),
    }
    caption = (
        f"{len(shown)} of the {len(alone):,} atoms that only one removes: those that "
        "the other ranks highest. A rank is the share of atoms that are removed before "
        "it or with it."
    )
    return columns_html(caption, columns)
