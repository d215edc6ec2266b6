"""The command line: the stages of the pipeline, without a notebook.

Everything that needs torch is imported inside the commands, so that `--help` is there
at once. Results go to standard output, as text or with `--json` as one JSON object;
progress and errors go to standard error.
"""

import dataclasses
import errno
import functools
import json
import math
import threading
import webbrowser
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from heapr_lab.cli import options, preflight
from heapr_lab.cli.failures import line_of, line_of_interrupt
from heapr_lab.errors import SpecError


class _Commands(TyperGroup):
    """The commands; what a user can do something about is one line.

    The exit status is 2 then, and 130 after Control-C.
    """

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as error:
            _say(line_of_interrupt(ctx.invoked_subcommand))
            raise typer.Exit(130) from error
        except Exception as error:
            line = line_of(error)
            if line is None or getattr(error, "errno", None) == errno.EPIPE:
                raise  # click ends quietly where nobody reads on
            _say(line)
            raise typer.Exit(2) from error


def _say(message: str) -> None:
    """One line on standard error."""
    typer.echo(f"heapr-lab: {' '.join(message.split())}", err=True)


app = typer.Typer(
    cls=_Commands,
    help="Score, prune and study the atomic experts of Mixture-of-Experts models.",
    epilog=options.EXAMPLES,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"heapr-lab {version('heapr-lab')}")
        raise typer.Exit


@app.callback()
def _common(
    _shown: Annotated[
        bool,
        typer.Option(
            "--version", callback=_version, is_eager=True, help="Show the version."
        ),
    ] = False,
) -> None:
    pass


@app.command(epilog=options.SCORE_EXAMPLES)
def score(
    model: options.Model,
    corpus: options.Corpus = "pydocs",
    n_sequences: options.Sequences = None,
    seq_len: options.SeqLen = None,
    seed: options.Seed = 0,
    out: Annotated[
        Path | None, typer.Option(help="Write the table here too, as parquet.")
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Windows per pass [default: what fits].")
    ] = None,
    eliminated: Annotated[
        bool,
        typer.Option("--eliminate", help="Scores of elimination too: a forward pass."),
    ] = False,
    profile: options.Profile = None,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    as_json: options.AsJson = False,
) -> None:
    """Measure the importance of every atom.

    The table stays in the cache, from which the other commands take it.
    """
    if out is not None:
        preflight.check_file(out, suffix=".parquet")
    from heapr_lab.cli import headless
    from heapr_lab.text.calibration import check_seed
    from heapr_lab.workbench.settings import Setting

    check_seed(seed)
    preflight.check_corpora([corpus], split="train")
    bench = headless.open_bench(
        model, profile=profile, seq_len=seq_len, device=device, dtype=dtype
    )
    estimator = "elimination" if eliminated else "heapr"
    setting = Setting(
        0.0, estimator, calibration=corpus, n_sequences=n_sequences, seed=seed
    )
    windows = bench.calibration_set(setting)
    table = bench.measure(windows, batch_size=batch_size)
    if eliminated:  # from the cache, but for the elimination
        table = bench.importance(setting)
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
    _print(facts, as_json=as_json)


@app.command(epilog=options.PRUNE_EXAMPLES)
def prune(
    model: options.Model,
    ratio: Annotated[
        float | None, typer.Option(help="What goes, in [0, 1): 0.25, not 25.")
    ] = None,
    max_rise: Annotated[
        float | None,
        typer.Option(
            help="Instead of --ratio: as much as raises perplexity by so much at most, "
            "before compensation; 0.02 is 2 %."
        ),
    ] = None,
    max_latency: Annotated[
        float | None,
        typer.Option(
            help="Instead of --ratio: as little as makes decoding take at most this "
            "share of the dense model's time, measured on this machine; 0.8."
        ),
    ] = None,
    importance: options.Importance = None,
    method: Annotated[
        str,
        typer.Option(
            help="best: the best estimator, and without --importance compensated "
            "weights; paper: HEAPr as published."
        ),
    ] = "best",
    estimator: options.EstimatorOrMethods = None,
    rounds: Annotated[
        int, typer.Option(min=1, help="Score anew so often, without --importance.")
    ] = 1,
    scope: Annotated[str, typer.Option(help="global or layer.")] = "global",
    granularity: Annotated[str, typer.Option(help="atom or expert.")] = "atom",
    structure: Annotated[
        str, typer.Option(help="ragged, aligned, per_layer or uniform.")
    ] = "ragged",
    multiple: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Widths are a multiple of it [default, aligned and uniform: the "
            "largest power of two in d_inter / 8].",
        ),
    ] = None,
    of: Annotated[
        str,
        typer.Option(
            help="What the ratio counts: routed atoms (atoms), parameters of the whole "
            "model (model), its bytes (bytes), or FLOPs of the routed experts (flops)."
        ),
    ] = "atoms",
    price: Annotated[
        float | None,
        typer.Option(help="Score per cost: 0 parameters, 1 FLOPs [default: no cost]."),
    ] = None,
    exclude_layers: Annotated[
        str, typer.Option(help="Layers to leave alone, with commas.")
    ] = "",
    min_atoms: Annotated[
        int, typer.Option(min=0, help="Atoms that every expert keeps.")
    ] = 0,
    protect_outliers: Annotated[
        float, typer.Option(help="Share of atoms with the largest outputs that stay.")
    ] = 0.0,
    protect_unrouted: Annotated[
        bool, typer.Option("--protect-unrouted", help="Keep experts without tokens.")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(help="FILE.parquet for the mask alone, else a checkpoint folder."),
    ] = None,
    perplexity: Annotated[
        str | None,
        typer.Option(
            help="Corpora whose perplexity the checkpoint's card gives, with commas "
            "[default: the calibration corpus, or none with --importance]."
        ),
    ] = None,
    corpus: options.Corpus = "pydocs",
    n_sequences: options.Sequences = None,
    seq_len: options.SeqLen = None,
    seed: options.Seed = 0,
    profile: options.Profile = None,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    as_json: options.AsJson = False,
) -> None:
    """Select what stays, say what that saves, and write the smaller model.

    The importance comes from a file of `score`, and then the model is never loaded: its
    files are sliced one tensor at a time. Without such a file it comes from the cache,
    measured if it is not there, and what stays in a checkpoint makes up for what goes.
    """
    from heapr_lab.checkpoints.same_model import own_table
    from heapr_lab.cli import headless
    from heapr_lab.models.loading import model_folder
    from heapr_lab.models.sources import read_source
    from heapr_lab.pruning.selection import default_multiple, select
    from heapr_lab.text.calibration import check_seed, corpora_of
    from heapr_lab.workbench.export import Chosen, facts_of, savings, with_model
    from heapr_lab.workbench.presets import find_method
    from heapr_lab.workbench.settings import Setting

    method_of = find_method(method)
    # Rounds score anew what a round of elimination has counted already.
    alone = importance is not None or rounds > 1
    estimator = estimator or (method_of.of_table if alone else method_of.estimator)
    _check_amount(
        ratio, max_rise, max_latency, alone=importance is not None, rounds=rounds
    )
    to_folder = out is not None and out.suffix != ".parquet"
    open_bench = functools.cache(
        functools.partial(
            headless.open_bench,
            model, profile=profile, seq_len=seq_len, device=device, dtype=dtype,
        )
    )  # fmt: skip
    choice: dict[str, Any] = {
        "ratio": 0.0 if ratio is None else ratio,
        "estimator": estimator,
        "scope": scope,
        "granularity": granularity,
        "structure": structure,
        "multiple": multiple,
        "of": of,
        "price": price,
        "exclude_layers": preflight.layer_numbers(exclude_layers),
        "min_atoms": min_atoms,
        "protect_outliers": protect_outliers,
        "protect_unrouted": protect_unrouted,
    }
    headless.check_choice(choice)
    _check_out(out, to_folder=to_folder)
    source = model_folder(model)
    preflight.check_layers(source, choice["exclude_layers"])
    parts = corpora_of(corpus)
    if max_rise is not None:
        _check_single(corpus, parts)
    if importance is None:
        check_seed(seed)
        preflight.check_corpora([corpus], split="train")
    measured = _names(perplexity or "")
    if perplexity is None and importance is None:
        measured = list(parts)  # a mixture has no test split
    preflight.check_corpora(measured, split="test")
    setting = Setting(
        0.0, estimator, calibration=corpus, n_sequences=n_sequences, seed=seed
    )
    if importance is None:
        table = open_bench().importance(setting)
    else:
        table = own_table(importance, source, name=model)
    if structure in {"aligned", "uniform"} and multiple is None:
        choice["multiple"] = default_multiple(table)
    if max_rise is not None:
        choice["ratio"] = headless.ratio_of_rise(
            open_bench(), setting, choice, max_rise, corpus=corpus
        )
    if max_latency is not None:
        choice["ratio"] = headless.ratio_of_latency(
            open_bench(), setting, choice, max_latency
        )
    # Rounds score what compensation leaves, so that the mask is that of a checkpoint.
    compensated = method_of.compensated and importance is None
    compensated &= to_folder or rounds > 1
    if importance is None:
        made = headless.choose(
            open_bench(), setting, choice, rounds=rounds, compensated=compensated
        )
    else:
        made = Chosen(select(table, **choice))
    keep = with_model(made.keep, table)
    made = dataclasses.replace(made, keep=keep)
    files = read_source(source)
    if out is not None and not to_folder:
        keep.write(out)
    elif out is not None:
        headless.write_pruned(
            out, made, source=source, name=model, corpora=measured,
            facts=facts_of(table, keep, source=files, seq_len=seq_len),
            bench=open_bench,
        )  # fmt: skip
        _say_if_without_tokenizer(source, out)
    saved = savings(
        keep, table, seq_len=seq_len, source=files, written=out if to_folder else None
    )
    counts = {"atoms": keep.n_atoms, "atoms_kept": keep.n_kept}
    how = {"method": method, "estimator": estimator, "compensated": compensated}
    facts = {"model": model, **how, **counts, "achieved_ratio": keep.achieved_ratio}
    facts |= saved if as_json else headless.in_words(saved)
    _print({**facts, "out": None if out is None else str(out)}, as_json=as_json)


@app.command(epilog=options.GGUF_EXAMPLES)
def export_gguf(
    folder: Annotated[Path, typer.Argument(exists=True, file_okay=False)],
    out: Annotated[Path, typer.Option(help="The file to write.")],
    as_json: options.AsJson = False,
) -> None:
    """Write a uniform checkpoint as a GGUF file, for llama.cpp."""
    preflight.check_file(out)
    from heapr_lab.checkpoints.gguf import write_gguf
    from heapr_lab.progress import progress_bar

    with progress_bar(f"writing {out.name}", "tensor") as bar:
        write_gguf(folder, out, progress=bar)
    _print({"out": str(out), "bytes": out.stat().st_size}, as_json=as_json)


@app.command(epilog=options.EVALUATE_EXAMPLES)
def evaluate(
    model: options.Model,
    mask: options.Mask = None,
    corpora: Annotated[
        str, typer.Option(help="Test splits to measure perplexity on, with commas.")
    ] = "pydocs",
    tasks: options.Tasks = "",
    limit: Annotated[
        int | None, typer.Option(min=1, help="Items of each harness task.")
    ] = None,
    kl: Annotated[
        bool, typer.Option("--kl", help="KL(dense || pruned) and top-1 agreement too.")
    ] = False,
    seq_len: options.SeqLen = None,
    profile: options.Profile = None,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    as_json: options.AsJson = False,
) -> None:
    """Measure perplexity and accuracy.

    Of the dense model, or under a mask of `prune`.
    """
    _check_asked(_names(corpora), _names(tasks), kl=kl, masked=mask is not None)
    from heapr_lab.checkpoints.same_model import own_mask
    from heapr_lab.cli import headless
    from heapr_lab.pruning.masks import KeepMask

    if mask is not None:
        KeepMask.read(mask)  # damaged or not, it is looked at again with the model
    preflight.check_corpora(_names(corpora), split="test")
    preflight.check_tasks(_names(tasks))
    bench = headless.open_bench(
        model, profile=profile, seq_len=seq_len, device=device, dtype=dtype
    )
    keep = None if mask is None else own_mask(mask, bench.identity, name=model)
    rows = []
    for corpus in _names(corpora):
        rows += headless.perplexity_rows(bench, keep, corpus, kl=kl)
    for task in _names(tasks):
        rows += headless.accuracy_rows(bench, keep, task, limit=limit)
    if as_json:
        _print({"model": model, "results": rows}, as_json=True)
        return
    for row in rows:
        error = f" ± {row['stderr']:.4g}" if math.isfinite(row["stderr"]) else ""
        name = f"{row['dataset']} {row['metric']}"
        typer.echo(f"{name:<40} {row['value']:.6g}{error}")


@app.command(epilog=options.FIGURES_EXAMPLES)
def figures(
    model: options.ModelOption = "lab",
    profile: options.Profile = None,
    out: options.OutFolder = None,
    n_workers: options.Workers = None,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    as_json: options.AsJson = False,
) -> None:
    """Make every figure and table."""
    _reproduce(
        model, profile, out, device, dtype,
        notebooks=False, publish=False, n_workers=n_workers, as_json=as_json,
    )  # fmt: skip


@app.command(epilog=options.REPRODUCE_EXAMPLES)
def reproduce(
    model: options.ModelOption = "lab",
    profile: options.Profile = None,
    out: options.OutFolder = None,
    notebooks: Annotated[bool, typer.Option(help="Execute the notebooks too.")] = True,
    publish: Annotated[
        bool,
        typer.Option(
            "--publish",
            help="Rewrite what is committed: figures, notebooks, tables of the README.",
        ),
    ] = False,
    n_workers: options.Workers = None,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    as_json: options.AsJson = False,
) -> None:
    """Make every figure, execute every notebook.

    The main job: score, prune at 10 to 90 %, evaluate, draw.
    """
    _reproduce(
        model, profile, out, device, dtype,
        notebooks=notebooks, publish=publish, n_workers=n_workers, as_json=as_json,
    )  # fmt: skip


@app.command(epilog=options.TRAIN_EXAMPLES)
def train_lab_model(
    recipe: Annotated[
        str, typer.Option(help="bundled, or wide: another family, wider experts.")
    ] = "bundled",
    out: Annotated[
        Path | None, typer.Option(help="Folder [default: the recipe's, in data].")
    ] = None,
    work: Annotated[
        Path | None, typer.Option(help="State to resume from [default: in the cache].")
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(min=1, help="One run of so many [default: the recipe's runs]."),
    ] = None,
    start_from: Annotated[
        Path | None, typer.Option(help="Earlier lab model to go on from, with --steps.")
    ] = None,
    seed: Annotated[
        int,
        typer.Option(min=-(2**32), max=2**32, help="Of weights and batches."),
    ] = 0,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    as_json: options.AsJson = False,
) -> None:
    """Train the lab model, or go on training it.

    The same seed and steps give the same model.
    """
    for folder in (out, work):
        if folder is not None:
            preflight.check_folder(folder)
    from heapr_lab.lab_model import card, train
    from heapr_lab.lab_model.recipes import RECIPES
    from heapr_lab.models.loading import check_device
    from heapr_lab.progress import progress_bar
    from heapr_lab.storage import paths

    _check_start(start_from, steps)
    _check_recipe(recipe, RECIPES)
    check_device(device)
    out = out or paths.lab_model_dir(recipe)
    work = work or paths.cache_dir() / f"lab_training-{recipe}"
    runs = [dataclasses.replace(r, seed=r.seed + seed) for r in RECIPES[recipe]]
    losses: list[float] = []
    with progress_bar("training the lab model", "step") as bar:

        def on_step(step: int, n_steps: int, loss: float) -> None:
            losses.append(loss)
            bar(step, n_steps)

        if steps is None:
            train.train_bundled(
                out, work=work, runs=runs, device=device, on_step=on_step
            )
        else:
            runs = [dataclasses.replace(runs[0], n_steps=steps)]
            train.train_lab_model(
                out,
                spec=runs[0],
                work=work,
                start_from=start_from,
                device=device,
                on_step=on_step,
            )
    title = "The lab model" if recipe == "bundled" else f"The {recipe} lab model"
    card.write_card(out, title=title)
    last = losses[-1] if losses else None
    facts = {
        "out": str(out),
        "steps": sum(run.n_steps for run in runs),
        "tokens": sum(run.n_tokens for run in runs),
    }
    _print({**facts, "last_batch_loss_nats": last}, as_json=as_json)


@app.command(epilog=options.PROVENANCE_EXAMPLES)
def provenance(
    file: Annotated[
        Path,
        typer.Argument(help="A png, pdf, md, tex, csv or parquet, or a checkpoint."),
    ],
    as_json: options.AsJson = False,
) -> None:
    """Say where a file of this package came from."""
    from heapr_lab.storage.provenance import read_provenance

    found = read_provenance(file)
    _print(found.facts() if as_json else dict(found.lines()), as_json=as_json)


@app.command("app", epilog=options.APP_EXAMPLES)
def panel(
    source: Annotated[
        str,
        typer.Argument(
            metavar="MODEL_OR_TABLE",
            help="A hub id, a local folder, `lab`, or a file of `score`, which cannot "
            "be evaluated.",
        ),
    ] = "lab",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="0 takes a free one.")
    ] = 0,
    browser: Annotated[bool, typer.Option(help="Open the page in a browser.")] = True,
    profile: options.Profile = None,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
) -> None:
    """Show the panel as a page, on this machine only.

    Needs Voilà: pip install 'heapr-lab[app]'. With &theme=dark the page is dark.
    """
    from heapr_lab.models.loading import check_device, check_dtype
    from heapr_lab.panel.app import panel_source, serve

    check_device(device)
    check_dtype(dtype)
    code = panel_source(
        source, profile=profile, device=device, dtype=dtype, folder=Path.cwd()
    )

    def announce(address: str) -> None:
        typer.echo(address)
        typer.echo("Control-C ends it.", err=True)
        if browser:
            # A browser that runs in the terminal would keep the server from answering.
            threading.Thread(target=webbrowser.open, args=(address,)).start()

    serve(code, port=port, on_ready=announce)


# --- what the commands share ------------------------------------------------------


def _check_single(corpus: str, parts: Sequence[str]) -> None:
    """Make sure that --max-rise has one corpus to measure on.

    Raises:
        SpecError: it is a mixture.
    """
    if len(parts) > 1:
        raise SpecError(
            f"--max-rise measures on the calibration corpus, and {corpus!r} is a "
            "mixture: give --ratio, or one corpus"
        )


def _check_amount(
    ratio: float | None,
    max_rise: float | None,
    max_latency: float | None,
    *,
    alone: bool,
    rounds: int,
) -> None:
    """Make sure that how much goes is said once, and can be found.

    Args:
        ratio: as `prune`.
        max_rise: as `prune`.
        max_latency: as `prune`.
        alone: whether there is a file of importance, and no model.
        rounds: as `prune`.

    Raises:
        SpecError: it is said otherwise.
    """
    searched = max_rise is not None or max_latency is not None
    if alone and (rounds > 1 or searched):
        raise SpecError(
            "--rounds, --max-rise and --max-latency run the model: leave --importance "
            "out"
        )
    if sum(given is not None for given in (ratio, max_rise, max_latency)) != 1:
        raise SpecError(
            "how much goes has to be said once: give --ratio, --max-rise or "
            "--max-latency"
        )


def _check_asked(
    corpora: list[str], tasks: list[str], *, kl: bool, masked: bool
) -> None:
    """Make sure that there is something to measure.

    Raises:
        SpecError: there is nothing, or nothing to compare with.
    """
    if not corpora and not tasks:
        raise SpecError("nothing to measure: give --corpora, --tasks or both")
    if kl and not masked:
        raise SpecError(
            "KL is that of a pruned model from the dense one, and there is no mask; "
            "give one (--mask), or leave --kl out"
        )


def _check_out(out: Path | None, *, to_folder: bool) -> None:
    """Make sure that a mask, or a checkpoint, can be written at `out`, if anywhere."""
    from heapr_lab.checkpoints.folder import check_new

    if out is not None and to_folder:
        preflight.check_folder(out)
        check_new(out)
    elif out is not None:
        preflight.check_file(out)


def _say_if_without_tokenizer(source: Path, checkpoint: Path) -> None:
    from heapr_lab.models.folders import has_tokenizer

    if not has_tokenizer(source):
        _say(
            f"there is no tokenizer in {source}, and so none in {checkpoint}: copy "
            "that of the base model there before it is evaluated"
        )


def _check_start(start_from: Path | None, steps: int | None) -> None:
    if start_from is not None and steps is None:
        raise typer.BadParameter("--start-from needs --steps: how long to go on")


def _check_recipe(recipe: str, known: Iterable[str]) -> None:
    """Make sure that there is a recipe of that name.

    Raises:
        SpecError: there is none.
    """
    if recipe not in known:
        raise SpecError(f"recipe {recipe!r}: expected one of {', '.join(known)}")


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _reproduce(
    model: str,
    profile: str | None,
    out: Path | None,
    device: str,
    dtype: str,
    *,
    notebooks: bool,
    publish: bool,
    n_workers: int | None,
    as_json: bool,
) -> None:
    if out is not None:
        preflight.check_folder(out)
    from heapr_lab.experiments.reproduce import reproduce as make

    summary = make(
        model,
        profile=profile,
        device=device,
        dtype=dtype,
        figures_dir=out,
        notebooks=notebooks,
        publish=publish,
        n_workers=n_workers,
    )
    if not as_json:
        typer.echo("\n".join(summary.lines()))
        return
    facts = {
        "model": model,
        "figures": str(summary.figures),
        "files": [str(path) for path in summary.files],
        "notebooks": [str(path) for path in summary.notebooks],
        "skipped": summary.skipped,
        "perplexity": summary.perplexity,
        "claims": summary.claims.to_dict("records"),
        "seconds": summary.seconds,
    }
    _print(facts, as_json=True)


def _print(facts: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(_plain(facts), indent=2))
        return
    for name, value in facts.items():
        if value is not None:
            shown = f"{value:,.6g}" if isinstance(value, float) else str(value)
            typer.echo(f"{name.replace('_', ' '):<28} {shown}")


def _plain(value: Any) -> Any:
    """JSON knows no NaN: what was not measured is null."""
    if isinstance(value, dict):
        return {name: _plain(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
