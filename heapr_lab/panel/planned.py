"""What the panel shows before it starts to measure for longer than ten minutes."""

from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

import ipywidgets as ipw

from heapr_lab.errors import SpecError
from heapr_lab.panel.jobs import Job, Report
from heapr_lab.repr_html import card_html
from heapr_lab.text.calibration_spec import Calibration

if TYPE_CHECKING:
    from heapr_lab.workbench.plan import Plan
    from heapr_lab.workbench.workbench import Workbench

_ADVICE = (
    "Nothing runs before the button is pressed. Cancel keeps what is finished, and the "
    "next run continues there. For less time, open the model with another profile, "
    "fewer windows, or on another device; the command <code>heapr-lab score</code> "
    "measures the same table, which is then in the cache."
)


class PlannedPanel(ipw.VBox):
    """The plan of a long measurement, a button that starts it, and then the panel.

    Attributes:
        plan: what the measurement needs.
        job: measures, and then shows the panel.
    """

    def __init__(
        self,
        plan: "Plan",
        workbench: "Workbench",
        *,
        calibration: Calibration | None,
        panel: Callable[[], ipw.VBox],
    ) -> None:
        """Show the plan; nothing is measured yet.

        Args:
            plan: of `workbench.long_plan`.
            workbench: that measures.
            calibration: what it measures on.
            panel: makes the panel once the importance is in the cache.
        """
        self.plan = plan
        self._bench, self._calibration, self._panel = workbench, calibration, panel
        tooltip = "measure the importance as planned, then show the panel"
        self.job = Job("Measure", self._measure, tooltip=tooltip)
        title = f"Measuring the importance of {workbench.name} takes long"
        card = ipw.HTML(card_html(title, plan.brief()))
        super().__init__([card, ipw.HTML(f"<small>{_ADVICE}</small>"), self.job])

    def __repr__(self) -> str:
        return "PlannedPanel(not measured yet; run the notebook to use it)"

    @property
    def session(self) -> NoReturn:
        """That of the panel.

        Raises:
            SpecError: the importance has not been measured yet.
        """
        raise SpecError(
            "the importance has not been measured: press Measure, or call importance() "
            "of the workbench, and make the panel again"
        )

    def _measure(self, report: Report) -> None:
        windows = self._bench.calibration_set(self._calibration)
        self._bench.measure(
            windows, progress=lambda done, total: report(done, total, "importance")
        )
        self.children = [self._panel()]
