"""`heapr-lab evaluate`: perplexity, divergence and accuracy, dense or masked."""

import math
from typing import TYPE_CHECKING, Annotated, Any

import typer

from heapr_lab.cli import options, preflight
from heapr_lab.cli.console import names_in, print_facts
from heapr_lab.errors import SpecError

if TYPE_CHECKING:
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
    limit: options.Limit = None,
    kl: Annotated[
        bool, typer.Option("--kl", help="Also KL(dense || pruned) and top-1 agreement.")
    ] = False,
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
        kl=kl,
        masked=mask is not None,
    )
    if mask is not None:
        from heapr_lab.pruning.masks import KeepMask

        KeepMask.read(mask)  # a damaged file is refused before any text is read
    preflight.check_corpora(names_in(corpora), split="test")
    preflight.check_tasks(names_in(tasks))
    from heapr_lab.checkpoints.same_model import own_mask

    bench = options.open_bench(
        model, profile, seq_len, device, dtype, stream, host_memory
    )
    keep = None if mask is None else own_mask(mask, bench.identity, name=model)
    rows = []
    for corpus in names_in(corpora):
        rows += _losses(bench, keep, corpus, kl=kl)
    for task in names_in(tasks):
        metrics = bench.task_results(keep, task, limit=limit)
        named = ("metric", "value", "stderr")
        rows += [{"dataset": task} | {k: row[k] for k in named} for row in metrics]
    if as_json:
        print_facts({"model": model, "results": rows}, as_json=True)
        return
    for row in rows:
        error = f" ± {row['stderr']:.4g}" if math.isfinite(row["stderr"]) else ""
        name = f"{row['dataset']} {row['metric']}"
        typer.echo(f"{name:<40} {row['value']:.6g}{error}")


def _check_asked(
    corpora: list[str], tasks: list[str], *, kl: bool, masked: bool
) -> None:
    """Make sure that there is something to measure.

    Raises:
        SpecError: there is no corpus and no task, or nothing to compare with.
    """
    if not corpora and not tasks:
        raise SpecError("nothing to measure: give --corpora, --tasks or both")
    if kl and not masked:
        raise SpecError(
            "--kl compares a pruned model with the dense one, and there is no mask; "
            "give one with --mask, or leave --kl out"
        )


def _losses(
    bench: "Workbench", keep: "KeepMask | None", corpus: str, *, kl: bool
) -> list[dict[str, Any]]:
    """Rows of dataset, metric, value and stderr for the test split of a corpus."""
    windows = bench.test_windows(corpus)
    perplexity = bench.perplexity(keep, windows)
    values = {"perplexity": perplexity.value, "nll": perplexity.nll}
    if kl and keep is not None:
        divergence = bench.divergence(keep, windows)
        values["kl"] = divergence.kl
        values["top1_agreement"] = divergence.top1_agreement
    return [
        {"dataset": corpus, "metric": metric, "value": value, "stderr": math.nan}
        for metric, value in values.items()
    ]
