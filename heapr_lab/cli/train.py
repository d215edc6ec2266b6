"""`heapr-lab train-lab-model`: train the bundled small models."""

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from heapr_lab.cli import options, preflight
from heapr_lab.cli.console import print_facts
from heapr_lab.errors import SpecError

SMOLMOE = "smolmoe"


def train_lab_model(
    recipe: Annotated[
        str,
        typer.Option(
            help="bundled; wide (another family, wider experts), unbalanced, fine "
            "(fine-grained, two shared experts), biased (experts with biases), "
            "upcycled (copies of one expert, trained on), or smolmoe "
            "(carved from a published model; hours)."
        ),
    ] = "bundled",
    out: Annotated[
        Path | None, typer.Option(help="Folder to write [default: the recipe's].")
    ] = None,
    work: Annotated[
        Path | None,
        typer.Option(help="Folder of the training state [default: in the cache]."),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(min=1, help="Steps of a single run [default: the recipe's runs]."),
    ] = None,
    start_from: Annotated[
        Path | None, typer.Option(help="Lab model to continue from; needs --steps.")
    ] = None,
    seed: Annotated[
        int, typer.Option(min=-(2**32), max=2**32, help="Seed of weights and batches.")
    ] = 0,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    as_json: options.AsJson = False,
) -> None:
    """Train the lab model, or continue its training.

    The same seed and steps give the same model.
    """
    for folder in (out, work):
        if folder is not None:
            preflight.check_folder(folder)
    if recipe == SMOLMOE:
        _check_smolmoe(steps, start_from, device)
        _build_smolmoe(out, work, seed, as_json=as_json)
        return
    from heapr_lab.lab_model.recipes import RECIPES

    _check_start(start_from, steps)
    _check_recipe(recipe, RECIPES)
    from heapr_lab.lab_model import card, train
    from heapr_lab.models.loading import check_device
    from heapr_lab.progress import progress_bar
    from heapr_lab.storage import paths

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
    print_facts({**facts, "last_batch_loss_nats": last}, as_json=as_json)


def _check_smolmoe(steps: int | None, start_from: Path | None, device: str) -> None:
    """Refuse what it does not take, before hours are spent.

    Raises:
        BadParameter: it was given one of these options.
    """
    if steps is not None or start_from is not None or device != "cpu":
        raise typer.BadParameter(
            "--recipe smolmoe takes neither --steps nor --start-from, and --device cpu "
            "alone: its lengths are part of the recipe; leave them out"
        )


def _build_smolmoe(
    out: Path | None, work: Path | None, seed: int, *, as_json: bool
) -> None:
    from heapr_lab.lab_model import smolmoe
    from heapr_lab.storage import paths

    out = out or paths.project_dir() / "data" / SMOLMOE
    work = work or paths.cache_dir() / f"lab_training-{SMOLMOE}"
    smolmoe.build_smolmoe(out, work, smolmoe.SmolmoeSpec(seed=seed))
    print_facts({"out": str(out)}, as_json=as_json)


def _check_start(start_from: Path | None, steps: int | None) -> None:
    if start_from is not None and steps is None:
        raise typer.BadParameter(
            "--start-from needs --steps, the number of steps to continue for"
        )


def _check_recipe(recipe: str, known: Iterable[str]) -> None:
    """Make sure that there is a recipe of that name.

    Raises:
        SpecError: there is no such recipe.
    """
    if recipe not in known:
        raise SpecError(f"recipe {recipe!r}: expected one of {', '.join(known)}")
