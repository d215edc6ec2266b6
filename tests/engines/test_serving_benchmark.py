"""benchmarks/serving.py in vLLM: what it reads of the engine, and that it runs."""

import os
import warnings
from typing import Any

import pandas as pd
import pytest
import torch

from heapr_lab import prune
from heapr_lab.errors import SpecError
from heapr_lab.models.experts import find_experts

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # vLLM's own
    pytest.importorskip("vllm")

from benchmarks import serving, speed

pytestmark = [
    pytest.mark.engine,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.usefixtures("engine"),
]

SIZES = serving.QUICK_SIZES
LOAD = serving.Load(4, 16, 6)


@pytest.mark.parametrize("structure", ["per_layer", "ragged"])
def test_the_routing_is_that_of_transformers(structure):
    """For the prompts and for every step, as `benchmarks/speed.py` observes it."""
    model: Any = speed.build_model(SIZES, "cpu")
    keep = serving.mask_of(SIZES, structure, 0.4)
    names = {x.layer: x.name for x in find_experts(model)}
    prompts = LOAD.prompts(SIZES.d_vocab)
    engine = serving.engine_of(model, keep, (LOAD,))
    table = serving.routing(engine, prompts, LOAD.n_steps, SIZES.n_experts)
    sliced, expected = prune(model, keep), []
    for n_steps, first in ((0, 0), (LOAD.n_steps, 1)):
        mode = speed.Mode("", LOAD.batch_size, LOAD.prompt_len, n_steps)
        rows = speed.routing(sliced, names, mode, torch.tensor(prompts))
        expected.append(rows.assign(call=rows["call"] + first))
    by = ["layer", "call", "expert"]
    pd.testing.assert_frame_equal(
        table.sort_values(by, ignore_index=True),
        pd.concat(expected).sort_values(by, ignore_index=True),
    )


def test_a_batch_that_does_not_fit_is_an_error():
    """Its times would be of several smaller batches."""
    model: Any = speed.build_model(SIZES, "cpu")
    engine = serving.engine_of(model, None, (serving.Load(2, 16, 6),))
    with pytest.raises(SpecError, match=r"expected 4 in each of 7"):
        serving.seconds_of(engine, LOAD.prompts(SIZES.d_vocab), LOAD.n_steps)


@pytest.mark.parametrize("dtype", serving.NAMES)
def test_all_of_it(dtype, tmp_path, monkeypatch):
    """A row for each structure and phase, run by the experts that are said."""
    monkeypatch.setattr(serving, "RATIOS", (0.4,))
    monkeypatch.setattr(serving, "LOADS", (LOAD,))
    command = ["serving.py", "--quick", "--n-repeats", "2", "--out", str(tmp_path)]
    monkeypatch.setattr("sys.argv", [*command, "--dtype", dtype])
    monkeypatch.setattr(os, "environ", os.environ.copy())
    serving.main()
    rows = pd.read_csv(tmp_path / f"{serving.NAMES[dtype]}.csv")
    assert rows["structure"].tolist() == ["dense", *serving.STRUCTURES] * 2
    experts = ["UnquantizedFusedMoEMethod"] * 2 + ["NarrowMethod", "RaggedMethod"]
    assert rows["experts_by"].tolist() == experts * 2
    assert (rows["tokens_per_second"] > 0).all()
    dense = rows["structure"].eq("dense")
    assert (rows["predicted_by_flops"][~dense] > 1.3).all()
    assert set(rows["speedup_over_dense"][dense]) == {1}
