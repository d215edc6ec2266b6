"""Table 1 of the paper: what it takes from the registry and from the paper."""

import pandas as pd
import pytest

from heapr_lab import methods
from heapr_lab.experiments import table1
from heapr_lab.models.named import PAPER_MODELS
from heapr_lab.tasks.paper_tasks import PAPER_TASKS

QWEN = PAPER_MODELS["Qwen1.5-MoE-A2.7B-Chat"]


def test_every_method_of_the_table_is_found_or_missing() -> None:
    """Whatever the spelling of the registry; nothing is left out."""
    names = table1.methods_of_table1()
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
def test_ratios_are_those_of_the_model(model: str, ratios: tuple[float, ...]) -> None:
    """Each model of the paper has its own; another one gets all of them."""
    assert table1.ratios_of_table1(model) == ratios


def test_another_model_stands_beside_all_of_the_papers() -> None:
    """Every row is there and marked; one of its models has its own rows alone."""
    rows = table1.published_rows(QWEN)
    assert rows["published"].all()
    assert set(rows["model"]) == {"Qwen1.5-MoE-A2.7B-Chat"}
    assert set(table1.published_rows("lab")["model"]) == set(PAPER_MODELS)


def test_results_take_the_form_of_the_table() -> None:
    """Perplexities, accuracies and their mean, only where all seven are there."""
    sizes = {"achieved_ratio": 0.0, "parameters": 7}
    line = {"method": "dense", "ratio": 0.0, **sizes}
    rows = [line | {"dataset": "ptb", "perplexity": 3.0}]
    for number, task in enumerate(PAPER_TASKS):
        rows.append(line | {"dataset": task, "acc": number / 10, "n_items": 4})
    (row,) = table1.as_table1(pd.DataFrame(rows)).to_dict("records")
    assert row["ptb_ppl"] == 3
    assert row["arc_easy"] == 0.1
    assert row["average"] == pytest.approx(0.3)
    assert row["parameters"] == 7
    assert "average" not in table1.as_table1(pd.DataFrame(rows[:-1]))
