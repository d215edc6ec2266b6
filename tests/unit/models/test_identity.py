"""What is active around a call never passes for the model as it is."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from families import tiny_ids, tiny_model
from keeps import full_keep, random_keep
from tiny_folder import write_model, write_text
from torch import nn

from heapr_lab.checkpoints.same_model import own_table
from heapr_lab.errors import HeaprLabError, SpecError
from heapr_lab.evaluation.perplexity import evaluate_perplexity
from heapr_lab.importance.collect import collect_statistics
from heapr_lab.models.experts import find_experts
from heapr_lab.models.identity import identity_in_force
from heapr_lab.pruning.surgery import masking
from heapr_lab.refinement.compensation import fit_compensation
from heapr_lab.refinement.compress import fit_compression
from heapr_lab.refinement.elimination import eliminate
from heapr_lab.text.calibration import CalibrationSet
from heapr_lab.workbench.settings import Setting
from heapr_lab.workbench.workbench import Workbench, open_workbench

WINDOWS = CalibrationSet.from_ids(tiny_ids(n_sequences=6))


@pytest.fixture
def model() -> nn.Module:
    """A tiny qwen2_moe in float32."""
    return tiny_model("qwen2_moe", dtype=torch.float32)


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workbench:
    """A workbench with a cache of its own."""
    monkeypatch.setenv("HEAPR_CACHE_DIR", str(tmp_path / "cache"))
    write_model(tmp_path / "moe")
    return open_workbench(str(tmp_path / "moe"), profile="small")


def spec_of(model: nn.Module) -> dict[str, Any]:
    """What a table that is measured now says it is of."""
    return collect_statistics(model, WINDOWS).metadata["spec"]


# --- tables -----------------------------------------------------------------------


def test_a_table_of_a_masked_model_says_so(model: nn.Module) -> None:
    """Its identity is that in force; of a mask that keeps all, the dense model's."""
    dense, keep = spec_of(model), random_keep(model)
    with masking(model, keep):
        masked = identity_in_force(model)
        assert spec_of(model) == dense | {"model": masked}
    with masking(model, full_keep(model)):
        assert spec_of(model) == dense
    assert identity_in_force(model) == dense["model"] != masked


def test_nested_masks_are_known_by_what_they_keep(model: nn.Module) -> None:
    """A mask within itself is itself; within another it is both."""
    keep, other = random_keep(model), random_keep(model, seed=1)
    with masking(model, keep):
        once = identity_in_force(model)
        with masking(model, keep):
            assert identity_in_force(model) == once
        with masking(model, other):
            assert identity_in_force(model) != once


def test_a_mask_of_another_model_changes_nothing(model: nn.Module) -> None:
    """Masks belong to the modules of their model."""
    other = tiny_model("qwen2_moe", dtype=torch.float32, seed=1)
    dense = spec_of(model)
    with masking(other, random_keep(other)):
        assert spec_of(model) == dense


def test_the_command_line_takes_no_masked_table(bench: Workbench) -> None:
    """`--importance` means the model as it is."""
    folder = Path(bench.model.name_or_path)
    windows = CalibrationSet.from_ids(tiny_ids())
    with masking(bench.model, random_keep(bench.model)):
        table = collect_statistics(bench.model, windows)
    table.write(folder / "masked.parquet")
    collect_statistics(bench.model, windows).write(folder / "dense.parquet")
    own_table(folder / "dense.parquet", folder, name="moe")
    with pytest.raises(SpecError, match="while a mask was active"):
        own_table(folder / "masked.parquet", folder, name="moe")


# --- the workbench ----------------------------------------------------------------


def calls(bench: Workbench) -> dict[str, Callable[[], Any]]:
    """Everything of a workbench that is kept in the cache."""
    keep, text = random_keep(bench.model), CalibrationSet.from_ids(tiny_ids(seed=3))
    corpus = str(write_text(Path(bench.model.name_or_path) / "own.txt"))
    setting = Setting(0.25, calibration=corpus)
    return {
        "perplexity": lambda: bench.perplexity(None, text),
        "masked perplexity": lambda: bench.perplexity(keep, text),
        "divergence": lambda: bench.divergence(keep, text),
        "measure": lambda: bench.measure(text),
        "importance": lambda: bench.table_of(setting),
        "keep": lambda: bench.keep(setting),
        "accuracy": lambda: bench.task_accuracy(None, f"continuation:{corpus}"),
    }


def numbers(bench: Workbench) -> dict[str, Any]:
    """What every call gives."""
    found = {name: call() for name, call in calls(bench).items()}
    return {
        name: result.frame.to_csv() if hasattr(result, "frame") else result
        for name, result in found.items()
    }


def test_a_workbench_refuses_inside_a_mask(bench: Workbench) -> None:
    """Every call, whether its result is in the cache or not; nothing is stored."""
    for asked in ("before", "after"):
        with masking(bench.model, random_keep(bench.model)):
            for call in calls(bench).values():
                with pytest.raises(SpecError, match="pass the mask as an argument"):
                    call()
        if asked == "before":
            first = numbers(bench)
    assert numbers(bench) == first
    dense = evaluate_perplexity(bench.model, tiny_ids(seed=3))
    assert first["perplexity"] == dense


def test_weights_changed_in_place_are_another_model(bench: Workbench) -> None:
    """Every number is that of the weights as they are; back again, as before."""
    first = numbers(bench)
    layer = find_experts(bench.model)[0]
    kept = layer.down.detach().clone()
    with torch.no_grad():
        layer.down.mul_(3)
    changed = numbers(bench)
    dense = evaluate_perplexity(bench.model, tiny_ids(seed=3))
    assert changed["perplexity"] == dense
    different = {name for name in first if first[name] != changed[name]}
    assert different >= {"perplexity", "divergence", "measure", "importance"}
    with torch.no_grad():
        layer.down.copy_(kept)
    assert numbers(bench) == first


# --- autocast and hooks -----------------------------------------------------------


def test_autocast_is_refused(bench: Workbench) -> None:
    """By everything that keeps what it finds; the message names dtype and remedy."""
    model, windows = bench.model, WINDOWS
    table = collect_statistics(model, windows)
    keep = random_keep(model)
    kept = calls(bench) | {
        "statistics": lambda: collect_statistics(model, windows),
        "compensation": lambda: fit_compensation(model, keep, windows),
        "elimination": lambda: eliminate(model, table, windows),
        "compression": lambda: fit_compression(model, windows, ratio=0.5),
    }
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for name, call in kept.items():
            with pytest.raises(SpecError, match="autocast to bfloat16"):
                pytest.fail(f"{name} gave {call()}")
    with torch.autocast("cpu", enabled=False):
        collect_statistics(model, windows)


def test_hooks_are_refused(bench: Workbench) -> None:
    """A hook of the user's own may change anything; without it, all is as before."""
    first = bench.perplexity(None, WINDOWS)
    block = bench.model.model.layers[1]
    handle = block.register_forward_hook(lambda *_: None)
    for call in (lambda: bench.perplexity(None, WINDOWS), lambda: spec_of(bench.model)):
        with pytest.raises(SpecError, match=r"'model.layers.1' has a hook.*remove"):
            call()
    handle.remove()
    assert bench.perplexity(None, WINDOWS) == first


def test_hooks_of_transformers_are_known(bench: Workbench) -> None:
    """Those that a model is given when it is asked for its states only watch."""
    bench.model(tiny_ids(), output_hidden_states=True, output_attentions=True)
    bench.model.enable_input_require_grads()
    assert any(m._forward_hooks for m in bench.model.modules())
    assert bench.perplexity(None, WINDOWS).n_tokens == WINDOWS.n_predicted


# --- while it runs ----------------------------------------------------------------


def test_weights_that_change_during_a_pass(
    bench: Workbench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The result is of no one model: an error, and nothing is kept."""
    model, first = bench.model, bench.perplexity(None, WINDOWS)
    monkeypatch.setattr("heapr_lab.importance.resuming._SAVE_SECONDS", 0.0)
    monkeypatch.setattr("heapr_lab.importance.resuming._SAVE_SHARE", float("inf"))
    state = tmp_path / "pass.state"

    def train(done: int, _total: int) -> None:
        with torch.no_grad():
            model.lm_head.weight.mul_(1.5)

    for call in (
        lambda: bench.perplexity(random_keep(model), WINDOWS, progress=train),
        lambda: collect_statistics(
            model, WINDOWS, batch_size=2, progress=train, state=state
        ),
    ):
        with pytest.raises(HeaprLabError, match="weights of the model changed"):
            call()
    assert not state.exists()
    again = bench.perplexity(None, WINDOWS)
    assert again == evaluate_perplexity(model, WINDOWS.ids) != first
