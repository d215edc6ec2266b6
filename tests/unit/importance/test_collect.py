"""A pass over the calibration windows: what it counts, survives and refuses."""

import copy
import logging
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from devices import GPU, OF_DEVICES
from families import FAMILIES, REPRESENTATIVES, tiny_model, tiny_windows
from heard import Heard, stop_at
from keeps import logits_of
from torch import nn

from heapr_lab import CalibrationSet, HeaprLabError, ImportanceTable, collect_statistics
from heapr_lab.errors import CacheError, CoverageError, LayoutError
from heapr_lab.importance import resuming
from heapr_lab.importance.collect import statistics_spec
from heapr_lab.importance.columns import pooled
from heapr_lab.models.experts import find_experts
from heapr_lab.models.identity import identity_in_force
from heapr_lab.models.likelihood import token_nll
from heapr_lab.storage import files
from heapr_lab.storage.hashing import digest

WINDOWS = tiny_windows(n_sequences=5)


def assert_same(got: ImportanceTable, expected: ImportanceTable) -> None:
    """Both tables have the same rows, and the same numbers but for rounding."""
    # float64: the order of some hundred additions.
    pd.testing.assert_frame_equal(got.frame, expected.frame, rtol=1e-12, atol=0)
    assert got.metadata["N"] == expected.metadata["N"]


# --- what is counted --------------------------------------------------------------


@pytest.mark.parametrize("family", ["qwen2_moe", "deepseek_v3", "gpt_oss"])
@pytest.mark.parametrize("batch_size", [1, 2, 3, None])
def test_the_batch_size_does_not_matter(family, batch_size):
    """Batches of 1, 2 (with a rest of 1), 3, or by default: the table of one batch."""
    model = tiny_model(family)
    whole = collect_statistics(model, WINDOWS, batch_size=5)
    parts = collect_statistics(model, WINDOWS, batch_size=batch_size)
    assert_same(parts, whole)
    assert parts.metadata["spec_hash"] == whole.metadata["spec_hash"]


def test_two_halves_are_the_whole():
    """The tables of windows 0-1 and 2-4 add up to that of all five."""
    model, ids = tiny_model("mixtral"), WINDOWS.ids
    whole = collect_statistics(model, WINDOWS, batch_size=5)
    halves = [
        collect_statistics(model, CalibrationSet.from_ids(part), batch_size=2)
        for part in (ids[:2], ids[2:])
    ]
    rows = pooled(*(half.frame for half in halves))[[*whole.frame]]
    assert_same(ImportanceTable.from_frame(rows, N=whole.metadata["N"]), whole)
    assert not np.allclose(halves[0].frame["sum_h2"], whole.frame["sum_h2"])


def test_auxiliary_losses_are_off():
    """A model set to add its load-balancing loss gives the table of the plain loss."""
    model = tiny_model("qwen2_moe", router_aux_loss_coef=10.0)
    plain = collect_statistics(model, WINDOWS, batch_size=5)
    model.config.output_router_logits = True
    with_loss = model(WINDOWS.ids, labels=WINDOWS.ids)
    assert with_loss.aux_loss is not None
    plain_loss = token_nll(model, WINDOWS.ids).mean()
    assert with_loss.loss > plain_loss + 1
    again = collect_statistics(model, WINDOWS, batch_size=5)
    pd.testing.assert_frame_equal(again.frame, plain.frame)


@pytest.mark.parametrize(
    ("dtype", "rtol"), [(torch.float32, 1e-4), (torch.bfloat16, 0.1)]
)
def test_lower_precision_is_close_to_float64(dtype, rtol):
    """float32 and bf16 tables are near the float64 table of the same weights."""
    low = tiny_model("qwen2_moe", seed=2).to(dtype)
    exact = copy.deepcopy(low).to(torch.float64)
    got = collect_statistics(low, WINDOWS, batch_size=2)
    expected = collect_statistics(exact, WINDOWS, batch_size=2)
    assert {str(t) for t in got.frame.dtypes} == {"int16", "int32", "int64", "float32"}
    assert expected.frame["sum_h2"].dtype == np.float64
    for column in ("tokens", "sum_h2", "sum_g2", "sum_ph2"):
        true = expected.frame[column].to_numpy()
        error = np.linalg.norm(got.frame[column] - true) / np.linalg.norm(true)
        assert error < rtol, f"{column}: {error:.2g}"
    norms = ["w_down_sq", "w_up_sq", "w_gate_sq"]
    np.testing.assert_allclose(got.frame[norms], expected.frame[norms], rtol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES if GPU == "cuda" else REPRESENTATIVES)
@pytest.mark.parametrize(
    ("dtype", "rtol"), [(torch.float32, 1e-3), (torch.float64, OF_DEVICES)]
)
def test_a_gpu_gives_the_table_of_the_cpu(family, dtype, rtol):
    """The same model measured there and on the CPU gives the same table.

    Sparse attention sees all tokens: which of those whose score is 0 it takes, as many
    have after a ReLU, depends on the device.
    """
    sparse = "index_topk" in FAMILIES[family]
    changes = {"index_topk": WINDOWS.ids.shape[1]} if sparse else {}
    model = tiny_model(family, **changes).to(dtype)
    expected = collect_statistics(model, WINDOWS, batch_size=2)
    got = collect_statistics(model.to(GPU), WINDOWS, batch_size=2)
    assert got.metadata["spec_hash"] == expected.metadata["spec_hash"]
    assert got.metadata["provenance"]["device"].startswith(GPU)
    for column in got.frame.columns:
        near, true = got.frame[column].to_numpy(), expected.frame[column].to_numpy()
        error = np.linalg.norm(near - true) / max(np.linalg.norm(true), 1e-30)
        assert error < rtol, f"{column}: {error:.2g}"


# --- the model afterwards ---------------------------------------------------------


def test_the_model_is_left_as_it_was():
    """Modes, requires_grad, gradients, weights, hooks and implementation stay."""
    model = tiny_model("qwen2_moe")
    model.train()
    model.model.layers[0].eval()
    model.lm_head.weight.requires_grad_(False)
    modes = {name: module.training for name, module in model.named_modules()}
    required = {name: p.requires_grad for name, p in model.named_parameters()}
    assert len(set(modes.values())) == len(set(required.values())) == 2
    weights = {name: t.clone() for name, t in model.state_dict().items()}

    def check() -> None:
        assert modes == {name: m.training for name, m in model.named_modules()}
        assert required == {n: p.requires_grad for n, p in model.named_parameters()}
        assert all(p.grad is None for p in model.parameters())
        assert all(torch.equal(t, weights[n]) for n, t in model.state_dict().items())
        assert not model.get_input_embeddings()._forward_hooks
        assert model.config._experts_implementation == "eager"

    collect_statistics(model, WINDOWS, batch_size=2)
    check()
    stop = stop_at(2, InterruptedError)
    with pytest.raises(InterruptedError):
        collect_statistics(model, WINDOWS, batch_size=2, progress=stop)
    check()


# --- interrupted passes -----------------------------------------------------------


@pytest.fixture
def saving_always(monkeypatch) -> None:
    """Save the state after every batch, whatever that costs."""
    monkeypatch.setattr(resuming, "_SAVE_SECONDS", 0.0)
    monkeypatch.setattr(resuming, "_SAVE_SHARE", float("inf"))


def interrupted(model: nn.Module, state: Path, window: int) -> None:
    """A pass of single windows that ends with an error after `window`."""
    stop = stop_at(window)
    with pytest.raises(KeyboardInterrupt):
        collect_statistics(model, WINDOWS, batch_size=1, state=state, progress=stop)


@pytest.mark.usefixtures("saving_always")
@pytest.mark.parametrize("window", range(2, 6))
def test_an_interrupted_pass_goes_on(window, tmp_path, caplog):
    """Stopped at any window and resumed with other batches, the table is the same."""
    model, state = tiny_model("qwen2_moe"), tmp_path / "pass.state"
    expected = collect_statistics(model, WINDOWS, batch_size=1)
    interrupted(model, state, window)
    done = Heard()
    caplog.set_level(logging.INFO)
    table = collect_statistics(model, WINDOWS, batch_size=2, state=state, progress=done)
    assert f"resumed {state} at window {window - 1}" in caplog.messages
    assert_same(table, expected)
    # The batch in which it stopped was not saved yet.
    assert table.metadata["provenance"]["resumed_at"] == window - 1
    assert done[0] == (min(window + 1, 5), 5)
    assert not state.exists()


@pytest.mark.usefixtures("saving_always")
def test_a_state_of_another_pass_is_refused(tmp_path):
    """Another model's or calibration set's state is an error, and is left alone.

    So is half of one. It has the hash of its specification, and how many windows are
    done.
    """
    model, state = tiny_model("qwen2_moe"), tmp_path / "pass.state"
    interrupted(model, state, 3)
    arrays, meta = files.load_state(state)
    spec = statistics_spec(identity_in_force(model), WINDOWS)
    assert meta == {"key": digest(spec), "done": 2}
    assert {name.partition(".")[0] for name in arrays} == {"0", "1"}
    assert arrays["1.tokens"].sum() == 2 * 9 * 2
    content = state.read_bytes()
    other_windows = tiny_windows(n_sequences=5, seed=9)
    for other, windows in (
        (tiny_model("qwen2_moe", seed=1), WINDOWS),
        (model, other_windows),
    ):
        with pytest.raises(CacheError, match=r"pass\.state is the state of another"):
            collect_statistics(other, windows, batch_size=1, state=state)
    assert state.read_bytes() == content
    state.write_bytes(content[: len(content) // 2])
    with pytest.raises(CacheError, match=r"pass\.state cannot be read"):
        collect_statistics(model, WINDOWS, batch_size=1, state=state)


# --- what is refused --------------------------------------------------------------


def test_non_finite_gradients_name_layer_and_windows():
    """float16 gradients that overflow are an error, though the loss is finite."""
    model = tiny_model("qwen2_moe").to(torch.float16)
    with torch.no_grad():
        # Logits of order 1, but 6e4 · (p - 1) summed over tokens is beyond 65504.
        model.model.norm.weight.fill_(1e-4)
        model.lm_head.weight.copy_(model.lm_head.weight.sign() * 6e4)
    assert torch.isfinite(logits_of(model, WINDOWS.ids)).all()
    text = r"non-finite gradients in layer \d on windows 0 to 1: use bfloat16"
    with pytest.raises(HeaprLabError, match=text):
        collect_statistics(model, WINDOWS, batch_size=2)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.float8_e4m3fn])
def test_quantised_experts_are_refused_by_name(dtype):
    """Weights of a type without ordinary arithmetic are named with their type."""
    model = tiny_model("qwen3_moe", dtype=torch.float32)
    module = find_experts(model)[0].module
    quantised = (module.down_proj.data * 10).to(dtype)
    module.down_proj = nn.Parameter(quantised, requires_grad=False)
    text = rf"layers\.0\S*\.experts\.down_proj is quantised \({dtype}\)"
    with pytest.raises(LayoutError, match=text):
        collect_statistics(model, WINDOWS)


def test_packed_and_unfused_experts_are_refused_by_name():
    """No fused weight, as after 4-bit packing; a list, as before transformers 5."""
    model = tiny_model("qwen2_moe")
    block = model.model.layers[1].mlp
    block.experts.down_proj = nn.Parameter(torch.zeros(4, 16), requires_grad=False)
    with pytest.raises(LayoutError, match=r"layers\.1\S*\.experts .*has no fused 3-D"):
        collect_statistics(model, WINDOWS)
    block.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
    with pytest.raises(LayoutError, match=r"layers\.1\.mlp\.experts \(ModuleList\)"):
        collect_statistics(model, WINDOWS)


@pytest.mark.parametrize("times", [0, 2])
def test_a_layer_takes_part_once(times):
    """One that is skipped is named; of one that runs twice the inputs do not add up."""
    model = tiny_model("qwen2_moe")
    mlp = model.model.layers[1].mlp
    once = mlp.forward
    mlp.forward = lambda x: once(once(x)) if times else x
    message = (
        f"1 took part {times} times in the pass over windows 0 to 1, expected once"
    )
    with pytest.raises(CoverageError, match=message):
        collect_statistics(model, WINDOWS, batch_size=2)
