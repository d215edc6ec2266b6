"""Run the tutorial as it is written, and write into it what that took.

`python docs/run_tutorial.py` has a folder and a cache of its own, so that nothing is
there beforehand, and makes the environment anew in a copy of the project.
"""

import contextlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from IPython.core.interactiveshell import InteractiveShell

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.readme import as_block, fill_blocks
from heapr_lab.storage import paths

TUTORIAL = Path(__file__).with_name("tutorial.md")
QWEN3_30B_A3B: dict[str, Any] = {
    "dtype": "bfloat16",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 48,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151936,
    "tie_word_embeddings": False,
}
"""What its `config.json` on the hub says of sizes."""

ENTER = ". .venv/bin/activate"
"""The line that is not run: whatever runs this is in an environment already."""
SERVER = "make lab"
"""The line that would not end: make only says what it would do."""

_FENCE = re.compile(r"^```(console|ipython|python)\n(.*?)^```$", re.M | re.S)
_PERPLEXITY = re.compile(r"^pydocs perplexity +([\d.]+)$", re.M)
_RATIO = 0.4
_GIB = 2**30


@dataclass(frozen=True)
class Step:
    """One command, or one cell."""

    language: str
    """`console`, else that of a cell."""
    code: str

    @property
    def name(self) -> str:
        """The command, or what a cell ends with."""
        return self.code.splitlines()[-1]


@dataclass(frozen=True)
class Done:
    """A step that was run."""

    step: Step
    seconds: float
    output: Any
    """What a command printed, or what a cell gave."""


def steps(text: str) -> Iterator[Step]:
    """Every command and every cell of a page, in its order."""
    for language, block in _FENCE.findall(text):
        if language != "console":
            yield Step(language, block)
            continue
        for line in block.splitlines():
            yield Step(language, line.removeprefix("$ "))


def run(
    steps: Iterable[Step],
    command: Callable[[str], str],
    shell: InteractiveShell,
) -> Iterator[Done]:
    """Run the steps one after the other.

    Args:
        steps: what to run.
        command: runs a command and returns what it printed.
        shell: runs the cells.
    """
    for step in steps:
        started = time.perf_counter()
        if step.language == "console":
            output: Any = command(step.code)
        else:
            ran = shell.run_cell(step.code)
            ran.raise_error()
            output = ran.result
        yield Done(step, time.perf_counter() - started, output)


# --- on this machine --------------------------------------------------------------


def main() -> None:
    """Run all of it on the lab model, and fill the tables of the tutorial."""
    tutorial = steps(TUTORIAL.read_text("utf-8"))
    with tempfile.TemporaryDirectory() as name, contextlib.chdir(name):
        os.environ["HEAPR_CACHE_DIR"] = str(Path(name) / "cache")
        os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        done = list(run(tutorial, _command, InteractiveShell()))
    blocks = {
        "times": f"\n{_machine()}\n{as_block(times(done))}",
        "perplexity": as_block(perplexities(done)),
        "sizes": as_block(sizes()),
    }
    fill_blocks(TUTORIAL, blocks)


def _command(line: str) -> str:
    """What a command prints."""
    if line == ENTER:
        return ""
    if line == "make install":
        return _install()
    if line == SERVER:
        line = f"make -n -C {shlex.quote(str(paths.project_dir()))} lab"
    return subprocess.run(
        line, shell=True, check=True, stdout=subprocess.PIPE, text=True
    ).stdout


def _install() -> str:
    """Make the environment in a copy of the project, beside what else is written."""
    left_out = shutil.ignore_patterns(".venv", ".git", "cache", "_build", "*.egg-info")
    shutil.copytree(paths.project_dir(), "project", ignore=left_out)
    command = ["make", "-C", "project", "install"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return ""


def _machine() -> str:
    import torch

    load = os.getloadavg()[0]
    return (
        f"{os.cpu_count()} CPU cores, of which {torch.get_num_threads()} used; "
        f"mean load of the machine at the end, with everything else: {load:.1f}."
    )


# --- what was found ---------------------------------------------------------------


def times(done: Iterable[Done]) -> pd.DataFrame:
    """Seconds of every step that was really run, and of all up to it."""
    ran = [one for one in done if one.step.code not in {ENTER, SERVER}]
    seconds = pd.Series([one.seconds for one in ran])
    columns = {
        "command, or end of the cell": [f"`{one.step.name}`" for one in ran],
        "seconds": seconds.round().astype(int),
        "seconds so far": seconds.cumsum().round().astype(int),
    }
    return pd.DataFrame(columns)


def perplexities(done: Iterable[Done]) -> pd.DataFrame:
    """What `evaluate` printed."""
    rows = [
        (f"`{one.step.code}`", float(match[1]))
        for one in done
        if one.step.language == "console" and (match := _PERPLEXITY.search(one.output))
    ]
    return pd.DataFrame(rows, columns=["command", "perplexity on pydocs"])


def sizes() -> pd.DataFrame:
    """Bytes and counts of Qwen3-30B-A3B that follow from its configuration."""
    from transformers import Qwen3MoeConfig

    from heapr_lab.models.experts import describe, find_experts
    from heapr_lab.models.folders import skeleton_of
    from heapr_lab.refinement.activation_grams import default_span, sizes_of
    from heapr_lab.workbench.settings import PROFILES

    model = skeleton_of(Qwen3MoeConfig(**QWEN3_30B_A3B))
    layers, whole = find_experts(model), describe(model)
    n_experts, d_inter = sizes_of(layers[0], default_span(layers))
    shape = whole.layers[layers[0].layer]
    n_atoms = shape.n_atoms * len(layers)
    removed = int(_RATIO * n_atoms) * shape.atom_parameters
    routed = n_atoms * shape.atom_parameters
    paper = PROFILES["paper"]
    tokens = paper.n_sequences * paper.seq_len
    dense, down = whole.n_parameters, n_atoms * shape.d_expert
    rows = {
        "parameters": f"{dense:,}",
        "of them in routed atoms": f"{routed / dense:.1%}",
        "layers × experts × atoms": f"{len(layers)} × {n_experts} × {d_inter}",
        "rows of the importance table": f"{n_atoms:,}",
        "calibration tokens": f"{tokens:,}",
        "of them through a mean expert": f"{tokens * shape.top_k // n_experts:,}",
        "weights in bfloat16": _gib(2 * dense),
        "weights in float32": _gib(4 * dense),
        "sums of one layer, float64": _gib(2 * 8 * n_experts * d_inter**2),
        "inputs of one layer, bfloat16": _gib(2 * tokens * whole.d_model),
        "new W_down of all layers, bfloat16": _gib(2 * down),
        f"routed experts at ratio {_RATIO}, bfloat16": _gib(2 * (routed - removed)),
        f"checkpoint at ratio {_RATIO}, bfloat16": _gib(2 * (dense - removed)),
        f"dense model, new W_down and routed experts at {_RATIO} together": _gib(
            2 * (dense + down + routed - removed)
        ),
    }
    return pd.DataFrame(list(rows.items()), columns=["what", "how much"])


def _gib(n_bytes: float) -> str:
    return f"{n_bytes / _GIB:.1f} GiB"


if __name__ == "__main__":
    main()
