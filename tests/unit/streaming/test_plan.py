"""What a run needs, from a configuration: against measurements and slow counts."""

import itertools
import json
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import plan_table
import psutil
import pytest
import torch
from families import tiny_model
from random_tables import random_table
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.machine import RESULTS
from benchmarks.streaming import HOST_MEMORY, SHAPES, config_of
from heapr_lab.errors import LayoutError, SpecError
from heapr_lab.importance.collect import TOKENS_PER_BATCH, collect_statistics
from heapr_lab.importance.table import ImportanceTable
from heapr_lab.models import likelihood
from heapr_lab.models.experts import find_experts
from heapr_lab.models.footprint import (
    IN_MEMORY,
    PROCESS,
    STREAMED,
    Work,
    device_parts,
    sizes_of,
    weight_bytes,
)
from heapr_lab.models.hooks import probed
from heapr_lab.models.likelihood import final_states
from heapr_lab.models.memory import size_of
from heapr_lab.models.modes import differentiating
from heapr_lab.models.moments import EXPERT_SUMS, MAXIMA, SUMS
from heapr_lab.storage import paths
from heapr_lab.streaming import devices
from heapr_lab.streaming import plan as planning
from heapr_lab.streaming.devices import Device, find_device, measured
from heapr_lab.streaming.plan import INFEASIBLE, Plan, plan, plan_if_long
from heapr_lab.text.calibration import CalibrationSet

CONFIGS = paths.project_dir() / "tests" / "data" / "shapes"
AS_MEASURED = 0.15
"""Relative difference from measured memory that is accepted."""
CPU = Device("a processor", "cpu", 16e9, 1e11, 2e9, 1e9, "given by the test")


def planned(shape: str, **options: Any) -> Plan:
    """The plan of one of the true shapes."""
    return plan(CONFIGS / shape, **options)


def of_benchmark(folder: Path, name: str) -> Path:
    """The configuration of a checkpoint in benchmarks/streaming.py."""
    config = config_of(SHAPES[name])
    (folder / "config.json").write_text(json.dumps(config))
    return folder


# --- memory -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "row",
    pd.read_csv(RESULTS / "streaming.csv").to_dict("records"),
    ids=lambda row: f"{row['model']}, {row['way']}",
)
def test_memory_is_that_of_the_benchmark(row: dict[str, Any], tmp_path: Path) -> None:
    """Peak memory of a process that scores, to 15 %; and what it reads from disk."""
    shape = SHAPES[row["model"]]
    found = plan(
        of_benchmark(tmp_path, row["model"]),
        n_sequences=shape.n_windows,
        seq_len=shape.seq_len,
        device=CPU,
        host_memory="100GB",
        stream=row["way"] == STREAMED,
    )
    assert found.engine == row["way"]
    assert found.checkpoint_bytes == pytest.approx(row["checkpoint_bytes"], rel=1e-3)
    states = min(found.host_bytes, HOST_MEMORY)
    kept = states if found.engine == STREAMED else 0
    measured_peak = row["peak_bytes"]
    assert found.device_peak + kept == pytest.approx(measured_peak, rel=AS_MEASURED)
    if found.engine == STREAMED:
        read = found.read_bytes["scores"] + 2 * found.read_bytes["perplexity"]
        assert read == pytest.approx(row["bytes_read"], rel=AS_MEASURED)


def test_the_page_says_how_far_plans_are_from_what_was_measured() -> None:
    """Worst and best of benchmarks/growth.py, and how many runs reach the goals."""
    rows = pd.read_csv(RESULTS / "growth.csv")
    page = " ".join((paths.project_dir() / "docs/plan.md").read_text("utf-8").split())
    time, memory, factor = (
        rows[name] for name in ("plan_seconds_ratio", "bytes_ratio", "seconds_ratio")
    )
    told = (
        f"{len(rows)} runs",
        f"{time.min():.2f} to {time.max():.2f} times what a plan says",
        f"at most 1.30 in {(time <= 1.3).sum()} of them",
        f"{memory.min():.2f} to {memory.max():.2f} times, in "
        f"{memory.between(0.85, 1.15).sum()} of them within 15 %",
        f"time is {factor.min():.2f} to {factor.max():.2f} times the prediction",
    )
    assert [text for text in told if text not in page] == []


def kept_bytes(model: Any, ids: torch.Tensor) -> int:
    """Bytes of everything that autograd keeps, counted once: the slow twin."""
    own = {t.untyped_storage().data_ptr() for t in model.state_dict().values()}
    found: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        found.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    embedded = model.get_input_embeddings().register_forward_hook(
        lambda _module, _args, output: output.requires_grad_()
    )
    with differentiating(model), probed(find_experts(model)), hooks:
        final_states(model, ids)
    embedded.remove()
    return sum(
        tensor.untyped_storage().nbytes()
        for place, tensor in found.items()
        if place not in own
    )


WIDE = {"hidden_size": 128, "moe_intermediate_size": 96, "vocab_size": 64}
FAMILIES = ["qwen2_moe", "qwen3_moe", "deepseek_v3", "mixtral"]


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_kept_is_what_autograd_keeps(family: str) -> None:
    """The rule for the activations of all layers, against every saved tensor."""
    sizes = WIDE | ({"intermediate_size": 96} if family == "mixtral" else {})
    model = tiny_model(family, dtype=torch.float32, **sizes)
    ids = torch.randint(0, 64, (2, 64), generator=torch.Generator().manual_seed(0))
    found = sizes_of(model)
    residual = 2 * found.architecture.d_model * len(found.layers)
    layers = range(len(found.layers))
    kept = sum(found.kept(number, "cpu") for number in layers) + residual
    assert 4 * kept * ids.numel() == pytest.approx(kept_bytes(model, ids), rel=0.2)


def test_a_streamed_pass_holds_one_part() -> None:
    """Its memory does not grow with depth, but for the sums of the atoms."""
    config = CONFIGS / "Qwen3-30B-A3B"
    sizes = sizes_of(planning.skeleton_of(planning._config_of(config)))
    work = Work(8, 512, 4096, 2, "cuda")
    assert weight_bytes(sizes, work, streamed=True) == 2 * max(sizes.layers)
    wide = replace(sizes, head_weights=max(sizes.layers) + 1)
    assert weight_bytes(wide, work, streamed=True) == 2 * wide.head_weights
    more = sizes.architecture.n_parameters + sum(sizes.layers)
    twice = replace(
        sizes,
        layers=sizes.layers * 2,
        outside=sizes.outside * 2,
        architecture=replace(sizes.architecture, n_parameters=more),
    )
    deep, flat = (device_parts(s, work, STREAMED) for s in (twice, sizes))
    assert deep["weights"] == flat["weights"]
    assert deep["activations"] == flat["activations"]
    deep, flat = (device_parts(s, work, IN_MEMORY) for s in (twice, sizes))
    assert deep["weights"] == flat["weights"] + 2 * sum(sizes.layers)


def test_the_size_of_a_table(tmp_path: Path) -> None:
    """A file of 65,536 atoms has the bytes that a plan says, to 15 %."""
    rng = np.random.default_rng(0)
    frame = random_table(2, 16, 2048).frame[["layer", "expert", "atom", "tokens"]]
    for name in EXPERT_SUMS[1:]:
        frame[name] = np.repeat(rng.lognormal(size=32), 2048)
    for name in (*SUMS, *MAXIMA, "w_down_sq", "w_up_sq", "w_gate_sq"):
        frame[name] = rng.lognormal(size=len(frame)).astype(np.float32)
    path = tmp_path / "table.parquet"
    ImportanceTable.from_frame(frame).write(path)
    of_a_row = path.stat().st_size / len(frame)
    assert of_a_row == pytest.approx(planning._ATOM_BYTES, rel=0.15)


# --- engines ----------------------------------------------------------------------


def test_more_memory_changes_the_engine() -> None:
    """Too little for a layer, enough for one, enough for all; then larger batches."""
    found = [
        planned("Qwen3-30B-A3B", device="h100", device_memory=size, host_memory="64GB")
        for size in ("2GB", "24GB", "100GB", "400GB")
    ]
    engines = [one.engine for one in found]
    assert engines == [INFEASIBLE, STREAMED, IN_MEMORY, IN_MEMORY]
    assert "GB are missing" in found[0].why
    assert found[0].seconds == {}
    assert found[1].device_peak <= 24e9
    assert found[3].batch_tokens[IN_MEMORY] == TOKENS_PER_BATCH["cuda"]
    assert found[2].batch_tokens[IN_MEMORY] < found[3].batch_tokens[IN_MEMORY]


def test_layer_inputs_beyond_the_host_are_a_file() -> None:
    """48 + 3 states of 262,144 tokens × 2048 × 2 bytes, and 8 experts of each token."""
    large, small = (
        planned("Qwen3-30B-A3B", device="a100", host_memory=size, stream=True)
        for size in ("64GB", "16GB")
    )
    kept = 262_144 * (51 * 2048 * 2 + 48 * 8 * 4)
    assert (large.host_bytes, large.file_bytes) == (kept, 0)
    assert (small.host_bytes, small.file_bytes) == (16 * 10**9, kept - 16 * 10**9)
    more = small.read_bytes["scores"] - large.read_bytes["scores"]
    assert more == 2 * small.file_bytes


def test_scores_cost_two_forward_passes_and_a_head(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Operations of a pass, against torch's counter on a tiny model.

    The backward pass of attention has twice the products of its forward pass, because
    neither factor is a weight; a plan counts it once, as a causal mask leaves half.
    """
    model = tiny_model("qwen2_moe", dtype=torch.float32)
    model.set_attn_implementation("eager")
    monkeypatch.setitem(likelihood.LOGITS_AT_ONCE, "cpu", 4 * 48)  # of four tokens
    monkeypatch.setattr(likelihood, "TOKENS_AT_LEAST", 1)
    sizes, work = sizes_of(model), Work(2, 8, 16, 4, "cpu")
    ids = torch.randint(0, 16, (2, 8), generator=torch.Generator().manual_seed(0))
    with FlopCounterMode(display=False) as counter:
        collect_statistics(model, CalibrationSet.from_ids(ids))
    of_attention = 2 * 8 * sizes.architecture.attention_width * ids.numel()
    scores = planning._flops(sizes, work, IN_MEMORY)["scores"]
    assert scores + of_attention == pytest.approx(counter.get_total_flops(), rel=0.05)
    forward = planning._flops(sizes, work, STREAMED)["perplexity"]
    assert planning._flops(sizes, work, STREAMED)["scores"] == 3 * forward


# --- shapes -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "billions"),
    [
        ("DeepSeekMoE-16B-Base", 16.4),
        ("Qwen1.5-MoE-A2.7B-Chat", 14.3),
        ("Qwen3-30B-A3B", 30.5),
        ("Qwen2-57B-A14B", 57.4),
        ("DeepSeek-V3", 671.0),
        ("Kimi-K2", 1026.4),
    ],
)
def test_true_shapes_have_their_parameters(shape: str, billions: float) -> None:
    """The totals that their makers state."""
    found = planned(shape, device="h200", host_memory="64GB")
    assert round(found.n_parameters / 1e9, 1) == billions
    assert found.weight_bytes["bfloat16"] == 2 * found.n_parameters


def test_the_page_has_the_table_of_now() -> None:
    """`python docs/plan_table.py` would change nothing."""
    page = plan_table.PAGE.read_text("utf-8")
    assert plan_table.table() in page
    assert plan_table.with_table(page) == page


def test_a_plan_is_shown_and_is_json() -> None:
    """The same facts as lines and as a card; plain data for --json."""
    found = planned("DeepSeek-V3", device="h200", host_memory="64GB")
    text, card = str(found), found._repr_html_()
    for said in (
        "58 of 61",
        "671.0 B",
        "streamed",
        "in files",
        "not measured",
    ):
        assert said in text
        assert said in card
    assert json.loads(json.dumps(found.to_dict()))["engine"] == found.engine
    assert found.brief()["engine"].startswith("streamed")


# --- this machine -----------------------------------------------------------------


def test_this_machine_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rates are positive and finite, and measured once; memory is that of now."""
    monkeypatch.setattr(devices, "_SECONDS", 0.01)
    monkeypatch.setattr(devices, "_FILE_BYTES", 2**20)
    monkeypatch.setattr(devices, "_COPY_BYTES", 2**20)
    ticks = itertools.count()

    def clock() -> float:
        next(ticks)
        return time.perf_counter()

    found = measured(torch.device("cpu"), clock=clock)
    looked = next(ticks)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=9))
    again = measured(torch.device("cpu"), clock=clock)
    assert next(ticks) == looked + 1
    assert again == replace(found, memory=9 + PROCESS["cpu"])
    assert found.kind == "cpu"
    assert min(found.memory, found.flops, found.fresh, found.disk) > 0
    assert found.source == "measured in float32"


def test_only_long_runs_have_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tiny model is not even measured; on a slow device it would be long."""
    model = tiny_model("qwen2_moe", dtype=torch.float32)
    monkeypatch.setattr(planning, "measured", lambda *_: replace(CPU, flops=1.0))
    assert plan_if_long(model, n_sequences=2, seq_len=8) is None
    monkeypatch.setattr(planning, "_SLOWEST", 1e-9)
    found = plan_if_long(model, n_sequences=2, seq_len=8)
    assert found is not None
    assert found.seconds["scores"] > 600
    monkeypatch.setattr(planning, "measured", lambda *_: CPU)
    assert plan_if_long(model, n_sequences=2, seq_len=8) is None


def test_measuring_says_that_it_takes_long(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The workbench logs the plan before the pass, not for a table in the cache."""
    from heapr_lab.workbench.settings import PROFILES
    from heapr_lab.workbench.workbench import Workbench

    monkeypatch.setattr(planning, "_SLOWEST", 1e-9)
    monkeypatch.setattr(planning, "measured", lambda *_: replace(CPU, flops=1.0))
    model = tiny_model("qwen2_moe", dtype=torch.float32)
    bench = Workbench(model, None, name="tiny", profile=PROFILES["small"])
    ids = torch.arange(16).reshape(2, 8)
    table = bench.measure(CalibrationSet.from_ids(ids))
    assert "engine: in memory" in caplog.text
    caplog.clear()
    again = bench.measure(CalibrationSet.from_ids(ids))
    assert caplog.text == ""
    assert table.n_atoms == again.n_atoms == collect_statistics(
        model, CalibrationSet.from_ids(ids)
    ).n_atoms  # fmt: skip


# --- errors -----------------------------------------------------------------------


@pytest.mark.parametrize("size", ["24 bananas", "GB", "-1GB", "", "0", 0])
def test_a_size_that_is_none(size: Any) -> None:
    """The message says what was given and what is expected."""
    with pytest.raises(SpecError, match="expected bytes, or a number with a unit"):
        size_of(size)


def test_what_cannot_be_planned(tmp_path: Path) -> None:
    """Unknown devices, dense models and foreign formats are named."""
    with pytest.raises(SpecError, match=r"device is 'abacus', expected this .* h100"):
        find_device("abacus")
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "llama", "num_hidden_layers": 1}))
    with pytest.raises(LayoutError, match="found 0 MoE layers in LlamaForCausalLM"):
        plan(path, device="h100")
    config = json.loads((CONFIGS / "Qwen3-30B-A3B" / "config.json").read_text())
    quantised = {"quantization_config": {"quant_method": "awq", "bits": 4}}
    path.write_text(json.dumps(config | quantised))
    with pytest.raises(SpecError, match="the format 'awq', which cannot be measured"):
        plan(path, device="h100")
    quantised = {"quantization_config": {"quant_method": "fp8"}}
    path.write_text(json.dumps(config | quantised))
    found = plan(path, device="h100", host_memory="64GB")
    assert found.checkpoint_bytes == found.n_parameters
    with pytest.raises(SpecError, match="stream is 'often'"):
        plan(path, device="h100", stream="often")
