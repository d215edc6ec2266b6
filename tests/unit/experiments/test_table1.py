"""Table 1 of the paper: what it takes from the registry, and what is comparable."""

from dataclasses import replace
from typing import Any

import pandas as pd
import pytest
import torch

from heapr_lab import methods
from heapr_lab.experiments import table1
from heapr_lab.models.paper_models import PAPER_MODELS
from heapr_lab.tasks.paper_tasks import PAPER_TASKS
from heapr_lab.text.calibration import CalibrationSet
from heapr_lab.workbench.settings import PROFILES

QWEN = PAPER_MODELS["Qwen1.5-MoE-A2.7B-Chat"]
AS_PUBLISHED = table1.Measured(
    QWEN,
    PROFILES["paper"],
    CalibrationSet.from_ids(torch.zeros(128, 2048, dtype=torch.long)),
    "wikitext2",
    {task: n for task, (_, n) in PAPER_TASKS.items()},
)


def reasons(**changes: Any) -> dict[str, str]:
    """Why the paper's rows at 25 % and of the dense model are not comparable."""
    rows = table1.published_rows(replace(AS_PUBLISHED, **changes))
    rows = rows[rows["ratio"].le(0.25) & rows["model"].eq("Qwen1.5-MoE-A2.7B-Chat")]
    assert rows["published"].all()
    return dict(zip(rows["method"], rows["not_comparable"], strict=True))


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


def test_the_paper_is_comparable_with_its_own_settings() -> None:
    """Its own rows are; those that it quotes come from other calibrations."""
    notes = reasons()
    assert (notes["Original"], notes["HEAPr"]) == ("", "")
    for rival in ("MC-SMoE", "HC-SMoE", "Sub-MoE"):
        assert "quoted by the paper" in notes[rival]


@pytest.mark.parametrize(
    ("changes", "of_dense", "of_heapr"),
    [
        ({"model": "lab"}, "another model", "another model"),
        ({"corpus": "pydocs"}, "", "other calibration"),
        ({"profile": PROFILES["lab"]}, "perplexity of other windows", None),
        (
            {"n_items": {"hellaswag": 1000, "piqa": 1838, "lambada": 5}},
            "other items: hellaswag 1,000 of 10,042",
            None,
        ),
    ],
)
def test_every_difference_is_named(
    changes: dict[str, Any], of_dense: str, of_heapr: str | None
) -> None:
    """Model, calibration, test windows and items, each on its own."""
    notes = reasons(**changes)
    assert notes["Original"] == of_dense
    assert notes["HEAPr"] == (of_dense if of_heapr is None else of_heapr)


def test_another_model_stands_beside_all_of_the_papers() -> None:
    """Every row is there and marked; one of its models has its own rows alone."""
    assert set(table1.published_rows(AS_PUBLISHED)["model"]) == {
        "Qwen1.5-MoE-A2.7B-Chat"
    }
    rows = table1.published_rows(replace(AS_PUBLISHED, model="lab"))
    assert set(rows["model"]) == set(PAPER_MODELS)
    shown, notes = table1.with_notes(rows)
    assert notes[0] == "a: another model"
    assert shown["not comparable"].str.startswith("a").all()
    rivals = ~shown["method"].isin(["Original", "HEAPr"])
    assert shown.loc[rivals, "not comparable"].eq("a, b").all()
    assert len(notes) == 2


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
    items = table1.n_items_of(pd.DataFrame(rows))
    assert items == dict.fromkeys(PAPER_TASKS, 4)
    assert table1.n_items_of(pd.DataFrame(rows[:1])) == {}
