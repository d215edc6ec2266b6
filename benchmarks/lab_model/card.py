"""The lab model's card: its training data, loss and expert load."""

import json
import math
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from heapr_lab.evaluation.perplexity import evaluate_perplexity
from heapr_lab.importance.collect import collect_statistics
from heapr_lab.models.experts import find_experts
from heapr_lab.models.loading import load_model
from heapr_lab.progress import progress_bar
from heapr_lab.storage import files
from heapr_lab.text.calibration import CalibrationSet, load_windows
from heapr_lab.workbench.settings import PROFILES

_TESTED = PROFILES["lab"]
"""How many windows of a split are read, and how long they are, as everywhere else."""

_CARD = Path(__file__).with_name("card.md").read_text("utf-8")


def write_card(folder: Path, *, recipe: str, title: str = "The lab model") -> None:
    """Measure the model in `folder` and write its card, README.md.

    The numbers are also added to its training.json, under `evaluation`.

    Args:
        folder: the folder that `train_lab_model` wrote.
        recipe: the name of the one that it was trained by.
        title: the title of the card.

    Raises:
        CorpusError: one of the training corpora is not available.
    """
    training = files.read_json(folder / "training.json")
    model, tokenizer = load_model(folder, device="cpu", dtype="float32")
    corpora = list(training["mixture"])
    losses = pd.DataFrame(
        _loss(model, tokenizer, corpus, split)
        for corpus in corpora
        for split in ("validation", "test")
    )
    load = pd.DataFrame(_load(model, tokenizer, corpora))
    training["evaluation"] = {
        "losses": losses.to_dict("records"),
        "expert_load": load.to_dict("records"),
    }
    (folder / "training.json").write_text(json.dumps(training, indent=2) + "\n")
    spec = training["spec"]
    family = spec.get("family", "qwen2_moe")
    facts: dict[str, Any] = spec | {
        "title": title,
        "recipe": recipe,
        "family": family,
        "shared": _shared(spec, family),
        "balance": _balance(spec),
        "n_moe": len(find_experts(model)),
        "millions": sum(p.numel() for p in model.parameters()) / 1e6,
        "n_tokens": sum(run["n_tokens"] for run in _runs(training)),
        "runs": markdown(_schedules(training)),
        "n_windows": _TESTED.n_test,
        "upcycling": _upcycling(training),
        "mixture": markdown(_mixtures(training)),
        "losses": markdown(losses),
        "load": markdown(load),
    }
    (folder / "README.md").write_text(_CARD.format(**facts))


def _shared(spec: dict[str, Any], family: str) -> str:
    """How many shared experts there are."""
    if family == "deepseek_v2":
        return f"{spec['d_shared'] // spec['d_inter']} shared experts"
    return "one shared expert" if family == "qwen2_moe" else "no shared expert"


def _balance(spec: dict[str, Any]) -> str:
    """How the routers were balanced."""
    if not spec["balance_weight"]:
        return "no load-balancing loss"
    return "routers balanced by a load-balancing loss for each layer"


def _loss(
    model: torch.nn.Module, tokenizer: Any, corpus: str, split: str
) -> dict[str, Any]:
    windows = _windows(tokenizer, corpus, split)
    with progress_bar(windows.label, "window") as bar:
        perplexity = evaluate_perplexity(model, windows.ids, progress=bar)
    return {
        "corpus": corpus,
        "split": split,
        "tokens": perplexity.n_tokens,
        "nll [nats]": round(perplexity.nll, 4),
        "perplexity": round(math.exp(perplexity.nll), 2),
    }


def _windows(tokenizer: Any, corpus: str, split: str) -> CalibrationSet:
    return load_windows(
        corpus,
        tokenizer,
        seq_len=_TESTED.seq_len,
        split=split,
        n_sequences=_TESTED.n_test,
    )


def _load(
    model: torch.nn.Module, tokenizer: Any, corpora: list[str]
) -> list[dict[str, Any]]:
    """Smallest, median and largest load of the experts, by corpus and over all."""
    tables = {
        corpus: collect_statistics(model, _windows(tokenizer, corpus, "validation"))
        for corpus in corpora
    }
    tokens = {corpus: table.expert_tokens() for corpus, table in tables.items()}
    pooled = pd.concat(tokens.values()).groupby(["layer", "expert"], as_index=False)
    rows = []
    for corpus, counts in (tokens | {"all of them": pooled["tokens"].sum()}).items():
        fair = counts.groupby("layer")["tokens"].transform("mean")
        share = counts["tokens"] / fair
        rows.append(
            {
                "corpus": corpus,
                "smallest": round(float(share.min()), 3),
                "median": round(float(share.median()), 3),
                "largest": round(float(share.max()), 3),
            }
        )
    return rows


def _runs(training: dict[str, Any]) -> list[dict[str, Any]]:
    """The record of each run, in order."""
    earlier = training.get("went_on_from")
    return [*(_runs(earlier) if earlier else []), training]


def _upcycling(training: dict[str, Any]) -> str:
    """Where the experts come from, if the run before had one of them a layer."""
    copied = any(run["spec"]["n_experts"] == 1 for run in _runs(training)[:-1])
    text = (
        "The first run trained one\nexpert a layer, of which all began the second as "
        "copies, with noise"
    )
    return f" {text}." if copied else ""


def _schedules(training: dict[str, Any]) -> pd.DataFrame:
    return pd.DataFrame(
        {
            "run": number,
            "steps": run["spec"]["n_steps"],
            "tokens": run["n_tokens"],
            "highest learning rate": run["spec"]["learning_rate"],
            "decay [share of steps]": run["spec"]["decay_fraction"],
            "arithmetic": run["spec"].get("precision", "float32"),
            "seed": run["spec"]["seed"],
        }
        for number, run in enumerate(_runs(training), start=1)
    ).astype(object)


def _mixtures(training: dict[str, Any]) -> pd.DataFrame:
    texts = {row["name"]: row["n_texts"] for row in training["corpora"]}
    return pd.DataFrame(
        {
            "corpus": name,
            "texts": texts[name],
            "share": share,
            "share in the decay": training["decay_mixture"][name],
        }
        for name, share in training["mixture"].items()
    )


def markdown(frame: pd.DataFrame) -> str:
    """A frame as a Markdown table."""
    head = "| " + " | ".join(frame.columns) + " |"
    rule = "|" + "---|" * len(frame.columns)
    rows = ["| " + " | ".join(map(str, row)) + " |" for row in frame.to_numpy()]
    return "\n".join([head, rule, *rows])
