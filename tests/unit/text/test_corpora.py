"""Text sources: what they hold, how they split, and how an absent one is reported."""

import ast
import gc
import gzip
import hashlib
import inspect
import json
import os
import re
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from heapr_lab.errors import CorpusError
from heapr_lab.text import corpora, pydocs
from heapr_lab.text.corpora import SPLITS, Corpus, corpus_names, load_corpus

DOMAIN = "pydocs:networkx"
"""Some 900 docstrings: enough for each split, harvested in a second or two."""


# --- pydocs -----------------------------------------------------------------------


def test_no_text_is_in_two_splits():
    """Not even one that differs only in case, digits, spaces or punctuation."""
    splits = {split: load_corpus(DOMAIN, split=split).texts for split in SPLITS}
    assert all(splits.values())
    every = [text.lower() for texts in splits.values() for text in texts]
    seen = [re.sub(r"[\W\d]+", "", text) for text in every]
    assert len(seen) > 300
    assert len(seen) == len(set(seen))
    shares = {split: len(texts) / len(seen) for split, texts in splits.items()}
    assert shares["train"] == pytest.approx(0.9, abs=0.05)
    assert shares["test"] == pytest.approx(0.05, abs=0.03)


def test_the_harvest_is_the_same_each_time():
    """Read from the cache or harvested anew, they are those of the package it names."""
    first = load_corpus("pydocs:filelock")
    source = r"docstrings of filelock \d\S*; split by hash of each text"
    assert re.fullmatch(source, first.source)
    pydocs.harvested.cache_clear()
    corpora._named_corpus.cache_clear()
    assert load_corpus("pydocs:filelock").fingerprint == first.fingerprint
    anew = corpora._hash_split("x", "train", pydocs.harvest(["filelock"]), "y")
    assert anew.fingerprint == first.fingerprint


def test_a_harvest_collects_no_garbage(monkeypatch):
    """Beside torch each collection takes as long as a file, and finds nothing."""
    enabled = []

    def docstrings_in(_path: Path) -> list[str]:
        enabled.append(gc.isenabled())
        return []

    monkeypatch.setattr(pydocs, "docstrings_in", docstrings_in)
    pydocs.harvest(["filelock"])
    assert set(enabled) == {False}
    assert gc.isenabled()


def slow_docstrings(path: Path) -> list[str]:
    """Docstrings of a file by a walk over every node of it."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    texts: list[str | None] = []
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, documented):
            texts.append(ast.get_docstring(node))
        elif isinstance(node, ast.Call) and pydocs._adds_docstring(node.func):
            values = [a.value for a in node.args if isinstance(a, ast.Constant)]
            texts += [inspect.cleandoc(v) for v in values if isinstance(v, str)]
    return [text for text in texts if text]


def test_expressions_are_walked_only_where_they_add_docstrings():
    """The same texts in the same order as from a walk over everything."""
    paths = [Path(inspect.getfile(module)) for module in (np, np._core, ast, inspect)]
    paths += sorted(paths[1].parent.glob("*.py"))
    called = [p for p in paths if pydocs._CALL_OF_DOC.search(p.read_bytes())]
    assert 0 < len(called) < len(paths)
    for path in paths:
        texts = [text for text in pydocs.docstrings_in(path) if text]
        assert texts == slow_docstrings(path)


def test_packages_harvested_apart_are_those_harvested_together():
    """Processes may share the packages out; a text of two is of the first."""
    together = pydocs.harvest(["filelock", "jinja2"])
    apart = [t for name in ("filelock", "jinja2") for t in pydocs.harvest([name])]
    assert together == apart
    assert pydocs.harvest(["jinja2", "jinja2"]) == pydocs.harvest(["jinja2"])


def test_docstrings_are_found_where_they_stand(tmp_path):
    """In modules, classes, functions and added by numpy's way; broken files skipped."""
    source = tmp_path / "source.py"
    source.write_text(
        '"""module"""\n'
        'class A:\n    """class"""\n    def f(self):\n        """method\n\n'
        '        indented"""\n'
        'async def g():\n    """coroutine"""\n'
        'add_newdoc("numpy", "name", """\n    added\n    """)\n'
        'x = "no docstring"\nprint("nor this")\n'
    )
    texts = set(pydocs.docstrings_in(source))
    assert {"module", "class", "method\n\nindented", "coroutine", "added"} <= texts
    assert not texts & {"no docstring", "nor this"}
    broken = tmp_path / "broken.py"
    broken.write_text("def {{ template }}(:\n")
    assert list(pydocs.docstrings_in(broken)) == []


def test_near_copies_are_dropped(tmp_path, monkeypatch):
    """The first of docstrings that differ in no letter stays; tests are left out."""
    text = " ".join(["Return the value of this thing as it was seen before."] * 4)
    package = tmp_path / "near_copies"
    (package / "tests").mkdir(parents=True)
    (package / "__init__.py").write_text(f'"""{text}"""')
    (package / "b.py").write_text(f'"""{text.upper()} 2!"""')
    (package / "c.py").write_text(f'"""Another. {text}"""')
    (package / "d.py").write_text('"""Too short."""')
    (package / "tests" / "e.py").write_text(f'"""Tested. {text}"""')
    monkeypatch.syspath_prepend(tmp_path)
    got = pydocs.harvest(["near_copies"])
    assert got == [text, f"Another. {text}"]


# --- fingerprints and splits ------------------------------------------------------


def test_the_fingerprint_is_that_of_the_texts():
    """SHA-256 over the texts with a zero byte after each; names do not matter."""
    corpus = Corpus("a", "train", ("x", "yz"), "here")
    assert corpus.fingerprint == hashlib.sha256(b"x\0yz\0").hexdigest()
    assert Corpus("b", "test", ("x", "yz"), "").fingerprint == corpus.fingerprint
    assert Corpus("a", "train", ("xy", "z"), "").fingerprint != corpus.fingerprint
    cuts = [("x\0y", "z"), ("x", "y\0z"), ("x", "y", "z"), ("x\0y\0z",)]
    prints = {Corpus("a", "train", texts, "").fingerprint for texts in cuts}
    assert len(prints) == len(cuts)
    assert corpus.joined() == "x\n\nyz"
    facts = {"name": "a", "split": "train", "source": "here", "n_texts": 2}
    assert corpus.provenance == facts | {"fingerprint": corpus.fingerprint}


def test_names_and_splits():
    """The message lists what there is."""
    with pytest.raises(CorpusError, match="split is 'dev', expected one of train"):
        load_corpus("pydocs", split="dev")
    assert {"pydocs", "pydocs:stdlib", "wikitext2", "ptb", "c4"} <= set(corpus_names())


# --- data sets --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("wikitext2", "Robert Boulter"),
        ("wikitext2:tokenized", "<unk>"),
        ("ptb", "N years"),
        ("c4", "the"),
    ],
)
def test_local_data_sets(name, text):
    """Where $HEAPR_DATA_DIR has them, each split is read and tells its file."""
    folder = corpora._local_folder(
        corpora._DATASETS[name], os.environ.get("HEAPR_DATA_DIR")
    )
    if folder is None:
        pytest.skip(f"$HEAPR_DATA_DIR has no {name}")
    loaded = {split: load_corpus(name, split=split) for split in SPLITS}
    assert text in loaded["test"].joined() or text in loaded["train"].joined()
    assert len({corpus.fingerprint for corpus in loaded.values()}) == 3
    assert all(folder.name in corpus.source for corpus in loaded.values())


def stored(**columns: Any) -> bytes:
    """A parquet file of these columns."""
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table(columns), sink)
    return bytes(sink.getvalue())


def write_hub_layout(root: Path) -> None:
    """Data sets as they lie on the hub, made of a few sentences each."""
    rows = {split: [f"{split} {i}" for i in range(3)] for split in SPLITS}
    wikitext = root / "Salesforce" / "wikitext"
    card = ["---", "configs:"]
    for config in ("wikitext-2-raw-v1", "wikitext-2-v1"):
        (wikitext / config).mkdir(parents=True)
        card += [f"- config_name: {config}", "  data_files:"]
        for split, texts in rows.items():
            path = wikitext / config / f"{split}-00000-of-00001.parquet"
            path.write_bytes(stored(text=[f"{config} {text}" for text in texts]))
            card += [f"  - split: {split}", f"    path: {config}/{split}-*"]
    (wikitext / "README.md").write_text("\n".join([*card, "---", ""]))
    ptb = root / "ptb-text-only" / "ptb_text_only"
    for split, texts in rows.items():
        path = ptb / "penn_treebank" / split / "0000.parquet"
        path.parent.mkdir(parents=True)
        path.write_bytes(stored(sentence=[f"ptb {text}" for text in texts]))
    shard = root / "allenai" / "c4" / corpora._C4_SHARD
    shard.parent.mkdir(parents=True)
    with gzip.open(shard, "wt") as file:
        for i in range(200):
            file.write(json.dumps({"text": f"page {i}", "url": "x"}) + "\n")


@pytest.fixture
def hub(tmp_path, monkeypatch) -> Path:
    """A working folder in which the hub's data sets lie under their own names.

    `datasets` takes a folder of that name before it asks the hub.
    """
    datasets = pytest.importorskip("datasets")
    write_hub_layout(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HEAPR_DATA_DIR", raising=False)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    return tmp_path


@pytest.mark.usefixtures("hub")
def test_data_sets_in_the_hubs_layout():
    """Each is read by the right configuration, column and split."""
    for name, config in (
        ("wikitext2", "wikitext-2-raw-v1"),
        ("wikitext2:tokenized", "wikitext-2-v1"),
        ("ptb", "ptb"),
    ):
        for split in SPLITS:
            corpus = load_corpus(name, split=split)
            assert corpus.texts == tuple(f"{config} {split} {i}" for i in range(3))
            assert corpus.source.startswith("hub:")
    dealt = [load_corpus("c4", split=split).texts for split in SPLITS]
    assert all(dealt)
    every = [text for texts in dealt for text in texts]
    assert sorted(every) == sorted(f"page {i}" for i in range(200))
    assert "c4-train.00000" in load_corpus("c4").source


def test_a_data_set_that_cannot_be_had_is_an_error(tmp_path, monkeypatch):
    """Offline and without the folder: the message names both ways to get it."""
    assert os.environ["HF_HUB_OFFLINE"] == "1"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HEAPR_DATA_DIR", str(tmp_path))
    for name, folder in (("ptb", "ptb"), ("c4", "c4_sample")):
        with pytest.raises(CorpusError) as caught:
            load_corpus(name)
        message = str(caught.value)
        assert f"expected the folder {folder!r}" in message
        assert str(tmp_path) in message
        assert corpora._DATASETS[name].hub_path in message
        assert "Set the variable, or connect to the hub" in message


def test_a_local_folder_that_lacks_a_split_is_not_replaced_by_the_hub(hub, monkeypatch):
    """A folder that is there is used, or is an error: never another source."""
    monkeypatch.setenv("HEAPR_DATA_DIR", str(hub))
    (hub / "ptb").mkdir()
    with pytest.raises(CorpusError, match=r"ptb/test\.parquet"):
        load_corpus("ptb", split="test")
    (hub / "ptb" / "test.parquet").write_bytes(stored(sentence=["mine"]))
    assert load_corpus("ptb", split="test").texts == ("mine",)


# --- files of one's own -----------------------------------------------------------


def test_own_files_of_each_kind(tmp_path):
    """Paragraphs of a text, a JSON object a line, the text column of a parquet."""
    (tmp_path / "a.txt").write_text("one\nline\n\n \n\ntwo\n\n")
    (tmp_path / "a.jsonl").write_text('{"text": "one\\nline"}\n\n{"text": "two"}\n')
    # Not a line break in JSON, though str.splitlines takes it for one.
    (tmp_path / "b.jsonl").write_text('{"text": "one\u2028line"}\n', "utf-8")
    assert load_corpus(str(tmp_path / "b.jsonl")).texts == ("one\u2028line",)
    for column in ("text", "sentence"):
        columns = {"n": [1, 2], column: ["one\nline", "two"]}
        (tmp_path / f"{column}.parquet").write_bytes(stored(**columns))
    paths = ("a.txt", "a.jsonl", "text.parquet", "sentence.parquet")
    loaded = [load_corpus(str(tmp_path / path), split="test") for path in paths]
    assert {corpus.texts for corpus in loaded} == {("one\nline", "two")}
    assert len({corpus.fingerprint for corpus in loaded}) == 1
    assert loaded[0].source == "file a.txt, used whole"
    assert loaded[0].split == "test"


def test_own_files_that_cannot_be_used(tmp_path):
    """Absent, empty, damaged or without a text: each error names the file."""
    # Arrow does not look at them when it reads.
    offsets = pa.array([0, 4], pa.int32()).buffers()[1]
    buffers = [None, offsets, pa.py_buffer(b"\xff\xfe\xfd\xfc")]
    not_utf8 = pa.Array.from_buffers(pa.string(), 1, buffers)
    with pytest.raises(CorpusError, match=r"absent\.txt' does not exist"):
        load_corpus(str(tmp_path / "absent.txt"))
    for name, content, text in (
        ("empty.txt", b" \n\n", "holds no text"),
        ("empty.jsonl", b"", "holds no text"),
        ("bad.jsonl", b'{"text": "a"}\n{"text"\n', "line 2: expected a JSON object"),
        ("other.jsonl", b'{"body": "a"}\n', "line 1: expected a JSON object"),
        ("list.jsonl", b"[1]\n", "line 1: expected a JSON object"),
        ("null.jsonl", b'{"text": null}\n', "line 1: expected a JSON object"),
        ("lists.jsonl", b'{"text": "a"}\n' + b"[" * 10**5, "line 2: .*recursion depth"),
        ("deep.jsonl", b'{"text": ' * 10**5, "line 1: .*maximum recursion depth"),
        ("large.jsonl", b'{"text": ' + b"9" * 5000 + b"}", "line 1: .*integer string"),
        # JSON can say half of a pair; UTF-8, and so a hash of the text, cannot.
        ("cut.jsonl", b'{"text": "a"}\n{"text": "\\ud83d"}', "text 2: surrogates.*cor"),
        ("bad.parquet", b"PAR1", "cannot be read"),
        ("bad.txt", b"\xff\xfe\xff", "not UTF-8"),
        ("latin.jsonl", b'{"text": "\xe9"}\n', "not UTF-8"),
        ("texts.parquet", stored(text=not_utf8), r"texts\.parquet' is not UTF-8"),
        ("b.parquet", stored(body=["a"]), r"columns \['body'\], expected one called"),
        ("ints.parquet", stored(text=[1, 2]), r"parquet, row 1: .*a text, not a int"),
        ("gap.parquet", stored(text=["a", None]), r"parquet, row 2: .*not a NoneType"),
    ):
        path = tmp_path / name
        path.write_bytes(content)
        with pytest.raises(CorpusError, match=text) as caught:
            load_corpus(str(path))
        assert name in str(caught.value)


def test_a_file_that_the_system_will_not_read(tmp_path, monkeypatch):
    """It is there, and that is all."""
    path = tmp_path / "text.txt"
    path.write_text("some text")
    denied = PermissionError(13, "Permission denied", str(path))
    monkeypatch.setattr(Path, "read_text", Mock(side_effect=denied))
    with pytest.raises(CorpusError, match=r"text\.txt' cannot be read \(Permission"):
        load_corpus(str(path))


def test_what_is_here_is_available_without_being_read(tmp_path, monkeypatch):
    """The panel asks before its first picture; what is missing says why."""
    monkeypatch.setenv("HEAPR_DATA_DIR", str(tmp_path))
    (tmp_path / "ptb").mkdir()
    (tmp_path / "ptb" / "test.parquet").write_bytes(b"read when it is used")
    monkeypatch.setattr(corpora, "harvested", lambda _: 1 / 0)
    available, skipped = corpora.available_corpora(["pydocs", "ptb", "wikitext2"])
    assert available == ["pydocs", "ptb"]
    assert "HEAPR_DATA_DIR" in skipped["wikitext2"]
