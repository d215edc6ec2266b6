"""`heapr-lab compare`: the list of methods, the table, the cache, what is refused."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import create_autospec

import pandas as pd
import pyarrow.parquet as pq
import pytest
from commands import TINY, invoke, one_line, run, said
from heard import Heard

from heapr_lab import Calibration, Method, Workbench, evaluate_perplexity, methods
from heapr_lab.experiments.paper import TABLE1_BESIDE
from heapr_lab.figures.curves import plain_name
from heapr_lab.figures.files import format_column
from heapr_lab.methods.comparison import Entry, compare_methods, entries
from heapr_lab.progress import Progress
from heapr_lab.tasks.paper_tasks import PAPER_TASKS


def asked(root: Path, *more: str) -> tuple[Any, ...]:
    """A comparison of the tiny model on the text."""
    text = str(root / "text.txt")
    return "compare", root / "moe", "--corpora", text, "--corpus", text, *TINY, *more


def results(root: Path, *more: str) -> list[dict[str, Any]]:
    """The rows that it prints."""
    return list(said(*asked(root, *more))["results"])


def test_the_list_has_every_method():
    """It says what is compressed, the citation and what deviates, as text and JSON."""
    listed = said("compare", "--list")["methods"]
    assert [row["name"] for row in listed] == list(methods.names())
    text = run("compare", "--list")
    for row in listed:
        assert row.keys() >= {"compresses", "citation", "deviations", "options"}
        assert f"{row['name']} ({row['compresses']}): {row['title']}\n" in text
        for part in (row["citation"], *row["deviations"]):
            assert part in text


def test_methods_are_compared_and_cached(root, monkeypatch):
    """A row for each, the dense model first; nothing is fitted a second time."""
    options = ("--methods", "heapr,reap", "--ratios", "0.25,0.5")
    rows = results(root, *options)
    assert [(row["method"], row["ratio"]) for row in rows] == [
        ("dense", 0.0),
        *((name, ratio) for name in ("heapr", "reap") for ratio in (0.25, 0.5)),
    ]
    assert [row["achieved_ratio"] for row in rows] == [0, 0.25, 0.5, 0.25, 0.5]
    assert len({row["perplexity"] for row in rows}) == 5
    assert rows[0]["parameters"] > rows[1]["parameters"] > rows[2]["parameters"]
    assert rows[3]["routed_flops"] == pytest.approx(rows[0]["routed_flops"])
    sizes = ["parameters", "bytes", "routed_flops"]
    assert [*rows[0]][4:] == ["achieved_ratio", "nll", "perplexity", *sizes]
    with monkeypatch.context() as patch:
        patch.setattr(Method, "fit", lambda *_a, **_o: 1 / 0)
        assert results(root, *options) == rows
    more = results(root, "--methods", "reap", "--ratios", "0.25,0.3")
    assert more[:2] == [rows[0], rows[3]]
    assert more[2]["ratio"] == 0.3
    table = run(*asked(root, *options))
    assert "perplexity" in table
    shown = format_column(pd.Series([row["perplexity"] for row in rows]))
    assert shown[-1] in table


def test_an_interrupted_comparison_continues(bench, root, monkeypatch):
    """What was measured before is not measured again; options have results apart."""
    text, fitted = str(root / "text.txt"), []
    calibration = Calibration(text)
    original = Method.fit

    def fit(self: Method, *args: Any, **options: Any) -> Any:
        if self.name == "ean":
            raise KeyboardInterrupt
        fitted.append((self.name, options["ratio"]))
        return original(self, *args, **options)

    monkeypatch.setattr(Method, "fit", fit)
    wanted = entries(["magnitude", "ean"], [0.25])
    with pytest.raises(KeyboardInterrupt):
        compare_methods(bench, wanted, [text], calibration=calibration)
    again = [*entries(["magnitude", "frequency"], [0.25]), *entries(["mone"], [0.25])]
    again += entries(["mone"], [0.25], {"mone": {"scope": "global"}})
    done = Heard()
    compare_methods(bench, again, [text], calibration=calibration, progress=done)
    assert [name for name, _ in fitted] == ["magnitude", "frequency", "mone", "mone"]
    assert done == [(n, 5) for n in range(1, 6)]


# --- tasks and Table 1 ------------------------------------------------------------


N_ITEMS = 12


@pytest.fixture
def text(root) -> str:
    """The text of the module."""
    return str(root / "text.txt")


def test_accuracies_stand_beside_perplexity(root, text):
    """In the table and as JSON."""
    task = f"continuation:{text}"
    chosen = ("--methods", "heapr", "--ratios", "0.5", "--tasks", task, "--limit", "6")
    rows = results(root, *chosen)
    assert [row["acc"] is None for row in rows] == [True, False] * 2
    assert [row["perplexity"] is None for row in rows] == [False, True] * 2
    shown = format_column(pd.Series([row["acc"] for row in rows], dtype=float))
    assert shown[3] in run(*asked(root, *chosen))


def test_results_are_those_of_the_compressed_model(bench, text):
    """Each is that of the model itself, without a cache; all say how far they are."""
    wanted = [
        *entries(["heapr", "reap", "random", "frequency"], [0.5]),
        *entries(["random"], [0.7]),
    ]
    task, calibration = f"continuation:{text}", Calibration(text)
    done: set[str] = set()

    def part(label: str, _unit: str) -> Progress:
        return lambda *_: done.add(label)

    options: Any = {"tasks": [task], "limit": N_ITEMS, "part": part}
    frame = compare_methods(bench, wanted, [text], calibration=calibration, **options)
    assert {
        "reap at 50%",
        f"random at 70% on {text}",
        f"random at 70% on {task}",
    } <= done
    windows, ids = bench.calibration_set(calibration), bench.test_windows(text).ids
    rows = frame[2:].to_dict("records")
    for entry, of_text, of_task in zip(wanted, rows[::2], rows[1::2], strict=True):
        compression = entry.method.fit(bench.model, windows, ratio=entry.ratio)
        with compression.apply(bench.model):
            metrics = bench.run_task(task, limit=N_ITEMS)
            loss = evaluate_perplexity(bench.model, ids).nll
        assert of_text["nll"] == pytest.approx(loss)
        for row in metrics:
            assert row["value"] == of_task[row["metric"]]
        assert (of_task["method"], of_task["n_items"]) == (entry.method.name, N_ITEMS)
        assert of_task["achieved_ratio"] == compression.achieved_ratio
    assert frame["acc"][2:].nunique() > 1


def test_no_accuracy_is_reported_as_that_of_another(bench, text, monkeypatch):
    """Another method, version, option, ratio, seed, limit or model is run itself."""
    run_task = create_autospec(Workbench.run_task, side_effect=Workbench.run_task)
    monkeypatch.setattr(Workbench, "run_task", run_task)
    options: Any = {"tasks": [f"continuation:{text}"], "calibration": Calibration(text)}

    def runs(wanted: list[Entry], limit: int = 4) -> list[int]:
        run_task.reset_mock()
        compare_methods(bench, wanted, [], limit=limit, **options)
        return [call.kwargs["limit"] for call in run_task.mock_calls]

    mone = entries(["mone"], [0.25])
    ranked = {"mone": {"scope": "global"}}
    newer = [Entry(replace(methods.get("mone"), version=3), 0.25, mone[0].options)]
    assert runs(mone) == [4, 4]  # dense and compressed
    for wanted in (
        entries(["frequency"], [0.25]),
        newer,
        entries(["mone"], [0.25], ranked),
        entries(["mone"], [0.5]),
    ):
        assert runs(wanted) == [4]
    assert runs(mone, 5) == [5, 5]
    weight: Any = bench.model.lm_head.weight  # type: ignore[union-attr]
    original = weight.data.clone()
    weight.data.mul_(1.5)
    assert runs(mone) == [4, 4]
    weight.data.copy_(original)
    assert runs(mone) == []


@pytest.fixture
def few_rows(tmp_path, monkeypatch) -> None:
    """The first rows of each file: fifteen states load all items of tasks again."""
    for name in ("HEAPR_TASKS_DIR", "HEAPR_DATA_DIR"):
        source = Path(os.environ[name])
        for path in source.rglob("*.parquet"):
            few = tmp_path / name / path.relative_to(source)
            few.parent.mkdir(parents=True, exist_ok=True)
            pq.write_table(pq.read_table(path).slice(0, 100), few)
        monkeypatch.setenv(name, str(tmp_path / name))


@pytest.mark.skipif(
    "HEAPR_TASKS_DIR" not in os.environ or "HEAPR_DATA_DIR" not in os.environ,
    reason="the tasks' items and corpora are not on this machine",
)
@pytest.mark.usefixtures("few_rows")
def test_table_1_of_the_paper(root, monkeypatch):
    """What it compares and more, on its text and C4, beside what is published."""
    args = (
        "compare", root / "moe", "--preset", "paper-table1", "--limit", "2",
        "--ratios", "0.25", *TINY,
    )  # fmt: skip
    facts = said(*args)
    rows = pd.DataFrame(facts["results"])
    assert set(rows["dataset"]) == {"wikitext2", "ptb", "c4", *PAPER_TASKS}
    assert set(rows["ratio"]) == {0.0, 0.25}
    assert {"dense", "naee", "heapr", *TABLE1_BESIDE} <= set(rows["method"])
    assert "random" not in set(rows["method"])
    of_tasks = rows["dataset"].isin(PAPER_TASKS)
    assert rows["acc"].notna().equals(of_tasks)
    assert rows["perplexity"].notna().equals(~of_tasks)
    assert (rows.loc[of_tasks, "n_items"] == 2).all()
    published = facts["published"]
    assert len(published) == 31
    assert all(row["published"] for row in published)
    assert "quoted from their papers" in facts["not_comparable"]
    names = {*rows["method"], *(row["method"] for row in facts["refused"])}
    names -= {*TABLE1_BESIDE}
    known = {plain_name(name) for name in (*names, *facts["not_here"])}
    assert known == {plain_name(row["method"]) for row in published} ^ {
        "dense",
        "original",
    }
    monkeypatch.setattr(Method, "fit", lambda *_a, **_o: 1 / 0)  # all is in the cache
    shown = run(*args, "--methods", "naee,heapr")
    heads = "wikitext2_ppl", "hellaswag", "average"
    for part in (*heads, "D^2-MoE", "Published in the paper (not comparable with"):
        assert part in shown
    heapr = rows.query("method == 'heapr'")
    mean = heapr.set_index("dataset")["acc"][[*PAPER_TASKS]].mean()
    assert f"{mean:.4f}" in shown


def test_options_replace_those_of_the_preset(root, text):
    """Text, methods, ratios and tasks; who is refused ends no comparison with it."""
    options = ("--methods", "heapr,reap", "--ratios", "0.5,0.75", "--limit", "6")
    options = ("--preset", "paper-table1", "--tasks", f"continuation:{text}", *options)
    result = invoke(*asked(root, *options), "--json")
    facts = json.loads(result.stdout)
    done = {(row["method"], row["ratio"]) for row in facts["results"]}
    assert done == {("dense", 0), ("heapr", 0.5), ("heapr", 0.75), ("reap", 0.5)}
    assert [row["n_items"] for row in facts["results"]] == [None, 6] * 4
    (row,) = facts["refused"]
    assert (row["method"], row["ratio"]) == ("reap", 0.75)
    assert "reap at 75% is left out" in result.stderr
    assert "reap at 75.00%: ratio 0.75 would leave" in run(*asked(root, *options))
    message = one_line(*asked(root, "--methods", "reap", "--ratios", "0.75"))
    assert "the largest possible ratio" in message
