"""`heapr-lab evaluate`: perplexity, divergence and accuracy, dense or masked."""

import math
from typing import TYPE_CHECKING, Annotated, Any

import typer

from heapr_lab.cli import options, preflight
from heapr_lab.cli.console import names_in, print_facts
from heapr_lab.cli.opening import open_bench
from heapr_lab.errors import SpecError

_N_PROMPTS = 32
_N_NEW = 64

if TYPE_CHECKING:
    from torch import nn

    from heapr_lab.pruning.masks import KeepMask
    from heapr_lab.workbench.workbench import Workbench


def evaluate(
    model: options.Model,
    mask: options.Mask = None,
    corpora: Annotated[
        str,
        typer.Option(help="Corpora whose test splits are used, separated by commas."),
    ] = "pydocs",
    tasks: options.Tasks = "",
    limit: Annotated[
        int | None, typer.Option(min=1, help="Number of items of each task.")
    ] = None,
    kl: Annotated[
        bool, typer.Option("--kl", help="Also KL(dense || pruned) and top-1 agreement.")
    ] = False,
    generation: Annotated[
        bool,
        typer.Option("--generation", help="Also compare what both write: with --mask."),
    ] = False,
    against: Annotated[
        str | None,
        typer.Option(help="The dense model, to compare what a pruned one writes."),
    ] = None,
    seq_len: options.SeqLen = None,
    profile: options.Profile = None,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    stream: options.Stream = None,
    host_memory: options.HostMemory = None,
    as_json: options.AsJson = False,
) -> None:
    """Measure perplexity and accuracy of the dense model, or of a masked one."""
    _check_asked(
        names_in(corpora),
        names_in(tasks),
        compared=[o for o, on in (("--kl", kl), ("--generation", generation)) if on],
        masked=mask is not None,
        against=against is not None,
    )
    from heapr_lab.pruning.masks import KeepMask

    if mask is not None:
        KeepMask.read(mask)  # a damaged file is refused before any text is read
    preflight.check_corpora(names_in(corpora), split="test")
    preflight.check_tasks(names_in(tasks))
    from heapr_lab.checkpoints.same_model import own_mask
    from heapr_lab.models.backend import backend_of

    bench = open_bench(model, profile, seq_len, device, dtype, stream, host_memory)
    if generation or against is not None:
        backend_of(bench.model).require_loaded(
            remedy="leave --generation and --against out, or give --no-stream",
        )
    keep = None if mask is None else own_mask(mask, bench.identity, name=model)
    rows = []
    for corpus in names_in(corpora):
        rows += _losses(bench, keep, corpus, kl=kl)
    if generation or against is not None:
        pair = _pair(bench, keep, against)
        for corpus in names_in(corpora):
            rows += _writing(bench, *pair, corpus)
    for task in names_in(tasks):
        found = bench.task_results(keep, task, limit=limit)
        rows += [_row(task, r["metric"], r["value"], r["stderr"]) for r in found]
    if as_json:
        print_facts({"model": model, "results": rows}, as_json=True)
        return
    for row in rows:
        error = f" ± {row['stderr']:.4g}" if math.isfinite(row["stderr"]) else ""
        name = f"{row['dataset']} {row['metric']}"
        typer.echo(f"{name:<40} {row['value']:.6g}{error}")


def _check_asked(
    corpora: list[str],
    tasks: list[str],
    *,
    compared: list[str],
    masked: bool,
    against: bool,
) -> None:
    """Make sure that there is something to measure.

    Raises:
        SpecError: there is no corpus and no task, or nothing to compare with.
    """
    if not corpora and not tasks:
        raise SpecError("nothing to measure: give --corpora, --tasks or both")
    if compared and not masked:
        raise SpecError(
            f"{compared[0]} compares a pruned model with the dense one, and there is "
            f"no mask; give one with --mask, or leave {compared[0]} out"
        )
    if against and masked:
        raise SpecError(
            "--mask compares with MODEL itself, --against with another one: give one "
            "of them"
        )
    if against and not corpora:
        raise SpecError("--against continues text: give --corpora")


def _pair(
    bench: "Workbench", keep: "KeepMask | None", against: str | None
) -> "tuple[nn.Module, nn.Module]":
    """The dense and the pruned model.

    Raises:
        SpecError: they have different tokens.
    """
    from heapr_lab.models.loading import load_model
    from heapr_lab.pruning.surgery import prune
    from heapr_lab.text.calibration import tokenizer_fingerprint

    if against is None:
        assert keep is not None
        return bench.model, prune(bench.model, keep)
    model: Any = bench.model
    dense, tokenizer = load_model(
        against, device=str(model.device), dtype=model.dtype, stream=False
    )
    if tokenizer_fingerprint(tokenizer) != tokenizer_fingerprint(bench.tokenizer):
        raise SpecError(
            f"{against} has another tokenizer than {bench.name}: give the dense model "
            "that it was made from"
        )
    return dense, model


def _writing(
    bench: "Workbench", dense: "nn.Module", pruned: "nn.Module", corpus: str
) -> list[dict[str, Any]]:
    """Rows of the agreement on continuations of the test windows' first halves."""
    from heapr_lab.inspection.agreement import evaluate_agreement
    from heapr_lab.progress import progress_bar

    windows = bench.test_windows(corpus).ids[:_N_PROMPTS]
    half = max(2, windows.shape[1] // 2)
    with progress_bar(f"continuations of {corpus}", "token") as bar:
        found = evaluate_agreement(
            dense,
            pruned,
            windows[:, :half],
            bench.tokenizer,
            n_new=min(_N_NEW, half),
            progress=bar,
        )
    return [
        _row(corpus, "teacher_forced_agreement", found.teacher_forced),
        _row(corpus, "until_difference", found.until_difference, found.stderr),
        _row(corpus, "chrf", found.chrf),
    ]


def _losses(
    bench: "Workbench", keep: "KeepMask | None", corpus: str, *, kl: bool
) -> list[dict[str, Any]]:
    """Rows of dataset, metric, value and stderr for the test split of a corpus."""
    windows = bench.test_windows(corpus)
    found = bench.perplexity(keep, windows)
    values = {"perplexity": found.value, "nll": found.nll}
    if kl and keep is not None:
        divergence = bench.divergence(keep, windows)
        values["kl"] = divergence.kl
        values["top1_agreement"] = divergence.top1_agreement
    return [_row(corpus, metric, value) for metric, value in values.items()]


def _row(
    dataset: str, metric: str, value: float, stderr: float = math.nan
) -> dict[str, Any]:
    return {"dataset": dataset, "metric": metric, "value": value, "stderr": stderr}
