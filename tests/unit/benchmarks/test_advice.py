"""What docs/when_not.md says is counted from rows of known outcome."""

import pandas as pd

from benchmarks import advice
from benchmarks.index import results_of
from heapr_lab.storage import paths


def rows(variant: str, against: float, **changes: object) -> dict[str, object]:
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
    } | changes


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
