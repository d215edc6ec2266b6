"""`heapr-lab score`: measure the importance of every atom."""

from pathlib import Path
from typing import Annotated, Any

import typer

from heapr_lab.cli import options, preflight
from heapr_lab.cli.console import print_facts


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
        preflight.check_table(out)
    from heapr_lab.text.calibration_spec import Calibration

    calibration = Calibration(corpus, n_sequences, seed=seed, own_text=own_text)
    preflight.check_corpora([corpus], split="train")
    from heapr_lab.streaming.distributed import joined

    with joined() as ranks:
        local = device if ranks is None else ranks.device(device)
        bench = options.open_bench(
            model, profile, seq_len, local, dtype, stream, host_memory
        )
        windows = bench.calibration_set(calibration)
        if ranks is None:
            table = bench.measure(windows, batch_size=batch_size)
        else:
            merged = bench.measure_on(ranks, windows, batch_size=batch_size)
            if merged is None:  # rank 0 does the rest
                return
            table = merged
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
