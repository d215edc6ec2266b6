"""A pruning being tried out: what is chosen, what stays, what it saves and costs.

Plain Python, without widgets; torch is needed only to evaluate. Selecting, counting and
predicting are quick and done at once, so that a slider can follow; the model runs only
in `PruningSession.evaluate`.
"""

import bisect
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from heapr_lab.errors import SpecError
from heapr_lab.evaluation.loss_prediction import DamageMap, fit_damage
from heapr_lab.importance.estimators import ESTIMATORS, PER_TOKEN
from heapr_lab.importance.table import ImportanceTable
from heapr_lab.progress import Parts, Progress, TimeLeft, time_left_text
from heapr_lab.pruning.masks import KeepMask
from heapr_lab.pruning.options import Selection
from heapr_lab.pruning.savings import at_context, savings_of, summed_scores
from heapr_lab.pruning.selection import select
from heapr_lab.text.calibration_spec import Calibration

if TYPE_CHECKING:
    from heapr_lab.evaluation.perplexity import Perplexity
    from heapr_lab.workbench.workbench import Workbench

_LEAST_TO_PREDICT = 2
_TASK_WINDOWS = 32
"""What a task counts as, for the time that is left."""
_NO_PREDICTION = (
    "Evaluate two ratios of this selection to see a prediction at every other; with a "
    "third it says how far off it may be."
)


_SHOWN = ("ratio", "scope", "granularity", "structure")
POINT_COLUMNS = (
    "selection",
    "estimator",
    *_SHOWN,
    "achieved_ratio",
    "summed_score",
    "dataset",
    "nll",
    "delta_nll",
    "perplexity",
    "n_tokens",
    "accuracy",
    "stderr",
)
"""Columns of `PruningSession.points`; the dense model has no selection."""


@dataclass(frozen=True)
class Step:
    """How far an evaluation has come."""

    label: str
    done: int
    """Windows that are through."""
    total: int
    seconds_left: float | None
    """Estimated; None while nothing has been measured."""

    @property
    def text(self) -> str:
        """One line for people."""
        line = f"{self.label}: window {self.done} of {self.total}"
        return line + time_left_text(self.seconds_left)


class PruningSession:
    """One table, one selection at a time, and every point that was evaluated.

    Example:
        >>> keys = {"layer": 0, "expert": 0, "atom": range(4), "tokens": 1}
        >>> sums = {"sum_h2": 1.0, "sum_g2": [1.0, 4.0, 9.0, 16.0]}
        >>> table = ImportanceTable.from_frame(pd.DataFrame({**keys, **sums}))
        >>> session = PruningSession(table)
        >>> session.choose(Selection(ratio=0.5))
        >>> session.keep.n_kept
        2
    """

    def __init__(
        self,
        table: ImportanceTable,
        *,
        workbench: "Workbench | None" = None,
        calibration: Calibration | None = None,
    ) -> None:
        """Start with the default selection.

        Args:
            table: what is selected from.
            workbench: the model that `table` was measured on; needed to evaluate.
            calibration: what it was measured on; by default the workbench's own.
        """
        self.table = table
        self.workbench = workbench
        self.calibration = calibration or Calibration()
        self.points = pd.DataFrame(columns=list(POINT_COLUMNS))
        self._selection = self._selected = Selection(0.25)
        self._rejected: SpecError | None = None
        self._scored: tuple[tuple[KeepMask, str], float] | None = None
        self._keep: KeepMask | None = None
        self._saved: tuple[KeepMask, pd.DataFrame | None] | None = None

    # --- choosing ---------------------------------------------------------------

    @property
    def estimators(self) -> tuple[str, ...]:
        """Those that the columns of the table suffice for."""
        return self.table.estimators

    @property
    def selection(self) -> Selection:
        """What is chosen, its scope being `layer` where nothing else is possible.

        Raises:
            SpecError: what was asked for last was rejected.
        """
        if self._rejected is not None:
            raise self._rejected
        return self._selection

    def reject(self, why: Exception) -> None:
        """Let nothing be chosen until something is: what was asked for is infeasible.

        Otherwise buttons would go on with the selection of before.
        """
        self._rejected = SpecError(f"the settings above are infeasible: {why}")

    @property
    def note(self) -> str:
        """What the selection does not show by itself; mostly nothing."""
        if not self.scope_is_fixed:
            return ""
        return (
            f"{self._selection.estimator} compares atoms within a layer only, so the "
            "scope is layer."
        )

    @property
    def scope_is_fixed(self) -> bool:
        """Whether the estimator leaves no selection of scope."""
        estimator = ESTIMATORS.get(self._selection.estimator)
        return estimator is not None and estimator.within_layer

    def choose(self, selection: Selection) -> None:
        """Change what is selected; whether it is feasible is seen at `keep`."""
        self._selection, self._rejected = selection, None

    @property
    def keep(self) -> KeepMask:
        """What stays."""
        selection = self.selection
        if self._keep is None or self._selected != selection:
            self._keep, self._selected = self.keep_of(selection), selection
        return self._keep

    def keep_of(self, selection: Selection) -> KeepMask:
        """What stays of `selection`, whatever is chosen now."""
        return select(self.table, selection)

    # --- counting ---------------------------------------------------------------

    def savings(self) -> pd.DataFrame | None:
        """One row of `savings_of`; None where the table lacks the sizes."""
        keep = self.keep
        if self._saved is None or self._saved[0] is not keep:
            self._saved = keep, self.savings_of(keep)
        return self._saved[1]

    def savings_of(self, keep: KeepMask) -> pd.DataFrame | None:
        """The same of any mask of the table."""
        columns = self.table.frame.columns
        if "architecture" not in self.table.metadata or "tokens" not in columns:
            return None
        size = None
        if self.workbench is not None:
            size = self.workbench.stored_bytes_per_parameter(self.table)
        return savings_of(keep, self.table, bytes_per_parameter=size)

    def bytes_are(self) -> str:
        """What the bytes of `savings` are counted as; dense ones may be of files."""
        source = None if self.workbench is None else self.workbench.source
        if source is not None:
            return f"{source.dtype_name} files, pruned: an estimate"
        size = self.table.architecture.bytes_per_parameter
        return f"an estimate, {size:g} for each parameter"

    def describe(self) -> str:
        """What is removed and saved, as text."""
        keep = self.keep
        text = (
            f"{keep.achieved_ratio:.1%} of the atomic experts removed: "
            f"{keep.n_kept:,} of {keep.n_atoms:,} kept. "
        )
        savings = self.savings()
        if savings is None:
            text += "The table has no architecture, so nothing is known of parameters."
        else:
            row = savings.iloc[0]
            text += (
                f"Parameters {row.parameters_before:,.0f} → {row.parameters_after:,.0f}"
                f" ({row.parameter_reduction:.1%} saved). FLOPs per token, "
                f"{at_context(row.seq_len)}: {row.flops_reduction:.1%} saved, of the "
                f"routed experts {row.routed_flops_reduction:.1%}."
            )
        return f"{text} {self.note}".strip()

    # --- predicting -------------------------------------------------------------

    def describe_prediction(self) -> str:
        """What the selection costs, as text: measured, or predicted; no model runs.

        Predictions are read from the `points` that were chosen alike at other ratios,
        on every corpus that has two of them. The range is that of `DamageMap.spread`.
        """
        measured = self.measured()
        told = [_measurement(row) for row in measured.to_dict("records")]
        points = self._points_for_fit()
        if points.empty:
            return " ".join([*told, _NO_PREDICTION])
        others = points[~points["dataset"].isin(measured["dataset"])]
        score = self._score_of(self.keep)
        groups = others.groupby("dataset", sort=False)
        return " ".join(
            [*told, *(_prediction(str(name), part, score) for name, part in groups)]
        )

    def measured(self) -> pd.DataFrame:
        """The `points` of what is chosen: of its very mask, on each corpus the last."""
        keep = self.keep
        points = _selected_alike(
            self.points[self.points["nll"].notna()], self.selection
        )
        if points.empty:
            return points
        same = points["summed_score"].eq(self._score_of(keep))
        same &= points["achieved_ratio"].eq(keep.achieved_ratio)
        return points[same].drop_duplicates("dataset", keep="last")

    def ratio_for_predicted_loss(self, rise: float, corpus: str) -> float:
        """The largest ratio, in steps of 0.01, whose predicted Δloss is at most `rise`.

        Args:
            rise: nats per token.
            corpus: whose points are read.

        Raises:
            SpecError: nothing was evaluated that a prediction could be made from.
        """
        points = self._points_for_fit()
        points = points[points["dataset"].eq(corpus)]
        if points.empty:
            raise SpecError(f"no prediction on {corpus} yet. {_NO_PREDICTION}")
        damage = _fitted(_measured(points))

        def too_much(hundredths: int) -> bool:
            ratio = hundredths / 100
            keep = self.keep_of(replace(self.selection, ratio=ratio))
            return float(damage.predict(self._score_of(keep))) > rise

        # Δloss rises with the ratio, so the first ratio that costs too much is found.
        first = bisect.bisect_left(range(100), True, key=too_much)
        return max(0, first - 1) / 100

    def predictions(self) -> pd.DataFrame:
        """Of the selection, by corpus with points enough: dataset, delta_nll, spread.

        `spread` is the factor that it may be off by, missing where it is not known.
        Corpora that the selection was `measured` on are left out.
        """
        if self._points_for_fit().empty:
            return self._predicted([])
        found = self._predicted([self.keep])
        return found[~found["dataset"].isin(self.measured()["dataset"])]

    def predicted_curve(self, ratios: Sequence[float]) -> pd.DataFrame:
        """The same for the selection at other ratios, with their achieved `ratio`."""
        if self._points_for_fit().empty:
            return self._predicted([])
        keeps = [self.keep_of(replace(self.selection, ratio=ratio)) for ratio in ratios]
        return self._predicted(keeps)

    def _predicted(self, keeps: Sequence[KeepMask]) -> pd.DataFrame:
        rows = []
        scores = [self._score_of(keep) for keep in keeps]
        for corpus, part in self._points_for_fit().groupby("dataset", sort=False):
            try:
                damage = _fitted(_measured(part))
            except SpecError:  # what is wrong is said by `describe_prediction`
                continue
            for keep, score in zip(keeps, scores, strict=True):
                loss = float(damage.predict(score))
                rows.append((corpus, keep.achieved_ratio, loss, damage.spread))
        columns = ["dataset", "ratio", "delta_nll", "spread"]
        return pd.DataFrame(rows, columns=columns)

    def _points_for_fit(self) -> pd.DataFrame:
        """Points chosen alike, of corpora that have enough of them to predict from."""
        points = _selected_alike(
            self.points[self.points["nll"].notna()], self.selection
        )
        counts = points.groupby("dataset")["summed_score"].transform("nunique")
        return points[counts >= _LEAST_TO_PREDICT]

    def _score_of(self, keep: KeepMask) -> float:
        """The summed score of what `keep` removes; of one mask it is summed once."""
        key = keep, self.selection.estimator
        if self._scored is None or self._scored[0] != key:
            self._scored = key, summed_scores(self.table, *key)
        return self._scored[1]

    # --- evaluating -------------------------------------------------------------

    def evaluate(
        self,
        corpora: Sequence[str],
        *,
        tasks: Sequence[str] = (),
        selection: Selection | None = None,
        progress: Callable[[Step], None] | None = None,
    ) -> pd.DataFrame:
        """Measure perplexity on the test split of `corpora`, and accuracy, both models.

        Whatever was measured before comes from the cache. Run it in any thread.

        Args:
            corpora: names or paths.
            tasks: of the harness, or `continuation`.
            selection: by default what is chosen now.
            progress: called as it goes; what it raises ends the evaluation.

        Returns:
            The new rows of `points`: the dense model (ratio 0) and the selection.

        Raises:
            SpecError: there is no model, or neither corpus nor task.
        """
        bench = self.workbench
        if bench is None:
            raise SpecError(
                "the session has a table but no model, so nothing can be evaluated; "
                "make it of a Workbench: open_workbench('lab')"
            )
        if not corpora and not tasks:
            raise SpecError("no corpus is chosen; choose at least one, such as pydocs")
        selection = selection or self.selection
        keep = self.keep_of(selection)
        masks = (None, keep) if keep.n_removed else (None,)
        score = summed_scores(self.table, keep, selection.estimator)
        windows = {corpus: bench.test_windows(corpus) for corpus in corpora}
        n_windows = sum(part.n_sequences for part in windows.values())
        n_parts = n_windows + _TASK_WINDOWS * len(tasks)
        clock = _Clock(len(masks) * n_parts, progress)
        rows: list[dict[str, Any]] = []
        for corpus, part in windows.items():
            for mask in masks:
                clock.begin(f"{'dense' if mask is None else 'pruned'} on {corpus}")
                found = bench.perplexity(mask, part, progress=clock.parts)
                clock.end(part.n_sequences)
                row = _point(selection, mask, corpus, score=score)
                rows.append(row | _loss(found))
            dense = rows[-len(masks)]["nll"]
            for row in rows[-len(masks) :]:
                row["delta_nll"] = row["nll"] - dense
        for task in tasks:
            for mask in masks:
                clock.begin(f"{'dense' if mask is None else 'pruned'} on {task}")
                accuracy = bench.task_accuracy(
                    mask, task, progress=clock.share_of(_TASK_WINDOWS)
                )
                clock.end(_TASK_WINDOWS)
                row = _point(selection, mask, task, score=score)
                rows.append(
                    row | {"accuracy": accuracy["value"], "stderr": accuracy["stderr"]}
                )
        new = pd.DataFrame(rows, columns=list(POINT_COLUMNS))
        self._add(new)
        return new

    def _add(self, new: pd.DataFrame) -> None:
        parts = [part for part in (self.points, new) if len(part)]
        asked = ["dataset", "selection"]
        together = pd.concat(parts, ignore_index=True)
        self.points = together.drop_duplicates(asked, keep="last", ignore_index=True)


def _point(
    selection: Selection, mask: KeepMask | None, dataset: str, *, score: float
) -> dict[str, Any]:
    shown = Selection(0.0) if mask is None else selection
    return {
        "selection": None if mask is None else selection,
        "estimator": "dense" if mask is None else selection.estimator,
        **{name: getattr(shown, name) for name in _SHOWN},
        "achieved_ratio": 0.0 if mask is None else mask.achieved_ratio,
        "summed_score": 0.0 if mask is None else score,
        "dataset": dataset,
    }


def _loss(found: "Perplexity") -> dict[str, Any]:
    return {
        "nll": found.nll,
        "perplexity": found.value,
        "n_tokens": found.n_tokens,
    }


def _selected_alike(points: pd.DataFrame, selection: Selection) -> pd.DataFrame:
    """Those of `points` that differ from `selection` in their ratio at most."""
    same = replace(selection, ratio=0.0)
    alike = [s is not None and replace(s, ratio=0.0) == same for s in points.selection]
    return points[np.array(alike, dtype=bool)]


def _measured(points: pd.DataFrame) -> tuple[tuple[float, float], ...]:
    """Summed score and Δloss of each point."""
    numbers = points[["summed_score", "delta_nll"]].astype(float)
    return tuple(numbers.itertuples(index=False, name=None))


@functools.lru_cache(maxsize=64)
def _fitted(points: tuple[tuple[float, float], ...]) -> DamageMap:
    """`fit_damage`, once for the same points: sliders ask at every move."""
    return fit_damage(points)


def _prediction(corpus: str, points: pd.DataFrame, score: float) -> str:
    """One sentence: what removing `score` costs on `corpus`, as its `points` say."""
    try:
        damage = _fitted(_measured(points))
        loss = float(damage.predict(score))
    except SpecError as error:  # what is wrong is shown; a display never fails
        return f"No prediction on {corpus}: {error}."
    dense = float((points["nll"] - points["delta_nll"]).iloc[0])
    losses = [loss]
    if damage.spread is not None:
        losses += [loss / damage.spread, loss * damage.spread]
    with np.errstate(over="ignore"):
        perplexities = np.exp(dense + np.array(losses)).tolist()
    beyond = ", beyond them and so less certain" if damage.extrapolates(score) else ""
    return (
        f"Predicted on {corpus} from {len(damage.points)} evaluated ratios{beyond}: "
        f"Δloss {_span(losses, '.3g')} {PER_TOKEN}, "
        f"perplexity {_span(perplexities, ',.1f')}."
    )


def _measurement(point: dict[str, Any]) -> str:
    """One sentence: what was measured of a selection on a corpus."""
    return (
        f"Measured on {point['dataset']}: Δloss {point['delta_nll']:.3g} "
        f"{PER_TOKEN}, perplexity {point['perplexity']:,.1f}."
    )


def _span(values: list[float], form: str) -> str:
    """The first of `values` and, in brackets, from where to where it may lie."""
    first, *rest = (format(value, form) for value in values)
    return f"{first} ({' to '.join(rest)})" if rest else first


class _Clock:
    """Turns the progress of each part into steps of the whole, with the time left."""

    def __init__(self, total: int, report: Callable[[Step], None] | None) -> None:
        self._report = report
        self._label = ""
        self._left = TimeLeft()
        self.parts = Parts(total, self._measured)

    def begin(self, label: str) -> None:
        """A part begins."""
        self._label = label
        self._left.skip_to(self.parts.done)
        self._tell()

    def share_of(self, n_windows: int) -> Progress:
        """Progress of a part that counts as so many windows."""
        return lambda done, total: self.parts(
            n_windows * done // max(1, total), n_windows
        )

    def end(self, n_windows: int) -> None:
        """The part, measured or read from the cache, is through."""
        self.parts.end(n_windows)
        self._left.skip_to(self.parts.done)
        self._tell()

    def _measured(self, done: int, _total: int) -> None:
        self._left.reached(done)
        self._tell()

    def _tell(self) -> None:
        if self._report is not None:
            done, total = self.parts.done, self.parts.total
            self._report(Step(self._label, done, total, self._left.seconds(total)))
