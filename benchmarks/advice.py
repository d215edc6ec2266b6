"""The tables of docs/when_not.md, each made from committed results."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from benchmarks.figures import real
from benchmarks.index import BENCHMARKS, results_of, rows_beside
from heapr_lab.experiments.answers import listed
from heapr_lab.experiments.intervals import UNDECIDED, loss_difference, of_error, state

COUNTED = ("compress", "fisher + compensation", "elimination + compensation")
"""`compress`, and the two that it chooses from besides HEAPr's own mask."""
WITH_OWN_TEXT = ("compress + own text", "heapr + own text")
"""The default of the command line, and HEAPr's mask calibrated in the same way."""
_ERRORS = 2.0
"""Standard errors that a difference exceeds to count."""
_METHODS = ("heapr", "heapr-expert", "reap", "evoesap")
_OF_EXPERTS = (
    "heapr-expert",
    "msan",
    "man",
    "naee",
    "reap",
    "evoesap",
    "ean",
    "mone",
    "frequency",
    "hc-smoe",
    "ream",
    "random-groups",
    "sub-moe-like",
    "mc-smoe",
)
_MORE = "heapr_total minus heapr, Δloss [nats per token] ↓"
_MIXTURE = "0.5*pydocs + 0.5*wikitext2"
_OWN = " + own text"
"""How the names of texts end to which self-generated windows were added."""


def tables() -> dict[str, pd.DataFrame]:
    """Every table of the page, by the name of its block."""
    quality = results_of("quality")
    return {
        "pretrained": _said_rows(default_gaps()),
        "worse": worse_table(quality),
        "runs": runs_table(quality),
        "experts": experts_table(results_of("methods")),
        "whole_experts": _said_rows(_less_heapr(_OF_EXPERTS)),
        "quantised": quantised_table(results_of("quantised")),
        "text": text_table(quality),
        "more_text": _said_rows(more_text_gaps()),
    }


def _said_rows(gaps: pd.DataFrame) -> pd.DataFrame:
    return pd.DataFrame(map(real.said, gaps.to_dict("records")))


def sentences() -> dict[str, str]:
    """What the tables of the pretrained MoE come to, by the name of its block."""
    return {
        "accuracy_said": _accuracy_said(),
        "experts_said": _experts_said(),
        "own_text_said": _own_text_said(),
    }


def _own_text_said() -> str:
    """What it costs to write text, where scores were measured without it as well."""
    sizes = rows_beside("real", "sizes")
    rows = sizes[sizes["model"].eq(real.MODEL) & sizes["method"].eq("heapr")]
    (own,) = rows[rows["fitted_to"].eq(f"{real.FITTED_TO}{_OWN}")].to_dict("records")
    alike = rows["fitted_to"].eq(real.FITTED_TO) & rows["ratio"].eq(own["ratio"])
    plain = rows.loc[alike & rows["device"].eq(own["device"]), "seconds_fit"]
    return (
        f"HEAPr's scores took {own['seconds_fit']:.0f} s of CPU with the text and its "
        f"writing, {plain.median():.0f} s without (one core of {own['device']})."
    )


def _accuracy_said() -> str:
    verdicts = [gap.verdict for gap in default_gaps()[real.ACCURACY]]
    return (
        f"In {verdicts.count(UNDECIDED)} of {len(verdicts)} rows the interval of the "
        "accuracy contains zero: there the lower loss has not been shown to help on "
        "tasks."
    )


def _experts_said() -> str:
    """Which methods of whole experts lose less than atoms, and on which text."""
    table = _less_heapr(_OF_EXPERTS)
    table = table[table["removed"].eq(table["removed"].iloc[0])].set_index("method")
    texts = []
    for corpus, text in real.TEXTS.items():
        gaps = table[real.LOSSES[corpus]].items()
        less = [method for method, gap in gaps if gap.high < 0]
        texts.append(f"on {text}, {listed(less) if less else 'none'}")
    return f"Which lose less than atoms there, by their intervals: {'; '.join(texts)}."


def default_gaps() -> pd.DataFrame:
    """What the default loses less than HEAPr does, by ratio and calibration text."""
    few = BENCHMARKS["real"].machine()["calibration"].partition(" of")[0]
    texts = {real.FITTED_TO: few, real.FRONT_TEXT: real.FRONT_TEXT.partition(", ")[2]}
    parts = []
    for text, said in texts.items():
        table = _less_heapr((real.DEFAULT,), text).drop(columns="method")
        table.insert(1, "calibrated on", said)
        parts.append(table)
    return pd.concat(parts).sort_values("removed", kind="stable", ignore_index=True)


def _less_heapr(
    methods: Sequence[str], fitted_to: str = real.FITTED_TO
) -> pd.DataFrame:
    """How far methods are from HEAPr: `real.apart`, for each ratio and method."""
    windows, items = (
        frame[real.of_model(frame) & frame["fitted_to"].eq(fitted_to)]
        for frame in (rows_beside("real", part) for part in ("windows", "items"))
    )
    there = {*zip(windows["ratio"], windows["method"], strict=True)}
    ratios = sorted({ratio for ratio, _ in there})
    return pd.DataFrame(
        {"method": method, "removed": f"{ratio:.0%}"}
        | _apart(windows, items, (method, "heapr"), ratio)
        for ratio, method in itertools.product(ratios, methods)
        if (ratio, method) in there
    )


def more_text_gaps() -> pd.DataFrame:
    """What more windows, or self-generated ones, change on the pretrained MoE.

    As `real.apart`, a row for each method and ratio.
    """
    windows, items = (rows_beside("real", part) for part in ("windows", "items"))
    windows, items = (
        frame[real.of_model(frame)].assign(method=frame["method"] + frame["fitted_to"])
        for frame in (windows, items)
    )
    added = tuple(f"{real.FITTED_TO}{text}" for text in (", ", _OWN))
    more = windows[windows["fitted_to"].str.startswith(added)]
    states = more[["ratio", "method", "fitted_to"]].drop_duplicates()
    states = states.sort_values(["ratio", "method"])
    rows = []
    for ratio, name, text in states.itertuples(index=False):
        method = name.removesuffix(text)
        row = {"method": method, "removed": f"{ratio:.0%}", "calibrated on": text}
        pair = name, f"{method}{real.FITTED_TO}"
        rows.append(row | _apart(windows, items, pair, ratio))
    return pd.DataFrame(rows)


def _apart(
    windows: pd.DataFrame, items: pd.DataFrame, pair: tuple[str, str], ratio: float
) -> dict[str, Any]:
    """What the first of two methods loses less the second, and on how much text."""
    gaps = real.apart(windows, items, pair, ratio)
    return gaps | _counts(windows, items, pair, ratio)


def _counts(
    windows: pd.DataFrame, items: pd.DataFrame, pair: tuple[str, str], ratio: float
) -> dict[str, str]:
    """Of how many windows and items two methods are compared."""
    counts = {}
    for name, frame, keys in (
        ("windows of each corpus", windows, ["corpus", "window"]),
        ("items of a task", items, ["task", "item"]),
    ):
        sides = (state(frame, one, ratio)[keys] for one in pair)
        sizes = pd.merge(*sides).groupby(keys[0], sort=False).size().astype(str)
        counts[name] = " / ".join(dict.fromkeys(sizes))
    return counts


def uses_table() -> pd.DataFrame:
    """What it gains to count the tokens of an expert, with 95 % intervals.

    `heapr_total` minus HEAPr where both remove as many atoms. Lab models are calibrated
    on the corpus that they are tested on.
    """
    rows = results_of("quality")
    same_text = rows["calibration"].eq(rows["test"]) & rows["ratio"].eq(0.4)
    states = rows[rows["variant"].eq("heapr_total") & rows["seed"].eq(0) & same_text]
    lines = [
        {
            "model": row["model"],
            "loss on": row["test"],
            "removed": f"{row['ratio']:.0%}",
            _MORE: of_error(row["against_paper"], row["stderr"]).said(),
        }
        for row in states.to_dict("records")
    ]
    windows = real.first_states(rows_beside("real", "windows"))
    for corpus, part in windows.groupby("corpus", sort=False):
        gap = loss_difference(part, "heapr_total", "heapr", 0.25)
        row = (real.MODEL, corpus, "25%", gap.said() if gap else "–")
        lines.append(dict(zip(lines[0], row, strict=True)))
    return pd.DataFrame(lines)


def worse_table(rows: pd.DataFrame) -> pd.DataFrame:
    """How often something else loses more than HEAPr on the calibrated corpus.

    What was not measured at a ratio has a dash there.

    Args:
        rows: of `benchmarks/quality.py`.
    """
    states = rows[rows["calibration"].eq(rows["test"])]
    paper = states[states["variant"].eq("heapr")].groupby("ratio")["delta_nll"].median()
    table = pd.DataFrame({"HEAPr's Δloss, median [nats per token]": paper})
    for name in (*COUNTED, *WITH_OWN_TEXT):
        part = states[states["variant"].eq(name)]
        worse = part["against_paper"].gt(_ERRORS * part["stderr"])
        counts = worse.groupby(part["ratio"]).agg(["sum", "size"]).astype(str)
        table[f"{name} loses more"] = counts["sum"] + " of " + counts["size"]
    return _in_words(table.rename_axis("removed").fillna("–").reset_index())


def runs_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Every run of `worse_table`, with 95 % intervals of what exceeds HEAPr's Δloss.

    Args:
        rows: of `benchmarks/quality.py`.
    """
    states = rows[rows["calibration"].eq(rows["test"])]
    runs = ["model", "test", "seed", "ratio"]
    table = states[states["variant"].eq("heapr")].set_index(runs)[["delta_nll"]]
    for name in ("compress", WITH_OWN_TEXT[0]):
        part = states[states["variant"].eq(name)].set_index(runs)
        gaps = map(of_error, part["against_paper"], part["stderr"])
        said = pd.Series([gap.said() for gap in gaps], part.index)
        table[f"{name} minus HEAPr"] = said.reindex(table.index).fillna("–")
    table = table.rename(columns={"delta_nll": "HEAPr's Δloss [nats per token]"})
    table = table.rename_axis(["model", "text", "draw", "removed"])
    return _in_words(table.reset_index())


def _in_words(table: pd.DataFrame) -> pd.DataFrame:
    """A table with self-generated text under its full name, and ratios as shares."""
    table = table.rename(columns=lambda name: name.replace("own", "self-generated"))
    return table.assign(removed=table["removed"].map("{:.0%}".format))


def experts_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Single atoms beside whole experts at 40 %, model by model.

    Args:
        rows: of `benchmarks/methods.py`.
    """
    named = rows.assign(method=rows["variant"].str.removesuffix("-like"))
    named = named[named["method"].isin(_METHODS) & named["ratio"].eq(0.4)]
    losses = named.filter(regex="^delta_nll ")
    texts = {
        "pydocs": losses["delta_nll pydocs"],
        "other": losses.drop(columns="delta_nll pydocs").mean(axis="columns"),
    }
    parts = [named.assign(text=text, loss=loss) for text, loss in texts.items()]
    table = _by_model(pd.concat(parts), ["text", "method"], "loss")
    order = [(text, name) for text in texts for name in _METHODS]
    return table.reindex([row for row in order if row in table.index]).reset_index()


def _by_model(rows: pd.DataFrame, index: list[str], loss: str) -> pd.DataFrame:
    """A column for each model, and their mean, of losses in nats per token."""
    table = rows.pivot_table(index=index, columns="model", values=loss, sort=False)
    table.columns = [f"{model.removesuffix(' model')} ↓" for model in table.columns]
    return table.assign(**{"mean ↓": table.mean(axis="columns")}).map(_said)


def _said(loss: float) -> str:
    return "–" if pd.isna(loss) else f"{loss:.3f}"


def quantised_table(rows: pd.DataFrame) -> pd.DataFrame:
    """What int8, int4 and pruning cost, with the size that each leaves.

    Args:
        rows: of `benchmarks/quantised.py`.
    """
    states: Mapping[str, tuple[str, float]] = {
        "int8": ("int8", 0.0),
        "int4": ("int4", 0.0),
        "40 % pruned": ("bfloat16", 0.4),
        "40 % pruned, int8": ("int8", 0.4),
        "40 % pruned, int4": ("int4", 0.4),
    }
    dense = rows[rows["weights"].eq("bfloat16") & rows["ratio"].eq(0.0)]
    whole = dense.set_index("model")["bytes"]
    lines = []
    for name, (weights, ratio) in states.items():
        part = rows[rows["weights"].eq(weights) & rows["ratio"].eq(ratio)]
        size = part.set_index("model")["bytes"] / whole
        row = {"model is": name, "size, mean ↓": f"{size.mean():.0%}"}
        row |= {
            f"Δloss, {run['model']} ↓": f"{run['delta_nll']:.4f} ± {run['stderr']:.4f}"
            for run in part.to_dict("records")
        }
        lines.append(row)
    return pd.DataFrame(lines)


def text_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Δloss of HEAPr at 40 % by the corpus of the calibration, model by model.

    Args:
        rows: of `benchmarks/quality.py`.
    """
    chosen = rows["variant"].eq("heapr") & rows["ratio"].eq(0.4) & rows["seed"].eq(0)
    part = rows[chosen & rows["calibration"].isin(["pydocs", "wikitext2", _MIXTURE])]
    part = part.rename(columns={"calibration": "calibrated on", "test": "loss on"})
    index = ["loss on", "calibrated on"]
    return _by_model(part, index, "delta_nll").sort_index().reset_index()
