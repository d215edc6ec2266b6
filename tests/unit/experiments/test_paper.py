"""Masks of two texts and of half of each, and Table 1: what is in them."""

import pandas as pd
import pytest
from tiny_folder import write_text

from heapr_lab import methods
from heapr_lab.evaluation.perplexity import evaluate_perplexity
from heapr_lab.experiments import paper
from heapr_lab.experiments.paper import MIXTURE, corpus_masks, mask_losses
from heapr_lab.inspection.mask_diff import ScoredMask
from heapr_lab.models.named import PAPER_MODELS
from heapr_lab.pruning.masks import KeepMask
from heapr_lab.pruning.surgery import masking
from heapr_lab.tasks.paper_tasks import PAPER_TASKS
from heapr_lab.text.calibration_spec import Calibration
from heapr_lab.workbench.workbench import Workbench


@pytest.fixture(scope="module")
def pair(root) -> tuple[str, str]:
    """Two texts of different words."""
    names = root / "one.txt", root / "other.txt"
    write_text(names[0], n_texts=60)
    words = " ".join(f"{number} of the others" for number in range(2000))
    names[1].write_text(words, encoding="utf-8")
    return str(names[0]), str(names[1])


@pytest.fixture(scope="module")
def masks(bench, pair) -> dict[str, ScoredMask]:
    """The masks of three calibrations; each removes half of the tiny model."""
    return corpus_masks(bench, pair, ratio=0.5)


def by_hand(bench: Workbench, keep: KeepMask, corpus: str) -> float:
    """Δloss without the workbench's cache."""
    ids = bench.test_windows(corpus).ids
    dense = evaluate_perplexity(bench.model, ids).nll
    with masking(bench.model, keep):
        return evaluate_perplexity(bench.model, ids).nll - dense


def test_the_masks_are_those_of_their_texts(bench, pair, masks):
    """All remove as much; the mixture is measured on half of each text."""
    assert list(masks) == [*pair, MIXTURE]
    assert {mask.keep.achieved_ratio for mask in masks.values()} == {0.5}
    assert len({mask.keep.fingerprint for mask in masks.values()}) == 3
    mixed = Calibration(f"0.5*{pair[0]} + 0.5*{pair[1]}")
    expected = bench.importance(mixed).scores("heapr")
    assert masks[MIXTURE].scores.tolist() == expected.tolist()
    windows = bench.calibration_set(mixed)
    assert (
        windows.n_sequences == bench.calibration_set(Calibration(pair[0])).n_sequences
    )


def test_losses_are_those_of_the_masked_model(bench, pair, masks):
    """Every mask on every text, against the dense model there."""
    losses = mask_losses(bench, masks, pair)
    assert len(losses) == 6
    for row in losses.itertuples():
        expected = by_hand(bench, masks[row.mask].keep, row.dataset)
        assert row.delta_nll == pytest.approx(expected, abs=1e-12)
    assert losses["delta_nll"].nunique() == 6


# --- Table 1 ------------------------------------------------------------------------


QWEN = PAPER_MODELS["Qwen1.5-MoE-A2.7B-Chat"]


@pytest.mark.parametrize(
    ("there", "corpora"),
    [
        ({"wikitext2", "c4"}, ["wikitext2", "c4"]),
        ({"wikitext2"}, ["pydocs", "wikitext2"]),
        ({"c4"}, ["pydocs", "c4"]),
        (set(), ["pydocs", "pydocs:stdlib"]),
    ],
)
def test_the_papers_two_corpora_are_compared_where_both_are_there(
    bench, monkeypatch, there, corpora
):
    """Else the default corpus is one of the two."""
    monkeypatch.setattr(paper, "_can_calibrate", lambda _, name: name in there)
    assert paper.calibration_corpora(bench) == corpora


def test_every_method_of_the_table_is_found_or_missing():
    """Whatever the spelling of the registry; nothing is left out."""
    names = paper.methods_of_table1()
    assert set(names) == {
        "NAEE", "MoE-I^2", "MoE-SVD", "D^2-MoE", "HEAPr", "MC-SMoE", "HC-SMoE",
        "Sub-MoE",
    }  # fmt: skip
    assert (names["NAEE"], names["HEAPr"]) == ("naee", "heapr")
    assert names["MoE-I^2"] == "moe-i2-like"
    assert {name for name in names.values() if name} <= set(methods.names())


@pytest.mark.parametrize(
    ("model", "ratios"),
    [
        (PAPER_MODELS["DeepSeekMoE-16B-Base"], (0.2, 0.4)),
        (QWEN, (0.25, 0.5)),
        (PAPER_MODELS["Qwen3-30B-A3B"], (0.25, 0.5)),
        (PAPER_MODELS["Qwen2-57B-A14B"], (0.4,)),
        ("lab", (0.2, 0.25, 0.4, 0.5)),
    ],
)
def test_ratios_are_those_of_the_model(model, ratios):
    """Each model of the paper has its own; another one gets all of them."""
    assert paper.ratios_of_table1(model) == ratios


def test_another_model_stands_beside_all_of_the_papers():
    """Every row is there and marked; one of its models has its own rows alone."""
    rows = paper.published_rows(QWEN)
    assert rows["published"].all()
    assert set(rows["model"]) == {"Qwen1.5-MoE-A2.7B-Chat"}
    assert set(paper.published_rows("lab")["model"]) == set(PAPER_MODELS)


def test_results_take_the_form_of_the_table():
    """Perplexities, accuracies and their mean, only where all seven are there."""
    sizes = {"achieved_ratio": 0.0, "parameters": 7}
    line = {"method": "dense", "ratio": 0.0, **sizes}
    rows = [line | {"dataset": "ptb", "perplexity": 3.0}]
    for number, task in enumerate(PAPER_TASKS):
        rows.append(line | {"dataset": task, "acc": number / 10, "n_items": 4})
    (row,) = paper.as_table1(pd.DataFrame(rows)).to_dict("records")
    assert row["ptb_ppl"] == 3
    assert row["arc_easy"] == 0.1
    assert row["average"] == pytest.approx(0.3)
    assert row["parameters"] == 7
    assert "average" not in paper.as_table1(pd.DataFrame(rows[:-1]))
