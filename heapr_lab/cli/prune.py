"""`heapr-lab prune`: select atoms, report the savings, write the smaller model."""

import functools
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from heapr_lab.checkpoints.engines import check_computed, widths_for
from heapr_lab.cli import options
from heapr_lab.cli.console import print_facts, say
from heapr_lab.cli.options import check_model_runs, check_out, is_folder
from heapr_lab.errors import one_of
from heapr_lab.models.sources import Source, read_source
from heapr_lab.text.calibration_spec import Calibration, corpora_of

if TYPE_CHECKING:
    import pandas as pd

    from heapr_lab.recipes.making import PruningResult
    from heapr_lab.recipes.weights import WeightRecipe
    from heapr_lab.workbench.settings import Setting
    from heapr_lab.workbench.workbench import Workbench

_WITH_DEFAULT_MULTIPLE = {"aligned", "uniform"}
"""Structures whose multiple is chosen, once widths are known, where none is given."""


def prune(
    model: options.Model,
    ratio: options.Ratio,
    of: options.Of = "atoms",
    method: options.MethodName = "best",
    estimator: options.EstimatorOrMethods = None,
    heal: options.Heal = 0,
    importance: options.Importance = None,
    engine: options.Engine = None,
    structure: options.Structure = None,
    multiple: options.Multiple = None,
    corpus: options.Corpus = "pydocs",
    n_sequences: options.Sequences = None,
    seq_len: options.SeqLen = None,
    own_text: options.OwnTextOrMethods = None,
    profile: options.Profile = None,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    stream: options.Stream = None,
    out: options.PrunedOut = None,
    as_json: options.AsJson = False,
) -> None:
    """Select the atoms to keep, report the savings, and write the smaller model.

    With a table of `score` one layer at a time is in memory (quantised weights are
    written in bfloat16, or in FP8 if they were and widths are whole blocks), and an
    interrupted call resumes.
    Without one the importance is measured, and the kept atoms make up for the others,
    unless held-out calibration windows are not in favour of it: then it is HEAPr as
    published.
    """
    from heapr_lab.pruning.options import Selection, read_ratio
    from heapr_lab.recipes.weights import MASKED, METHODS, WeightRecipe
    from heapr_lab.workbench.settings import Setting

    check_model_runs(importance, out, own_text=own_text, heal=heal)
    preset = METHODS[one_of(method, METHODS, name="method")]
    structure, multiple = widths_for(engine, structure, multiple)
    unset = multiple is None and structure in _WITH_DEFAULT_MULTIPLE
    usual = preset.estimator if importance is None else preset.of_table
    selection = Selection(
        read_ratio(ratio),
        estimator=estimator or usual,
        structure=structure,
        multiple=1 if unset else multiple,
        of=of,
    )
    recipe = preset.recipe if importance is None else MASKED
    if recipe.chooses and estimator is not None:
        recipe = WeightRecipe("compensated")
    if not (recipe.chooses or is_folder(out)):
        recipe = MASKED  # its mask is known without fitting weights
    generated = recipe.own_text if own_text is None else own_text
    recipe = replace(recipe, own_text=generated, heal=heal)
    calibration = Calibration(corpus, n_sequences, own_text=generated)
    request = Request(
        model=model,
        method=method,
        setting=Setting(selection, calibration),
        recipe=recipe,
        default_multiple=unset,
        default_own_text=own_text is None,
        importance=importance,
        out=out,
        engine=engine,
        opening=(model, profile, seq_len, device, dtype, stream, None),
    )
    print_facts(request.run(in_words=not as_json), as_json=as_json)


@dataclass
class Request:
    """One call of `prune`: its settings, and the steps from a table to files."""

    model: str
    method: str
    setting: "Setting"
    """The multiple is 1 if it is set later."""
    recipe: "WeightRecipe"
    """How weights are made."""
    default_multiple: bool
    default_own_text: bool
    importance: Path | None
    out: Path | None
    engine: str | None
    opening: tuple[Any, ...]
    """The arguments of `options.open_bench`."""

    @functools.cached_property
    def bench(self) -> "Workbench":
        """The dense model, opened when it is needed."""
        return options.open_bench(*self.opening)

    def run(self, *, in_words: bool) -> dict[str, Any]:
        """Check, select and write; returns the facts to print."""
        check_out(self.out)
        corpora = self._check_text()
        from heapr_lab.models.loading import model_folder
        from heapr_lab.recipes.export import savings

        source = read_source(model_folder(self.model))
        self._check(source.folder)
        self._settle_text()
        outcome = self._choose(source.folder)
        written = self.out if is_folder(self.out) else None
        if written is not None:
            self._write(written, outcome, source, corpora)
        elif self.out is not None:
            outcome.keep.write(self.out)
        saved = savings(outcome.keep, outcome.table, source=source, written=written)
        fitted = outcome.compensation
        return {
            "model": self.model,
            "method": self.method,
            "estimator": outcome.keep.settings.get(
                "estimator", self.setting.selection.estimator
            ),
            "compensated": written is not None and bool(fitted and fitted.down_projs),
            "healed_on": self.recipe.heal,
            **_held_out(outcome.report, in_words=in_words),
            "atoms": outcome.keep.n_atoms,
            "atoms_kept": outcome.keep.n_kept,
            "achieved_ratio": outcome.keep.achieved_ratio,
            **(_in_words(saved) if in_words else saved),
            "out": None if self.out is None else str(self.out),
        }

    def _check_text(self) -> tuple[str, ...]:
        """Check the text, or the table, without torch; returns the corpora of the card.

        Raises:
            CacheError: the table is damaged or of another kind.
            SpecError: a corpus cannot be used.
        """
        if self.importance is not None:
            from heapr_lab.importance.table import ImportanceTable

            ImportanceTable.read(self.importance, [])  # before anything slow
            return ()
        corpora = corpora_of(self.setting.calibration.corpus)
        for split in ("train", "test"):
            options.check_corpora(corpora, split=split)
        return corpora

    def _check(self, source: Path) -> None:
        """Check what needs no weights.

        Raises:
            SpecError: the engine computes another model, experts are narrower than
                the multiple, or no checkpoint has this structure.
            LayoutError: a part of a layer that predicts further tokens is missing.
        """
        from heapr_lab.models.folders import read_config
        from heapr_lab.recipes.export import check_selection

        check_computed(self.engine, read_config(source))
        check_selection(source, self.setting.selection, written=is_folder(self.out))

    def _settle_text(self) -> None:
        """Leave out self-generated text that the model cannot write; check the rest.

        Raises:
            SpecError: the model cannot be healed, or there is too little text for it.
        """
        from heapr_lab.refinement.healing import check_trainable
        from heapr_lab.refinement.own_text import can_write

        calibration = self.setting.calibration
        wanted = self.default_own_text and calibration.own_text
        if wanted and not can_write(self.bench.model):
            say(
                "a streamed model writes no text of its own: fitted to the corpus alone"
            )
            calibration = replace(calibration, own_text=0.0)
            self.setting = replace(self.setting, calibration=calibration)
            self.recipe = replace(self.recipe, own_text=0.0)
        if self.recipe.heal:
            check_trainable(self.bench.model)
            self.bench.calibration_set(self.recipe.healed_on(calibration))

    def _choose(self, source: Path) -> "PruningResult":
        from heapr_lab.checkpoints.same_model import own_table
        from heapr_lab.progress import progress_bars
        from heapr_lab.pruning.selection import default_multiple, select
        from heapr_lab.recipes.making import PruningResult, make, with_model

        setting = self.setting
        if self.importance is not None:
            table = own_table(self.importance, source, name=self.model)
        elif self.recipe.chooses:
            table = self.bench.fitted(setting.calibration).table()
        else:
            table = self.bench.table_of(setting)
        if self.default_multiple:
            selection = replace(setting.selection, multiple=default_multiple(table))
            setting = replace(setting, selection=selection)
        if self.importance is not None:
            keep = select(table, setting.selection)
            return PruningResult(with_model(keep, table), table=table)
        with progress_bars() as part:
            return make(self.bench, table, setting, self.recipe, part=part)

    def _write(
        self,
        out: Path,
        outcome: "PruningResult",
        source: Source,
        corpora: tuple[str, ...],
    ) -> None:
        """Write the checkpoint; without compensation the model need not be loaded."""
        from heapr_lab.models.folders import has_tokenizer
        from heapr_lab.progress import progress_bars
        from heapr_lab.recipes.export import slice_checkpoint, write_checkpoint

        with progress_bars() as part:
            common: Any = {"base": self.model, "corpora": corpora, "part": part}
            if source.dequantised_from or outcome.differs:
                write_checkpoint(out, outcome, self.bench, **common)
            else:
                bench = self.bench if corpora else None
                slice_checkpoint(out, source, outcome, bench=bench, **common)
        if not has_tokenizer(source.folder):
            say(
                f"there is no tokenizer in {source.folder}, and so none in {out}: copy "
                "the tokenizer of the base model there before evaluating it"
            )


def _held_out(report: "pd.DataFrame | None", *, in_words: bool) -> dict[str, Any]:
    """What was chosen, and the held-out losses, of `FittedCompression.report`."""
    if report is None:
        return {}
    chosen = report.loc[report["chosen"]].iloc[0]
    if not in_words:
        return {"chosen": chosen["made"], "held_out": report.to_dict("records")}
    paper = report.iloc[0]
    if chosen["made"] == paper["made"]:
        return {"chosen": "heapr: held-out windows are not in favour of compensation"}
    change = f"{paper['delta_nll']:.4f} -> {chosen['delta_nll']:.4f} nats per token"
    if math.isfinite(chosen["stderr"]):
        change += f", by {chosen['against_paper']:+.4f} ± {chosen['stderr']:.4f}"
    return {"chosen": chosen["made"], "held-out loss, HEAPr": change}


def _in_words(saved: dict[str, Any]) -> dict[str, Any]:
    """`export.savings` for people: FLOPs with their context, bytes with their kind."""
    from heapr_lab.pruning.savings import at_context

    at = at_context(saved["seq_len"])
    shown = {
        name: f"{value:,.6g} {at}" if name.startswith("flops_") else value
        for name, value in saved.items()
        if name not in {"seq_len", "bytes_per_parameter", "bytes_after_is"}
    }
    after = f"{saved['bytes_after']} ({saved['bytes_after_is']})"
    return shown | {"bytes_after": after}
