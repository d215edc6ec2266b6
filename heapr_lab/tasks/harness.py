"""Zero-shot accuracy through EleutherAI's lm-evaluation-harness itself.

The seven tasks of the paper use the harness's stock definitions. Where
`$HEAPR_TASKS_DIR` holds a task's items as parquet, only the data source is replaced;
otherwise the items come from the hub. The results name their source.

`continuation_task` makes an ordinary task of any corpus: which of four continuations is
the right one? Chance is 25 %, and no network is needed. A passage is a run of whole
texts with enough words; an item takes 48 consecutive words of it as context and the
next 12 as the right choice. The three wrong ones are the right ones of other passages.
White space is kept, except that every choice begins with that of the right one, so that
it does not give the answer away.

The harness is imported when it is first needed, because this is slow.
"""

import contextlib
import functools
import hashlib
import itertools
import json
import logging
import math
import os
import random
import re
import tempfile
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
from torch import nn

from heapr_lab.errors import CorpusError, SpecError, whole_number
from heapr_lab.models.modes import evaluating
from heapr_lab.progress import Progress
from heapr_lab.storage.hashing import digest
from heapr_lab.tasks.paper_tasks import (
    CHOICES,
    PAPER_TASKS,
    local_items,
    refuse_unknown,
)
from heapr_lab.text.corpora import Corpus

if TYPE_CHECKING:
    from lm_eval.api.task import ConfigurableTask

N_CONTEXT_WORDS = 48
N_CHOICE_WORDS = 12
N_CHOICES = CHOICES["continuation"]

_WORD = re.compile(r"\S+")


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Hide the harness's log and progress bars; its errors are still shown.

    It also decorates a function, which is quiet then.
    """
    import datasets
    import lm_eval.api.task
    from tqdm import tqdm

    log = logging.getLogger("lm_eval")
    level, had_bars = log.level, datasets.is_progress_bar_enabled()
    bar = lm_eval.api.task.tqdm
    log.setLevel(logging.ERROR)
    datasets.disable_progress_bars()
    # "Building contexts" has no switch of its own.
    lm_eval.api.task.tqdm = functools.partial(tqdm, disable=True)
    try:
        yield
    finally:
        lm_eval.api.task.tqdm = bar
        log.setLevel(level)
        if had_bars:
            datasets.enable_progress_bars()


def run_tasks(
    model: nn.Module,
    tokenizer: Any,
    tasks: "Sequence[str | ConfigurableTask] | str",
    *,
    limit: int | None = None,
    progress: Progress | None = None,
) -> pd.DataFrame:
    """Accuracies of `model` on `tasks`, one row for each task and metric.

    Columns: task, metric (acc, acc_norm), value, stderr, n (items evaluated), source.
    The name of a task whose items are only partly available says so: `hellaswag (1000
    of 10042)`. Masks that are active around the call apply.

    Args:
        model: a causal language model of transformers.
        tokenizer: its tokenizer; it is not changed.
        tasks: names (`PAPER_TASKS`, or any that the harness knows) or tasks.
        limit: evaluate only the first `limit` items of each task; all by default.
        progress: called with (requests done, requests in all).

    Raises:
        CorpusError: the items of a task are not available here.
        SpecError: no task is given, a task is unknown, or a number is not positive.
    """
    names = [tasks] if isinstance(tasks, str) else list(tasks)
    if not names:
        raise SpecError(f"no tasks given; for example {', '.join(PAPER_TASKS)}")
    if limit is not None:
        whole_number(limit, name="limit")
    import lm_eval

    with quiet(), evaluating(model):
        loaded = load_tasks(names)
        from heapr_lab.tasks.harness_model import PackingHFLM

        lm = PackingHFLM(model, tokenizer, progress=progress)
        # `simple_evaluate` would only add seeds for sampling, which is not used here,
        # and a slow survey of the machine.
        output = lm_eval.evaluate(
            lm=lm,
            task_dict=loaded,
            limit=limit,
            bootstrap_iters=1000,  # accuracies have a closed form, used if this is > 0
            log_samples=False,
        )
    assert output is not None  # only the other ranks of a parallel run get None
    return _tidy(output, loaded["tasks"])


def items_fingerprint(
    task: "str | ConfigurableTask", *, limit: int | None = None
) -> dict[str, str]:
    """A fingerprint of the items of `task` and of how they are asked.

    For items in `$HEAPR_TASKS_DIR`: the file's bytes and the version of the harness,
    which has the stock definition; the harness is not imported. For others: the
    documents and the configuration, as the harness loads them.

    Args:
        task: a name or a task, as `run_tasks` takes it.
        limit: only the first `limit` items; all by default.

    Raises:
        CorpusError: the items are not available here.
        SpecError: there is no such task.
    """
    path = local_items(task) if isinstance(task, str) else None
    if path is None:
        loaded = load_tasks([task])["tasks"]
        items = digest({name: _asked(member, limit) for name, member in loaded.items()})
    else:
        items = hashlib.sha256(path.read_bytes()).hexdigest()
    return {"items": items, "harness": version("lm_eval")}


def _asked(task: "ConfigurableTask", limit: int | None) -> list[str]:
    """The configuration of a task and its documents, as text."""
    config = task.dump_config()
    # The path of its file does not matter.
    config["metadata"] = (config.get("metadata") or {}).get("version")
    documents = itertools.islice(task.eval_docs, limit)
    return [repr(config), *map(repr, documents)]


# --- sources of the items --------------------------------------------------------


@quiet()
def load_tasks(tasks: "list[str | ConfigurableTask]") -> Any:
    """The `tasks`, loaded by the harness's task manager.

    Stock definitions are included from small files of our own, so that the manager
    need not read thousands of its own.

    Raises:
        CorpusError: the items of a task are not available here.
        SpecError: a task is unknown.
    """
    from lm_eval.tasks import TaskManager

    names = [task for task in tasks if isinstance(task, str)]
    stock = [name for name in names if name in PAPER_TASKS]
    others = [name for name in names if name not in stock]
    with tempfile.TemporaryDirectory() as folder:
        for name in stock:
            path = Path(folder) / f"{name}.yaml"
            path.write_text(json.dumps(_definition(name)))  # JSON is YAML
        manager = TaskManager(include_path=folder, include_defaults=bool(others))
        refuse_unknown(set(others) - set(manager.all_tasks))
        return _merged([_load_one(manager, task) for task in tasks])


def _load_one(manager: Any, task: "str | ConfigurableTask") -> Any:
    try:
        return manager.load([task])
    except Exception as error:
        # The remedy is the same for any error of a download or of a parquet reader.
        raise CorpusError(
            f"the items of task {task!r} are not available ({type(error).__name__}: "
            f"{error}). Connect to the hub, or set $HEAPR_TASKS_DIR (now "
            f"{os.environ.get('HEAPR_TASKS_DIR')!r}) to a folder with "
            f"{task}/<split>.parquet, which has the columns of the hub's data set"
        ) from error


def _merged(loaded: list[Any]) -> Any:
    merged: dict[str, dict[str, Any]] = {"tasks": {}, "groups": {}, "group_map": {}}
    for part in loaded:
        for key, values in merged.items():
            values.update(part.get(key, {}))
    return merged


def _definition(name: str) -> dict[str, Any]:
    """The stock definition of `name`, with the items on this machine if available."""
    import lm_eval.tasks

    task, path = PAPER_TASKS[name], local_items(name)
    include = str(Path(lm_eval.tasks.__file__).parent / task["definition"])
    split = task["split"]
    if path is None:
        return {"include": include, "task": name}
    splits = dict.fromkeys(("training_split", "validation_split", "test_split"))
    return {
        "include": include,
        "task": name,
        "dataset_path": "parquet",
        "dataset_name": None,
        "dataset_kwargs": {"data_files": {split: str(path)}},
        **splits,
        f"{split}_split": split,
        "metadata": {
            "version": 1.0,
            "source": f"{path.parent.parent.name}/{name}/{path.name}",
            "n_official": task["n_items"],
        },
    }


# --- continuations --------------------------------------------------------------


@quiet()
def continuation_task(corpus: Corpus, *, n_items: int) -> "ConfigurableTask":
    """A four-way continuation task of `corpus`, as an ordinary task of the harness.

    Each item shows 48 words of a text and asks which of four continuations of 12 words
    is the right one; the other three are continuations of other texts.

    Args:
        corpus: held-out text, usually a test split.
        n_items: number of items, each from another passage.
    """
    from lm_eval.api.task import ConfigurableTask

    items = continuation_items(corpus, n_items=n_items)
    metrics = [
        {"metric": name, "aggregation": "mean", "higher_is_better": True}
        for name in ("acc", "acc_norm")
    ]
    config = {
        "task": f"continuation:{corpus.name}",
        "custom_dataset": functools.partial(_as_dataset, items),
        "output_type": "multiple_choice",
        "test_split": "test",
        "doc_to_text": "context",
        "doc_to_target": "gold",
        "doc_to_choice": "choices",
        "target_delimiter": "",  # a choice begins with the text's own white space
        "metric_list": metrics,
        "metadata": {
            "version": 1.0,
            "source": f"{corpus.name} {corpus.split}: {corpus.source}",
        },
    }
    return ConfigurableTask(config=config)


def _as_dataset(items: pd.DataFrame, **_metadata: Any) -> dict[str, Any]:
    import datasets

    return {"test": datasets.Dataset.from_list(items.to_dict("records"))}


def continuation_items(corpus: Corpus, *, n_items: int) -> pd.DataFrame:
    """Items with columns context, choices (a list of four) and gold (its index).

    The same corpus and number give the same items everywhere.

    Args:
        corpus: held-out text, usually a test split.
        n_items: number of items, each from another passage.

    Raises:
        SpecError: `n_items` is below four, or the corpus has fewer passages, or
            conversations.
    """
    if corpus.chat:
        raise SpecError(
            f"corpus {corpus.name!r} has conversations, expected plain text"
        )
    passages = list(_passages(corpus.texts))
    if n_items < N_CHOICES or n_items > len(passages):
        raise SpecError(
            f"n_items is {n_items}, expected {N_CHOICES} to {len(passages)}: corpus "
            f"{corpus.name!r} ({corpus.split}) has {len(passages)} passages of at "
            f"least {N_CONTEXT_WORDS + N_CHOICE_WORDS} words"
        )
    rng = random.Random(0)
    chosen = rng.sample(passages, n_items)
    pairs = [_context_and_continuation(passage, rng) for passage in chosen]
    return pd.DataFrame([_item(pairs, index, rng) for index in range(n_items)])


def _passages(texts: tuple[str, ...]) -> Iterator[str]:
    """Shortest runs of consecutive texts, joined by a blank line, with enough words."""
    run: list[str] = []
    n_words = 0
    for text in texts:
        run.append(text)
        n_words += len(_WORD.findall(text))
        if n_words >= N_CONTEXT_WORDS + N_CHOICE_WORDS:
            yield "\n\n".join(run)
            run, n_words = [], 0


def _context_and_continuation(passage: str, rng: random.Random) -> tuple[str, str]:
    words = list(_WORD.finditer(passage))
    first = rng.randrange(len(words) - N_CONTEXT_WORDS - N_CHOICE_WORDS + 1)
    middle = words[first + N_CONTEXT_WORDS - 1].end()
    last = words[first + N_CONTEXT_WORDS + N_CHOICE_WORDS - 1].end()
    return passage[words[first].start() : middle], passage[middle:last]


def _item(
    pairs: list[tuple[str, str]], index: int, rng: random.Random
) -> dict[str, str | list[str] | int]:
    context, right = pairs[index]
    break_ = right[: len(right) - len(right.lstrip())]
    choices = [right]
    for other in rng.sample(range(len(pairs)), len(pairs)):
        wrong = break_ + pairs[other][1].lstrip()
        if wrong not in choices:  # texts repeat: a heading, a licence
            choices.append(wrong)
        if len(choices) == N_CHOICES:
            break
    rng.shuffle(choices)
    return {"context": context, "choices": choices, "gold": choices.index(right)}


# --- running ----------------------------------------------------------------------


def _number(value: Any) -> float:
    """A number, or NaN: the standard error of a single item is "N/A" in the harness."""
    return float(value) if isinstance(value, int | float) else math.nan


def _tidy(output: Any, tasks: dict[str, Any]) -> pd.DataFrame:
    rows = []
    for name, task in tasks.items():
        counts = output["n-samples"][name]
        metadata = task.config.metadata or {}
        n_official = metadata.get("n_official", counts["original"])
        partial = counts["original"] != n_official
        label = f"{name} ({counts['original']} of {n_official})" if partial else name
        path, config = task.config.dataset_path, task.config.dataset_name
        source = metadata.get("source", f"hub:{path} {config or ''}".strip())
        results = output["results"][name]
        for key, value in results.items():
            metric, comma, filtering = key.partition(",")
            if not comma or metric.endswith("_stderr"):
                continue
            rows.append(
                {
                    "task": label,
                    "metric": metric,
                    "value": float(value),
                    "stderr": _number(results[f"{metric}_stderr,{filtering}"]),
                    "n": counts["effective"],
                    "source": source,
                }
            )
    return pd.DataFrame(rows)
