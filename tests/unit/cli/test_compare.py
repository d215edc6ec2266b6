"""`heapr-lab compare`: the list of methods, the table, the cache, what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
from commands import TINY, one_line, run

from heapr_lab import methods
from heapr_lab.methods.comparison import compare_methods, entries
from heapr_lab.methods.method import Method
from heapr_lab.pruning.surgery import masking
from heapr_lab.text.calibration_spec import Calibration
from heapr_lab.workbench.workbench import Workbench


def asked(root: Path, *more: str) -> tuple[Any, ...]:
    """A comparison of the tiny model on the text."""
    text = str(root / "text.txt")
    given = ("--corpora", text, "--corpus", text, "--json", *TINY, *more)
    return "compare", root / "moe", *given


def results(root: Path, *more: str) -> list[dict[str, Any]]:
    """The rows that it prints."""
    rows: list[dict[str, Any]] = json.loads(run(*asked(root, *more)))["results"]
    return rows


def test_the_list_has_every_method() -> None:
    """With what it compresses, its citation and what deviates, as text and as JSON."""
    found = json.loads(run("compare", "--list", "--json"))["methods"]
    assert [own["name"] for own in found] == list(methods.names())
    text = run("compare", "--list")
    for own in found:
        assert own.keys() >= {"compresses", "citation", "deviations", "options"}
        assert f"{own['name']} ({own['compresses']}): {own['title']}\n" in text
        for part in (own["citation"], *own["deviations"]):
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
    found: Any = methods.get("heapr").fit(bench.model, windows, ratio=0.4)
    expected = bench.perplexity(found.keep, bench.test_windows(text)).value
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
    wanted = entries(["minitron", "ean"], [0.25])
    with pytest.raises(KeyboardInterrupt):
        compare_methods(bench, wanted, [text], calibration=calibration)
    again = [*entries(["minitron", "frequency"], [0.25]), *entries(["reap"], [0.25])]
    again += entries(["reap"], [0.25], {"reap": {"protect_super_experts": True}})
    done: list[tuple[int, int]] = []
    compare_methods(
        bench,
        again,
        [text],
        calibration=calibration,
        progress=lambda *counts: done.append(counts),
    )
    assert [name for name, _ in fitted] == ["minitron", "frequency", "reap", "reap"]
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
    found: Any = methods.get("heapr").fit(
        bench.model, bench.calibration_set(calibration), ratio=0.4
    )
    with (
        masking(bench.model, found.keep),
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
    """In one line, before the model is loaded."""
    monkeypatch.setattr(
        "heapr_lab.workbench.workbench.open_workbench", lambda *_a, **_o: 1 / 0
    )
    assert message in one_line(*asked(root, *options))
