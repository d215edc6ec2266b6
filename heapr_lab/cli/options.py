"""The options of the command line, each written once.

What they ask for is opened here, too.
"""

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from heapr_lab.errors import one_of
from heapr_lab.models.dtypes import DTYPES, device_name
from heapr_lab.models.named import dense_of, hub_id
from heapr_lab.models.safetensors_headers import check_there
from heapr_lab.streaming.sizes import size_of

if TYPE_CHECKING:
    from heapr_lab.workbench.workbench import Workbench


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
    check_there(name)
    if dense_of(name) is None:
        return hub_id(name)
    from heapr_lab.models.loading import model_folder

    return str(model_folder(name))


def dtype_name(name: str) -> str:
    """A type that models can be run in."""
    return str(one_of(name, DTYPES, name="dtype"))


def profile_name(name: str | None) -> str | None:
    """A profile that there is, if one is given."""
    if name is not None:
        from heapr_lab.workbench.settings import profile_of

        profile_of("", name)
    return name


_amount = functools.partial(typer.Option, rich_help_panel="How much")
_method = functools.partial(typer.Option, rich_help_panel="Method")
_shape = functools.partial(typer.Option, rich_help_panel="Shape")
_text = functools.partial(typer.Option, rich_help_panel="Text")
_machine = functools.partial(typer.Option, rich_help_panel="Machine")
_output = functools.partial(typer.Option, rich_help_panel="Output")

NAME_HELP = (
    "A hub id or a model of the paper, a local folder, `lab`, `smolmoe` or `smollm2`; "
    "a dense Llama with `as-moe:` before its name."
)
Model = Annotated[
    str, typer.Argument(metavar="MODEL", help=NAME_HELP, callback=model_name)
]
AsJson = Annotated[bool, _output("--json", help="Print one JSON object.")]
Profile = Annotated[
    str | None,
    _text(
        help="Amount of text to calibrate on: small (8 windows of 64 tokens), lab (128 "
        "of 256), pretrained (32 of 512), paper (128 of 2048) [default: the model's].",
        callback=profile_name,
    ),
]
Device = Annotated[
    str, _machine(help="auto, cpu, cuda, cuda:1, ...", callback=device_name)
]
Dtype = Annotated[
    str, _machine(help="auto, float32, bfloat16, ...", callback=dtype_name)
]
Stream = Annotated[
    bool | None,
    _machine(
        "--stream/--no-stream",
        help="Keep decoder layers on disk and read them one at a time [default: where "
        "the scores do not fit].",
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
    int | None, _text(min=2, help="Tokens per window [default: the profile's].")
]
Corpus = Annotated[
    str, _text(help="Calibration text: a corpus, a file, or a mixture of them.")
]
Sequences = Annotated[
    int | None, _text(min=1, help="Number of windows [default: the profile's].")
]
OwnTextOrMethods = Annotated[
    float | None,
    _text(
        "--own-text",
        min=0,
        help="Windows that the model writes itself, for each of the corpus, so that "
        "what the corpus does not show is not pruned away [default: 0.25 with "
        "--method best, else 0].",
    ),
]
EstimatorOrMethods = Annotated[
    str | None,
    _method(
        "--estimator",
        help="heapr, heapr_total, fisher, elimination, magnitude, frequency or random "
        "[default: the method's].",
    ),
]
Importance = Annotated[
    Path | None,
    _method(
        exists=True,
        dir_okay=False,
        help="A table of `score` [default: measured, or from the cache].",
    ),
]
Mask = Annotated[
    Path | None, typer.Option(exists=True, dir_okay=False, help="A mask of `prune`.")
]
Limit = Annotated[int | None, typer.Option(min=1, help="Number of items of each task.")]
Tasks = Annotated[
    str,
    typer.Option(
        help="Tasks, separated by commas: those of the harness, such as arc_easy; "
        "continuation (of pydocs), or continuation:CORPUS."
    ),
]
Ratio = Annotated[
    str,
    _amount(metavar="SHARE", help="Share to prune, in [0, 1): 0.25 or 25%, not 25."),
]
MethodName = Annotated[
    str,
    _method(
        help="best: one of two masks with compensated weights, or HEAPr where held-out "
        "calibration windows see no gain (with --estimator, compensated weights; with "
        "--importance, weights unchanged); paper: HEAPr as published."
    ),
]
Heal = Annotated[
    int,
    _method(
        min=0,
        help="Windows of the corpus on which what is kept is then trained to predict "
        "the text, and as the dense model does; 128 is a good start. Resumes after an "
        "interruption. Not with --importance.",
    ),
]
Engine = Annotated[
    str | None,
    _shape(
        "--for",
        help="Choose structure and multiple for an engine: transformers, vllm, "
        "vllm-fp8, sglang, sglang-fp8, tensorrt-llm, llama.cpp or llama.cpp-q4_k.",
    ),
]
Structure = Annotated[
    str | None, _shape(help="ragged, aligned, per_layer or uniform [default: ragged].")
]
Multiple = Annotated[
    int | None,
    _shape(
        min=1,
        help="Widths are multiples of it [default for aligned and uniform: the "
        "largest power of two up to d_inter / 8].",
    ),
]
Of = Annotated[
    str,
    _amount(
        help="What the ratio counts: routed atoms (atoms), or parameters of the whole "
        "model (model)."
    ),
]
PrunedOut = Annotated[
    Path | None,
    _output(help="FILE.parquet for only the mask, else a checkpoint folder."),
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
