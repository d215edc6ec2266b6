"""The tab that writes the pruned model: a checkpoint folder, and how to load it."""

import html
from pathlib import Path
from typing import Any

import ipywidgets as ipw

from heapr_lab.explorer.jobs import Job, Report, status
from heapr_lab.sessions import PruningSession

_NEEDS_CODE = {
    True: "from transformers import AutoModelForCausalLM",
    False: "import heapr_lab\nfrom transformers import AutoModelForCausalLM",
}


class ExportTab(ipw.VBox):
    """Folder, compensation, a button; afterwards what loads the model again."""

    def __init__(self, session: PruningSession) -> None:
        """Lay the tab out for `session`, whose workbench has the model."""
        self.session = session
        self.folder = ipw.Text(
            "pruned", description="folder", continuous_update=False,
            tooltip="a new folder, relative to the notebook's",
        )  # fmt: skip
        self.compensated = ipw.Checkbox(
            value=True, description="compensate W_down (one forward pass)"
        )
        self.job = Job("Export", self._export, tooltip="write the pruned model")
        self.note = ipw.HTML(status(""))
        self.command = ipw.HTML()
        if session.workbench is None:
            self.job.button.disabled = True
            self.job.text.value = status("a table without a model cannot be exported")
        row = ipw.HBox(
            [self.folder, self.compensated], layout={"flex_flow": "row wrap"}
        )
        super().__init__([row, self.note, self.job, self.command])
        self.refresh()

    def refresh(self) -> None:
        """Say what would be written."""
        self.note.value = status(f"To be written: {self.session.choice.text}.")

    def _export(self, report: Report) -> None:
        from heapr_lab.checkpoints import check_new, save_pruned
        from heapr_lab.compensation import describe_weights, fit_compensation
        from heapr_lab.pipeline import Setting
        from heapr_lab.surgery import prune

        bench: Any = self.session.workbench
        folder = Path(self.folder.value)
        check_new(folder)
        keep, downs, weights = self.session.keep, None, None
        self.command.value = ""
        total = bench.profile.n_sequences + 1
        if self.compensated.value:
            windows = bench.calibration_set(self.session.setting or Setting(0.0))
            total = windows.n_sequences + 1
            found = fit_compensation(
                bench.model,
                keep,
                windows,
                progress=lambda done, _: report(done, total, "compensating: window"),
            )
            downs, weights = found.downs, describe_weights(found, windows)
        report(total - 1, total, f"writing {folder}")
        pruned: Any = prune(bench.model, keep, downs=downs)
        if weights is not None:
            pruned.__dict__["heapr_weights"] = weights
        saved = self.session.savings()
        facts = {} if saved is None else {"savings": saved.iloc[0].to_dict()}
        save_pruned(pruned, folder, tokenizer=bench.tokenizer, facts=facts)
        self.command.value = _load_command(folder, stock=keep.settings)


def _load_command(folder: Path, *, stock: Any) -> str:
    imports = _NEEDS_CODE[stock.get("structure") == "uniform"]
    code = f'{imports}\n\nmodel = AutoModelForCausalLM.from_pretrained("{folder}")'
    return (
        f"{status(f'Written to {folder}. To load it:')}<pre>{html.escape(code)}</pre>"
    )
