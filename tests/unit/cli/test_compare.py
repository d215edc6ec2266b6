"""`heapr-lab compare`: the list of methods, the table, the cache, what is refused."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from commands import TINY, invoke, one_line, run

from heapr_lab import methods
from heapr_lab.methods.comparison import Entry, compare_methods, entries
from heapr_lab.methods.method import Method
from heapr_lab.pruning.surgery import masking
from heapr_lab.tasks.paper_tasks import PAPER_TASKS
from heapr_lab.text.calibration_spec import Calibration
from heapr_lab.workbench.workbench import Workbench


def asked(root: Path, *more: str) -> tuple[Any, ...]:
    """A comparison of the tiny model on the text."""
    text = str(root / "text.txt")
    options = ("--corpora", text, "--corpus", text, "--json", *TINY, *more)
    return "compare", root / "moe", *options


def results(root: Path, *more: str) -> list[dict[str, Any]]:
    """The rows that it prints."""
    rows: list[dict[str, Any]] = json.loads(run(*asked(root, *more)))["results"]
    return rows


def test_the_list_has_every_method() -> None:
    """It says what is compressed, the citation and what deviates, as text and JSON."""
    listed = json.loads(run("compare", "--list", "--json"))["methods"]
    assert [row["name"] for row in listed] == list(methods.names())
    text = run("compare", "--list")
    for row in listed:
        assert row.keys() >= {"compresses", "citation", "deviations", "options"}
        assert f"{row['name']} ({row['compresses']}): {row['title']}\n" in text
        for part in (row["citation"], *row["deviations"]):
            assert part in text


def test_methods_are_compared_and_cached(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    with monkeypatch.context() as patch:
        patch.setattr(Method, "fit", lambda *_a, **_o: 1 / 0)
        assert results(root, *options) == rows
    more = results(root, "--methods", "reap", "--ratios", "0.25,0.3")
    assert more[:2] == [rows[0], rows[3]]
    assert more[2]["ratio"] == 0.3
    table = run(*[part for part in asked(root, *options) if part != "--json"])
    assert "perplexity" in table
    assert f"{rows[-1]['perplexity']:.4f}" in table


def test_results_are_those_of_the_masked_model(bench: Workbench, root: Path) -> None:
    """The perplexity of a method of atoms is that of its mask on the bench."""
    text = str(root / "text.txt")
    calibration = Calibration(text)
    frame = compare_methods(
        bench, entries(["heapr"], [0.4]), [text], calibration=calibration
    )
    windows = bench.calibration_set(calibration)
    compression: Any = methods.get("heapr").fit(bench.model, windows, ratio=0.4)
    expected = bench.perplexity(compression.keep, bench.test_windows(text)).value
    assert frame["perplexity"].iloc[1] == pytest.approx(expected, rel=1e-12)
    assert expected != frame["perplexity"].iloc[0]


def test_an_interrupted_comparison_continues(
    bench: Workbench, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    again = [*entries(["magnitude", "frequency"], [0.25]), *entries(["reap"], [0.25])]
    again += entries(["reap"], [0.25], {"reap": {"protect_super_experts": True}})
    done: list[tuple[int, int]] = []
    compare_methods(
        bench,
        again,
        [text],
        calibration=calibration,
        progress=lambda *counts: done.append(counts),
    )
    assert [name for name, _ in fitted] == ["magnitude", "frequency", "reap", "reap"]
    assert done == [(n, 5) for n in range(1, 6)]


def test_the_cache_knows_the_model(bench: Workbench, root: Path) -> None:
    """Other weights are another result, and a masked model is refused."""
    text = str(root / "text.txt")
    calibration, wanted = Calibration(text), entries(["frequency"], [0.25])
    before = compare_methods(bench, wanted, [text], calibration=calibration)
    weight: Any = bench.model.lm_head.weight  # type: ignore[union-attr]
    original = weight.data.clone()
    weight.data.mul_(1.5)
    after = compare_methods(bench, wanted, [text], calibration=calibration)
    weight.data.copy_(original)
    assert (before["nll"] - after["nll"]).abs().min() > 1e-4
    compression: Any = methods.get("heapr").fit(
        bench.model, bench.calibration_set(calibration), ratio=0.4
    )
    with (
        masking(bench.model, compression.keep),
        pytest.raises(ValueError, match="mask is active"),
    ):
        compare_methods(bench, wanted, [text], calibration=calibration)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--methods", "naeee"), "unknown method 'naeee'"),
        (("--methods", ""), "nothing to measure"),
        (("--ratios", "20%"), "expected numbers separated by commas"),
        (("--ratios", "25"), "ratio must be in [0, 1), got 25"),
        (("--corpora", ""), "nothing to measure"),
        (("--set", "alpha=1"), "expected METHOD.OPTION=VALUE"),
        (("--set", "reap.alpha=1"), "no option alpha"),
        (("--set", "camera-p.alpha=high"), "is 'high', expected float"),
    ],
)
def test_what_cannot_be_compared_is_refused(
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: tuple[str, ...],
    message: str,
) -> None:
    """The refusal is one line, before the model is loaded."""
    monkeypatch.setattr(
        "heapr_lab.workbench.workbench.open_workbench", lambda *_a, **_o: 1 / 0
    )
    assert message in one_line(*asked(root, *options))


# --- tasks and Table 1 ------------------------------------------------------------


local_data = pytest.mark.skipif(
    "HEAPR_TASKS_DIR" not in os.environ or "HEAPR_DATA_DIR" not in os.environ,
    reason="the tasks' items and corpora are not on this machine",
)
N_ITEMS = 12


def accuracies(bench: Workbench, wanted: list[Entry], **options: Any) -> pd.DataFrame:
    """Rows of the continuation task, without those of the dense model."""
    text = options.pop("text")
    frame = compare_methods(
        bench,
        wanted,
        [],
        tasks=[f"continuation:{text}"],
        calibration=Calibration(text),
        limit=options.pop("limit", N_ITEMS),
        **options,
    )
    return frame[frame["method"].ne("dense")].reset_index(drop=True)


@pytest.fixture
def text(root: Path) -> str:
    """The text of the module."""
    return str(root / "text.txt")


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows with every task that is run on a model, with its limit."""
    done: list[int] = []
    original = Workbench.run_task

    def run_task(self: Workbench, task: str, **options: Any) -> Any:
        done.append(options["limit"])
        return original(self, task, **options)

    monkeypatch.setattr(Workbench, "run_task", run_task)
    return done


def test_accuracies_are_those_of_the_compressed_model(
    bench: Workbench, text: str
) -> None:
    """Each result is that of the harness on the model itself, without a cache."""
    wanted = [
        *entries(["heapr", "reap", "random", "frequency"], [0.5]),
        *entries(["random"], [0.7]),
    ]
    frame = accuracies(bench, wanted, text=text)
    again = accuracies(bench, wanted, text=text)
    pd.testing.assert_frame_equal(frame, again)
    assert "metrics" not in frame  # as the harness has them: rows of their own
    windows = bench.calibration_set(Calibration(text))
    for entry, row in zip(wanted, frame.to_dict("records"), strict=True):
        compression = entry.method.fit(bench.model, windows, ratio=entry.ratio)
        with compression.apply(bench.model):
            rows = bench.run_task(f"continuation:{text}", limit=N_ITEMS)
        assert {r["metric"]: r["value"] for r in rows} == {
            metric: row[metric] for metric in ("acc", "acc_norm")
        }
        assert (row["method"], row["n_items"]) == (entry.method.name, N_ITEMS)
        assert row["achieved_ratio"] == compression.achieved_ratio
    assert frame["acc"].nunique() > 1


def test_no_accuracy_is_reported_as_that_of_another(
    bench: Workbench, text: str, runs: list[int]
) -> None:
    """Another method, version, option, ratio, seed, limit or model is run itself."""
    reap = entries(["reap"], [0.25])
    protected = {"reap": {"protect_super_experts": True}}
    newer = [Entry(replace(methods.get("reap"), version=2), 0.25, reap[0].options)]
    accuracies(bench, reap, text=text, limit=4)
    assert runs == [4, 4]  # dense and compressed
    cases: list[tuple[list[Entry], int]] = [
        (entries(["frequency"], [0.25]), 4),
        (newer, 4),
        (entries(["reap"], [0.25], protected), 4),
        (entries(["reap"], [0.5]), 4),
    ]
    for wanted, limit in cases:
        runs.clear()
        accuracies(bench, wanted, text=text, limit=limit)
        assert runs == [limit]
    runs.clear()
    accuracies(bench, reap, text=text, limit=5)
    assert runs == [5, 5]
    weight: Any = bench.model.lm_head.weight  # type: ignore[union-attr]
    original = weight.data.clone()
    weight.data.mul_(1.5)
    runs.clear()
    accuracies(bench, reap, text=text, limit=4)
    weight.data.copy_(original)
    assert runs == [4, 4]
    runs.clear()
    accuracies(bench, reap, text=text, limit=4)
    assert runs == []


def test_steps_are_watched_and_end_the_work(bench: Workbench, text: str) -> None:
    """Fits, perplexities and tasks say what they do; an exception stops them."""
    seen: list[str] = []
    wanted = entries(["ean"], [0.25])
    options: Any = {"tasks": [f"continuation:{text}"], "limit": 4}
    options |= {"calibration": Calibration(text, seed=3)}
    compare_methods(
        bench, wanted, [text], **options, watch=lambda label, *_: seen.append(label)
    )
    assert {"ean at 25%", f"ean at 25% on {text}"} <= set(seen)
    assert f"ean at 25% on continuation:{text}" in seen
    options["calibration"] = Calibration(text, seed=4)

    def stop(label: str, *_counts: int) -> None:
        if label == "ean at 25%":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compare_methods(bench, wanted, [text], **options, watch=stop)


def test_a_refused_method_is_named_and_others_go_on(
    bench: Workbench, text: str
) -> None:
    """They do where somebody asks; else a refusal ends the comparison."""
    wanted = [*entries(["reap"], [0.75]), *entries(["heapr"], [0.75])]
    calibration = Calibration(text)
    refusals: list[tuple[str, str]] = []
    frame = compare_methods(
        bench,
        wanted,
        [text],
        calibration=calibration,
        refused=lambda entry, why: refusals.append((entry.label, str(why))),
    )
    assert frame["method"].tolist() == ["dense", "heapr"]
    ((label, why),) = refusals
    assert label == "reap at 75%"
    assert "the largest possible ratio" in why
    with pytest.raises(ValueError, match="the largest possible ratio"):
        compare_methods(bench, wanted, [text], calibration=calibration)


def test_an_ordinary_comparison_has_accuracies(root: Path, text: str) -> None:
    """They stand beside perplexity, in the table and as JSON."""
    task = f"continuation:{text}"
    args = (
        "compare", root / "moe", "--methods", "heapr", "--ratios", "0.5",
        "--corpora", text, "--corpus", text, "--tasks", task, "--limit", "6",
        *TINY,
    )  # fmt: skip
    rows = json.loads(run(*args, "--json"))["results"]
    assert [row["dataset"] for row in rows] == [text, task] * 2
    assert [row["acc"] is None for row in rows] == [True, False] * 2
    assert [row["perplexity"] is None for row in rows] == [False, True] * 2
    assert rows[1]["n_items"] == 6
    table = run(*args)
    assert f"{rows[3]['acc']:.4f}" in table
    assert "acc_norm" in table.splitlines()[0].split()
    message = one_line("compare", root / "moe", "--tasks", "continuation:gone", *TINY)
    assert "gone" in message


@local_data
def test_table_1_of_the_paper(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Methods, ratios, corpora and tasks are its own, beside what is published."""
    args = (
        "compare", root / "moe", "--preset", "paper-table1", "--limit", "2",
        "--ratios", "0.25", *TINY,
    )  # fmt: skip
    facts = json.loads(run(*args, "--json"))
    rows = pd.DataFrame(facts["results"])
    assert set(rows["dataset"]) == {"wikitext2", "ptb", *PAPER_TASKS}
    assert set(rows["ratio"]) == {0.0, 0.25}
    assert {"dense", "naee", "heapr"} <= set(rows["method"])
    assert not {"random", "reap"} & set(rows["method"])
    of_tasks = rows["dataset"].isin(PAPER_TASKS)
    assert rows["acc"].notna().equals(of_tasks)
    assert rows["perplexity"].notna().equals(~of_tasks)
    assert (rows.loc[of_tasks, "n_items"] == 2).all()
    published = facts["published"]
    assert len(published) == 31
    for row in published:
        assert row["published"]
        assert row["not_comparable"].startswith("another model; ")
    names = {row["method"] for row in published} - {"Original"}
    known = {"".join(c for c in name if c.isalnum()).lower() for name in names}
    names = {name.removesuffix("-like") for name in set(rows["method"])}
    here = {"".join(c for c in name if c.isalnum()) for name in names}
    missing = {"".join(c for c in n if c.isalnum()).lower() for n in facts["not_here"]}
    refused = {
        row["method"].removesuffix("-like").replace("-", "") for row in facts["refused"]
    }
    assert known == (here | refused | missing) - {"dense"}
    monkeypatch.setattr(Method, "fit", lambda *_a, **_o: 1 / 0)  # all is in the cache
    shown = run(*args, "--methods", "naee,heapr")
    heads = "wikitext2_ppl", "hellaswag", "average", "Published in the paper:"
    for part in (*heads, "D^2-MoE", "Not comparable, a: another model"):
        assert part in shown
    heapr = rows.query("method == 'heapr'")
    mean = heapr.set_index("dataset")["acc"][[*PAPER_TASKS]].mean()
    assert f"{mean:.4f}" in shown


def test_options_replace_those_of_the_preset(root: Path, text: str) -> None:
    """Text, methods, ratios and no task at all; another preset is refused."""
    args = (
        "compare", root / "moe", "--preset", "paper-table1", "--methods", "heapr,reap",
        "--ratios", "0.5,0.75", "--corpora", text, "--corpus", text, "--tasks", "",
        *TINY,
    )  # fmt: skip
    result = invoke(*args, "--json")
    facts = json.loads(result.stdout)
    done = {(row["method"], row["ratio"]) for row in facts["results"]}
    assert done == {("dense", 0), ("heapr", 0.5), ("heapr", 0.75), ("reap", 0.5)}
    (row,) = facts["refused"]
    assert (row["method"], row["ratio"]) == ("reap", 0.75)
    assert "reap at 75% is left out" in result.stderr
    assert "reap at 75.00%: ratio 0.75 would leave" in run(*args)
    message = one_line("compare", root / "moe", "--preset", "table2")
    assert "expected paper-table1" in message
