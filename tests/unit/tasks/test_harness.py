"""The harness: continuation items, sources of tasks, packed contexts."""

import itertools
import os
import re
import statistics
from copy import copy
from pathlib import Path

import pandas as pd
import pytest
import torch
from heard import Heard
from lm_eval.api.instance import Instance
from text_models import byte_model, corpus_of, requests_of

from heapr_lab.errors import CorpusError, SpecError
from heapr_lab.tasks.harness import (
    continuation_items,
    continuation_task,
    load_tasks,
    quiet,
    run_tasks,
)
from heapr_lab.tasks.harness_model import PackingHFLM, _row
from heapr_lab.tasks.paper_tasks import CHOICES, PAPER_TASKS, check_defined
from heapr_lab.text.corpora import Corpus

WORD = re.compile(r"[a-z]+(?P<text>\d+)x(?P<place>\d+)")
local_tasks = pytest.mark.skipif(
    not Path(os.environ.get("HEAPR_TASKS_DIR", "none")).is_dir(),
    reason="the tasks' items are not in $HEAPR_TASKS_DIR",
)


def check_answers(got, model, tokenizer, instances):
    """The answers are those of the harness alone, to 1e-4."""
    from lm_eval.models.huggingface import HFLM

    theirs = HFLM(pretrained=model, tokenizer=copy(tokenizer), batch_size=1)
    expected = theirs.loglikelihood(instances, disable_tqdm=True)
    assert [a[0] for a in got] == pytest.approx([a[0] for a in expected], rel=1e-4)
    assert [a[1] for a in got] == [a[1] for a in expected]


# --- items --------------------------------------------------------------------------


def test_items_are_cut_at_words():
    """48 words, then the text's own next 12, among 12 of three other texts."""
    items = continuation_items(corpus_of(9), n_items=8)
    assert len(items) == 8
    for item in items.itertuples():
        right = item.choices[item.gold]
        words = [WORD.fullmatch(word) for word in (item.context + right).split()]
        assert len({word["text"] for word in words}) == 1
        first = int(words[0]["place"])
        places = [int(word["place"]) for word in words]
        assert places == list(range(first, first + 60))
        sources = [{WORD.fullmatch(w)["text"] for w in c.split()} for c in item.choices]
        assert [len(c.split()) for c in item.choices] == [12] * 4
        assert all(len(texts) == 1 for texts in sources)
        assert len(set.union(*sources)) == 4


def test_items_are_always_the_same():
    """The draw is repeated, and the right choice stands in every place."""
    corpus = corpus_of(30)
    first = continuation_items(corpus, n_items=20)
    pd.testing.assert_frame_equal(first, continuation_items(corpus, n_items=20))
    assert first["gold"].nunique() == 4


def test_choices_begin_with_the_same_break():
    """The white space before a choice is that of the right one, whatever it was."""
    texts = [text.replace(" ", "\n    ") for text in corpus_of(3).texts]
    mixed = Corpus("mixed", "test", (*texts, *corpus_of(6).texts[3:]), "made here")
    items = continuation_items(mixed, n_items=6)
    breaks = [
        {choice[: len(choice) - len(choice.lstrip())] for choice in choices}
        for choices in items["choices"]
    ]
    assert all(len(kinds) == 1 for kinds in breaks)
    assert {"\n    ", " "} == set.union(*breaks)


def test_short_texts_are_joined():
    """Lines of 25 words: three of them make a passage, so 12 lines make four."""
    lines = corpus_of(12, n_words=25)
    assert len(continuation_items(lines, n_items=4)) == 4
    with pytest.raises(SpecError, match=r"n_items is 5, expected 4 to 4.*4 passages"):
        continuation_items(lines, n_items=5)


# --- running ------------------------------------------------------------------------


def test_prompts_are_the_items():
    """The harness asks for exactly the texts of the items, white space included."""
    items = continuation_items(corpus_of(16), n_items=7).itertuples()
    expected = [(item.context, choice) for item in items for choice in item.choices]
    assert [request.args for request in requests_of(7)] == expected


def test_accuracy_is_that_of_the_likelihoods(tokenizer):
    """Accuracy, by hand: the share of items whose right choice is the likeliest."""
    model, corpus = byte_model(), corpus_of(12)
    items, pad = continuation_items(corpus, n_items=10), tokenizer.pad_token
    right, right_norm = [], []
    for item in items.itertuples():
        scores = []
        for choice in item.choices:
            n_context = len(tokenizer(item.context).input_ids)
            ids = torch.tensor([tokenizer(item.context + choice).input_ids])
            with torch.no_grad():
                log_p = model(ids).logits.log_softmax(-1)[0, n_context - 1 : -1]
            scores.append(log_p.gather(1, ids[0, n_context:, None]).sum().item())
        lengths = [len(choice) for choice in item.choices]
        norm = [s / n for s, n in zip(scores, lengths, strict=True)]
        right.append(scores.index(max(scores)) == item.gold)
        right_norm.append(norm.index(max(norm)) == item.gold)
    heard = Heard()
    task = continuation_task(corpus, n_items=10)
    frame = run_tasks(model, tokenizer, [task], progress=heard).set_index("metric")
    assert frame.loc["acc", "value"] == pytest.approx(sum(right) / 10)
    assert frame.loc["acc_norm", "value"] == pytest.approx(sum(right_norm) / 10)
    variance = pd.Series(right).astype(float).var()
    assert frame.loc["acc", "stderr"] == pytest.approx((variance / 10) ** 0.5)
    assert set(frame["n"]) == {10}
    assert set(frame["source"]) == {"numbered test: made here"}
    assert heard == [(done, 40) for done in range(1, 41)]
    assert tokenizer.pad_token == pad


@pytest.mark.parametrize(
    ("family", "changes", "packs"),
    [
        ("qwen2_moe", {}, True),
        ("deepseek_v3", {}, True),
        ("granitemoe", {"logits_scaling": 3.0}, True),
        ("gpt_oss", {}, False),
        ("qwen3_next", {}, False),
    ],
)
def test_packed_contexts_change_nothing(tokenizer, caplog, family, changes, packs):
    """Where contexts are shared the answers are the harness's own to 1e-4."""
    model, instances = byte_model(family, **changes), requests_of(7)
    ours = PackingHFLM(model, tokenizer)
    ours.tokens_at_once = 900
    assert ours.packs == packs
    got = ours.loglikelihood(instances)
    check_answers(got, model, tokenizer, instances)
    assert pd.Series([a[0] for a in got]).std() > 1
    assert "does not support" not in caplog.text


def test_a_shared_prefix_is_fed_once(tokenizer):
    """Also of contexts that differ, as WinoGrande's: a tree gives the same answers."""
    requests = [("a", [7, 8], [3, 4]), ("b", [7, 9], [3, 4, 5]), ("c", [7, 8], [3, 6])]
    row = _row(requests, range(3), 10)
    assert (row.ids, row.parents) == ([7, 8, 3, 9, 3, 4], [-1, 0, 1, 0, 3, 4])
    assert row.predicts == [[1, 2], [3, 4, 5], [1, 2]]
    assert _row(requests[1:2], range(1), 2).ids == [3, 4]

    model = byte_model()
    pairs = [
        (f"The {name} of item {i}", " is") for i in range(3) for name in ("a", "bb")
    ]
    instances = [
        Instance("loglikelihood", {}, pair, 0, metadata=("two", number // 2, 1))
        for number, pair in enumerate(pairs)
    ]
    got = PackingHFLM(model, tokenizer).loglikelihood(instances)
    check_answers(got, model, tokenizer, instances)


def test_packing_that_would_be_wrong_is_not_used(tokenizer, caplog):
    """A recurrent layer sees past a mask: the first item shows it, the harness runs."""
    model, instances = byte_model("qwen3_next"), requests_of(4)
    ours = PackingHFLM(model, tokenizer)
    ours.packs = True
    got = ours.loglikelihood(instances)
    assert "Qwen3NextForCausalLM does not support packed contexts" in caplog.text
    check_answers(got, model, tokenizer, instances)


def test_packing_is_compared_once_for_a_model(tokenizer, monkeypatch):
    """Not again for each mask of it: the comparison costs as much as an item's runs."""
    model, instances, seen = byte_model(), requests_of(4), []
    agrees = PackingHFLM._agrees
    monkeypatch.setattr(
        PackingHFLM, "_agrees", lambda lm, some: seen.append(lm) or agrees(lm, some)
    )
    first, again = (PackingHFLM(model, tokenizer) for _ in range(2))
    assert first.loglikelihood(instances) == again.loglikelihood(instances)
    assert seen == [first]
    assert again.packs


# --- the paper's tasks --------------------------------------------------------------


@local_tasks
def test_seven_tasks_run_from_local_items(tokenizer, tmp_path, monkeypatch):
    """Each task gives acc from its parquet; a part of a task is labelled as one."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path))
    frame = run_tasks(byte_model(), tokenizer, PAPER_TASKS, limit=2).set_index("task")
    assert list(frame.index.unique()) == [
        name if name != "hellaswag" else "hellaswag (1000 of 10042)"
        for name in PAPER_TASKS
    ]
    assert "acc" in set(frame.loc["piqa", "metric"])
    assert set(frame["n"]) == {2}
    assert frame.loc["mathqa", "source"].iloc[0] == "zero_shot/mathqa/test.parquet"


@local_tasks
def test_guessing_is_right_as_often_as_items_have_answers(tmp_path, monkeypatch):
    """One of the choices of each of the first two hundred items of a task."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path))
    for name, task in load_tasks(list(PAPER_TASKS))["tasks"].items():
        documents = itertools.islice(task.eval_docs, 200)
        chances = [1 / len(task.doc_to_choice(item)) for item in documents]
        assert statistics.fmean(chances) == pytest.approx(1 / CHOICES[name], abs=0.002)


@local_tasks
def test_prompts_are_the_stock_ones():
    """Prompt and choices of ARC-Easy are those of the stock definition."""
    task = load_tasks(["arc_easy"])["tasks"]["arc_easy"]
    doc = task.eval_docs[0]
    assert len(task.eval_docs) == 2376
    assert task.doc_to_text(doc) == f"Question: {doc['question']}\nAnswer:"
    assert task.doc_to_choice(doc) == doc["choices"]["text"]


def test_what_is_loaded_meanwhile_is_quiet_too():
    """Loading within a quiet run does not bring its bars back."""
    from lm_eval.api import task

    shown = task.tqdm
    with quiet():
        hidden = task.tqdm
        continuation_task(corpus_of(9), n_items=4)
        assert task.tqdm is hidden
    assert task.tqdm is shown


def test_a_task_that_cannot_be_had(tokenizer, tmp_path, monkeypatch):
    """Neither here nor, offline, on the hub: the error says how to get it."""
    monkeypatch.setenv("HEAPR_TASKS_DIR", str(tmp_path))
    with pytest.raises(CorpusError, match=r"'piqa' are not available.*HEAPR_TASKS_DIR"):
        run_tasks(byte_model(), tokenizer, ["piqa"])


def test_no_name_is_refused_that_the_harness_knows():
    """Tags and groups are also in definitions that others include."""
    from lm_eval.tasks import TaskManager

    manager = TaskManager()
    names = {*manager.all_tags, *manager.all_groups, *sorted(manager.all_tasks)[::50]}
    assert len(names) > 1000
    check_defined(names)
    with pytest.raises(SpecError, match="knows no task arc_esy, piqqa;"):
        check_defined(["arc_easy", "piqqa", "arc_esy", "mmlu"])
