"""`heapr-lab score` and `evaluate`: the importance of every atom, losses, accuracy."""

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from heapr_lab.cli import options
from heapr_lab.cli.console import names_in, print_facts
from heapr_lab.errors import SpecError
from heapr_lab.text.calibration_spec import Calibration

if TYPE_CHECKING:
    from heapr_lab.pruning.masks import KeepMask
    from heapr_lab.workbench.workbench import Workbench


def score(
    model: options.Model,
    corpus: options.Corpus = "pydocs",
    n_sequences: options.Sequences = None,
    seq_len: options.SeqLen = None,
    seed: Annotated[int, typer.Option(help="Seed for drawing the windows.")] = 0,
    own_text: Annotated[
        float,
        typer.Option(
            min=0, help="Windows that the model writes itself, for each of the corpus."
        ),
    ] = 0.0,
    out: Annotated[
        Path | None, typer.Option(help="Also write the table to this parquet file.")
    ] = None,
    batch_size: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Windows per batch [default: by the device; halved where memory runs "
            "out].",
        ),
    ] = None,
    eliminated: Annotated[
        bool,
        typer.Option("--eliminate", help="Also measure elimination: one forward pass."),
    ] = False,
    profile: options.Profile = None,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    stream: options.Stream = None,
    host_memory: options.HostMemory = None,
    as_json: options.AsJson = False,
) -> None:
    """Measure the importance of every atom.

    The table is kept in the cache, where the panel and `prune --method paper` find it;
    the default of `prune` measures other windows. Under torchrun, each process measures
    a part of the windows.
    """
    if out is not None:
        options.check_table(out)
    calibration = Calibration(corpus, n_sequences, seed=seed, own_text=own_text)
    options.check_corpora([corpus], split="train")
    from heapr_lab.streaming.distributed import joined

    with joined() as ranks:
        local = device if ranks is None else ranks.device(device)
        bench = options.open_bench(
            model, profile, seq_len, local, dtype, stream, host_memory
        )
        windows = bench.calibration_set(calibration)
        table = bench.measure_on(ranks, windows, batch_size=batch_size)
    if table is None:  # rank 0 does the rest
        return
    if eliminated:  # only elimination is measured, the rest is cached
        table = bench.importance(calibration, estimator="elimination")
    if out is not None:
        table.write(out)
    facts: dict[str, Any] = {
        "model": model,
        "atoms": table.n_atoms,
        "layers": table.n_layers,
        "predicted_tokens": table.metadata["N"],
        "unrouted_experts": len(table.unrouted()),
        "calibration": f"{windows.n_sequences} x {windows.seq_len} of {windows.label}",
        "spec_hash": table.metadata["spec_hash"],
        "out": None if out is None else str(out),
    }
    print_facts(facts, as_json=as_json)


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
    measured, asked = names_in(corpora), names_in(tasks)
    _check_asked(measured, asked, kl=kl, masked=mask is not None)
    if mask is not None:
        from heapr_lab.pruning.masks import KeepMask

        KeepMask.read(mask)  # a damaged file is refused before any text is read
    options.check_corpora(measured, split="test")
    options.check_tasks(asked)
    from heapr_lab.checkpoints.same_model import own_mask

    bench = options.open_bench(
        model, profile, seq_len, device, dtype, stream, host_memory
    )
    keep = None if mask is None else own_mask(mask, bench.identity, name=model)
    rows = []
    for corpus in measured:
        rows += _losses(bench, keep, corpus, kl=kl)
    for task in asked:
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
