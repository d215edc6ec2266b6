"""The panel in a page, and what stands there while its scores are measured."""

from typing import Any

import ipywidgets as ipw

from heapr_lab.panel.jobs import Job, Report
from heapr_lab.panel.loading import LoadingWorkbench
from heapr_lab.panel.looks import status
from heapr_lab.panel.panel import explore


class Measuring(ipw.VBox):
    """How far the scores of a model are; then its panel, in their place.

    Attributes:
        job: measures them, and begins at once.
    """

    def __init__(self, bench: LoadingWorkbench) -> None:
        """Begin to measure.

        Args:
            bench: that of the model.
        """
        self._bench: Any = bench
        text = f"The scores of {bench.name} are not in the cache, so they are measured."
        self.job = Job("Measure", self._measure, tooltip="measure, or go on with it")
        super().__init__([ipw.HTML(status(text)), self.job])
        self.job.start()

    def _measure(self, report: Report) -> None:
        report(0, 1, "loading the model")
        bench = self._bench.load()
        windows = bench.calibration_set()
        name = f"scores on {windows.label}: window"
        report(0, windows.n_sequences, name)
        bench.measure(windows, progress=lambda done, n: report(done, n, name))
        panel = explore(self._bench)
        self.children = [panel]
        panel.begin()


def opened(name: str, **options: Any) -> ipw.VBox:
    """The panel of a model, or what measures its scores first.

    Args:
        name: as `open_workbench` takes it.
        **options: the options of `open_workbench`.
    """
    bench: Any = LoadingWorkbench(name, **options)
    return explore(bench) if bench.is_measured else Measuring(bench)
