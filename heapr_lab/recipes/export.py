"""Write the pruned model of a workbench, for the panel and the command line.

Weights are written in the dtype of the files of the dense model, in whatever dtype it
was loaded, and perplexities are measured with the weights that are written.
"""

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from heapr_lab.checkpoints.mtp_head import whole_heads
from heapr_lab.checkpoints.save import prune_folder, save_pruned, structure_of
from heapr_lab.checkpoints.stored_type import file_types, round_changed
from heapr_lab.checkpoints.uniform import stock_config
from heapr_lab.errors import CacheError, CorpusError, HeaprLabError, SpecError
from heapr_lab.evaluation.perplexity import evaluate_perplexity
from heapr_lab.importance.table import ImportanceTable
from heapr_lab.models.experts import find_experts
from heapr_lab.models.folders import read_config, skeleton_of
from heapr_lab.models.sources import Source, dtype_name, source_of, weights_bytes
from heapr_lab.progress import StartPart, no_parts
from heapr_lab.pruning.masks import KeepMask
from heapr_lab.pruning.options import Selection
from heapr_lab.pruning.savings import savings_of
from heapr_lab.pruning.surgery import masking
from heapr_lab.recipes.describing import calibration_of, describe_calibration
from heapr_lab.recipes.making import PruningResult, healing_of, pruned_model, records
from heapr_lab.streaming.opening import load_like, why_no_copy
from heapr_lab.text.calibration import CalibrationSet
from heapr_lab.workbench.workbench import Workbench

_MOST_APART, _MOST_IN_HALF = 5e-5, 0.01
"""Nats per token by which losses may differ, as kernels round differently."""
_N_WINDOWS = 4
"""Held-out windows on which both are compared."""

Check = Callable[[Path], dict[str, str]]

# --- facts about a checkpoint --------------------------------------------------------


def savings(
    keep: KeepMask,
    table: ImportanceTable,
    *,
    source: Source | None = None,
    written: Path | None = None,
) -> dict[str, Any]:
    """`savings_of`, with the sizes of files where there are any.

    Args:
        keep: the kept atoms.
        table: the table that it was selected from.
        source: the files of the dense model, whose size is `bytes_before`.
        written: folder of the pruned checkpoint, if it was written; `bytes_after` is
            then the size of its files. `bytes_after_is` names the source.
    """
    numbers = savings_of(keep, table, source=source)
    origin = f"an estimate, {numbers['bytes_per_parameter']:.4g} bytes per parameter"
    if source is not None and source.is_dequantised(keep.one_width):
        origin = "an estimate, in bfloat16"
    if written is not None:
        numbers["bytes_after"] = weights_bytes(written)
        origin = "that of the files"
    return {**numbers, "bytes_after_is": origin}


def facts_of(made: PruningResult, source: Source | None) -> dict[str, Any]:
    """The facts on importance and savings, for manifest and card.

    The manifest itself records the sizes of the new files, as `files`.
    """
    saved = savings(made.keep, made.table, source=source)
    # The table of `compress` is of a part of its windows.
    windows = None if made.report is None else made.windows
    record = made.table.calibration if windows is None else windows.record
    calibration = calibration_of(record)
    facts = {
        "calibration": describe_calibration(record),
        "calibrated_on": calibration.to_dict() if calibration else None,
        "importance": made.table.metadata.get("spec_hash"),
        "savings": {k: v for k, v in saved.items() if not k.startswith("bytes_")},
    }
    if made.report is not None:
        facts["held_out"] = records(made.report)
    return facts if source is None else facts | {"bytes_before": source.n_bytes}


def _text_of_heads(bench: Workbench, made: PruningResult) -> CalibrationSet | None:
    """What `save_pruned` scores a layer on that predicts a further token.

    None where no such layer is pruned, or the text is not known or not on this machine.
    """
    if made.calibration is not None and structure_of(made.keep) == "uniform":
        with contextlib.suppress(CorpusError):
            return bench.calibration_set(made.calibration)
    return None


# --- writing -------------------------------------------------------------------------


def check_selection(source: Path, selection: Selection, *, written: bool) -> None:
    """Check, before anything is measured, that a model has the widths that are asked.

    Args:
        source: the folder of the dense model, whose headers are read.
        selection: its structure and multiple.
        written: whether a checkpoint will be, which is possible as well.

    Raises:
        LayoutError: a part of a layer that predicts further tokens is missing.
        SpecError: the family has no configuration with experts of one other width, or
            all experts are narrower than the multiple.
    """
    config = read_config(source)
    skeleton = skeleton_of(config)
    widest = max(layer.d_inter for layer in find_experts(skeleton))
    if (selection.multiple or 1) > widest:
        raise SpecError(
            f"widths in multiples of {selection.multiple} were requested, and experts "
            f"have {widest} atoms: give a smaller multiple (--multiple)"
        )
    if written:
        whole_heads(skeleton, str(source))
        if selection.structure == "uniform":
            stock_config(config, selection.multiple or 1)


def slice_checkpoint(
    out: Path,
    source: Source,
    made: PruningResult,
    *,
    base: str,
    bench: Workbench | None = None,
    corpora: Sequence[str] = (),
    part: StartPart = no_parts,
) -> None:
    """Write the sliced model of `source` to `out`, a layer at a time.

    Args:
        out: a new folder.
        source: the files of the dense model, which is streamed.
        made: the kept atoms, whose weights are unchanged.
        base: name of the dense model.
        bench: the same model, opened; needed if there are `corpora`.
        corpora: as `write_checkpoint`; the model with the mask stands for the files.
        part: takes the progress of each part.

    Raises:
        CacheError: the files, loaded again, have another loss; nothing is left.
    """
    facts, keep = facts_of(made, source), made.keep
    check = None
    if bench is not None and corpora:
        texts = {name: bench.test_windows(name) for name in corpora}
        change = {
            name: [bench.perplexity(mask, text).value for mask in (None, keep)]
            for name, text in texts.items()
        }
        facts |= {"perplexity": change}
        with masking(bench.model, keep):
            check = _check(bench, bench.model, corpora, part)
    prune_folder(
        source.folder,
        keep,
        out,
        base=base,
        facts=facts,
        calibration=None if bench is None else _text_of_heads(bench, made),
        progress=part("slicing", "layer"),
        check=check,
    )


def write_checkpoint(
    out: Path,
    made: PruningResult,
    bench: Workbench,
    *,
    corpora: Sequence[str],
    base: str | None = None,
    part: StartPart = no_parts,
) -> None:
    """Write the pruned model of `bench` to the folder `out`.

    Args:
        out: a new folder.
        made: the kept atoms, and how their weights are made.
        bench: the dense model, which is not changed.
        corpora: corpora on whose test splits the card's perplexities are measured, with
            the weights that are written. On the first, the files are compared with the
            model in memory.
        base: name of the dense model; by default where it was loaded from.
        part: takes the progress of each part.

    Raises:
        CacheError: the files, loaded again, have another loss; nothing is left.
        SpecError: another process heals the same model.
    """
    source = bench.source
    facts = facts_of(made, source)  # before anything slow: the table may lack them
    with healing_of(bench, made) as healing:
        pruned, weight_facts = pruned_model(bench, made, healing, part)
        facts |= weight_facts
        types = file_types(pruned)
        round_changed(pruned, types)
        change = {name: _perplexities(bench, pruned, name, part) for name in corpora}
        if change:
            facts |= {"perplexity": change}
        check = _check(bench, pruned, corpora, part)
        kind = dtype_name(types.dtype) if types.packing is None else "FP8"
        part(f"writing {out} in {kind}", "step")(0, 1)
        save_pruned(
            pruned,
            out,
            tokenizer=bench.tokenizer,
            base=base,
            source=None if source is None else source.folder,
            facts=facts,
            calibration=_text_of_heads(bench, made),
            check=check,
        )


def _perplexities(
    bench: Workbench, pruned: Any, corpus: str, part: StartPart
) -> tuple[float, float]:
    """Perplexity on the test split of `corpus`, of the dense model and of `pruned`."""
    windows = bench.test_windows(corpus)
    name = f"perplexity on {corpus}, {{}}".format
    dense = bench.perplexity(None, windows, progress=part(name("dense"), "window"))
    after = evaluate_perplexity(
        pruned, windows.ids, progress=part(name("as written"), "window")
    )
    return dense.value, after.value


# --- the files, loaded again ------------------------------------------------------


def _check(
    bench: Workbench, pruned: Any, corpora: Sequence[str], part: StartPart
) -> Check:
    """A check of the folder that a pruned model is written to.

    It is made while the weights are those that are written: the loss is measured now.

    Args:
        bench: the dense model, in whose dtype and on whose devices files are loaded.
        pruned: the model in memory, with its experts rounded as in the files, or the
            dense one within `masking`.
        corpora: of the first one's held-out text four windows are used.
        part: takes the progress of each part.

    Returns:
        A function of the folder that returns the fact `reloaded`. It raises
        CacheError if the folder cannot be loaded, or its loss is another.
    """
    if not corpora:
        return lambda _folder: {"reloaded": "not checked: no corpus to compare on"}
    corpus, like = corpora[0], bench.model
    part(f"loss on {corpus}, to compare with that of the files", "step")(0, 1)
    ids = bench.test_windows(corpus).ids[:_N_WINDOWS]
    expected = evaluate_perplexity(pruned, ids).nll

    def check(folder: Path) -> dict[str, str]:
        part("loading the files again", "step")(0, 1)
        why = why_no_copy(pruned, like)
        if why is not None:
            return {"reloaded": f"not checked: {why}"}
        change = _loss_of(folder, like, ids) - expected
        if not abs(change) <= _most_apart(like):  # which NaN is not, either
            raise CacheError(
                f"the written checkpoint was loaded again, and its loss on {len(ids)} "
                f"windows of {corpus} is {expected + change:.6f} nats per token in "
                f"place of {expected:.6f}: nothing is kept; write it again"
            )
        return {"reloaded": f"Δ nll = {change:z.4f} on {len(ids)} windows of {corpus}"}

    return check


def _most_apart(like: Any) -> float:
    source = source_of(like)
    # Dequantised weights outside the experts are rounded in the files.
    rounded = source is not None and source.dequantised_from is not None
    in_half = rounded or like.dtype.itemsize < torch.float32.itemsize
    return _MOST_IN_HALF if in_half else _MOST_APART


def _loss_of(folder: Path, like: Any, ids: torch.Tensor) -> float:
    try:
        return evaluate_perplexity(load_like(folder, like), ids).nll
    except HeaprLabError as error:
        raise CacheError(
            f"the checkpoint was written, and cannot be loaded again: {error}"
        ) from error
