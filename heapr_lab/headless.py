"""What the commands do, without their options: models, files and rows of results."""

import contextlib
import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np

from heapr_lab import accounting
from heapr_lab.budgets import ratio_for_latency, ratio_for_loss
from heapr_lab.checkpoints import prune_folder, save_pruned, structure_of
from heapr_lab.compensation import Compensation, describe_weights, fit_compensation
from heapr_lab.evaluation import evaluate_perplexity
from heapr_lab.folders import read_config
from heapr_lab.harness import run_tasks
from heapr_lab.iterated import prune_in_rounds
from heapr_lab.masks import KeepMask
from heapr_lab.models import LAB, architecture_identity
from heapr_lab.pipeline import Setting, Workbench, open_workbench
from heapr_lab.progress import progress_bar
from heapr_lab.ragged import RaggedExperts
from heapr_lab.rules import Rules, as_fraction, exact_ratio
from heapr_lab.selection import select
from heapr_lab.shards import down_norms
from heapr_lab.specs import SpecError
from heapr_lab.surgery import masking, prune
from heapr_lab.table import ImportanceTable
from heapr_lab.uniform import skeleton_of, uniform_width

_CONTINUATION = "continuation"


def open_bench(
    model: str,
    *,
    profile: str | None,
    seq_len: int | None,
    device: str,
    dtype: str,
) -> Workbench:
    """A workbench, its profile's windows of another length if one is given."""
    bench = open_workbench(model, profile=profile, device=device, dtype=dtype)
    if seq_len is not None:
        bench.profile = dataclasses.replace(bench.profile, seq_len=seq_len)
    return bench


# --- files of this model ----------------------------------------------------------


def own_table(path: Path, source: Path, *, name: str) -> ImportanceTable:
    """The importance table in a file, if it was measured on the model in `source`.

    The model is not loaded: its configuration is compared, and the squared norms that
    the table has of its weights with those of some of the weights.

    Raises:
        SpecError: it was measured on another model, or does not say.
        CacheError: the file is damaged or of another kind.
    """
    table = ImportanceTable.read(path)
    spec = table.metadata.get("spec") or {}
    skeleton = skeleton_of(read_config(source))
    own = architecture_identity(skeleton)
    _check_identity(spec.get("model"), own, path=path, name=name)
    if "active" in spec["model"]:
        raise SpecError(
            f"{path} was measured while a mask was active, not on {name} as it is; "
            "make it with `heapr-lab score`"
        )
    _check_norms(down_norms(source, skeleton), table, path=path, name=name)
    return table


def _check_norms(
    norms: dict[int, np.ndarray], table: ImportanceTable, *, path: Path, name: str
) -> None:
    """Make sure that a table's squared norms are those of the model's weights.

    Raises:
        SpecError: they are not.
    """
    frame = table.frame
    first = frame[frame["expert"].eq(0)]
    for layer, expected in norms.items():
        found = first.loc[first["layer"].eq(layer), "w_down_sq"].to_numpy()
        # Rounding to another dtype moves a norm by less than a hundredth.
        if len(found) != len(expected) or not np.allclose(found, expected, rtol=1e-2):
            raise SpecError(
                f"{path} was made for another model than {name}: its weights in layer "
                f"{layer} have other norms; make it from this model"
            )


def own_mask(path: Path, bench: Workbench, *, name: str) -> KeepMask:
    """The keep mask in a file, if it was selected for this model.

    Raises:
        SpecError: it was selected for another model, or does not say.
        CacheError: the file is damaged or of another kind.
    """
    keep = KeepMask.read(path)
    _check_identity(keep.settings.get("model"), bench.identity, path=path, name=name)
    return keep


def with_model(keep: KeepMask, table: ImportanceTable) -> KeepMask:
    """`keep` with the model it is for, which `own_mask` looks at."""
    identity = (table.metadata.get("spec") or {}).get("model")
    return dataclasses.replace(keep, settings={**keep.settings, "model": identity})


def _check_identity(
    found: dict[str, str] | None, own: dict[str, str], *, path: Path, name: str
) -> None:
    """Make sure that the file `path` is of this model, in whatever dtype.

    Raises:
        SpecError: it is of another model, or does not say.
    """
    if not found:
        raise SpecError(
            f"{path} does not say which model it was made for; make it with "
            "`heapr-lab score` or `heapr-lab prune`"
        )
    # Not the dtype: a table measured in bfloat16 serves the same weights in float32.
    differ = [
        part
        for part in ("class", "config", "weights")
        if part in own and found.get(part) != own[part]
    ]
    if differ:
        shown = ", ".join(
            f"{part} {str(found.get(part))[:16]} instead of {own[part][:16]}"
            for part in differ
        )
        raise SpecError(
            f"{path} was made for another model than {name}: {shown}; make it from "
            "this model, with the same --dtype"
        )


# --- methods ----------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Method:
    """What is done where nothing else is asked for."""

    estimator: str
    of_table: str
    """Estimator where there is a table alone, and no text to run the model on."""
    compensated: bool
    """Whether what stays makes up for what goes, where there is text to do it on."""


METHODS = {
    "best": Method("elimination", of_table="shrunk", compensated=True),
    "paper": Method("heapr", of_table="heapr", compensated=False),
}


def find_method(name: str) -> Method:
    """The method of that name.

    Raises:
        SpecError: there is none.
    """
    if name not in METHODS:
        raise SpecError(f"method {name!r}: expected one of {', '.join(METHODS)}")
    return METHODS[name]


def check_choice(choice: dict[str, Any]) -> None:
    """Refuse before anything is measured what `select` would refuse afterwards.

    What depends on the model, such as how much can go at all, is seen later.
    """
    exact_ratio(choice["ratio"])
    rules = {name: value for name, value in choice.items() if name != "ratio"}
    if rules["structure"] == "aligned":
        rules["multiple"] = rules["multiple"] or 1  # chosen once widths are known
    for name in ("price", "protect_outliers"):
        if rules[name] is not None:
            rules[name] = as_fraction(rules[name], name=name)
    Rules(**rules | {"exclude_layers": tuple(rules["exclude_layers"])})


def ratio_of_rise(
    bench: Workbench,
    setting: Setting,
    choice: dict[str, Any],
    rise: float,
    *,
    corpus: str,
) -> float:
    """The largest ratio of atoms whose perplexity on `corpus` rises by at most `rise`.

    Raises:
        SpecError: the choice has more to it than a search can follow.
    """
    wanted = _searchable(setting, choice, option="--max-rise")
    found, _ = ratio_for_loss(bench, wanted, corpus, rise=rise)
    return found.ratio


def ratio_of_latency(
    bench: Workbench, setting: Setting, choice: dict[str, Any], share: float
) -> float:
    """The smallest ratio whose decoding takes at most `share` of the dense time here.

    Raises:
        SpecError: the choice has more to it than a search can follow, or no ratio is
            as fast.
    """
    wanted = _searchable(setting, choice, option="--max-latency")
    found, _ = ratio_for_latency(bench, wanted, share=share)
    return found.ratio


def _searchable(setting: Setting, choice: dict[str, Any], *, option: str) -> Setting:
    """`setting` with what a search over ratios can follow of the choice.

    Raises:
        SpecError: the choice has more to it.
    """
    names = ("estimator", "scope", "granularity", "structure", "multiple")
    more: dict[str, Any] = {
        "of": "atoms",
        "price": None,
        "exclude_layers": [],
        "min_atoms": 0,
        "protect_outliers": 0.0,
        "protect_unrouted": False,
    }
    beyond = [name for name, plain in more.items() if choice[name] != plain]
    if beyond:
        raise SpecError(
            f"{option} goes with {', '.join(names)}, not with {', '.join(beyond)}: "
            "give --ratio"
        )
    return dataclasses.replace(setting, **{name: choice[name] for name in names})


@dataclasses.dataclass(frozen=True)
class Chosen:
    """What stays, and the weights that make up for the rest, if any."""

    keep: KeepMask
    compensation: Compensation | None = None

    @classmethod
    def of_table(cls, table: ImportanceTable, choice: dict[str, Any]) -> "Chosen":
        """What a table alone says; `choice` as `select`."""
        return cls(select(table, **choice))


def choose(
    bench: Workbench,
    setting: Setting,
    choice: dict[str, Any],
    *,
    rounds: int,
    compensated: bool,
) -> Chosen:
    """What stays of a model at hand, in rounds and compensated where asked for."""
    table = bench.importance(setting)
    if rounds == 1 and not compensated:
        return Chosen.of_table(table, choice)
    windows = bench.calibration_set(setting)
    with progress_bar(f"compensation on {windows.label}", "window") as bar:
        if rounds > 1:
            found = prune_in_rounds(
                bench.model,
                windows,
                rounds=rounds,
                compensated=compensated,
                table=table,
                progress=bar,
                **choice,
            )
            return Chosen(found.keep, found.compensation)
        keep = select(table, **choice)
        if structure_of(keep) == "uniform":
            model: Any = bench.model
            uniform_width(keep, model.dtype)  # refused now rather than at the end
        return Chosen(keep, fit_compensation(bench.model, keep, windows, progress=bar))


# --- checkpoints ------------------------------------------------------------------


def facts_of(table: ImportanceTable, saved: dict[str, Any]) -> dict[str, Any]:
    """What manifest and card say of the importance, and of what is saved."""
    made = table.metadata.get("provenance", {}).get("calibration", {})
    shown = (
        "{n_sequences} windows of {seq_len} tokens of {corpus} ({split}), seed {seed}"
    )
    keys = ("n_sequences", "seq_len", "corpus", "split", "seed")
    known = all(key in made for key in keys)
    return {
        "calibration": shown.format(**made) if known else "not recorded",
        "importance": table.metadata.get("spec_hash"),
        "savings": saved,
    }


def write_checkpoint(
    out: Path, source: Path, keep: KeepMask, *, name: str, facts: dict[str, Any]
) -> None:
    """Slice the files in `source` into `out`, with progress and an ETA."""
    base = _base_of(name, source)
    with progress_bar("slicing", "B") as bar:
        prune_folder(source, keep, out, base=base, facts=facts, progress=bar)


def _base_of(name: str, source: Path) -> str:
    """How manifest and card call the model that was asked for by `name`."""
    return name if name == LAB or not Path(name).is_dir() else str(source)


def write_compensated(
    out: Path,
    source: Path,
    made: Chosen,
    bench: Workbench,
    setting: Setting,
    *,
    name: str,
    facts: dict[str, Any],
    corpora: list[str],
) -> None:
    """Write the compensated model to `out`, in the type of the files in `source`.

    Its perplexity is measured on the weights as they are written.
    """
    compensation = made.compensation
    assert compensation is not None
    pruned: Any = prune(bench.model, made.keep, downs=compensation.downs)
    windows = bench.calibration_set(setting)
    pruned.__dict__["heapr_weights"] = describe_weights(compensation, windows)
    stored = read_config(source).dtype or pruned.dtype
    for module in pruned.modules():
        if isinstance(module, RaggedExperts):
            _cast(module._parameters, stored, back=True)
    change = {}
    for corpus in corpora:
        test = bench.test_windows(corpus)
        after = evaluate_perplexity(pruned, test.ids).value
        change[corpus] = bench.perplexity(None, test).value, after
    if stored != pruned.dtype:
        _cast_for_files(pruned, stored)
    report = compensation.report.to_dict("records")
    more = {
        "perplexity": change,
        "compensation": compensation.settings,
        "errors": report,
    }
    save_pruned(
        pruned,
        out,
        tokenizer=bench.tokenizer,
        base=_base_of(name, source),
        source=source,
        facts=facts | more,
    )


def _cast(tensors: Any, dtype: Any, *, back: bool = False) -> None:
    """Cast floating tensors of a dictionary in place, or round them to `dtype`."""
    for tensor in tensors.values():
        if tensor is not None and tensor.is_floating_point():
            rounded = tensor.data.to(dtype)
            tensor.data = rounded.to(tensor.dtype) if back else rounded


def _cast_for_files(model: Any, dtype: Any) -> None:
    """Cast what is saved, but for what the family keeps in float32."""
    kept = tuple(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    state = model.state_dict(keep_vars=True)
    _cast({k: v for k, v in state.items() if not any(n in k for n in kept)}, dtype)


# --- results ----------------------------------------------------------------------


def savings(keep: KeepMask, table: ImportanceTable, *, seq_len: int) -> dict[str, Any]:
    """`accounting.summary` as plain numbers; counts are whole."""
    row = accounting.summary(keep, table, seq_len=seq_len).iloc[0]
    numbers = {str(name): float(value) for name, value in row.items()}
    return {
        name: round(value) if name.startswith(("parameters_", "bytes_")) else value
        for name, value in numbers.items()
    }


def perplexity_rows(
    bench: Workbench, keep: KeepMask | None, corpus: str, *, kl: bool
) -> list[dict[str, Any]]:
    """Rows of dataset, metric, value and stderr, of one corpus' test split.

    Raises:
        SpecError: there is no mask whose divergence from the dense model could be told.
    """
    if kl and keep is None:
        raise SpecError(
            "KL is that of a pruned model from the dense one, and there is no mask; "
            "give one (--mask), or leave --kl out"
        )
    windows = bench.test_windows(corpus)
    found = bench.perplexity(keep, windows)
    values = {"perplexity": found.value, "nll": found.nll}
    if kl and keep is not None:
        divergence = bench.divergence(keep, windows)
        values["kl"] = divergence.kl
        values["top1_agreement"] = divergence.top1_agreement
    return [_row(corpus, metric, value) for metric, value in values.items()]


def perplexity_change(
    bench: Workbench, keep: KeepMask, corpus: str
) -> tuple[float, float]:
    """Perplexity on a corpus' test split, dense and pruned."""
    windows = bench.test_windows(corpus)
    dense, pruned = (bench.perplexity(k, windows).value for k in (None, keep))
    return dense, pruned


def accuracy_rows(
    bench: Workbench, keep: KeepMask | None, task: str, *, limit: int | None
) -> list[dict[str, Any]]:
    """Rows of dataset, metric, value and stderr, of one task of the harness.

    `continuation`, of a corpus after a colon or of pydocs, comes from the cache.
    """
    name, _, corpus = task.partition(":")
    if name == _CONTINUATION:
        if limit is not None:
            bench.profile = dataclasses.replace(bench.profile, n_items=limit)
        found = bench.continuation_accuracy(keep, corpus or "pydocs")
        return [_row(task, "acc", found["value"], found["stderr"])]
    masked = contextlib.nullcontext() if keep is None else masking(bench.model, keep)
    with masked, progress_bar(task, "request") as bar:
        frame = run_tasks(
            bench.model, bench.tokenizer, [task], limit=limit, progress=bar
        )
    return [
        _row(row.task, row.metric, row.value, float(row.stderr))
        for row in frame.itertuples()
    ]


def _row(
    dataset: str, metric: str, value: float, stderr: float = math.nan
) -> dict[str, Any]:
    return {"dataset": dataset, "metric": metric, "value": value, "stderr": stderr}
