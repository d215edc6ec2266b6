"""What docs/when_not.md says is counted from rows of known outcome."""

import pandas as pd

from benchmarks import advice
from benchmarks.index import results_of
from heapr_lab.storage import paths


def rows(variant: str, against: float, **others: object) -> dict[str, object]:
    """A row of `benchmarks/quality.py` with a standard error of 0.01."""
    return {
        "calibration": "pydocs",
        "test": "pydocs",
        "seed": 0,
        "ratio": 0.4,
        "variant": variant,
        "delta_nll": 0.5,
        "against_paper": against,
        "stderr": 0.01,
    } | others


def test_only_what_exceeds_two_errors_loses_more() -> None:
    """0.03 does and 0.01 does not; another corpus is not counted."""
    names = (*advice.COUNTED, "heapr + own text")
    measured = [rows("heapr", 0.0)]
    for name in names:
        measured += [rows(name, 0.03), rows(name, 0.01, seed=1)]
        measured += [rows(name, 0.5, test="wikitext2")]
    table = advice.worse_table(pd.DataFrame(measured))
    assert table["removed"].tolist() == ["40%"]
    assert table.iloc[0, 2:].tolist() == ["1 of 2"] * len(names)
    assert table.iloc[0, 1] == 0.5


def test_a_ratio_at_which_not_everything_was_measured_is_counted() -> None:
    """What the default loses there is not hidden by what nobody measured."""
    measured = [
        rows(name, against, ratio=ratio)
        for ratio, names in ((0.1, ["compress"]), (0.4, [*advice.COUNTED]))
        for name, against in [("heapr", 0.0), *((name, 0.03) for name in names)]
    ]
    measured.append(rows("heapr + own text", 0.0))
    table = advice.worse_table(pd.DataFrame(measured)).set_index("removed")
    assert table.index.tolist() == ["10%", "40%"]
    assert table.loc["10%", "compress loses more"] == "1 of 1"
    assert table.loc["10%", "fisher + compensation loses more"] == "–"


def test_equal_flops_are_left_out_where_they_were_measured() -> None:
    """Earlier results have both kinds of rows."""
    both = pd.DataFrame([{"equal": "atoms"}, {"equal": "flops"}])
    assert len(advice.of_atoms(both)) == 1
    assert len(advice.of_atoms(both.drop(columns="equal"))) == 2


def test_sizes_are_those_of_the_dense_model() -> None:
    """Half of the bytes in int8; pruned and rounded a third."""
    states = {
        ("bfloat16", 0.0): 90, ("int8", 0.0): 45, ("int4", 0.0): 30,
        ("bfloat16", 0.4): 60, ("int8", 0.4): 30, ("int4", 0.4): 18,
    }  # fmt: skip
    measured = [
        {"model": "m", "weights": weights, "ratio": ratio, "bytes": size}
        for (weights, ratio), size in states.items()
    ]
    frame = pd.DataFrame(measured).assign(delta_nll=0.1, stderr=0.01)
    table = advice.quantised_table(frame).set_index("model is")
    assert table["size, mean ↓"].tolist() == ["50%", "33%", "67%", "33%", "20%"]
    assert table.loc["int8", "Δloss, m ↓"] == "0.1000 ± 0.0100"


def test_other_text_is_the_mean_of_the_other_corpora() -> None:
    """Whole experts: 0.2 on their corpus, 0.4 and 0.6 elsewhere."""
    shown = {"model": "m", "variant": "heapr-expert", "ratio": 0.4}
    losses = {"pydocs": 0.2, "ptb": 0.4, "c4": 0.6}
    row = shown | {f"delta_nll {name}": loss for name, loss in losses.items()}
    table = advice.experts_table(pd.DataFrame([row])).round(6)
    assert table.to_dict("records") == [
        {"method": "heapr-expert", "pydocs, 40% ↓": 0.2, "other text, 40% ↓": 0.5}
    ]


def test_a_mixture_stands_below_its_parts() -> None:
    """Means over models, a row for each calibration."""
    measured = [
        rows("heapr", 0.0, calibration=text, test=test, delta_nll=loss)
        for text, test, loss in (
            ("0.5*pydocs + 0.5*wikitext2", "pydocs", 0.2),
            ("pydocs", "pydocs", 0.1),
        )
    ]
    table = advice.text_table(pd.DataFrame(measured))
    assert table["calibrated on"].tolist() == ["pydocs", "0.5*pydocs + 0.5*wikitext2"]
    assert table.iloc[:, 1].tolist() == [0.1, 0.2]


def test_self_generated_text_costs_something_and_saves_more() -> None:
    """As the pages on the method and on when not to use it say: at every ratio."""
    measured = results_of("quality_models")
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
