"""The seven tasks: our model class of the harness beside the harness's own.

    python benchmarks/tasks.py [--model smollm2] [--n-items 50] [--dtype float32]
        [--harness-batch 16]

Both answer the same requests, those of the items that `task_items` draws, with the same
loaded model on one thread of a CPU: the harness one request in a row, ours one item in
a row, as a tree. Times are CPU seconds, so that other jobs disturb them less. A row for
each task, and one for all:

- tokens: what the harness feeds the model, without padding;
- difference [nats]: the largest between the log-likelihoods of a choice;
- other answers: items with another likeliest choice, by acc or by acc_norm.
"""

import argparse
import logging
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.latency import timed
from benchmarks.machine import RESULTS, machine, write_results
from heapr_lab import load_model
from heapr_lab.tasks.harness import load_tasks, quiet
from heapr_lab.tasks.items import drawn_items
from heapr_lab.tasks.paper_tasks import PAPER_TASKS

logger = logging.getLogger("tasks")

HARNESS, OURS = "harness [CPU s]", "ours [CPU s]"


def measured(theirs: Any, ours: Any, task: Any, n_items: int) -> dict[str, Any]:
    """Both model classes on the requests of some items of a task."""
    drawn = sorted(drawn_items(len(task.eval_docs), n_items, seed=0))
    task.build_all_requests(limit=None, samples=drawn, rank=0, world_size=1)
    requests = task.instances
    expected, their_seconds = timed(lambda: answers_of(theirs, requests))
    answers, our_seconds = timed(lambda: answers_of(ours, requests))
    apart = [abs(a - b) for (a, _), (b, _) in zip(expected, answers, strict=True)]
    return {
        "items": len(drawn),
        "requests": len(requests),
        "tokens": sum(n_tokens(theirs, request.args) for request in requests),
        HARNESS: round(their_seconds, 1),
        OURS: round(our_seconds, 1),
        "difference [nats]": float(f"{max(apart):.1e}"),
        "other answers": other_answers(requests, expected, answers),
    }


@torch.no_grad()
def answers_of(lm: Any, requests: list[Any]) -> Any:
    """The answers of a model class."""
    return lm.loglikelihood(requests, disable_tqdm=True)


def n_tokens(lm: Any, pair: tuple[str, str]) -> int:
    """Tokens that a request is fed as: all but the last."""
    return sum(map(len, lm._encode_pair(*pair))) - 1


def other_answers(requests: list[Any], expected: Any, given: Any) -> int:
    """Items whose likeliest choice differs, in all or for each character."""
    documents = np.array([request.doc_id for request in requests])
    lengths = np.array([len(request.args[1]) for request in requests])
    values = np.array([[a, b] for (a, _), (b, _) in zip(expected, given, strict=True)])
    several = ((values[rows], lengths[rows, None]) for rows in choices_of(documents))
    return sum(
        len(set(scores.argmax(0))) > 1 or len(set((scores / length).argmax(0))) > 1
        for scores, length in several
    )


def choices_of(documents: np.ndarray) -> list[np.ndarray]:
    """Which requests each document has."""
    return [(documents == document).nonzero()[0] for document in np.unique(documents)]


def run(arguments: argparse.Namespace) -> None:
    """Measure every task, and write the table."""
    from lm_eval.models.huggingface import HFLM

    from heapr_lab.tasks.harness_model import PackingHFLM

    torch.set_num_threads(1)
    model, tokenizer = load_model(arguments.model, device="cpu", dtype=arguments.dtype)
    rows = []
    with quiet():
        size = arguments.harness_batch
        theirs = HFLM(
            pretrained=model,
            tokenizer=tokenizer,
            batch_size=size,
            softmax_dtype=torch.float32,
        )
        ours = PackingHFLM(model, tokenizer)
        for name, task in load_tasks(list(PAPER_TASKS))["tasks"].items():
            row = measured(theirs, ours, task, arguments.n_items)
            rows.append({"model": arguments.model, "task": name, **row})
            logger.info("%s", rows[-1])
    details = machine() | {"n_threads": 1, "dtype": arguments.dtype, "batch": size}
    write_results("tasks", [*rows, in_all(rows)], details, arguments.out)


def in_all(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The row of all tasks together."""
    summed = ("items", "requests", "tokens", HARNESS, OURS, "other answers")
    return {
        "model": rows[0]["model"],
        "task": "all",
        **{name: round(sum(row[name] for row in rows), 1) for name in summed},
        "difference [nats]": max(row["difference [nats]"] for row in rows),
    }


def parsed(words: list[str] | None = None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--n-items", type=int, default=50)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--harness-batch", type=int, default=16)
    parser.add_argument("--out", type=Path, default=RESULTS)
    return parser.parse_args(words)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    run(parsed())
