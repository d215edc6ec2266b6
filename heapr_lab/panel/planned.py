"""What the panel shows before it starts to measure for longer than ten minutes."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NoReturn

import ipywidgets as ipw

from heapr_lab.errors import SpecError
from heapr_lab.panel.jobs import Job, Report
from heapr_lab.panel.static_copy import StaticCopy, copy_bundle
from heapr_lab.repr_html import card_html
from heapr_lab.text.calibration_spec import Calibration

if TYPE_CHECKING:
    from heapr_lab.streaming.plan import Plan
    from heapr_lab.workbench.workbench import Workbench

_ADVICE = (
    "Nothing runs before the button is pressed. Cancel keeps what is finished, and the "
    "next run continues there. For less time, open the model with another profile, "
    "fewer windows, or on another device; the command <code>heapr-lab score</code> "
    "measures the same table, which is then in the cache."
)
_NOT_YET = "Not measured yet"


class PlannedPanel(ipw.VBox):
    """The plan of a long measurement, a button that starts it, and then the panel.

    Attributes:
        plan: what the measurement needs.
        job: measures, and then shows the panel.
        copy: what a saved notebook shows without a kernel.
    """

    def __init__(
        self,
        plan: "Plan",
        workbench: "Workbench",
        *,
        calibration: Calibration | None,
        panel: Callable[[StaticCopy], ipw.VBox],
    ) -> None:
        """Show the plan; nothing is measured yet.

        Args:
            plan: of `workbench.long_plan`.
            workbench: that measures.
            calibration: what it measures on.
            panel: makes the panel once the importance is in the cache; given the copy
                of the plan, in whose output its own goes on.
        """
        self.plan = plan
        self._bench, self._calibration, self._panel = workbench, calibration, panel
        tooltip = "measure the importance as planned, then show the panel"
        self.job = Job("Measure", self._measure, tooltip=tooltip)
        title = f"Measuring the importance of {workbench.name} takes long"
        card = ipw.HTML(card_html(title, plan.brief()))
        self.copy = StaticCopy(
            lambda: copy_bundle(
                _NOT_YET, views=[card.value], text=f"{title}\n{_lines(plan.brief())}"
            )
        )
        advice = ipw.HTML(f"<small>{_ADVICE}</small>")
        super().__init__([card, advice, self.job, self.copy.hides])

    def __repr__(self) -> str:
        return "PlannedPanel(not measured yet; run the notebook to use it)"

    def _ipython_display_(self) -> None:
        self.copy.show(self)

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
        self.children = [self._panel(self.copy)]


def _lines(facts: Mapping[str, str]) -> str:
    return "\n".join(f"{name}: {value}" for name, value in facts.items())
