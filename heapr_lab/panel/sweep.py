"""Evaluations of many selections: what is missing, how long it takes, what it shows."""

import bisect
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pandas as pd

from heapr_lab.errors import SpecError
from heapr_lab.evaluation.paired import paired_difference
from heapr_lab.importance.estimators import find_estimator
from heapr_lab.importance.table import ImportanceTable
from heapr_lab.inspection.budgets import largest_ratio
from heapr_lab.panel.jobs import Report
from heapr_lab.panel.session import PruningSession, named, setting_text
from heapr_lab.pruning.options import Selection, read_ratio
from heapr_lab.pruning.selection import select
from heapr_lab.recipes.weights import MASKED, WeightRecipe

DIFFERENCES = ("dataset", "removed", "setting", "against", "difference", "stderr")
"""Columns of `differences`."""
SEARCH = "Find the ratio"
"""The button that searches."""
_HIGHEST = 95
"""The largest per cent that is tried."""


def read_ratios(text: str) -> tuple[float, ...]:
    """Ratios as people write them, ascending.

    Raises:
        SpecError: there is none, or one is not a ratio in (0, 1).

    Example:
        >>> read_ratios("40%, 0.2; 20 %")
        (0.2, 0.4)
    """
    ratios = {
        read_ratio(part) for part in text.replace(";", ",").split(",") if part.strip()
    }
    if not ratios or 0.0 in ratios:
        raise SpecError(
            f"the ratios are {text!r}, expected some above 0, such as 10%, 20%, 40%"
        )
    return tuple(sorted(ratios))


@dataclass(frozen=True)
class Sweep:
    """Selections that are evaluated one after the other, on the same text.

    Example:
        >>> Sweep((Selection(0.2), Selection(0.4)), ("pydocs",)).selections[1].ratio
        0.4
    """

    selections: tuple[Selection, ...]
    datasets: tuple[str, ...]
    recipe: WeightRecipe = MASKED

    def missing(self, session: PruningSession) -> dict[Selection, list[str]]:
        """Selections with the corpora and tasks that they have no point of.

        Points of what the text of a corpus was before do not count.
        """
        corpora = {*self.datasets} - {*session.tasks}
        texts = {k: text for k, text in session.texts.items() if k in corpora}
        points = session.points[session.points["weights"].eq(self.recipe.text)]
        points = points[~points["dataset"].isin(session.changed(texts))]
        known = set(zip(points["selection"], points["dataset"], strict=True))
        left = {
            selection: [k for k in self.datasets if (selection, k) not in known]
            for selection in map(self.recipe.asked, self.selections)
        }
        return {selection: datasets for selection, datasets in left.items() if datasets}

    def seconds(self, session: PruningSession) -> float | None:
        """How long the missing ones take, if nothing is cached; None if not known."""
        missing, each = self.missing(session), session.seconds_a_window
        if each is None or not missing or not session.is_ready:
            return None
        n_windows = session.n_windows(self.datasets) + sum(
            session.n_windows(datasets, selection, self.recipe)
            for selection, datasets in missing.items()
        )
        return each * n_windows

    def run(self, session: PruningSession, *, report: Report) -> None:
        """Evaluate what is missing.

        Args:
            session: points are added to it; those of what is finished stay if a
                later one fails or is cancelled.
            report: called with (done, in all, what), in selections.

        Raises:
            SpecError: there is no model, or a selection is infeasible.
        """
        missing = self.missing(session)
        for number, (selection, datasets) in enumerate(missing.items()):
            name = named(selection, self.recipe)
            session.evaluate(
                datasets,
                selection=selection,
                recipe=self.recipe,
                report=_of_several(report, name, number, len(missing)),
            )


def _of_several(report: Report, name: str, number: int, n_selections: int) -> Report:
    """Takes the progress of one of several selections, and reports that of all."""

    def of_one(
        done: float, total: float, text: str = "", *, cached: bool = False
    ) -> None:
        share = number + done / max(1, total)
        report(share, n_selections, f"{name}: {text}; selection", cached=cached)

    return of_one


def sweep_of(
    current: Selection,
    recipe: WeightRecipe,
    *,
    ratios: Sequence[float],
    estimators: Sequence[str],
    datasets: Sequence[str],
) -> Sweep:
    """The current selection at other ratios, by several estimators.

    An estimator whose scores are compared within a layer only has the scope layer.

    Raises:
        SpecError: there are no estimators, or neither corpora nor tasks.
    """
    if not estimators:
        raise SpecError("no estimator is selected; select one, such as heapr")
    if not datasets:
        raise SpecError("no corpus and no task are selected; select one above")
    names = [current.estimator] if recipe.chooses else estimators
    selections = [_with(current, ratio, name) for name in names for ratio in ratios]
    return Sweep(tuple(selections), tuple(datasets), recipe)


def _with(current: Selection, ratio: float, estimator: str) -> Selection:
    if estimator == current.estimator:
        return replace(current, ratio=ratio)
    scope = "layer" if find_estimator(estimator).within_layer else current.scope
    return replace(
        current, ratio=ratio, estimator=estimator, scope=scope, estimator_options=()
    )


def search_ratio(
    session: PruningSession,
    selection: Selection,
    corpus: str,
    *,
    rise: float,
    report: Report,
) -> None:
    """Evaluate ratios until the largest within a target is known, in whole per cent.

    Args:
        session: its weights are evaluated; what has a point is not run again.
        selection: what is pruned; its ratio is not used.
        corpus: what Δloss is measured on.
        rise: the largest allowed Δloss, in nats per token.
        report: called with the progress of each evaluation.

    Raises:
        SpecError: there is no model.
    """
    recipe = session.recipe

    def loss_at(ratio: float) -> float:
        tried = replace(selection, ratio=round(ratio, 2))
        sweep = Sweep((tried,), (corpus,), recipe=recipe)
        sweep.run(session, report=report)
        points = session.points_for(recipe.asked(tried), recipe.text)
        return float(points.set_index("dataset")["delta_nll"][corpus])

    largest_ratio(loss_at, rise, highest=_feasible(session.table, selection))


def _feasible(table: ImportanceTable, selection: Selection) -> float:
    """The highest ratio in whole per cent that can be selected, up to `_HIGHEST`."""

    def is_refused(per_cent: int) -> bool:
        try:
            select(table, replace(selection, ratio=per_cent / 100))
        except SpecError:
            return True
        return False

    first = bisect.bisect_left(range(_HIGHEST + 1), True, key=is_refused)
    return max(0, first - 1) / 100


def differences(session: PruningSession) -> pd.DataFrame:
    """Losses of settings at the same ratio, window by window, against the first one.

    Returns:
        Columns `DIFFERENCES`: the corpus, the removed share, the setting and the one it
        is compared with as text; the mean difference of their losses and its standard
        error over windows, in nats per token.
    """
    table = []
    points = session.points.dropna(subset=["selection", "nll"])
    for (dataset, removed), rows in points.groupby(["dataset", "achieved_ratio"]):
        pairs = list(zip(rows["selection"], rows["weights"], strict=True))
        text = session.texts.get(str(dataset), "")
        first, *others = [session.windows.get((*pair, text), ()) for pair in pairs]
        for pair, nll in zip(pairs[1:], others, strict=True):
            if len(nll) == len(first) > 0:
                texts = setting_text(*pair), setting_text(*pairs[0])
                table.append((dataset, removed, *texts, *paired_difference(nll, first)))
    return pd.DataFrame(table, columns=list(DIFFERENCES))
