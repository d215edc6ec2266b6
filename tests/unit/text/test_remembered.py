"""What a workbench remembers is that of the texts and items as they are now."""

import shutil
from pathlib import Path

import pandas as pd
import pytest
from heard import Heard
from tiny_folder import write_model, write_piqa, write_text

from heapr_lab import Calibration, Workbench, load_corpus, open_workbench
from heapr_lab.tasks.harness import items_fingerprint
from heapr_lab.text import corpora


@pytest.fixture
def bench(cache, tmp_path, monkeypatch) -> Workbench:
    """A workbench with a cache of its own, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    return open_workbench(str(write_model(tmp_path / "moe")), profile="small")


def fingerprints(bench: Workbench, corpus: str) -> tuple[str, str]:
    """Fingerprints of the calibration and of the test windows."""
    return (
        bench.calibration_set(Calibration(corpus)).fingerprint,
        bench.test_windows(corpus).fingerprint,
    )


# --- texts ------------------------------------------------------------------------


def test_a_file_that_changed_gives_its_new_windows(bench):
    """Written to, of the same length, and put back: each time what it holds.

    So do the items of the task that is made of it.
    """
    path, task = write_text(Path("own.txt")), "continuation:own.txt"
    first, items = fingerprints(bench, "own.txt"), bench.task_key(task, 4)
    assert fingerprints(bench, "own.txt") == first
    ids = bench.test_windows("own.txt").ids
    assert bench.test_windows("own.txt").ids is ids  # remembered, while it is the same
    text = path.read_text()
    path.write_text(text.replace("x", "y"))
    changed = fingerprints(bench, "own.txt")
    assert not set(changed) & set(first)
    assert bench.task_key(task, 4) != items
    path.write_text(text)
    assert fingerprints(bench, "own.txt") == first
    assert bench.task_key(task, 4) == items


def test_a_relative_name_is_that_of_the_folder(bench, monkeypatch):
    """The same name from another folder is another file."""
    for name, n_texts in (("a", 12), ("b", 20)):
        Path(name).mkdir()
        write_text(Path(name) / "own.txt", n_texts=n_texts)
    prints = []
    for folder in ("a", "../b", "../a"):
        monkeypatch.chdir(folder)
        prints.append(fingerprints(bench, "own.txt"))
    assert prints[0] == prints[2]
    assert not set(prints[0]) & set(prints[1])


def test_weights_of_a_mixture_are_remembered(bench):
    """Two mixtures of the same corpora are not one another."""
    write_text(Path("a.txt"))
    shutil.copy("a.txt", "b.txt")
    provenances = {
        mixture: str(bench.calibration_set(Calibration(mixture)).provenance)
        for mixture in ("0.7*a.txt + 0.3*b.txt", "0.3*a.txt + 0.7*b.txt")
    }
    assert len(set(provenances.values())) == 2


def test_a_data_folder_that_changed_is_read_again(tmp_path, monkeypatch):
    """A parquet file of $HEAPR_DATA_DIR that is replaced, and a folder that is."""
    file = Path("ptb", "test.parquet")
    for name, texts in (("one", ["first", "text"]), ("two", ["other"])):
        (tmp_path / name / "ptb").mkdir(parents=True)
        pd.DataFrame({"sentence": texts}).to_parquet(tmp_path / name / file)
    monkeypatch.setenv("HEAPR_DATA_DIR", str(tmp_path / "one"))
    assert load_corpus("ptb", split="test").texts == ("first", "text")
    assert load_corpus("ptb", split="test") is load_corpus("ptb", split="test")
    shutil.copy(tmp_path / "two" / file, tmp_path / "one" / file)
    assert load_corpus("ptb", split="test").texts == ("other",)
    monkeypatch.chdir(tmp_path / "two")
    monkeypatch.setenv("HEAPR_DATA_DIR", ".")
    pd.DataFrame({"sentence": ["third"]}).to_parquet(file)
    assert load_corpus("ptb", split="test").texts == ("third",)
    corpora._named_corpus.cache_clear()


def test_a_tokenizer_with_more_tokens_gives_other_windows(bench):
    """Windows and the tokenizer's own fingerprint are of the tokenizer as it is."""
    write_text(Path("own.txt"))
    before = fingerprints(bench, "own.txt"), bench.tokenizer_id
    assert bench.tokenizer.add_tokens(["w0x"]) == 1
    after = fingerprints(bench, "own.txt"), bench.tokenizer_id
    assert after[0] != before[0]
    assert after[1] != before[1]


# --- items ------------------------------------------------------------------------


def test_accuracy_is_of_the_items_as_they_are(bench, tmp_path, monkeypatch):
    """Another $HEAPR_TASKS_DIR, or another item in it, is another result."""
    for name, changed in (("one", None), ("two", 3)):
        write_piqa(tmp_path / name / "piqa", 12, changed=changed)
    done = Heard()

    def asked(folder: str) -> int:
        monkeypatch.setenv("HEAPR_TASKS_DIR", str(tmp_path / folder))
        done.clear()
        bench.task_accuracy(None, "piqa", progress=done)
        return len(done)

    assert asked("one") > 0
    assert asked("one") == 0  # from the cache
    assert asked("two") > 0
    assert asked("one") == 0
    write_piqa(tmp_path / "one" / "piqa", 12, changed=5)
    assert asked("one") > 0


def test_items_of_the_hub_are_known_by_what_is_asked(tmp_path, monkeypatch):
    """Where no file holds them: the documents, of which only the first are asked."""
    monkeypatch.delenv("HEAPR_TASKS_DIR", raising=False)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "hf"))
    prints = {}
    for name, changed in (("one", None), ("again", None), ("two", 3), ("late", 9)):
        write_piqa(tmp_path / name / "baber" / "piqa", 12, changed=changed)
        monkeypatch.chdir(tmp_path / name)
        prints[name] = items_fingerprint("piqa", limit=8)
    assert prints["one"] == prints["again"] == prints["late"] != prints["two"]
    assert items_fingerprint("piqa") != prints["late"]
