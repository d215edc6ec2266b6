"""The card of `smolmoe`: what it was made from and how, and how good it is."""

import math
from pathlib import Path
from typing import Any

import pandas as pd

from benchmarks.lab_model.card import markdown
from heapr_lab.pretrained.carved import Layout
from heapr_lab.pretrained.smollm2 import WHEEL
from heapr_lab.storage import paths
from heapr_lab.storage.files import read_json
from heapr_lab.tasks.paper_tasks import MEAN, METRICS, task_difference, task_summary

_CARD = Path(__file__).with_name("smolmoe.md").read_text("utf-8")

_RESULTS = """
Both models in float32, by `benchmarks/real.py`: perplexity on {windows} of {seq_len}
tokens of each test split, and mean accuracy (± one standard error) on the paper's
seven tasks, {asked}.

{table}

Accuracy of the carved model minus the dense one's, item by item on {n_items} of each
task: {difference} points.
"""
_NOT_MEASURED = """
Not measured yet: `python benchmarks/real.py` writes what is missing of `real.csv` and
`real_items.parquet`, with both models.
"""
_MODELS = ("smollm2", "smolmoe")
_CORPORA = ("wikitext2", "ptb", "c4")
_ITEM = ["task", "item"]


def write_card(folder: Path, mixture: dict[str, float], seq_len: int) -> None:
    """Write the card of the files in `folder`, README.md, from its training.json.

    What the tests say comes from the results of `benchmarks/real.py`, if there are any.

    Args:
        folder: it holds `delta.safetensors` and `training.json`.
        mixture: share of the training windows of each corpus.
        seq_len: tokens of a window.
    """
    record = read_json(folder / "training.json")
    spec, layout = record["spec"], Layout.named(record["chosen"])
    healing = spec["healing"]
    size = (folder / "delta.safetensors").stat().st_size
    text = _CARD.format(
        **vars(layout),
        parameters=record["parameters"],
        routed=record["routed_parameters"] / record["parameters"],
        wheel=f"{WHEEL.project} {WHEEL.version}",
        n_tokens=healing["n_tokens"],
        rate=healing["learning_rate"],
        batch=healing["batch_size"] * seq_len,
        settling=spec["settling"]["n_tokens"],
        trial=spec["trial"]["n_tokens"],
        seed=spec["seed"],
        torch=record["torch"],
        megabytes=size / 1e6,
        n_judged=record["n_judged"],
        n_items=record["n_items"],
        carved=100 * record["carved"]["value"],
        carved_error=100 * record["carved"]["stderr"],
        seq_len=seq_len,
        trials=_trials(record),
        stages=_stages(record),
        curve=_curve(record["kl"]),
        mixture=markdown(_shares(mixture)),
        smallest=record["load"][0],
        largest=record["load"][1],
        n_layers=len(record["captured"]),
        tests=_tests(paths.project_dir() / "benchmarks" / "results", seq_len),
    )
    (folder / "README.md").write_text(text, encoding="utf-8")


def _trials(record: dict[str, Any]) -> str:
    rows = []
    for name, trial in record["trials"].items():
        chosen = " (taken)" if name == record["chosen"] else ""
        rows.append(
            {
                "layout": name + chosen,
                "active": _active(name),
                "captured": trial["captured"],
                **{f"{c}, carved": p for c, p in trial["carved"].items()},
                **{f"{c}, healed": p for c, p in trial["healed"].items()},
                "least load": trial["load"][0],
            }
        )
    return markdown(pd.DataFrame(rows))


def _stages(record: dict[str, Any]) -> str:
    stages = ("dense", "healed", "rounded", "settled")
    rows = [{"state": stage, **record[stage]} for stage in stages]
    return markdown(pd.DataFrame(rows))


def _active(layout: str) -> float:
    """The share of the neurons that a token has."""
    sizes = Layout.named(layout)
    routed = sizes.n_experts * sizes.d_inter
    active = sizes.n_shared + sizes.top_k * sizes.d_inter
    return round(active / (sizes.n_shared + routed), 4)


def _tests(results: Path, seq_len: int) -> str:
    """Both models, dense and carved, and their difference item by item."""
    table, answers = results / "real.csv", results / "real_items.parquet"
    if not (table.is_file() and answers.is_file()):
        return _NOT_MEASURED
    rows = pd.read_csv(table)
    rows = rows[rows["method"].eq("dense")].set_index("model")
    if not {*_MODELS} <= {*rows.index}:
        return _NOT_MEASURED
    rows, items = rows.loc[[*_MODELS]], pd.read_parquet(answers)
    dense = items[items["method"].eq("dense")].set_index("model")
    states = [dense.loc[model, [*_ITEM, *METRICS]] for model in _MODELS]
    common = states[0][_ITEM].merge(states[1][_ITEM])
    pair = [common.merge(state) for state in states]
    shown = {
        **{c: rows[f"perplexity {c}"].map("{:.2f}".format) for c in _CORPORA},
        "windows": rows["windows"],
        "items of a task": [_n_items(state) for state in states],
        "accuracy [%]": [_mean(task_summary(state)) for state in states],
    }
    asked = "on the same items"
    if any(len(state) > len(common) for state in states):
        shown[f"on the same {_n_items(common)}"] = [
            _mean(task_summary(p)) for p in pair
        ]
        asked = "first on the items that each was asked, then on those that both were"
    return _RESULTS.format(
        windows="windows spread over them" if rows["spread"].any() else "all windows",
        seq_len=seq_len,
        asked=asked,
        table=markdown(pd.DataFrame(shown).reset_index()),
        n_items=_n_items(common),
        difference=_mean(task_difference(*reversed(pair)), "+.1f"),
    )


def _n_items(items: pd.DataFrame) -> int:
    """The items of each task."""
    return int(items.groupby("task").size().min())


def _mean(table: pd.DataFrame, form: str = ".1f") -> str:
    """The mean over tasks and its standard error, in per cent."""
    value, error = 100 * table.set_index("task").loc[MEAN, ["value", "stderr"]]
    return f"{value:{form}} ± {error:.1f}"


def _curve(values: list[float]) -> str:
    tenth = math.ceil(len(values) / 10)
    tenths = [values[start : start + tenth] for start in range(0, len(values), tenth)]
    return ", ".join(f"{sum(part) / len(part):.3f}" for part in tenths)


def _shares(mixture: dict[str, float]) -> pd.DataFrame:
    rows = [{"corpus": name, "share": share} for name, share in mixture.items()]
    return pd.DataFrame(rows)
