"""A target loss: the largest ratio that meets it, found by evaluating."""

import bisect
from collections.abc import Callable
from dataclasses import dataclass, replace

from heapr_lab.errors import SpecError
from heapr_lab.importance.table import ImportanceTable
from heapr_lab.inspection.budgets import largest_ratio
from heapr_lab.panel.jobs import Report
from heapr_lab.panel.session import PruningSession
from heapr_lab.panel.sweep import Sweep
from heapr_lab.pruning.options import Selection
from heapr_lab.pruning.selection import select

SEARCH = "Find the ratio"
"""The button that searches."""
_HIGHEST = 95
"""Per cent that are tried at most."""


@dataclass(frozen=True)
class Target:
    """A loss increase that must not be exceeded on a corpus."""

    corpus: str
    rise: float
    """In nats per token."""

    def search(
        self,
        session: PruningSession,
        selection: Selection,
        *,
        report: Report,
        on_points: Callable[[], None],
    ) -> float:
        """The largest ratio found, in whole per cent; its points are the session's.

        Args:
            session: whose weights are evaluated; what has a point is not run again.
            selection: what is pruned; its ratio is not used.
            report: called with the progress of each evaluation.
            on_points: called after each.

        Raises:
            SpecError: there is no model.
        """
        recipe = session.recipe

        def loss_at(ratio: float) -> float:
            one = replace(selection, ratio=round(ratio, 2))
            sweep = Sweep((one,), (self.corpus,), recipe=recipe)
            sweep.run(session, report=report, on_points=on_points)
            return session.loss_of(one, recipe, self.corpus)

        highest = _feasible(session.table, selection)
        return round(largest_ratio(loss_at, self.rise, highest=highest), 2)


def _feasible(table: ImportanceTable, selection: Selection) -> float:
    """The highest ratio in whole per cent that can be selected, up to `_HIGHEST`."""

    def is_refused(per_cent: int) -> bool:
        try:
            select(table, replace(selection, ratio=per_cent / 100))
        except SpecError:
            return True
        return False

    if not is_refused(_HIGHEST):
        return _HIGHEST / 100
    first = bisect.bisect_left(range(_HIGHEST), True, key=is_refused)
    return max(0, first - 1) / 100
