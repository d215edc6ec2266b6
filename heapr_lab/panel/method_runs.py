"""The part of the panel that runs compression methods, and the rows they give."""

from collections.abc import Sequence
from typing import Any

import ipywidgets as ipw
import pandas as pd

from heapr_lab.errors import SpecError
from heapr_lab.panel.controls import several_of
from heapr_lab.panel.jobs import Job, Report
from heapr_lab.panel.looks import beside, line
from heapr_lab.panel.session import LOSS, PruningSession
from heapr_lab.panel.sweep import read_ratios
from heapr_lab.progress import Progress

_REDUCED = {
    "parameters": "parameter_reduction",
    "bytes": "bytes_reduction",
    "routed_flops": "routed_flops_reduction",
}
_FIRST = ("heapr", "reap")
_NO_MODEL = "methods need a model, not a table alone"


class MethodRuns(ipw.VBox):
    """Methods, a ratio, corpora, and a button that fits and measures them."""

    def __init__(self, session: PruningSession) -> None:
        """Lay it out.

        Args:
            session: its model and calibration are used.
        """
        self.session = session
        self.methods = several_of("methods", [], [])
        self.offer()
        # Named unlike the box above the tabs.
        self.ratio = line("remove", "25%", width="160px")
        self.corpora = several_of("corpora", session.corpora, session.corpora[:1])
        self.job = Job(
            "Run methods",
            self._run,
            of=lambda: ", ".join(self.methods.value),
            never="" if session.workbench else _NO_MODEL,
        )
        super().__init__([beside(self.methods, self.ratio, self.corpora), self.job])

    def offer(self) -> None:
        """Offer the methods, once there is a model: to name them takes torch."""
        if not self.session.is_ready or self.methods.options:
            return
        from heapr_lab import methods

        self.methods.options = methods.names()
        self.methods.value = _FIRST
        self.methods.rows = 5

    def _run(self, report: Report) -> None:
        corpora = tuple(self.corpora.value)
        texts = self.session.texts_of(corpora)
        rows = method_rows(self._measured(corpora, report))
        self.session.add_methods(rows, texts)

    def _measured(self, corpora: Sequence[str], report: Report) -> pd.DataFrame:
        """The table of `compare_methods` for what is chosen.

        Raises:
            SpecError: nothing is chosen, or there is no model.
        """
        from heapr_lab.methods.comparison import compare_methods, entries

        names = self.methods.value
        ratios = read_ratios(self.ratio.value)
        if not names or not corpora:
            raise SpecError("nothing to compare: select methods and corpora")
        done, total = 0, (1 + len(names) * len(ratios)) * len(corpora)

        def reached(n_done: int, _total: int) -> None:
            nonlocal done
            done = n_done

        def part(label: str, unit: str) -> Progress:
            return lambda step, of: report(
                done, total, f"{label}, {unit} {step} of {of}, result"
            )

        return compare_methods(
            self.session.bench,
            entries(names, ratios),
            corpora,
            calibration=self.session.calibration,
            progress=reached,
            part=part,
        )


def method_rows(results: pd.DataFrame) -> list[dict[str, Any]]:
    """For each method and ratio of `compare_methods`, a row as in `CompareTab.frame`.

    Savings and Δloss [nats per token] are against the dense model.
    """
    first, *others = [
        rows for _, rows in results.groupby(["method", "ratio"], sort=False)
    ]
    losses = first.set_index("dataset")["nll"]
    return [_row(first.iloc[0], rows, losses) for rows in others]


def _row(dense: pd.Series, rows: pd.DataFrame, losses: pd.Series) -> dict[str, Any]:
    first = rows.iloc[0]
    reduced = {name: 1 - first[size] / dense[size] for size, name in _REDUCED.items()}
    changes = {
        f"{LOSS}{row.dataset}": row.nll - losses[row.dataset]
        for row in rows.itertuples()
    }
    numbers = dict(first[["ratio", "achieved_ratio"]]) | reduced | changes
    return {
        "label": f"{first['method']} {100 * first['ratio']:.4g}%",
        "method": first["method"],
        **{name: float(number) for name, number in numbers.items()},
    }
