"""Conversations in files: through the chat template, and refused where they cannot."""

import copy
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from heapr_lab import load_calibration, load_corpus, load_windows, open_workbench
from heapr_lab.errors import CorpusError, SpecError
from heapr_lab.tasks.harness import continuation_items

CHATS = [
    [
        {"role": "user", "content": f"what is the weather in town {number}?"},
        {"role": "assistant", "content": f"rain, wind, {number} degrees\n\nand fog"},
    ]
    for number in range(40)
]
TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}"


@pytest.fixture
def tokenizer(tokenizer) -> Any:
    """One with a chat template."""
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def written(folder: Path, chats: list[Any], kind: str = "jsonl") -> str:
    """A file of conversations: one in each line, or a column of parquet.

    There a key of one message is a field of all.
    """
    path = folder / f"chats.{kind}"
    if kind == "parquet":
        columns = {"messages": chats, "source": ["x"] * len(chats)}
        pq.write_table(pa.table(columns), path)
    else:
        path.write_text("\n".join(json.dumps({"messages": chat}) for chat in chats))
    return str(path)


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_windows_are_those_of_the_rendered_text(tmp_path, tokenizer, kind):
    """Token by token as the template says, for calibration and for tests."""
    path = written(tmp_path, CHATS, kind)
    corpus = load_corpus(path)
    assert (corpus.chat, len(corpus.texts)) == (True, len(CHATS))
    turns = [f"[{turn['role']}]{turn['content']}\n" for chat in CHATS for turn in chat]
    ids = tokenizer("".join(turns), add_special_tokens=False)["input_ids"]
    windows = load_windows(path, tokenizer, seq_len=16)
    assert windows.ids.flatten().tolist() == ids[: windows.ids.numel()]
    drawn = load_calibration(path, tokenizer, n_sequences=3, seq_len=16)
    assert all(window in windows.ids.tolist() for window in drawn.ids.tolist())


def test_keys_without_a_value_are_left_out(tmp_path, tokenizer):
    """Parquet fills them in; a template may ask whether a key is there."""
    chat = [{"role": "user", "content": "hi"}, {"role": "a", "content": "b", "x": "y"}]
    path = written(tmp_path, [chat], "parquet")
    assert json.loads(load_corpus(path).texts[0]) == chat


def test_another_template_gives_other_windows(tmp_path, source):
    """Also in a workbench that has already rendered them."""
    path = written(tmp_path, CHATS)
    bench = open_workbench(str(source), profile="small", seq_len=16)
    prints = []
    for template in (TEMPLATE, TEMPLATE.replace("[", "<")):
        bench.tokenizer.chat_template = template
        prints.append(bench.test_windows(path).fingerprint)
    assert prints[0] != prints[1]


def test_what_cannot_be_rendered_is_named(tmp_path, tokenizer):
    """The conversation that a template refuses; without one none is plain text."""
    path = written(tmp_path, CHATS)
    tokenizer.chat_template = None
    with pytest.raises(CorpusError, match="tokenizer has no chat template"):
        load_windows(path, tokenizer, seq_len=16)
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(CorpusError, match=r"conversation 1: .*roles must alternate"):
        load_windows(path, tokenizer, seq_len=16)


def test_what_is_no_conversation(tmp_path):
    """However it is none; the line is named, or the row of parquet."""
    for row in ([], "hi", [1], [{"content": "no role"}], [{"role": 7, "content": "x"}]):
        path = written(tmp_path, [CHATS[0], row])
        with pytest.raises(
            CorpusError, match=r"line 2: .*'messages' field.*with a role"
        ):
            load_corpus(path)
    path = written(tmp_path, [CHATS[0], None], "parquet")
    with pytest.raises(CorpusError, match=r"row 2: .*with a role"):
        load_corpus(path)


def test_rows_of_two_kinds(tmp_path):
    """The first row says which kind the file has; a text is read where both are."""
    path = tmp_path / "mixed.jsonl"
    path.write_text('{"messages": [{"role": "u"}]}\n{"text": "plain"}\n')
    with pytest.raises(CorpusError, match=r"line 2: .*'messages'"):
        load_corpus(str(path))
    path.write_text('{"messages": [{"role": "u"}], "text": "plain"}\n')
    assert load_corpus(str(path)).texts == ("plain",)


def test_no_continuation_items_of_conversations(tmp_path):
    """Their JSON is not text."""
    corpus = load_corpus(written(tmp_path, CHATS))
    with pytest.raises(SpecError, match="expected plain text"):
        continuation_items(corpus, n_items=4)
