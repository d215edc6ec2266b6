"""A pruning being tried out: what is chosen, what stays, what it saves and costs.

Plain Python, without widgets; torch is needed only to evaluate. Selecting, counting and
predicting are quick and done at once, so that a slider can follow; the model runs only
in `PruningSession.evaluate`.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from heapr_lab import accounting
from heapr_lab.damage import fit_damage, summed_scores
from heapr_lab.estimators import ESTIMATORS
from heapr_lab.masks import KeepMask
from heapr_lab.selection import select
from heapr_lab.specs import SpecError
from heapr_lab.table import ImportanceTable

if TYPE_CHECKING:
    from heapr_lab.evaluation import Perplexity
    from heapr_lab.pipeline import Workbench

_SEQ_LEN = 2048
_LEAST_TO_PREDICT = 2
_NO_PREDICTION = (
    "Evaluate two ratios of this choice to see a prediction at every other; with a "
    "third it says how far off it may be."
)


@dataclass(frozen=True)
class Choice:
    """How atoms are chosen, as `select` takes it."""

    ratio: float = 0.25
    estimator: str = "heapr"
    scope: str = "global"
    granularity: str = "atom"
    structure: str = "ragged"
    multiple: int | None = None


POINT_COLUMNS = (
    *(field.name for field in fields(Choice)),
    "achieved_ratio",
    "summed_score",
    "dataset",
    "nll",
    "delta_nll",
    "perplexity",
    "n_tokens",
)
"""Columns of `PruningSession.points`."""


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
        if self.seconds_left is None:
            return line
        minutes, seconds = divmod(round(self.seconds_left), 60)
        return f"{line}, about {minutes}:{seconds:02d} left"


class PruningSession:
    """One table, one choice at a time, and every point that was evaluated.

    Example:
        >>> keys = {"layer": 0, "expert": 0, "atom": range(4), "tokens": 1}
        >>> sums = {"sum_h2": 1.0, "sum_g2": [1.0, 4.0, 9.0, 16.0]}
        >>> table = ImportanceTable.from_frame(pd.DataFrame({**keys, **sums}))
        >>> session = PruningSession(table)
        >>> session.choose(Choice(ratio=0.5))
        >>> session.keep.n_kept
        2
    """

    def __init__(
        self, table: ImportanceTable, *, workbench: "Workbench | None" = None
    ) -> None:
        """Start with the default choice.

        Args:
            table: what is selected from.
            workbench: the model that `table` was measured on; needed to evaluate.
        """
        self.table = table
        self.workbench = workbench
        self.points = pd.DataFrame(columns=list(POINT_COLUMNS))
        self._choice = self._selected = Choice()
        self._keep: KeepMask | None = None

    # --- choosing ---------------------------------------------------------------

    @property
    def estimators(self) -> tuple[str, ...]:
        """Those that the columns of the table suffice for."""
        return self.table.estimators

    @property
    def choice(self) -> Choice:
        """What is chosen, its scope being `layer` where nothing else is possible."""
        return self._choice

    @property
    def note(self) -> str:
        """What the choice does not show by itself; mostly nothing."""
        if not self.scope_is_fixed:
            return ""
        return (
            f"{self._choice.estimator} compares atoms within a layer only, so the "
            "scope is layer."
        )

    @property
    def scope_is_fixed(self) -> bool:
        """Whether the estimator leaves no choice of scope."""
        estimator = ESTIMATORS.get(self._choice.estimator)
        return estimator is not None and estimator.within_layer

    def choose(self, choice: Choice) -> None:
        """Change what is chosen; whether it can be had is seen when `keep` is asked."""
        self._choice = choice
        if self.scope_is_fixed:
            self._choice = replace(choice, scope="layer")

    @property
    def keep(self) -> KeepMask:
        """What stays."""
        if self._keep is None or self._selected != self._choice:
            choice = self._choice
            self._keep, self._selected = self.keep_of(choice), choice
        return self._keep

    def keep_of(self, choice: Choice) -> KeepMask:
        """What stays of `choice`, whatever is chosen now."""
        return select(self.table, **asdict(choice))

    # --- counting ---------------------------------------------------------------

    def savings(self) -> pd.DataFrame | None:
        """One row as `accounting.summary`, or None where the table lacks the sizes."""
        columns = self.table.frame.columns
        if "architecture" not in self.table.metadata or "tokens" not in columns:
            return None
        bench = self.workbench
        seq_len = _SEQ_LEN if bench is None else bench.profile.seq_len
        return accounting.summary(self.keep, self.table, seq_len=seq_len)

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
                f" ({row.parameter_reduction:.1%} saved). FLOPs per token "
                f"{row.flops_reduction:.1%} saved, of the routed experts "
                f"{row.routed_flops_reduction:.1%}."
            )
        return f"{text} {self.note}".strip()

    # --- predicting -------------------------------------------------------------

    def describe_prediction(self) -> str:
        """What the choice will probably cost, as text; the model does not run.

        Read from the `points` that were chosen alike at other ratios, on every corpus
        that has two of them. The range is that of `DamageMap.spread`.
        """
        choice = self.choice
        points = _chosen_alike(self.points, choice)
        counts = points.groupby("dataset")["summed_score"].transform("nunique")
        points = points[counts >= _LEAST_TO_PREDICT]
        if points.empty:
            return _NO_PREDICTION
        score = summed_scores(self.table, self.keep_of(choice), choice.estimator)
        groups = points.groupby("dataset", sort=False)
        return " ".join(_prediction(str(name), part, score) for name, part in groups)

    # --- evaluating -------------------------------------------------------------

    def evaluate(
        self,
        corpora: Sequence[str],
        *,
        choice: Choice | None = None,
        progress: Callable[[Step], None] | None = None,
    ) -> pd.DataFrame:
        """Measure perplexity on the test split of `corpora`, dense and pruned.

        Whatever was measured before comes from the cache. Run it in any thread.

        Args:
            corpora: names or paths.
            choice: by default what is chosen now.
            progress: called as it goes; what it raises ends the evaluation.

        Returns:
            The new rows of `points`: the dense model (ratio 0) and the choice.

        Raises:
            SpecError: there is no model, or no corpus.
        """
        bench = self.workbench
        if bench is None:
            raise SpecError(
                "the session has a table but no model, so nothing can be evaluated; "
                "make it of a Workbench: open_workbench('lab')"
            )
        if not corpora:
            raise SpecError("no corpus is chosen; choose at least one, such as pydocs")
        choice = choice or self.choice
        keep = self.keep_of(choice)
        masks = (None, keep) if keep.n_removed else (None,)
        score = summed_scores(self.table, keep, choice.estimator)
        windows = {corpus: bench.test_windows(corpus) for corpus in corpora}
        n_windows = len(masks) * sum(part.n_sequences for part in windows.values())
        clock = _Clock(n_windows, progress)
        rows: list[dict[str, Any]] = []
        for corpus, part in windows.items():
            for mask in masks:
                clock.begin(f"{'dense' if mask is None else 'pruned'} on {corpus}")
                found = bench.perplexity(mask, part, progress=clock)
                clock.end(part.n_sequences)
                rows.append(_point(choice, mask, found, corpus, score=score))
            dense = rows[-len(masks)]["nll"]
            for row in rows[-len(masks) :]:
                row["delta_nll"] = row["nll"] - dense
        new = pd.DataFrame(rows, columns=list(POINT_COLUMNS))
        self._add(new)
        return new

    def _add(self, new: pd.DataFrame) -> None:
        parts = [part for part in (self.points, new) if len(part)]
        asked = ["dataset", *(field.name for field in fields(Choice))]
        together = pd.concat(parts, ignore_index=True)
        self.points = together.drop_duplicates(asked, keep="last", ignore_index=True)


def _point(
    choice: Choice,
    mask: KeepMask | None,
    found: "Perplexity",
    corpus: str,
    *,
    score: float,
) -> dict[str, Any]:
    shown = Choice(0.0, estimator="dense") if mask is None else choice
    return {
        **asdict(shown),
        "achieved_ratio": 0.0 if mask is None else mask.achieved_ratio,
        "summed_score": 0.0 if mask is None else score,
        "dataset": corpus,
        "nll": found.nll,
        "perplexity": found.value,
        "n_tokens": found.n_tokens,
    }


def _chosen_alike(points: pd.DataFrame, choice: Choice) -> pd.DataFrame:
    """Those of `points` that differ from `choice` in their ratio at most."""
    alike = pd.Series(True, index=points.index)
    for name, value in asdict(choice).items():
        if name != "ratio":
            column = points[name]
            alike &= column.isna() if value is None else column.eq(value)
    return points[alike]


def _prediction(corpus: str, points: pd.DataFrame, score: float) -> str:
    """One sentence: what removing `score` costs on `corpus`, as its `points` say."""
    measured = points[["summed_score", "delta_nll"]].astype(float)
    try:
        damage = fit_damage(measured.itertuples(index=False, name=None))
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
        f"Δloss {_span(losses, '.3g')} nats/token, "
        f"perplexity {_span(perplexities, ',.1f')}."
    )


def _span(values: list[float], form: str) -> str:
    """The first of `values` and, in brackets, from where to where it may lie."""
    first, *rest = (format(value, form) for value in values)
    return f"{first} ({' to '.join(rest)})" if rest else first


class _Clock:
    """Turns the progress of each part into that of the whole, with the time left."""

    def __init__(self, total: int, report: Callable[[Step], None] | None) -> None:
        self._total = total
        self._report = report
        self._label = ""
        self._before = self._in_part = self._measured = 0
        self._seconds = self._last = 0.0

    def begin(self, label: str) -> None:
        """A part begins."""
        self._label, self._in_part, self._last = label, 0, time.monotonic()
        self._tell()

    def __call__(self, done: int, _of_part: int) -> None:
        """`done` windows of the part were measured."""
        now = time.monotonic()
        self._seconds, self._last = self._seconds + now - self._last, now
        self._measured += done - self._in_part
        self._in_part = done
        self._tell()

    def end(self, n_windows: int) -> None:
        """The part, measured or read from the cache, is through."""
        self._before, self._in_part = self._before + n_windows, 0
        self._tell()

    def _tell(self) -> None:
        if self._report is None:
            return
        done, left = self._before + self._in_part, None
        if self._measured:
            left = self._seconds / self._measured * (self._total - done)
        self._report(Step(self._label, done, self._total, left))
