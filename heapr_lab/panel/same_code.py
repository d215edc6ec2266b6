"""What the Export tab would do, as Python and as a command that can be copied."""

import html
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ipywidgets as ipw

from heapr_lab.errors import HeaprLabError, SpecError
from heapr_lab.panel.jobs import alert, status
from heapr_lab.panel.session import PruningSession
from heapr_lab.text.calibration_spec import Calibration
from heapr_lab.workbench.as_command import as_command
from heapr_lab.workbench.as_python import as_python
from heapr_lab.workbench.recipe import Code, Recipe, Written

if TYPE_CHECKING:
    from heapr_lab.workbench.opening import Opening
    from heapr_lab.workbench.workbench import Workbench


class SameCode(ipw.Accordion):
    """Python and a command, written while they are shown.

    Attributes:
        python: the first, as HTML; likewise `command`.
    """

    def __init__(
        self,
        session: PruningSession,
        written: Callable[[], Written],
        calibration: Callable[[], Calibration],
    ) -> None:
        """Show nothing until it is opened.

        Args:
            session: whose selection and source are written.
            written: the checkpoint; not asked where there is a table alone.
            calibration: what its weights are fitted to.
        """
        self._session, self._written, self._calibration = session, written, calibration
        self.python, self.command = ipw.HTML(), ipw.HTML()
        parts = [
            ipw.HTML("<b>Copy as Python</b>"),
            self.python,
            ipw.HTML("<b>Copy as command</b>"),
            self.command,
        ]
        super().__init__([ipw.VBox(parts)], titles=["The same as code"])
        self.observe(self.refresh, names="selected_index")

    def refresh(self, _change: Any = None) -> None:
        """Write both again, if they are shown."""
        if self.selected_index is not None:
            self.python.value = self._html(as_python)
            self.command.value = self._html(as_command)

    def recipe(self) -> Recipe:
        """What Export would do now.

        Raises:
            SpecError: the settings are infeasible, or the source cannot be named.
        """
        session, bench = self._session, self._session.workbench
        if bench is None:
            return Recipe(_file_of(session), session.selection)
        opening = _opening_of(bench)
        check_calibration(session, bench)
        own, made = self._calibration(), self._written()
        if made.corpora == _corpora_of(own.corpus):
            made = replace(made, corpora=None)
        return Recipe(opening, session.selection, own, made)

    def _html(self, write: Callable[[Recipe], Code]) -> str:
        try:
            code = write(self.recipe())
        except HeaprLabError as error:
            return alert(str(error))
        notes = "".join(map(status, code.notes))
        return f'<pre tabindex="0">{html.escape(code.text)}</pre>{notes}'


def dtype_of_files(bench: "Workbench | None") -> str | None:
    """The dtype that Export writes, if the model in memory has another one."""
    if bench is None:
        return None
    from heapr_lab.models.sources import dtype_name
    from heapr_lab.workbench.export import stored_dtype

    stored, model = stored_dtype(bench), bench.model
    return None if stored == model.dtype else dtype_name(stored)


def check_calibration(session: PruningSession, bench: "Workbench") -> None:
    """Make sure that the table was measured on the calibration of the session.

    Raises:
        SpecError: it was measured on other windows, or does not say on which.
    """
    from heapr_lab.workbench.export import calibration_of, describe_calibration

    asked, table = resolved(session.calibration, bench), session.table
    found = calibration_of(table)
    drawn = "seed" in (table.metadata.get("provenance") or {}).get("calibration", {})
    same = found is not None and drawn and _same_windows(found, asked, session, bench)
    if not same:
        raise SpecError(
            f"the table was measured on: {describe_calibration(table)}, and the panel "
            f"is calibrated on {asked}: open the panel with the table's calibration"
        )


def _same_windows(
    found: Calibration, asked: Calibration, session: PruningSession, bench: "Workbench"
) -> bool:
    """Of the same settings, or, as of a file that was moved, of the same tokens."""
    if _windows(found) == _windows(asked):
        return True
    measured = (session.table.metadata.get("spec") or {}).get("calibration")
    return measured == bench.calibration_set(asked).fingerprint


def resolved(calibration: Calibration, bench: "Workbench") -> Calibration:
    """The calibration with the numbers that it takes from the profile."""
    profile = bench.profile
    return replace(
        calibration,
        n_sequences=calibration.n_sequences or profile.n_sequences,
        seq_len=calibration.seq_len or profile.seq_len,
    )


def _windows(calibration: Calibration) -> tuple[Calibration, int]:
    """What draws the windows; the model's own are a number of them, not a share."""
    n_own = calibration.n_own(calibration.n_sequences or 0)
    return replace(calibration, own_text=0.0), n_own


def _opening_of(bench: "Workbench") -> "Opening":
    from heapr_lab.workbench.settings import profile_of

    opening = bench.opening
    if opening is None:
        raise SpecError(
            "this workbench was made of a model in memory, which code cannot name: "
            "open it with open_workbench"
        )
    usual = profile_of(opening.model, opening.profile)
    if opening.seq_len is not None:
        usual = replace(usual, seq_len=opening.seq_len)
    if bench.profile != usual:
        raise SpecError(
            f"the profile of the workbench is {bench.profile}, and it was opened with "
            f"{usual}: open it again with a profile of heapr_lab"
        )
    return opening


def _file_of(session: PruningSession) -> Path:
    if session.file is None:
        raise SpecError(
            "this table is not in a file that the panel knows: write it with "
            "table.write('importance.parquet'), and explore that path"
        )
    return session.file


def _corpora_of(corpus: str) -> tuple[str, ...]:
    from heapr_lab.text.calibration import corpora_of

    return corpora_of(corpus)
