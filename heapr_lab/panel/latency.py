"""A button that times pruned models against the dense one, and what it found."""

from collections.abc import Callable, Sequence

from heapr_lab.errors import SpecError
from heapr_lab.panel.jobs import Job, Report, status
from heapr_lab.panel.session import PruningSession, Way, edit_of
from heapr_lab.pruning.options import Selection


class Latency(Job):
    """Times a decoding step of sliced models, which take turns with the dense one.

    Attributes:
        saved: share of the dense model's time that is saved, by selection and way; of
            this machine, as it was then.
    """

    def __init__(
        self,
        session: PruningSession,
        *,
        pins: Callable[[], Sequence[tuple[Selection, Way]]],
        show: Callable[[], None],
    ) -> None:
        """Lay out the button.

        Args:
            session: whose model is timed.
            pins: what is sliced out.
            show: called in the measuring thread when there are new times.
        """
        self.saved: dict[tuple[Selection, Way], float] = {}
        self._session, self._pins, self._show = session, pins, show
        tooltip = (
            "time a decoding step of each pin on this machine, against the dense model"
        )
        super().__init__("Measure latency", self._measure, tooltip=tooltip)
        if session.workbench is None:
            self.button.disabled = True
            self.text.value = status("latency needs a model, not a table alone")

    def _measure(self, report: Report) -> None:
        from heapr_lab.workbench.budgets import share_of_decoding

        bench, pins = self._session.workbench, self._pins()
        if not pins:
            raise SpecError("nothing is pinned: Pin saves the current selection")
        assert bench is not None  # without one the button is disabled
        for number, (selection, way) in enumerate(pins):
            made = self._session.made(selection, way, report=report)
            report(number, len(pins), "pins that are timed")
            keep, _ = edit_of(made)
            assert keep is not None  # which only the dense model has not
            share = share_of_decoding(bench, keep, self._session.calibration)
            self.saved[selection, way] = 1 - share
        self._show()
