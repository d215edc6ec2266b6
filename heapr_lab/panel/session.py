"""The state behind the panel: a selection, its mask, its savings and its losses.

It has no widgets, and needs torch only to evaluate. Selecting and counting are fast
enough to follow a slider; the model runs only in `PruningSession.evaluate`.
"""

import contextlib
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec
import numpy as np
import pandas as pd
import traitlets

from heapr_lab.errors import HeaprLabError, SpecError
from heapr_lab.evaluation.paired import paired_difference
from heapr_lab.importance.estimators import find_estimator
from heapr_lab.importance.table import ImportanceTable
from heapr_lab.panel.evaluations import Clock, Part, seconds_of_scoring
from heapr_lab.progress import StartPart, no_parts
from heapr_lab.pruning.masks import KeepMask
from heapr_lab.pruning.options import Selection
from heapr_lab.pruning.savings import savings_of, summed_scores
from heapr_lab.pruning.selection import select
from heapr_lab.recipes.weights import MASKED, WeightRecipe
from heapr_lab.text.calibration_spec import Calibration

if TYPE_CHECKING:
    from heapr_lab.recipes.making import PruningResult
    from heapr_lab.workbench.workbench import Workbench

LOSS: Final = "Δloss "
"""Column names of losses on a corpus begin with it."""
_SHOWN = ("ratio", "scope", "granularity", "structure")
_PATIENCE: Final = 0.5
"""Seconds between the reports of work that waits."""
_WINDOWS_OF_TASK: Final = 32
"""What a task counts as until it was measured."""


class JobSettings(NamedTuple):
    """What a job begins with, and keeps: a selection, and how weights are made."""

    selection: Selection
    recipe: WeightRecipe


class NotKnownError(SpecError):
    """Weights that choose their own mask have not been made yet."""


class Pin(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A selection saved for comparison."""

    label: str
    selection: Selection
    recipe: WeightRecipe = msgspec.field(default=MASKED, name="way")


class Point(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One model on one corpus or task: a row of `PruningSession.points`."""

    selection: Selection | None
    """None for the dense model."""
    estimator: str
    weights: str
    """The `text` of a `WeightRecipe`."""
    ratio: float
    scope: str
    granularity: str
    structure: str
    achieved_ratio: float
    summed_score: float
    dataset: str
    nll: float | None
    delta_nll: float | None
    perplexity: float | None
    n_tokens: float | None
    accuracy: float | None
    stderr: float | None
    """The standard error of `accuracy`, or over windows of `delta_nll`."""


POINT_COLUMNS = Point.__struct_fields__
"""Columns of `PruningSession.points`."""
_DENSE = {
    "selection": None,
    **{name: getattr(Selection(0.0), name) for name in _SHOWN},
    "estimator": "dense",
    "weights": "dense",
    "achieved_ratio": 0.0,
    "summed_score": 0.0,
}
"""What is the same in all points of the dense model."""


def named(selection: Selection, recipe: WeightRecipe) -> str:
    """A pruned model as text: its selection, and how its weights are made."""
    return _text_of(selection.text, selection, recipe.text)


def setting_text(selection: Selection | None, weights: str) -> str:
    """A selection without its ratio, and the `text` of a recipe: a curve's name."""
    if selection is None:
        return "dense"
    return _text_of(selection.rules_text, selection, weights)


def _text_of(text: str, selection: Selection, weights: str) -> str:
    """The text with its weights; without the estimator, if weights choose it."""
    if weights.startswith("compress"):
        text = text.removeprefix(f"{selection.estimator}, ")
    return f"{text}, {weights}"


class PruningSession(traitlets.HasTraits):
    """One table, one selection at a time, and every point that was evaluated.

    What is a trait tells its observers of changes, in the thread that makes them.

    Example:
        >>> keys = {"layer": 0, "expert": 0, "atom": range(4), "tokens": 1}
        >>> sums = {"sum_h2": 1.0, "sum_g2": [1.0, 4.0, 9.0, 16.0]}
        >>> table = ImportanceTable.from_frame(pd.DataFrame({**keys, **sums}))
        >>> session = PruningSession(table)
        >>> session.choose(Selection(ratio=0.5))
        >>> session.keep.n_kept
        2
    """

    points = traitlets.Instance(pd.DataFrame)
    """A row for each `Point`."""
    method_rows = traitlets.List[dict[str, Any]]()
    """Rows of the methods that were run, as in `CompareTab.frame`."""

    def __init__(
        self,
        table: ImportanceTable,
        *,
        workbench: "Workbench | None" = None,
        calibration: Calibration | None = None,
    ) -> None:
        """Start with the default selection.

        Args:
            table: the importance of the atoms.
            workbench: that of the model `table` was measured on; needed to evaluate.
            calibration: what `table` was measured on; by default the workbench's.
        """
        super().__init__()
        self.table = table
        self.workbench = workbench
        self.calibration = calibration or Calibration()
        self.recipe = MASKED
        """How weights are made."""
        self.panel: object = None
        """Of several panels of one session, that whose controls chose last."""
        self.corpora: Sequence[str] = ("pydocs",)
        """Perplexity can be measured on their test splits."""
        self.tasks: Sequence[str] = ("continuation",)
        """Their accuracy can be measured."""
        self.points = pd.DataFrame(columns=list(POINT_COLUMNS))
        self.windows: dict[tuple[Selection | None, str, str], tuple[float, ...]] = {}
        """Mean losses of single windows, by selection, weights and hash of the text."""
        self.texts: dict[str, str] = {}
        """Hash of the text, or items, that points of a corpus or task, and rows, are
        of."""
        self.seconds_a_window = (
            None if workbench is None else seconds_of_scoring(table, workbench.profile)
        )
        """Seconds a window in the last evaluation that was not read from the cache;
        before there is one, what is expected of the pass that measured the table."""
        self.seconds: dict[str, float] = {}
        """Seconds that a task, or making the weights of a recipe, took last."""
        self._selection = Selection(0.25)
        self._rejected: SpecError | None = None
        self._making, self._adding = threading.Lock(), threading.Lock()
        self._last_made: tuple[tuple[Selection, WeightRecipe], PruningResult] | None = (
            None
        )
        self._chosen: dict[tuple[Selection, WeightRecipe], KeepMask] = {}
        """Masks that were chosen with the weights."""
        # For the selection that is shown, each is computed once.
        last = lru_cache(maxsize=2)
        self._ranked = last(partial(select, table))
        self._last_savings = last(self.savings_of)
        self._score = last(self.score_of)

    @property
    def is_ready(self) -> bool:
        """Whether there is a model that can be asked without waiting for it."""
        bench = self.workbench
        return bench is not None and getattr(bench, "is_loaded", True)

    @property
    def bench(self) -> "Workbench":
        """The workbench.

        Raises:
            SpecError: there is none.
        """
        if self.workbench is None:
            raise SpecError(
                "the session has a table but no model, so nothing can be evaluated; "
                "open it with a workbench, such as open_workbench('lab')"
            )
        return self.workbench

    def check_ready(self) -> None:
        """Make sure that no model would be waited for.

        Raises:
            SpecError: it is not loaded yet.
        """
        if self.workbench is not None and not self.is_ready:
            raise SpecError("the model is not loaded yet: try again once it is there")

    # --- choosing ---------------------------------------------------------------

    @property
    def selection(self) -> Selection:
        """The current selection.

        Raises:
            SpecError: the last settings were rejected.
        """
        if self._rejected is not None:
            raise self._rejected
        return self.recipe.asked(self._selection)

    def settings(self) -> JobSettings:
        """The settings of a job on what is chosen.

        Raises:
            SpecError: as `selection`.
        """
        return JobSettings(self.selection, self.recipe)

    def reject(self, why: Exception) -> None:
        """Have no selection until the next `choose`: the settings are infeasible.

        Otherwise the buttons would use the previous selection.
        """
        self._rejected = SpecError(f"the settings above are infeasible: {why}")

    def choose(self, selection: Selection) -> None:
        """Change the selection; `keep` raises an error if it is infeasible."""
        self._selection, self._rejected = selection, None

    @property
    def keep(self) -> KeepMask:
        """The mask of the selection, with the weights of `recipe`."""
        return self.keep_of(self.selection)

    def keep_of(
        self, selection: Selection, recipe: WeightRecipe | None = None
    ) -> KeepMask:
        """The mask of any selection, with weights of any recipe; by default, this one.

        Raises:
            SpecError: the selection is infeasible.
            NotKnownError: the weights choose the mask, and have not been made.
        """
        recipe = recipe or self.recipe
        asked = recipe.asked(selection)
        if not recipe.chooses or self.removes_nothing(asked):
            return self._ranked(asked)
        keep = self._chosen.get((asked, recipe))
        if keep is None:
            raise NotKnownError(
                f"not known yet: {recipe.text} chooses the atoms itself; Evaluate does "
                "so"
            )
        return keep

    def removes_nothing(self, selection: Selection) -> bool:
        """Whether a selection leaves the dense model, with weights of any recipe.

        Raises:
            SpecError: the selection is infeasible.
        """
        return not self._ranked(selection).n_removed

    # --- counting ---------------------------------------------------------------

    def savings(self) -> dict[str, Any] | None:
        """As `savings.savings_of` gives them; None if the table has no sizes."""
        return self._last_savings(self.keep)

    def savings_of(self, keep: KeepMask) -> dict[str, Any] | None:
        """The same for any mask of the table."""
        columns = self.table.frame.columns
        if "architecture" not in self.table.metadata or "tokens" not in columns:
            return None
        source = None if self.workbench is None else self.workbench.source
        return savings_of(keep, self.table, source=source)

    def score_of(self, keep: KeepMask, selection: Selection) -> float:
        """The sum of the scores, by which a selection ranks, of what a mask prunes."""
        options = dict(selection.estimator_options)
        return summed_scores(self.table, keep, selection.estimator, **options)

    def bytes_are(self) -> str:
        """The kind of the bytes in `savings`: of files, or an estimate."""
        source = None if self.workbench is None else self.workbench.source
        if source is not None and source.is_dequantised(self.keep.one_width):
            return f"{source.dequantised_from} files, pruned in bfloat16: an estimate"
        if source is not None:
            return f"{source.dtype_name} files, pruned: an estimate"
        size = self.table.architecture.bytes_per_parameter
        return f"an estimate, {size:g} for each parameter"

    def named(self) -> str:
        """The selection, and how its weights are made, as text."""
        return named(self.selection, self.recipe)

    def describe(self) -> str:
        """The pruned share, as text."""
        keep, estimator = self.keep, find_estimator(self.selection.estimator)
        text = (
            f"{keep.achieved_ratio:.1%} of the atomic experts removed: "
            f"{keep.n_kept:,} of {keep.n_atoms:,} kept."
        )
        if estimator.name == Selection(0.0).estimator:
            return text
        text = f"{text} Estimator: {estimator.name}"
        if not estimator.within_layer:
            return f"{text}."
        return f"{text}, which compares atoms within a layer only: the scope is layer."

    # --- what was measured ------------------------------------------------------

    def measured(self) -> pd.DataFrame:
        """The last of the `points` of exactly this mask, for each corpus.

        For `compress`, which chooses a mask of its own, those of exactly this ratio.
        """
        if self.removes_nothing(self.selection):
            points = self.points_for(None, "dense")
            return points[points["nll"].notna()]
        points = self._points_alike()
        if points.empty:
            return points
        if self.recipe.chooses:
            same = points["ratio"].eq(self.selection.ratio)
        else:
            keep = self.keep
            score = self._score(keep, self.selection)
            same = points["summed_score"].eq(score)
            same &= points["achieved_ratio"].eq(keep.achieved_ratio)
        return points[same].drop_duplicates("dataset", keep="last")

    def points_for(self, selection: Selection | None, weights: str) -> pd.DataFrame:
        """The points of exactly this selection, with weights of this `text`.

        Those of the dense model where it removes nothing.
        """
        if selection is None or self.removes_nothing(selection):
            selection, weights = None, "dense"
        rows = zip(self.points["selection"], self.points["weights"], strict=True)
        same = [row == (selection, weights) for row in rows]
        return self.points[np.array(same, dtype=bool)]

    def measured_losses(self, corpus: str) -> pd.Series:
        """Δloss on a corpus by ratio, ascending: the points of these settings."""
        points = self._points_alike()
        points = points[points["dataset"].eq(corpus)]
        last = points.drop_duplicates("ratio", keep="last").set_index("ratio")
        return last["delta_nll"].astype(float).sort_index()

    def _points_alike(self) -> pd.DataFrame:
        """Points with a loss and the same settings, except for the ratio."""
        same = self.selection.ranking_key
        points = self.points[self.points["nll"].notna()]
        points = points[points["weights"].eq(self.recipe.text)]
        points = points[points["selection"].notna()]
        alike = [selection.ranking_key == same for selection in points["selection"]]
        return points[np.array(alike, dtype=bool)]

    # --- evaluating -------------------------------------------------------------

    def evaluate(
        self,
        datasets: Sequence[str],
        *,
        selection: Selection | None = None,
        recipe: WeightRecipe | None = None,
        report: "Callable[..., None] | None" = None,
        masked_first: bool = False,
    ) -> None:
        """Measure perplexity on the test splits of corpora, and accuracy of tasks.

        The dense model is measured, and the pruned one with weights of `recipe`;
        earlier results of the dense and of the masked model come from the cache. Their
        rows are added to `points`. It may run in any thread.

        Args:
            datasets: corpora, by their names or paths, and tasks among `tasks`.
            selection: by default the current one.
            recipe: by default the current one.
            report: called for each window as that of a `Job` is; an exception it raises
                ends the work.
            masked_first: whether the masked model is measured, too, and its points are
                added before other weights are made.

        Raises:
            SpecError: there is no model, or there are no corpora and no tasks.
        """
        recipe = recipe or self.recipe
        selection = recipe.asked(selection or self.selection)
        parts = self._parts(datasets)  # only now, for it waits for the model
        ranked = self._ranked(selection)
        first = [MASKED] if recipe != MASKED and masked_first else []
        recipes = [*first, recipe] if ranked.n_removed else []
        to_make = [self._windows_to_make(selection, one) for one in recipes]
        each = sum(part.n_windows for part in parts)
        clock = Clock((1 + len(recipes)) * each + sum(to_make), report)
        score = self.score_of(ranked, selection)
        dense = self._measured(parts, clock, _DENSE)
        rows = [_compared(row, row) for row in dense]
        for one, n_windows in zip(recipes, to_make, strict=True):
            made = self.made(selection, one, part=clock.making(n_windows))
            if clock.seconds:
                self.seconds[one.text] = clock.seconds
            about = _about(selection, one, made.keep, score)
            named = "pruned" if one == recipe else "masked"
            pruned = self._measured(parts, clock, about, made, named=named)
            rows += map(_compared, pruned, dense)
            if one != recipe:
                self._add(rows)
        self._add(rows)

    def _parts(self, datasets: Sequence[str]) -> list[Part]:
        """What each model is measured on.

        Raises:
            SpecError: there is no model, or nothing to measure it on.
        """
        if not datasets:
            raise SpecError(
                "no corpus and no task are selected; select one, such as pydocs"
            )
        return [self._part(name, is_task=name in self.tasks) for name in datasets]

    def _part(self, dataset: str, *, is_task: bool) -> Part:
        if is_task:
            n_windows = self._counted(dataset, _WINDOWS_OF_TASK)
            return Part(self.bench, dataset, None, n_windows)
        text = self.bench.test_windows(dataset)
        return Part(self.bench, dataset, text, text.n_sequences)

    def changed(
        self, texts: Mapping[str, str], tasks: Collection[str] = ()
    ) -> list[str]:
        """The names in `texts` whose text is not the one that it has the hash of.

        What is not here is not among them: it cannot be measured here, either.
        """
        names = []
        for name, text in texts.items() if self.workbench else ():
            with contextlib.suppress(HeaprLabError):
                if self._part(name, is_task=name in tasks).text != text:
                    names.append(name)
        return names

    def _counted(self, work: str, guess: int) -> int:
        """What work counts as, in windows: by the time it took last, if that is known.

        Args:
            work: a task, or the `text` of a recipe whose weights are made.
            guess: what it counts as else.
        """
        taken, each = self.seconds.get(work), self.seconds_a_window
        return round(taken / each) if taken and each else guess

    def _windows_to_make(self, selection: Selection, recipe: WeightRecipe) -> int:
        """The work of making weights, in windows of an evaluation."""
        if self._last_made is not None and self._last_made[0] == (selection, recipe):
            return 0
        asked = recipe.calibration(self.calibration)
        n_sequences: Any = self.bench.profile.counted(asked).n_sequences
        n_windows = n_sequences + asked.n_own(n_sequences)
        return self._counted(recipe.text, recipe.n_passes * n_windows)

    def n_windows(
        self,
        datasets: Sequence[str],
        selection: Selection | None = None,
        recipe: WeightRecipe = MASKED,
    ) -> int:
        """The work of evaluating one model, the dense one by default, in windows.

        Raises:
            SpecError: as `evaluate`.
        """
        making = 0 if selection is None else self._windows_to_make(selection, recipe)
        return making + sum(part.n_windows for part in self._parts(datasets))

    def _measured(
        self,
        parts: list[Part],
        clock: Clock,
        about: Mapping[str, Any],
        made: "PruningResult | None" = None,
        *,
        named: str = "dense",
    ) -> list[dict[str, Any]]:
        """The rows of one model, `about` which is the same in all.

        Losses of single windows, and which items are answered rightly, are kept; and
        how long a task took, and a window, unless it came from the cache.
        """
        rows = []
        for part in parts:
            progress = clock.part(f"{named} on {part.dataset}", part.n_windows)
            row = {**about, "dataset": part.dataset, **part.measured(made, progress)}
            losses = row.get("windows", ())
            if clock.seconds and losses:
                self.seconds_a_window = clock.seconds / len(losses)
            elif clock.seconds:
                self.seconds[part.dataset] = clock.seconds
            if each := losses or row.get("items"):
                self.windows[row["selection"], row["weights"], row["text"]] = each
            rows.append(row)
        return rows

    def made(
        self, selection: Selection, recipe: WeightRecipe, *, part: StartPart = no_parts
    ) -> "PruningResult":
        """The mask of `selection`, or of `compress`, and the new weights, if any.

        What was made last is kept, so that it is exported as it was evaluated.
        """
        from heapr_lab.recipes.making import make
        from heapr_lab.workbench.settings import Setting

        setting = Setting(selection, self.calibration)
        work = partial(make, self.bench, self.table, setting)
        if recipe.weights == "unchanged":
            return work(recipe, part=part)
        fitted = replace(recipe, heal=0)
        key = selection, fitted
        with self._turn(part):
            if self._last_made is None or self._last_made[0] != key:
                self._last_made = None  # weights are not held beside the next ones
                pruning = work(fitted, part=part)
                self._last_made = key, pruning
                if recipe.chooses:
                    self._chosen[key] = pruning.keep
            return replace(self._last_made[1], recipe=recipe)

    @contextlib.contextmanager
    def _turn(self, part: StartPart) -> Iterator[None]:
        """Wait for what another tab makes; each report can end that by an exception."""
        report = part("weights that another tab makes come first", "turn")
        while not self._making.acquire(timeout=_PATIENCE):
            report(0, 1)
        try:
            yield
        finally:
            self._making.release()

    def _add(self, rows: list[dict[str, Any]]) -> None:
        """Add points in place of those of the same model, or of another text."""
        keys = ["dataset", "selection", "weights"]
        new = pd.DataFrame(rows, columns=list(POINT_COLUMNS))
        with self._adding:  # two tabs may measure at the same time
            self._keep_texts({row["dataset"]: row["text"] for row in rows})
            frames = [frame for frame in (self.points, new) if len(frame)]
            points = pd.concat(frames, ignore_index=True)
            self.points = points.drop_duplicates(keys, keep="last", ignore_index=True)

    def add_methods(self, new: list[dict[str, Any]], texts: dict[str, str]) -> None:
        """Add rows of methods in place of those of the same, or of another text.

        Args:
            new: the rows.
            texts: what `texts_of` gave before they were measured.
        """
        labels = {row["label"] for row in new}
        with self._adding:
            self._keep_texts(texts)
            old = [row for row in self.method_rows if row["label"] not in labels]
            self.method_rows = old + new

    def texts_of(self, corpora: Sequence[str]) -> dict[str, str]:
        """The hash of the test windows of each corpus."""
        return {name: self._part(name, is_task=False).text for name in corpora}

    def _keep_texts(self, texts: dict[str, str]) -> None:
        """Note what is measured on now; points and rows of another text go."""
        others = {k for k, text in texts.items() if self.texts.get(k, text) != text}
        if others:
            self.points = self.points[~self.points["dataset"].isin(others)]
        # Of rows in earlier sessions, the text may not be known.
        others |= texts.keys() - self.texts.keys()
        self.method_rows = without_losses(self.method_rows, others)
        self.texts = self.texts | texts  # saved sessions keep the old one


def without_losses(
    rows: list[dict[str, Any]], corpora: Collection[str]
) -> list[dict[str, Any]]:
    """The rows of methods that have no loss on any of these corpora."""
    losses = {f"{LOSS}{name}" for name in corpora}
    return [row for row in rows if not losses & row.keys()]


def _about(
    selection: Selection, recipe: WeightRecipe, keep: KeepMask, score: float
) -> dict[str, Any]:
    """What is the same in all points of a pruned model, whose mask is `keep`."""
    return {
        "selection": selection,
        # Of `compress`, maybe not the one asked for.
        "estimator": str(keep.settings.get("estimator", selection.estimator)),
        "weights": recipe.text,
        **{name: getattr(selection, name) for name in _SHOWN},
        "achieved_ratio": keep.achieved_ratio,
        "summed_score": score,
    }


def _compared(row: dict[str, Any], dense: Mapping[str, Any]) -> dict[str, Any]:
    """A row with its difference to that of the dense model on the same text."""
    if "nll" not in row:
        return row
    windows = row["windows"], dense["windows"]
    row["delta_nll"] = row["nll"] - dense["nll"]
    if row is not dense and len(windows[0]) == len(windows[1]) > 0:
        row["stderr"] = paired_difference(*windows)[1]
    return row
