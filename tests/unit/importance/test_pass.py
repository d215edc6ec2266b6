"""What a pass takes, says and writes down, beside what it counts."""

import platform
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from families import tiny_ids, tiny_model, tiny_windows
from keeps import logits_of

from heapr_lab import CalibrationSet, collect_statistics
from heapr_lab.errors import CoverageError, LayoutError, SpecError
from heapr_lab.importance import collect, resuming
from heapr_lab.models.experts import describe, find_experts
from heapr_lab.models.hooks import Routed, edits_of, masked, observed
from heapr_lab.models.identity import identity_in_force
from heapr_lab.storage.hashing import digest

WINDOWS = tiny_windows(n_sequences=5)


# --- coverage ---------------------------------------------------------------------


def test_experts_without_tokens_are_named(caplog, monkeypatch):
    """They are counted, and named by layer and expert; of many, the first ones."""
    model = tiny_model("qwen2_moe")
    ids = WINDOWS.ids[:1, :2]
    table = collect_statistics(model, CalibrationSet.from_ids(ids))
    unrouted = table.unrouted()
    assert len(unrouted)
    named = ", ".join(f"{row.layer}/{row.expert}" for row in unrouted.itertuples())
    assert (
        f"{len(unrouted)} experts saw no token (layer/expert): {named}"
        in caplog.messages
    )
    monkeypatch.setattr(collect, "_MOST_NAMED", 1)
    collect.check_coverage(table)
    first = f"(layer/expert): {named.partition(',')[0]}, ..."
    assert caplog.messages[-1].endswith(first)


def test_windows_that_repeat_are_told(model, caplog):
    """They count as often as they are there; of others nothing is said."""
    ids = tiny_ids(n_sequences=20)
    table = collect_statistics(model, CalibrationSet.from_ids(ids))
    assert len(table.unrouted()) == 0
    assert caplog.messages == []
    collect_statistics(model, CalibrationSet.from_ids(ids[[0, 1, 0, 0]]))
    message = "2 of 4 calibration windows repeat another, and count as often"
    assert message in caplog.messages


def test_what_is_refused_before_anything_is_run(caplog):
    """Broken experts are refused, and those of which a rank holds only a part."""
    model = tiny_model("qwen2_moe")
    layer = find_experts(model)[1]
    with torch.no_grad():
        layer.down[2, :, 5] = torch.nan
    message = r"layers\.1\.mlp\.experts: 1 atoms have weights that are NaN.*\(2, 5\)"
    with pytest.raises(LayoutError, match=message):
        collect_statistics(model, WINDOWS)
    layer.module._is_expert_parallel = True
    with pytest.raises(LayoutError, match="expert-parallel"):
        collect_statistics(model, WINDOWS)
    assert caplog.messages == []


def test_a_batch_size_is_checked_before_weights_are_read(model, monkeypatch):
    """Their hash takes minutes if they are many."""
    monkeypatch.delattr(collect, "identity_in_force")
    with pytest.raises(SpecError, match="batch_size must be"):
        collect_statistics(model, WINDOWS, batch_size=0)


def test_tokens_that_differ_from_layer_to_layer(model):
    """One layer of two experts per token, one of a single expert: a wrong count."""
    table = collect_statistics(model, WINDOWS)
    collect.check_coverage(table)
    frame = table.frame
    for tokens in (
        np.where(frame["layer"] == 1, 1, frame["tokens"]),
        0 * frame["tokens"],
    ):
        changed = frame.assign(tokens=tokens)
        wrong = type(table).from_frame(changed, **table.metadata)
        with pytest.raises(CoverageError, match="routed tokens differ from layer to"):
            collect.check_coverage(wrong)


@pytest.mark.parametrize(
    ("up", "down", "lost"),
    [
        (1.0, 1.0, []),
        (1e-12, 1.0, ["sum_h2", "sum_hg2"]),
        (1.0, 1e-25, ["sum_hg2"]),  # gradients are small as W_down is
        (1e-12, 1e15, ["sum_h2"]),  # activations that W_down makes up for
    ],
)
def test_squares_that_underflow_are_said(up, down, lost, caplog):
    """They do in float32, where weights are so small; in float64 none does."""
    for dtype in (torch.float32, torch.float64):
        model = tiny_model("qwen2_moe", dtype=dtype)
        for layer in find_experts(model):
            layer.module.gate_up_proj.data *= up
            layer.module.down_proj.data *= down
        caplog.clear()
        sums = collect_statistics(model, WINDOWS).frame[["sum_h2", "sum_hg2"]]
        zero = [name for name in sums if sums[name].eq(0).all()]
        assert zero == (lost if dtype == torch.float32 else [])
        warned = any("squares are 0 in float32" in line for line in caplog.messages)
        assert warned == bool(zero)


# --- what is written down ---------------------------------------------------------


def test_metadata():
    """It has all that determined the numbers, and where they were measured."""
    model = tiny_model("qwen2_moe")
    model.config._name_or_path, model.config._commit_hash = "some/model", "abc"
    begun = datetime.now(UTC) - timedelta(seconds=1)
    windows = CalibrationSet.from_ids(WINDOWS.ids)
    metadata = collect_statistics(model, windows, batch_size=2).metadata
    spec = collect.statistics_spec(identity_in_force(model), windows)
    assert spec == {
        "schema": 1,
        "model": identity_in_force(model),
        "calibration": windows.fingerprint,
    }
    assert metadata["spec"] == spec
    assert metadata["spec_hash"] == digest(spec)
    assert metadata["architecture"] == describe(model).to_dict()
    assert metadata["N"] == 40
    origin = metadata["provenance"]
    assert begun <= datetime.fromisoformat(origin.pop("created")) <= datetime.now(UTC)
    seconds = origin.pop("seconds")
    assert 0 < seconds < 600
    assert seconds == round(seconds, 2)
    assert origin == {
        "model": "some/model",
        "revision": "abc",
        "calibration": windows.provenance | {"n_sequences": 5, "seq_len": 9},
        "device": "cpu",
        "batch_size": 2,
        "resumed_at": 0,
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    }


def test_windows_that_are_written_to_are_other_windows(model):
    """The fingerprint is that of the ids as they are when it is asked for."""
    windows = tiny_windows()
    first = collect_statistics(model, windows)
    windows.ids[1, 2] = (windows.ids[1, 2] + 1) % 48
    after = collect_statistics(model, windows)
    assert after.metadata["spec_hash"] != first.metadata["spec_hash"]


# --- states -----------------------------------------------------------------------


def test_states_are_saved_when_a_minute_has_passed_and_cost_little(
    model, tmp_path, monkeypatch
):
    """The test has its own clock: each window takes 30 s, each saving 1.5 s."""
    now = [0.0]
    saved: list[tuple[int, float]] = []
    loss, save = collect._Pass.loss, resuming.files.save_state

    def stepping(self: Any, windows: slice) -> torch.Tensor:
        now[0] += 30
        return loss(self, windows)

    def saving(path: Path, arrays: Any, meta: dict[str, Any]) -> None:
        saved.append((meta["done"], now[0]))
        now[0] += 1.5
        save(path, arrays, meta)

    monkeypatch.setattr(collect.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(collect._Pass, "loss", stepping)
    monkeypatch.setattr(resuming.files, "save_state", saving)
    windows = tiny_windows(n_sequences=9)
    state = tmp_path / "pass.state"
    collect_statistics(model, windows, batch_size=1, state=state)
    # After 60 s; then 1.5 s are 2 % of 75 s, which three windows take.
    assert saved == [(2, 60.0), (5, 151.5), (8, 243.0)]
    assert not state.exists()
    collect_statistics(model, windows, batch_size=1)
    assert len(saved) == 3


# --- masks and observers in nested contexts ------------------------------------------


def test_observers_see_the_dense_model(model):
    """The mask around them does not matter, and is there again afterwards.

    They see the forwards of their own thread.
    """
    layers = find_experts(model)
    drop = [torch.zeros(4, 8, dtype=torch.bool) for _ in layers]
    dense, inside = list[Routed](), list[Routed]()
    with torch.no_grad():
        with observed(layers, [dense.append] * 2), ThreadPoolExecutor(1) as pool:
            expected = model(WINDOWS.ids).logits
            pool.submit(logits_of, model, WINDOWS.ids).result()
        with masked(layers, drop):
            with observed(layers, [inside.append] * 2):
                assert torch.equal(model(WINDOWS.ids).logits, expected)
            assert len(edits_of(model)) == 2
            assert not torch.allclose(model(WINDOWS.ids).logits, expected)
        model(WINDOWS.ids)
    assert edits_of(model) == {}
    assert len(dense) == len(layers)
    for one, other in zip(dense, inside, strict=True):
        assert torch.equal(one.h, other.h)


def test_replaced_weights_in_nested_masks(model):
    """The inner W_down rules; where there is none, the outer one stays."""
    layers = find_experts(model)
    keep = [torch.ones(4, 8, dtype=torch.bool) for _ in layers]
    two, three = ([layer.down.detach() * k for layer in layers] for k in (2, 3))

    def logits(*masks: Any) -> torch.Tensor:
        if not masks:
            return model(WINDOWS.ids).logits
        with masked(layers, keep, masks[0]):
            return logits(*masks[1:])

    with torch.no_grad():
        assert torch.equal(logits(two, three), logits(three))
        assert torch.equal(logits(two, None), logits(two))
        assert torch.equal(logits(None, two), logits(two))
        assert torch.equal(
            logits([two[0], None], [None, three[1]]), logits([two[0], three[1]])
        )
        assert not torch.allclose(logits(two), logits(three))
