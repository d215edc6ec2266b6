"""Claims are checked against results of known outcome."""

import math

import pandas as pd
import pytest
from figure_rows import bins_frame, item_rows, window_rows

from benchmarks.index import results_of
from benchmarks.readme import claims_table, in_short, kept_of_items
from heapr_lab.experiments import claims as tested
from heapr_lab.experiments.claims import Evidence, answer_of, claims
from heapr_lab.figures import bins_data
from heapr_lab.storage import paths


def bins(slope: float) -> pd.DataFrame:
    """Ten tenths whose loss is the score times `slope`, in both orders."""
    rows = bins_frame()
    return bins_data(rows.assign(delta_nll=slope * rows["score_sum"], dataset="text"))


def removed(**shares: float) -> pd.DataFrame:
    """The state at 20 % of the atoms, which are half of the model."""
    row = {"ratio": 0.2, "parameters_saved": 0.1, "flops_saved": 0.2} | shares
    return pd.DataFrame([row])


def shares(last: float) -> pd.DataFrame:
    """Three layers, of which the first loses .5, the middle .2; two draws."""
    return pd.DataFrame(
        {"seed": seed, "ratio": 0.25, "layer": layer, "share": share}
        for seed in (0, 1)
        for layer, share in enumerate((0.5, 0.2, last))
    )


def savings(**shares: float) -> pd.DataFrame:
    """The share of the FLOPs that each granularity saves at 20 %."""
    columns = {"granularity": [*shares], "flops_reduction": [*shares.values()]}
    return pd.DataFrame(columns).assign(ratio=0.2, seq_len=2048)


def draws(wikitext2: float) -> pd.DataFrame:
    """Three draws of two corpora, of which C4 loses 1.0 nats."""
    losses = {"wikitext2": 3 * [wikitext2], "c4": [1.0, 1.01, 1.02]}
    rows = [
        (corpus, seed, loss)
        for corpus, values in losses.items()
        for seed, loss in enumerate(values)
    ]
    frame = pd.DataFrame(rows, columns=["calibration", "seed", "value"])
    return frame.assign(metric="nll", ratio=0.2, n_sequences=8, dataset="ptb")


def judged(**evidence: object) -> pd.DataFrame:
    """The claims by number, where nothing else was measured."""
    table = claims(Evidence("text", **evidence))  # type: ignore[arg-type]
    return table.set_index("number")


def test_there_are_twelve_each_with_a_verdict():
    """What was not measured says so, and the paper's numbers are from its tables."""
    table = judged()
    assert table.index.tolist() == list(range(1, 13))
    assert table["verdict"].tolist() == ["agrees", *["cannot be tested here"] * 11]
    paper = table["paper"]
    assert "first, alone or with another, in 14 of 14 perplexities" in paper[2]
    assert "8% at 20%" in paper[4]
    assert "59.5, 60.0, 60.7" in paper[5]
    assert "6.54 against 6.9 at 20%" in paper[7]
    assert "93% of the accuracy and 20% fewer FLOPs at <0.4 of the model" in paper[9]


@pytest.mark.parametrize(
    ("gigabytes", "verdict"), [(43, "undecided"), (45, "disagrees")]
)
def test_the_cost_on_a_gpu_is_compared(gigabytes, verdict):
    """One way within both the minutes and the memory of the paper is enough.

    The other model of the paper's table is open then.
    """
    run = {"model": "DeepSeekMoE-16B"}
    slow = run | {"device": "x", "way": "a", "seconds": 361, "peak_bytes": 1e10}
    fast = run | {
        "device": "y",
        "way": "b",
        "seconds": 30,
        "peak_bytes": gigabytes * 1e9,
    }
    gpu = pd.DataFrame([slow, fast])
    row = judged(gpu=gpu).loc[12]
    assert row["verdict"] == verdict
    assert f"x: 6.0 min, 10 GB (a); y: 0.5 min, {gigabytes} GB (b)" in row["found"]
    assert "Qwen2-57B-A14B: not measured as a whole" in row["found"]
    whole = pd.DataFrame([fast, fast | {"model": "Qwen2-57B-A14B"}])
    assert judged(gpu=whole.assign(peak_bytes=1e10))["verdict"][12] == "agrees"


def test_the_proof_of_equal_scores_is_there():
    """The first claim names a test, which is a file."""
    assert (paths.project_dir() / tested._SAME_SCORES).is_file()


def test_orders_of_the_paper_agree():
    """Every window of the method that should lose more has a higher loss."""
    losses = {
        ("dense", 0.0): 1.0,
        ("heapr", 0.2): 1.01,
        ("heapr-l", 0.2): 1.1,
        ("camera-p", 0.2): 1.2,
        ("heapr-expert", 0.2): 1.3,
    }
    table = judged(windows=window_rows(losses))
    assert table["verdict"][[3, 5, 6, 7]].tolist() == ["agrees"] * 4


@pytest.mark.parametrize(("loss", "verdict"), [(1.0, "disagrees"), (1.01, "undecided")])
def test_an_order_is_refuted_or_undecided(loss, verdict):
    """Layer-wise ranking beside a global loss of 1.01: less, or equal."""
    losses = window_rows(
        {("dense", 0.0): 1.0, ("heapr", 0.2): 1.01, ("heapr-l", 0.2): loss}
    )
    assert judged(windows=losses)["verdict"][6] == verdict


def test_a_claim_has_to_hold_on_other_text_too():
    """Whole experts lose more on the calibrated corpus and less on another."""
    calibrated = window_rows({("heapr", 0.2): 1.0, ("heapr-expert", 0.2): 1.1})
    other = window_rows({("heapr", 0.2): 1.0, ("heapr-expert", 0.2): 0.9}, "other")
    row = judged(windows=pd.concat([calibrated, other])).loc[7]
    assert row["verdict"] == "disagrees"
    assert row["found"] == (
        "heapr-expert loses less than heapr in 1 of 2 comparisons and more in 1 "
        "(-0.100 ± 0.000 nats at 20% on other text)"
    )


@pytest.mark.parametrize(("pruned", "verdict"), [(1.04, "agrees"), (1.3, "disagrees")])
def test_lossless_is_what_the_paper_lost(pruned, verdict):
    """Its worst perplexity at up to 25 % is 9.10 of 8.64, which is 0.052 nats."""
    losses = window_rows({("dense", 0.0): 1.0, ("heapr", 0.2): pruned})
    assert judged(windows=losses)["verdict"][3] == verdict


def test_accuracy_counts_item_by_item():
    """Half of the items lost on all of forty is more than 0.03."""
    right = {("dense", 0.0): [1] * 40, ("heapr", 0.2): [1, 0] * 20}
    assert judged(items=item_rows(right))["verdict"][3] == "disagrees"
    kept = kept_of_items(item_rows(right), removed())
    assert kept["value"].tolist() == [0.5]
    assert kept["guessing"].tolist() == pytest.approx([2.2 / 7])
    assert judged(kept=kept)["verdict"][9] == "disagrees"
    # What is kept is of the items that both were asked.
    more = {("dense", 0.0): [1] * 40 + [0] * 40, ("heapr", 0.2): [1, 0] * 20}
    kept = kept_of_items(item_rows(more), removed())
    assert kept["value"].tolist() == [0.5]


@pytest.mark.parametrize(
    ("flops", "verdict", "said"),
    [
        (0.25, "agrees", "and 25% fewer FLOPs at 10% of the model"),
        (0.15, "disagrees", "and 15% fewer FLOPs at 10% of the model"),
        (math.nan, "agrees", ") of the accuracy at 10% of the model"),
    ],
)
def test_the_boundary_is_of_accuracy_and_flops(flops, verdict, said):
    """Where all answers are kept, the FLOPs decide; half of the model are atoms."""
    right = {("dense", 0.0): [1, 0] * 20, ("heapr", 0.2): [1, 0] * 20}
    kept = kept_of_items(item_rows(right), removed(flops_saved=flops))
    row = judged(kept=kept).loc[9]
    assert row["verdict"] == verdict
    assert said in row["found"]
    end = "measured to 10%; 90% cannot be reached: routed experts are 50%"
    assert row["found"].endswith(end)
    reached = judged(kept=kept.assign(removed=0.19))
    assert "cannot be reached" not in reached["found"][9]


@pytest.mark.parametrize(("saved", "verdict"), [(0.07, "disagrees"), (0.19, "agrees")])
def test_flops_are_those_of_the_abstract_or_of_the_table(saved, verdict):
    """The paper says nearly 20 % in one place and 8 % in another."""
    assert judged(savings=savings(atom=saved))["verdict"][4] == verdict


def test_whole_experts_save_what_is_counted_here():
    """The count is told beside the losses, and what the paper's way saves."""
    losses = window_rows({("heapr", 0.2): 1.0, ("heapr-expert", 0.2): 1.1})
    text = judged(windows=losses, savings=savings(atom=0.3, expert=0.07))["found"]
    assert "; whole experts save 7.0% at 20% of the FLOPs where nothing" in text[7]
    assert text[4].startswith("30.0% at 20% of the atoms (at 2,048 tokens of context)")
    alone = judged(windows=losses, savings=savings(atom=0.3))
    assert "save" not in alone["found"][7]


def test_scores_in_the_opposite_order_do_not_predict():
    """In the order of the losses they do, as an answer says below."""
    assert judged(bins=bins(-2.0))["verdict"][8] == "disagrees"


def test_layers_fall_and_rise_again():
    """The last layer loses more than the middle one, in every draw; below, less."""
    assert judged(shares=shares(0.3))["verdict"][11] == "agrees"


def test_an_answer_begins_with_what_is_refuted():
    """The late rise is not there; the tenths follow their scores; no items are there.

    The paper's numbers are told, where it has some.
    """
    evidence = Evidence("text", shares=shares(0.1), bins=bins(2.0))
    text = repr(answer_of(evidence, 8, 9, 11, also="More."))
    parts = (
        "The paper says: early layers lose most, the middle least, the last ones more "
        "again (only drawn). This model **disagrees**: at 25% (2 draws) the first",
        "of its atoms than the middle, the last layer 10 (10 to 10) points less",
        "This model **agrees**: Spearman 1.00",
        "the costliest tenth: 2.0 × its scores, the others 2.0 ×. The paper",
        "(93% of the accuracy and 20% fewer FLOPs at <0.4 of the model",
        "It **cannot be tested** here: not measured. More.",
    )
    places = [text.index(part) for part in parts]
    assert places == sorted(places)
    assert places[0] == 0
    equal = answer_of(Evidence("text"), 1).short
    assert equal.startswith("The paper says: two forward passes and one backward")
    assert "per expert. This model **agrees**" in equal


@pytest.mark.parametrize(
    ("loss", "on_c4", "verdict"),
    [
        (1.0, [1, 1], "undecided"),
        (1.0, [1, 0], "disagrees"),
        (2.0, [1, 1], "disagrees"),
    ],
)
def test_a_corpus_matters_by_loss_or_accuracy(loss, on_c4, verdict):
    """That nothing is affected can be refuted by either, and not shown."""
    losses = window_rows({("heapr", 0.25): 1.0, (tested.ON_C4, 0.25): loss})
    right = {("heapr", 0.25): [1] * 40, (tested.ON_C4, 0.25): on_c4 * 20}
    row = judged(windows=losses, items=item_rows(right)).loc[10]
    assert row["verdict"] == verdict
    assert "in place of c4 at 25% (1 draw of each): nats per token" in row["found"]
    assert "the paper speaks, +" in row["found"]
    assert f"nats per token {1 - loss:+.3f} (" in row["found"]
    unasked = judged(windows=losses)["verdict"]
    assert unasked[10] == ("undecided" if loss == 1.0 else "disagrees")


def test_a_corpus_matters_over_draws():
    """The interval is over draws of the calibration windows."""
    assert judged(draws=draws(2.0))["verdict"][10] == "disagrees"
    same = draws(1.01)
    row = judged(draws=same).loc[10]
    assert row["verdict"] == "undecided"
    assert row["found"].startswith(
        "wikitext2 in place of c4 at 20% (3 draws of each): nats"
    )
    answers = draws(2.0).assign(metric="accuracy", dataset="continuation")
    assert judged(draws=pd.concat([same, answers]))["verdict"][10] == "disagrees"


@pytest.fixture
def two_rivals(monkeypatch) -> None:
    """The paper has two rivals."""
    monkeypatch.setattr(tested, "RIVALS", ("naee", "hc-smoe"))


@pytest.mark.usefixtures("two_rivals")
@pytest.mark.parametrize(("least", "verdict"), [(0.5, "agrees"), (-0.5, "disagrees")])
def test_rivals_lose_more_on_every_model(least, verdict):
    """The interval is over models."""
    rows = [
        (model, name, loss + model)
        for model in range(3)
        for name, loss in (("heapr", 0.0), ("naee", least), ("hc-smoe", 0.6))
    ]
    columns = ["model", "variant", "delta_nll text"]
    measured = pd.DataFrame(rows, columns=columns).assign(seed=0, ratio=0.2)
    assert judged(rivals=measured)["verdict"][2] == verdict
    missing = measured["model"].eq(2) & measured["variant"].eq("naee")
    assert judged(rivals=measured[~missing])["verdict"][2] == verdict
    heapr = measured["variant"].eq("heapr")
    worse = measured[heapr].assign(seed=1, **{"delta_nll text": 9.0})
    drawn_again = pd.concat([measured, worse])  # where no rival was measured
    assert judged(rivals=drawn_again)["verdict"][2] == verdict


@pytest.mark.usefixtures("two_rivals")
@pytest.mark.parametrize(
    ("naee", "verdict"), [(1.1, "agrees"), (1.01, "undecided"), (0.9, "disagrees")]
)
def test_rivals_lose_more_on_every_window(naee, verdict):
    """One model, on which two rivals were measured at one ratio."""
    losses = {("heapr", 0.25): 1.01, ("naee", 0.25): naee, ("hc-smoe", 0.25): 2.0}
    assert judged(windows=window_rows(losses))["verdict"][2] == verdict
    right = item_rows({state: [1, 0] * 20 for state in losses})
    text = judged(windows=window_rows(losses), items=right)["found"][2]
    assert "of 2 comparisons and more in" in text
    assert "the closest rival is naee at 25%: " in text
    assert "its accuracy is higher in 0 of 2, lower in 0" in text
    del losses["hc-smoe", 0.25]  # no more than undecided without it
    least = "undecided" if verdict == "agrees" else verdict
    assert judged(windows=window_rows(losses))["verdict"][2] == least


def test_refuted_claims_come_first():
    """The table of README.md, of the committed pretrained model and a lab model."""
    lab = claims(Evidence("text"))
    table = claims_table(lab, {"real": results_of("real")})
    bold = table.astype(str).apply(lambda row: "**disagrees**" in " ".join(row), axis=1)
    assert len(table) == 12
    assert bold.iloc[0]
    assert bold.is_monotonic_decreasing
    short, names = in_short(table), list(table)
    for name in names[1:]:
        assert all(map(str.startswith, table[name], short[name]))
    lab_verdicts = {"agrees", "**disagrees**", "undecided", "cannot be tested here"}
    assert {*short[names[2]]} <= lab_verdicts | {"the same"}
