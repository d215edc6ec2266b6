"""The answers of notebooks say what their numbers say."""

import pandas as pd

from heapr_lab.experiments import answers
from heapr_lab.experiments.answers import Folded, Prose, answer


def test_an_answer_begins_with_the_short_one():
    """The whole answer is text for notebooks, and empty sentences are left out."""
    reply = answer("Against. Short.", ["More.", ""])
    assert reply._repr_markdown_() == repr(reply) == "Against. Short. More."
    assert repr(reply.short) == "Against. Short."
    assert Prose("a")._repr_markdown_() == "a"


def losses(other: float) -> pd.DataFrame:
    """Two masks and a mixture; the mask of `a` loses `other` on `b`."""
    rows = [
        ("a", "a", 0.1), ("a", "b", other),
        ("b", "a", 0.4), ("b", "b", 0.1),
        ("mixture", "a", 0.15), ("mixture", "b", 0.2),
    ]  # fmt: skip
    return pd.DataFrame(rows, columns=["mask", "dataset", "delta_nll"])


def test_the_tour_has_both_sides_and_the_papers_numbers():
    """Perplexity 20 to 22 is +10 %; other text loses more, or not always."""
    results = pd.DataFrame(
        {
            "metric": "perplexity",
            "estimator": ["dense", "heapr"],
            "dataset": "a",
            "value": [20.0, 22.0],
        }
    )
    saved = pd.Series(
        {"parameter_reduction": 0.19, "flops_reduction": 0.09, "seq_len": 256}
    )
    text = repr(answers.tour(results, saved, losses(0.5)))
    assert (
        "from 20.00 to 22.00 (+10.0%; the paper's models on WikiText-2: +2.3%" in text
    )
    assert "it costs more: Δloss is 0.100 nats per token on a, and 0.500 on b" in text
    assert "is 0.200 instead of 0.500, and that on a 0.150 instead of 0.100" in text
    assert "not always more" in repr(answers.tour(results, saved, losses(0.05)))


def test_more_text_and_other_text_are_told():
    """Perplexity at 8 and at 16 windows; the other mask loses 0.3 and 0.4 more."""
    rows = [
        ("a", 16, "a", 9.0), ("a", 8, "a", 10.0), ("a", 8, "b", 7.0),
        ("b", 8, "b", 30.0), ("b", 16, "b", 20.0),
        ("b", 8, "continuation", 0.5), ("b", 16, "continuation", 0.75),
    ]  # fmt: skip
    names = ["calibration", "n_sequences", "dataset", "value"]
    sizes = pd.DataFrame(rows, columns=names).assign(spread=0.1, n_seeds=3)
    of_items = sizes["dataset"].eq("continuation")
    sizes["metric"] = of_items.map({True: "accuracy", False: "perplexity"})
    text = answers.amount_of_text(sizes, ratio=0.2)
    assert text == (
        "Where 20% is removed, from 8 to 16 windows (mean of 3 draws ± standard "
        "deviation) perplexity on the calibrated corpus goes from 10.00 ± 0.10 to 9.00 "
        "± 0.10 (a) and from 30.00 ± 0.10 to 20.00 ± 0.10 (b), and accuracy from 50.0% "
        "± 10.0% to 75.0% ± 10.0% (b)."
    )
    assert "accuracy" not in answers.amount_of_text(sizes[~of_items], ratio=0.2)
    assert "by +0.300 on a and +0.400 on b" in answers.other_text(losses(0.5))


def test_the_exported_ratio_is_within_the_limit_or_says_so():
    """Perplexity +5 % is within a rise of a tenth, +20 % is not."""
    relative = pd.DataFrame({"a": [1.05, 1.2], "b": [1.3, 2.0]}, index=[0.1, 0.2])
    largest = pd.Series({"checkpoint_bytes": 34e9, "peak_bytes": 3.5e9})
    within = answers.own_model(relative, 0.1, (12_000_000, 9_000_000), largest)
    assert "10% is the largest within a rise of a tenth" in within.short
    assert "the files shrink from 12.0 to 9.0 MB" in within.short
    beyond = answers.own_model(relative, 0.2, (12_000_000, 9_000_000), largest)
    assert "none is within a rise of a tenth" in beyond.short


def test_importance_says_what_a_pass_measured():
    """Ten scores from 1 to 10; the largest has 10 of 55."""
    scores = pd.Series(range(1, 11), dtype=float)
    ranks = pd.DataFrame(
        {"heapr": [1.0, 0.9, 0.1]}, index=["heapr", "fisher", "random"]
    )
    facts = {
        "tokens": 100,
        "corpus": "a",
        "experts": 4,
        "unrouted": 0,
        "cost": "Little.",
    }
    text = repr(answers.importance(scores, ranks, facts))
    assert "over 100 predicted tokens of a gives the sums of 10 atomic experts" in text
    assert "has 18% of their sum" in text
    assert "0 of 4 experts got no tokens. Little. The upper" in text
    assert "fisher ranks most like it (Spearman 0.90), and random least (0.10)" in text


def test_the_best_score_is_told_at_the_nearest_ratio():
    """Methods round to whole atoms; what is not drawn or not ours does not count."""
    rows = [
        (name, source, dataset, ratio, value + ratio)
        for name, source, a, b in (
            ("heapr", "ours", 11.0, 20.0),
            ("fisher", "ours", 10.0, 22.0),
            ("random", "ours", 1.0, 1.0),
            ("heapr", "paper", 1.0, 1.0),
        )
        for dataset, value in (("a", a), ("b", b))
        for ratio in (0.0, 0.25, 0.39)
    ]
    names = ["name", "source", "dataset", "ratio", "value"]
    curves = pd.DataFrame(rows, columns=names).assign(metric="perplexity")
    text = answers.best_scores(curves, 0.4)
    assert "where 40% is removed is *Fisher* on a and *HEAPr* on b;" in text
    assert "HEAPr's is 1.00 to 1.10 times as high" in text


def test_a_folded_table_has_its_title_and_all_rows():
    """What is longer than ten rows is out of sight, and escaped."""
    shown = Folded(pd.DataFrame({"a": range(12)}), "a < b")._repr_html_()
    assert "<summary>a &lt; b (12 rows)</summary>" in shown
    assert shown.count("<tr>") == 12
    assert repr(Folded(pd.DataFrame({"a": [1]}), "one")) == "one (1 rows)"
