"""The options and the examples of the command line, each written once.

What they ask for is opened here, too.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from heapr_lab.models.dtypes import check_dtype
from heapr_lab.models.named import check_there, dense_of
from heapr_lab.models.paper_models import hub_id
from heapr_lab.streaming.sizes import size_of

if TYPE_CHECKING:
    from heapr_lab.workbench.workbench import Workbench

EXAMPLES = """\b
Examples:
  heapr-lab score lab
  heapr-lab prune lab --ratio 0.25 --out mask.parquet
  heapr-lab prune lab --ratio 0.4 --structure uniform --multiple 8 --out pruned
  heapr-lab evaluate lab --mask mask.parquet --corpora pydocs,ptb --kl
  heapr-lab reproduce
"""
PLAN_EXAMPLES = """\b
Examples:
  heapr-lab plan lab
  heapr-lab plan Qwen/Qwen3-30B-A3B --memory 80GB --dtype bfloat16
  heapr-lab plan ./config.json --memory 24GB --json
"""
SCORE_EXAMPLES = """\b
Examples:
  heapr-lab score lab --out importance.parquet
  heapr-lab score Qwen/Qwen1.5-MoE-A2.7B --corpus wikitext2 --seq-len 2048
  heapr-lab score ./my_moe --corpus "0.7*pydocs + 0.3*ptb" --seed 1 --json
"""
PRUNE_EXAMPLES = """\b
Examples:
  heapr-lab prune lab --ratio 0.25 --out mask.parquet
  heapr-lab prune lab --ratio 0.4 --structure uniform --multiple 8 --out pruned
  heapr-lab prune lab --importance importance.parquet --ratio 40%
  heapr-lab prune lab --ratio 0.3 --structure aligned --multiple 16 --of model
  heapr-lab prune lab --ratio 0.4 --method paper --out as_published
  heapr-lab prune lab --ratio 0.4 --heal 128 --out healed
  heapr-lab prune lab --max-rise 0.02 --out at_most_two_per_cent
"""
EVALUATE_EXAMPLES = """\b
Examples:
  heapr-lab evaluate lab --corpora pydocs,ptb
  heapr-lab evaluate lab --mask mask.parquet --kl --tasks continuation
  heapr-lab evaluate ./my_moe --tasks arc_easy,piqa --limit 200 --json
"""
COMPARE_EXAMPLES = """\b
Examples:
  heapr-lab compare --list
  heapr-lab compare lab --methods heapr,reap,naee --ratios 0.2,0.4
  heapr-lab compare ./my_moe --methods camera-p --set camera-p.alpha=0.95 --json
  heapr-lab compare ./my_moe --methods heapr,reap --tasks arc_easy,piqa --limit 200
  heapr-lab compare qwen1.5-moe-a2.7b-chat --preset paper-table1
"""
REPRODUCE_EXAMPLES = """\b
Examples:
  heapr-lab reproduce
  heapr-lab reproduce --model ./my_moe --profile lab
  heapr-lab reproduce --no-notebooks --out my_figures
"""
PROVENANCE_EXAMPLES = """\b
Examples:
  heapr-lab provenance figures/4_boundary.png
  heapr-lab provenance mask.parquet --json
  heapr-lab provenance pruned
"""
APP_EXAMPLES = """\b
Examples:
  heapr-lab app
  heapr-lab app ./my_moe --profile lab
  heapr-lab app importance.parquet --port 8866 --no-browser
"""


def _size(size: str | None) -> str | None:
    """`size`, if it is one, whether it is needed or not.

    Raises:
        SpecError: it is not.
    """
    if size is not None:
        size_of(size, least=0)
    return size


def model_name(name: str) -> str:
    """The hub id or folder of a model as it was named.

    A dense model is made a MoE here, so that all that follows sees its folder.

    Raises:
        SpecError: there is no such model.
        LayoutError: a dense one has no such form.
    """
    dense, known = dense_of(name), hub_id(name)
    check_there(known if dense is None else dense)
    if dense is None:
        return known
    from heapr_lab.models.loading import model_folder

    return str(model_folder(name))


def dtype_name(name: str) -> str:
    """A type that models can be run in."""
    check_dtype(name)
    return name


def profile_name(name: str | None) -> str | None:
    """A profile that there is, if one is given."""
    if name is not None:
        from heapr_lab.workbench.settings import profile_of

        profile_of("", name)
    return name


NAME_HELP = (
    "A hub id or a model of the paper, a local folder, `lab`, `smolmoe` or `smollm2`; "
    "a dense Llama with `as-moe:` before its name."
)
Model = Annotated[
    str, typer.Argument(metavar="MODEL", help=NAME_HELP, callback=model_name)
]
ModelOption = Annotated[
    str, typer.Option("--model", help=NAME_HELP, callback=model_name)
]
AsJson = Annotated[
    bool,
    typer.Option("--json", help="Print one JSON object.", rich_help_panel="Output"),
]
Profile = Annotated[
    str | None,
    typer.Option(
        help="Amount of text: small, lab or paper [default: the model's].",
        callback=profile_name,
        rich_help_panel="Text",
    ),
]
Device = Annotated[
    str, typer.Option(help="auto, cpu, cuda, cuda:1, ...", rich_help_panel="Machine")
]
Dtype = Annotated[
    str,
    typer.Option(
        help="auto, float32, bfloat16, ...",
        callback=dtype_name,
        rich_help_panel="Machine",
    ),
]
Stream = Annotated[
    bool | None,
    typer.Option(
        "--stream/--no-stream",
        help="Keep decoder layers on disk and read them one at a time [default: where "
        "the scores do not fit].",
        rich_help_panel="Machine",
    ),
]
HostMemory = Annotated[
    str | None,
    typer.Option(
        "--host-memory",
        metavar="SIZE",
        callback=_size,
        help="Of a streamed model: memory for the states of its layers, such as 16GB; "
        "others go to files in the cache [default: half of what is free].",
    ),
]
SeqLen = Annotated[
    int | None,
    typer.Option(
        min=2,
        help="Tokens per window [default: the profile's].",
        rich_help_panel="Text",
    ),
]
Corpus = Annotated[
    str,
    typer.Option(
        help="Calibration text: a corpus, a file, or a mixture of them.",
        rich_help_panel="Text",
    ),
]
Sequences = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Number of windows [default: the profile's].",
        rich_help_panel="Text",
    ),
]
Seed = Annotated[int, typer.Option(help="Seed for drawing the windows.")]
OwnText = Annotated[
    float,
    typer.Option(
        min=0, help="Windows that the model writes itself, for each of the corpus."
    ),
]
OwnTextOrMethods = Annotated[
    float | None,
    typer.Option(
        "--own-text",
        min=0,
        help="Windows that the model writes itself, for each of the corpus, so that "
        "what the corpus does not show is not pruned away [default: 0.25 with "
        "--method best, else 0].",
        rich_help_panel="Text",
    ),
]
Workers = Annotated[
    int | None,
    typer.Option(
        "--workers",
        min=1,
        help="Number of processes [default: one per core for a small model on the "
        "CPU, else one].",
    ),
]
OutFolder = Annotated[Path | None, typer.Option(help="Folder for the figures.")]
EstimatorOrMethods = Annotated[
    str | None,
    typer.Option(
        "--estimator",
        help="heapr, heapr_total, fisher, shrunk, elimination, camera, magnitude, "
        "frequency or random [default: the method's].",
        rich_help_panel="Method",
    ),
]
Importance = Annotated[
    Path | None,
    typer.Option(
        exists=True,
        dir_okay=False,
        help="A table of `score` [default: the cache].",
        rich_help_panel="Method",
    ),
]
Mask = Annotated[
    Path | None, typer.Option(exists=True, dir_okay=False, help="A mask of `prune`.")
]
Tasks = Annotated[
    str,
    typer.Option(
        help="Tasks, separated by commas: those of the harness, such as arc_easy; "
        "continuation (of pydocs), or continuation:CORPUS."
    ),
]
Ratio = Annotated[
    str | None,
    typer.Option(
        metavar="SHARE",
        help="Share to prune, in [0, 1): 0.25 or 25%, not 25.",
        rich_help_panel="How much",
    ),
]
MaxRise = Annotated[
    float | None,
    typer.Option(
        help="Instead of --ratio: prune as much as possible while perplexity, before "
        "compensation, rises by at most this share; 0.02 is 2 %.",
        rich_help_panel="How much",
    ),
]
MethodName = Annotated[
    str,
    typer.Option(
        help="best: one of two masks with compensated weights, or HEAPr where held-out "
        "calibration windows see no gain (with --estimator, compensated weights; with "
        "--importance, weights unchanged); paper: HEAPr as published.",
        rich_help_panel="Method",
    ),
]
Heal = Annotated[
    int,
    typer.Option(
        min=0,
        help="Windows of the corpus on which what is kept is then trained to predict "
        "the text, and as the dense model does; 128 is a good start. Resumes after an "
        "interruption. Not with --importance.",
        rich_help_panel="Method",
    ),
]
Engine = Annotated[
    str | None,
    typer.Option(
        "--for",
        help="Choose structure and multiple for an engine: transformers, vllm, "
        "vllm-fp8, sglang, sglang-fp8, tensorrt-llm, llama.cpp or llama.cpp-q4_k.",
        rich_help_panel="Shape",
    ),
]
Structure = Annotated[
    str | None,
    typer.Option(
        help="ragged, aligned, per_layer or uniform [default: ragged].",
        rich_help_panel="Shape",
    ),
]
Multiple = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Widths are multiples of it [default for aligned and uniform: the "
        "largest power of two up to d_inter / 8].",
        rich_help_panel="Shape",
    ),
]
Of = Annotated[
    str,
    typer.Option(
        help="What the ratio counts: routed atoms (atoms), or parameters of the whole "
        "model (model).",
        rich_help_panel="How much",
    ),
]
PrunedOut = Annotated[
    Path | None,
    typer.Option(
        help="FILE.parquet for only the mask, else a checkpoint folder.",
        rich_help_panel="Output",
    ),
]


def open_bench(
    model: str,
    profile: str | None,
    seq_len: int | None,
    device: str,
    dtype: str,
    stream: bool | None,
    host_memory: str | None,
) -> "Workbench":
    """The workbench that the options of these names ask for."""
    from heapr_lab.workbench.workbench import open_workbench

    return open_workbench(
        model,
        profile=profile,
        seq_len=seq_len,
        device=device,
        dtype=dtype,
        stream="auto" if stream is None else stream,
        host_memory=host_memory,
    )
