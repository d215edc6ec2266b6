"""The tab that writes the pruned model: a checkpoint folder, and how to load it."""

import html
from pathlib import Path
from typing import Any

import ipywidgets as ipw

from heapr_lab.explorer.jobs import Job, Report, status
from heapr_lab.masks import KeepMask
from heapr_lab.sessions import PruningSession
from heapr_lab.specs import SpecError

_IMPORTS = {
    "stock": "from transformers import AutoModelForCausalLM",
    "ragged": "import heapr_lab\nfrom transformers import AutoModelForCausalLM",
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
        wide = {"indent": False, "layout": {"width": "auto"}}
        self.compensated = ipw.Checkbox(
            value=True, description="compensate W_down (one forward pass)", **wide
        )
        self.gguf = ipw.Checkbox(
            value=False, description="GGUF file too (uniform structure)", **wide
        )
        self.job = Job("Export", self._export, tooltip="write the pruned model")
        self.note = ipw.HTML(status(""))
        self.command = ipw.HTML()
        if session.workbench is None:
            self.job.button.disabled = True
            self.job.text.value = status("a table without a model cannot be exported")
        row = ipw.HBox(
            [self.folder, self.compensated, self.gguf],
            layout={"flex_flow": "row wrap"},
        )
        super().__init__([row, self.note, self.job, self.command])
        self.refresh()

    def refresh(self) -> None:
        """Say what would be written."""
        self.note.value = status(f"To be written: {self.session.choice.text}.")

    def _export(self, report: Report) -> None:
        from heapr_lab.checkpoints import check_new, save_pruned

        bench: Any = self.session.workbench
        folder, keep = Path(self.folder.value), self.session.keep
        uniform = self.session.choice.structure == "uniform"
        check_new(folder)
        if self.gguf.value and not uniform:
            raise SpecError(
                f"a GGUF file has one width for all experts, and the structure is "
                f"{self.session.choice.structure}: choose uniform"
            )
        self.command.value = ""
        pruned = self._pruned(keep, report)
        saved = self.session.savings()
        facts = {} if saved is None else {"savings": saved.iloc[0].to_dict()}
        report(1, 1, f"writing {folder}")
        save_pruned(pruned, folder, tokenizer=bench.tokenizer, facts=facts)
        if self.gguf.value:
            self._write_gguf(folder, report)
        self.command.value = _load_command(folder, stock=uniform)

    def _write_gguf(self, folder: Path, report: Report) -> None:
        from heapr_lab.gguf_file import write_gguf

        file = f"{folder}.gguf"
        name = f"writing {file}: tensor"
        write_gguf(folder, file, progress=lambda done, total: report(done, total, name))

    def _pruned(self, keep: KeepMask, report: Report) -> Any:
        """The smaller model, compensated if asked."""
        from heapr_lab.compensation import compensate
        from heapr_lab.pipeline import Setting
        from heapr_lab.surgery import prune

        bench: Any = self.session.workbench
        if not self.compensated.value:
            return prune(bench.model, keep)
        return compensate(
            bench.model,
            keep,
            bench.calibration_set(self.session.setting or Setting(0.0)),
            progress=lambda done, total: report(done, total, "compensating: window"),
        )


def _load_command(folder: Path, *, stock: bool) -> str:
    imports = _IMPORTS["stock" if stock else "ragged"]
    code = f'{imports}\n\nmodel = AutoModelForCausalLM.from_pretrained("{folder}")'
    return (
        f"{status(f'Written to {folder}. To load it:')}<pre>{html.escape(code)}</pre>"
    )
