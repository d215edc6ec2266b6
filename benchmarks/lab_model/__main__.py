"""`python -m benchmarks.lab_model`: train the small models in `data/`."""

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from benchmarks.lab_model import card, smolmoe, train
from benchmarks.lab_model.recipes import RECIPES
from heapr_lab.cli import options
from heapr_lab.cli.console import SAVED, in_one_line, print_facts
from heapr_lab.errors import SpecError
from heapr_lab.models.loading import check_device
from heapr_lab.progress import progress_bar
from heapr_lab.storage import paths

SMOLMOE = "smolmoe"
PROGRAM = "python -m benchmarks.lab_model"
_EXAMPLES = f"""\b
Examples:
  {PROGRAM} --out my_lab_model
  {PROGRAM} --recipe upcycled
  {PROGRAM} --out tiny --work tiny_work --steps 200 --seed 1
  {PROGRAM} --out more --work more_work --steps 500 --start-from tiny
"""


class _Command(TyperCommand):
    """An error that the user can correct is one line, as those of `heapr-lab`."""

    def invoke(self, ctx: Any) -> Any:
        with in_one_line(lambda: f"interrupted; {SAVED}"):
            return super().invoke(ctx)


app = typer.Typer(
    add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False
)


@app.command(cls=_Command, epilog=_EXAMPLES)
def lab_model(
    recipe: Annotated[
        str,
        typer.Option(
            help="bundled, unbalanced, fine (fine-grained, two shared experts), "
            "biased (experts with biases), upcycled (copies of one expert, trained "
            "on), or smolmoe (carved from a published model; hours)."
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
            options.check_folder(folder)
    work = work or paths.cache_dir() / f"lab_training-{recipe}"
    if recipe == SMOLMOE:
        _check_smolmoe(steps, start_from, device)
        out = out or paths.project_dir() / "data" / SMOLMOE
        smolmoe.build_smolmoe(out, work, smolmoe.SmolmoeSpec(seed=seed))
        print_facts({"out": str(out)}, as_json=as_json)
        return
    _check_start(start_from, steps)
    _check_recipe(recipe)
    check_device(device)
    out = out or paths.lab_model_dir(recipe)
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
    card.write_card(out, recipe=recipe, title=title)
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


def _check_start(start_from: Path | None, steps: int | None) -> None:
    if start_from is not None and steps is None:
        raise typer.BadParameter(
            "--start-from needs --steps, the number of steps to continue for"
        )


def _check_recipe(recipe: str) -> None:
    """Make sure that there is a recipe of that name.

    Raises:
        SpecError: there is no such recipe.
    """
    if recipe not in RECIPES:
        raise SpecError(f"recipe {recipe!r}: expected one of {', '.join(RECIPES)}")


if __name__ == "__main__":
    app(prog_name=PROGRAM)
