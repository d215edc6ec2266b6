"""What the commands do, without their options: models, files and rows of results."""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from heapr_lab.errors import SpecError
from heapr_lab.evaluation.harness import run_tasks
from heapr_lab.models.loading import LAB
from heapr_lab.progress import progress_bar
from heapr_lab.pruning.masks import KeepMask
from heapr_lab.pruning.options import Rules, as_fraction, exact_ratio
from heapr_lab.pruning.savings import at_context
from heapr_lab.pruning.selection import select
from heapr_lab.pruning.surgery import masking
from heapr_lab.refinement.compensation import fit_compensation
from heapr_lab.refinement.iterative import prune_in_rounds
from heapr_lab.workbench import export
from heapr_lab.workbench.budgets import ratio_for_latency, ratio_for_loss
from heapr_lab.workbench.export import Chosen
from heapr_lab.workbench.settings import Setting
from heapr_lab.workbench.workbench import Workbench, open_workbench

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


# --- what is chosen -----------------------------------------------------------------


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
        return Chosen(select(table, **choice))
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
            return Chosen(found.keep, found.compensation, windows)
        keep = select(table, **choice)
        export.check_width(keep, bench)  # refused now rather than at the end
        fitted = fit_compensation(bench.model, keep, windows, progress=bar)
        return Chosen(keep, fitted, windows)


# --- checkpoints ------------------------------------------------------------------


def write_pruned(
    out: Path,
    made: Chosen,
    *,
    source: Path,
    name: str,
    facts: dict[str, Any],
    corpora: list[str],
    bench: Callable[[], Workbench],
) -> None:
    """Write the checkpoint; without compensation the model need not be loaded."""
    base = name if name == LAB or not Path(name).is_dir() else str(source)
    with _reported() as report:
        if made.compensation is not None:
            export.write_checkpoint(
                out, made, bench(), base=base, facts=facts, corpora=corpora,
                report=report,
            )  # fmt: skip
            return
        change = {c: perplexity_change(bench(), made.keep, c) for c in corpora}
        facts = facts | ({"perplexity": change} if change else {})
        export.slice_checkpoint(
            out, source, made.keep, base=base, facts=facts, report=report
        )


@contextlib.contextmanager
def _reported() -> Iterator[export.Report]:
    """A bar for each part of what is reported."""
    with contextlib.ExitStack() as bars:
        shown: dict[str, Callable[[int, int], None]] = {}

        def report(done: int, total: int, text: str) -> None:
            if text not in shown:
                bars.close()
                label, _, unit = text.partition(": ")
                shown[text] = bars.enter_context(progress_bar(label, unit or "step"))
            shown[text](done, total)

        yield report


# --- results ----------------------------------------------------------------------


def in_words(saved: dict[str, Any]) -> dict[str, Any]:
    """`export.savings` for people: what was counted at which context, in which type."""
    at = at_context(saved["seq_len"])
    shown = {
        name: f"{value:,.6g} {at}" if name.startswith("flops_") else value
        for name, value in saved.items()
        if name not in {"seq_len", "bytes_per_parameter", "bytes_after_is"}
    }
    after = f"{saved['bytes_after']} ({saved['bytes_after_is']})"
    return shown | {"bytes_after": after}


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
