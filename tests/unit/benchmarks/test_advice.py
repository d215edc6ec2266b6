"""What docs/when_not.md says is counted from rows of known outcome."""

import pandas as pd

from benchmarks import advice
from benchmarks.figures import real
from benchmarks.index import results_of
from heapr_lab.recipes.weights import DEFAULT, METHODS
from heapr_lab.storage import paths


def rows(variant: str, against: float, **changes: object) -> dict[str, object]:
    """A row of `benchmarks/quality.py` with a standard error of 0.01."""
    return {
        "model": "a",
        "calibration": "pydocs",
        "test": "pydocs",
        "seed": 0,
        "ratio": 0.4,
        "variant": variant,
        "delta_nll": 0.5,
        "against_paper": against,
        "stderr": 0.01,
    } | changes


def test_every_run_has_its_interval():
    """1.96 standard errors to both sides; one that was not measured has a dash."""
    measured = [rows("heapr", 0.0, delta_nll=0.2), rows("heapr", 0.0, ratio=0.1)]
    measured += [rows("compress", -0.1), rows("compress", 9.0, test="wikitext2")]
    table = advice.runs_table(pd.DataFrame(measured))
    assert table["removed"].tolist() == ["40%", "10%"]
    gaps = ["-0.100 (-0.120 to -0.080)", "–"]
    assert table["compress minus HEAPr"].tolist() == gaps
    assert table["HEAPr's Δloss [nats per token]"].tolist() == [0.2, 0.5]


def test_self_generated_text_is_the_default_because_it_pays_on_pretrained_weights():
    """Of `compress` it saves more on other text than it costs on the calibrated one."""
    assert METHODS[DEFAULT].recipe.own_text > 0
    gaps = advice.more_text_gaps().set_index(["method", "calibrated on"])
    gap = gaps.loc[("compress", "wikitext2 + own text")]
    cost, *saved = (gap[name] for name in real.LOSSES.values())
    assert all(less.high < 0 for less in saved)
    assert cost.high < -sum(less.high for less in saved) / len(saved)


def test_the_default_is_never_worse_than_heapr_by_more_than_noise():
    """On no lab model where it was calibrated, and on no text of the pretrained one."""
    counts = advice.worse_table(results_of("quality"))["compress loses more"]
    assert counts.str.fullmatch(r"0 of [1-9]\d*").all()
    gaps = advice.default_gaps()
    assert not any(gap.low > 0 for name in real.LOSSES.values() for gap in gaps[name])


def test_every_model_has_a_column():
    """Other text is the mean of the other corpora; a missing run has no number."""
    losses = {"delta_nll pydocs": 0.1, "delta_nll ptb": 0.2, "delta_nll c4": 0.4}
    cases = ("lab model", "reap"), ("lab model", "heapr"), ("fine model", "heapr")
    measured = pd.DataFrame(
        {"model": model, "variant": variant, "ratio": 0.4} | losses
        for model, variant in cases
    )
    table = advice.experts_table(measured).set_index(["text", "method"])
    assert table.columns.tolist() == ["lab ↓", "fine ↓", "mean ↓"]
    assert table.loc[("other", "heapr")].tolist() == ["0.300"] * 3
    assert table.loc[("pydocs", "reap")].tolist() == ["0.100", "–", "0.100"]
    assert table.index.tolist() == [
        ("pydocs", "heapr"), ("pydocs", "reap"), ("other", "heapr"), ("other", "reap")
    ]  # fmt: skip


def test_self_generated_text_costs_something_and_saves_more():
    """As the pages on the method and on when not to use it say: at every ratio."""
    measured = results_of("quality")
    pairs = measured[measured["variant"].isin(["heapr", "heapr + own text"])]
    same = pairs["calibration"].eq(pairs["test"])
    run = ["model", "seed", "calibration", "test", "ratio"]
    loss = pairs.assign(same=same).pivot(
        index=[*run, "same"], columns="variant", values="delta_nll"
    )
    gap = loss["heapr + own text"] - loss["heapr"]
    means = gap.dropna().groupby(["ratio", "same"]).mean().unstack()
    assert (means[True] > 0).all()
    assert (means[False] < -means[True]).all()
    for name in ("method", "when_not"):
        page = (paths.project_dir() / "docs" / f"{name}.md").read_text("utf-8")
        assert "costs something on the calibrated corpus" in page
