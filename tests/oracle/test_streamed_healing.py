"""Healing models on disk: the weights and the report are those of healing in memory."""

import gc
import itertools
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from commands import manifest_of, said, text_of
from families import REPRESENTATIVES
from heard import Heard, stop_at
from keeps import random_keep, weights_of, widths_keep, window_nll
from oracles.streamed import ROUNDED, both, free_on_disk, resident, stream, weights
from stored_tensors import tensors_in
from tiny_folder import opened, write_model, write_text

from heapr_lab.checkpoints.save import save_pruned
from heapr_lab.checkpoints.stored_type import file_types, round_changed
from heapr_lab.errors import CacheError, SpecError
from heapr_lab.models.identity import model_identity
from heapr_lab.pruning.surgery import prune
from heapr_lab.refinement import healing
from heapr_lab.refinement.healing import forget, heal
from heapr_lab.storage.paths import cache_dir
from heapr_lab.streaming.sweep_store import SweepStore
from heapr_lab.text.calibration import CalibrationSet

TEXT = CalibrationSet.from_ids(torch.arange(20 * 9).reshape(20, 9) % 48)
"""Each token is the one before it plus one: five windows held out, fifteen trained."""
OPTIONS: Any = {"learning_rate": 1e-2, "batch_tokens": 36}
"""Four windows a step, three in the last of four; each is followed by a judgement."""

STOPS = 4
"""Places at which a training is interrupted."""


def assert_same(model: Any, expected: dict[str, torch.Tensor], near: float = 0) -> None:
    """The weights of a streamed model are these, bit for bit or nearly."""
    torch.testing.assert_close(weights(model), dict(expected), rtol=near, atol=near)


def pruned_of(dense: Any) -> Any:
    """Half of the atoms are gone: one expert is empty, one whole."""
    return prune(dense, random_keep(dense))


@pytest.mark.parametrize(
    "family", [*REPRESENTATIVES, "glm_moe_dsa", "deepseek_v4", "inkling_text"]
)
def test_the_weights_are_those_in_memory(family, tmp_path):
    """So is the report; the dense model, and all that is not trained, stay as they are.

    Also where layers hand on indices of tokens, or several streams of states.
    """
    models = both(tmp_path / "dense", family)
    pruned = [pruned_of(model) for model in models]
    before, identity = weights_of(pruned[0]), model_identity(models[1])
    for model, dense in zip(pruned, models, strict=True):
        assert heal(model, dense, TEXT, **OPTIONS) is model
    in_float32 = {*ROUNDED, "deepseek_v4"}  # whose norms are
    near = 1e-4 if family in in_float32 else 1e-9
    healed = pruned[0].state_dict()
    assert_same(pruned[1], healed, near)
    changed = [name for name in healed if not torch.equal(healed[name], before[name])]
    assert any("experts" in name for name in changed)
    assert any("norm" in name for name in changed)
    reports = [model.heapr_healing for model in pruned]
    torch.testing.assert_close(
        *(torch.tensor(report.to_numpy()) for report in reports),
        rtol=near, atol=0, equal_nan=True,
    )  # fmt: skip
    assert pruned[1].heapr_weights == pruned[0].heapr_weights
    assert model_identity(models[1]) == identity


@pytest.fixture
def small_batches(monkeypatch) -> None:
    """Two windows run together, so that a step of four has two batches."""
    monkeypatch.setattr(healing, "BATCH_TOKENS", 18)


def in_files(folder: Path, family: str = "qwen2_moe") -> tuple[Any, Any]:
    """A model in memory, and streamed, of which nothing is kept in memory."""
    models = both(folder, family)
    stream(models[1]).host_memory = 0
    return models


@pytest.mark.usefixtures("small_batches")
@pytest.mark.parametrize(
    "losses", [(3.0, 2.0, 1.0, 2.0, 3.0), (3.0, 3.1, 3.2), (3.0, 2.0, 2.5, 1.0, 0.5)]
)
def test_the_best_version_is_taken(losses, tmp_path, monkeypatch):
    """After two rises, which end it; the first version is the model as it was."""
    models = in_files(tmp_path / "dense")
    pruned = [pruned_of(model) for model in models]
    judge, text = healing.evaluate_perplexity, TEXT.ids[:5]
    for model, dense in zip(pruned, models, strict=True):
        said, seen = iter(losses), list[float]()

        def judged(model: Any, ids: torch.Tensor, **_: Any) -> Any:
            seen.append(judge(model, ids).nll)  # noqa: B023
            return SimpleNamespace(nll=next(said))  # noqa: B023

        monkeypatch.setattr(healing, "evaluate_perplexity", judged)
        heal(model, dense, TEXT, **OPTIONS)
        assert len(seen) == len(losses)
        best = seen[losses.index(min(losses))]
        assert window_nll(model, text).mean().item() == pytest.approx(best, rel=1e-12)
        assert len(set(seen)) == len(seen)
    assert_same(pruned[1], pruned[0].state_dict(), 1e-9)


@pytest.mark.usefixtures("small_batches")
def test_an_interrupted_one_resumes(tmp_path, monkeypatch):
    """Wherever it was cut off: before a file is written, and before one is removed.

    Also if all is in files then, and all was in memory in the whole one.
    """
    _, dense = both(tmp_path / "dense", "qwen2_moe")
    text = CalibrationSet.from_ids(TEXT.ids[:10])
    options = OPTIONS | {"batch_tokens": 27}  # steps of 3, 3 and 2 windows
    whole = pruned_of(dense)
    calls = itertools.count()
    left = dict.fromkeys(("put", "drop"), 0)
    limit: float = float("inf")

    def counted(name: str, inner: Callable[..., None]) -> Callable[..., None]:
        def call(*arguments: Any) -> None:
            left[name] += 1
            if next(calls) >= limit:
                raise KeyboardInterrupt
            inner(*arguments)

        return call

    for name in left:
        inner = getattr(SweepStore, name)
        monkeypatch.setattr(SweepStore, name, counted(name, inner))
    heal(whole, dense, text, **options)
    n_calls, expected = next(calls), weights(whole)
    assert min(left.values()) > 10
    stream(dense).host_memory = 0
    state, resumed = tmp_path / "state.safetensors", 0
    for limit in range(3, n_calls, n_calls // STOPS):
        halves, again, calls = pruned_of(dense), pruned_of(dense), itertools.count()
        with pytest.raises(KeyboardInterrupt):
            heal(halves, dense, text, state=state, **options)
        calls, was, limit = itertools.count(), limit, float("inf")
        heal(again, dense, text, state=state, **options)
        resumed += next(calls) < n_calls - 3
        assert again.heapr_healing.equals(whole.heapr_healing), was
        assert_same(again, expected)
        del halves, again
        gc.collect()
        forget(state)
        assert not state.with_suffix(".training").exists()
    assert resumed > STOPS / 2


@pytest.mark.parametrize("structure", ["ragged", "uniform"])
def test_it_is_written_and_read_again(structure, tmp_path):
    """The files have the healed weights, rounded as the files are, and so has it."""
    _, dense = both(tmp_path / "dense", "qwen2_moe")
    keep = random_keep(dense)
    if structure == "uniform":
        keep = widths_keep(dense, 4, structure=structure)
    pruned = prune(dense, keep)
    first = model_identity(pruned)
    heal(pruned, dense, TEXT, **OPTIONS)
    assert model_identity(pruned) != first
    exact = weights(pruned)
    folder = save_pruned(pruned, tmp_path / "out", dtype=torch.float64)
    again = opened(folder, stream=False)
    losses = [window_nll(model, TEXT.ids) for model in (again, pruned)]
    assert torch.allclose(*losses, rtol=1e-12)
    if structure == "ragged":
        assert_same(pruned, again.state_dict())
    round_changed(pruned, file_types(pruned, torch.bfloat16))
    for name, weight in weights(pruned).items():
        if re.search(r"\.experts\.|norm|gate\.weight", name):
            exact[name] = exact[name].bfloat16().double()
        assert torch.equal(weight, exact[name]), name


def test_a_pruned_checkpoint_on_disk_is_healed(tmp_path):
    """It is read from its files, in place of the dense model's; twice in a row."""
    models = both(tmp_path / "dense", "qwen2_moe")
    folder = save_pruned(pruned_of(models[0]), tmp_path / "pruned")
    pruned = [opened(folder, stream=way) for way in (False, True)]
    for model, dense in zip(pruned, models, strict=True):
        for _ in range(2):
            heal(model, dense, TEXT, **OPTIONS)
    assert_same(pruned[1], pruned[0].state_dict(), 1e-9)


def test_one_part_is_in_memory_and_the_dense_model_is_read_once(tmp_path):
    """For all steps, if there is room for its final states; else once a step."""
    n_reads = []
    for memory in (None, 0):
        _, dense = both(tmp_path / f"dense-{memory}", "qwen2_moe")
        stream(dense).host_memory = memory
        pruned, reader = pruned_of(dense), stream(dense).reader
        reader.read = Mock(wraps=reader.read)

        def look(*_: Any, models: Any = (pruned, dense)) -> None:
            assert sum(len(resident(model)) for model in models) == 1

        for block in stream(pruned).blocks:
            block.register_forward_hook(look)
        heal(pruned, dense, TEXT, **OPTIONS)
        n_reads.append([call.args[0] for call in reader.read.mock_calls].count(1))
    assert n_reads[1] - n_reads[0] == 3
    assert not any(p.requires_grad for p in pruned.parameters())


def test_files_are_removed_when_asked(tmp_path):
    """Temporary ones are with the model; a training that ended is not run again."""
    _, dense = in_files(tmp_path / "dense")
    state, steps = tmp_path / "state.safetensors", Heard()
    folder, cache = state.with_suffix(".training"), cache_dir() / "sweeps"
    pruned = pruned_of(dense)
    heal(pruned, dense, TEXT, state=state, **OPTIONS)
    expected = weights(pruned)
    assert not [*folder.glob("*-gradients-*"), *folder.glob("*-moments-*")]
    versions = {path.stem[-9:] for path in folder.glob("training-weights-*")}
    assert len(versions) <= 2  # the last, which is the best, and the best before it
    del pruned
    gc.collect()
    again = pruned_of(dense)  # as after an error while the first was written
    heal(again, dense, TEXT, state=state, progress=steps, **OPTIONS)
    assert steps == []
    assert_same(again, expected)
    temporary = pruned_of(dense)
    heal(temporary, dense, TEXT, **OPTIONS)
    assert_same(temporary, expected)
    assert [*cache.glob("*/*.safetensors")]
    del again, temporary
    gc.collect()
    forget(state)
    assert not folder.exists()
    assert not [*cache.glob("*/*.safetensors")]


def test_what_cannot_go_on_is_an_error(tmp_path, monkeypatch):
    """Another training, a missing or damaged file, a full disk, 16 bits; one line."""
    _, dense = in_files(tmp_path / "dense")
    state = tmp_path / "state.safetensors"
    options = OPTIONS | {"state": state}
    with pytest.raises(KeyboardInterrupt):
        heal(pruned_of(dense), dense, TEXT, progress=stop_at(2), **options)
    with pytest.raises(CacheError, match="is the state of another pass"):
        heal(pruned_of(dense), dense, TEXT, **options | {"batch_tokens": 18})
    free_on_disk(monkeypatch, 1000)
    pruned = pruned_of(dense)
    before = weights(pruned)
    with pytest.raises(
        SpecError, match=r"two moments need .* GB on the disk of"
    ) as error:
        heal(pruned, dense, TEXT, **OPTIONS)
    assert "\n" not in str(error.value)
    assert_same(pruned, before)


@pytest.mark.parametrize(
    ("dtype", "near"), [(torch.float32, 1e-4), (torch.bfloat16, 2**-8)]
)
def test_the_command_heals_a_streamed_model(dtype, near, tmp_path, monkeypatch):
    """As one in memory: the manifest and the weights are the same to rounding.

    The files have what was trained in their own type, and so has what is measured.
    """
    write_model(tmp_path / "moe", dtype=dtype)
    write_text(tmp_path / "text.txt")
    written, healing_of = {}, {}
    for way in ("--stream", "--no-stream"):
        monkeypatch.setenv("HEAPR_CACHE_DIR", str(tmp_path / f"cache{way}"))
        out = tmp_path / f"out{way}"
        base = ("prune", tmp_path / "moe", "--ratio", 0.4, "--heal", 16, "--out", out)
        base += ("--dtype", "float32")
        facts = said(*base, "--method", "paper", way, *text_of(tmp_path))
        assert facts["healed_on"] == 16
        manifest = manifest_of(out)
        assert "then healed on 384 tokens of" in manifest["weights"]
        assert manifest["reloaded"].startswith("Δ nll = 0.0000")
        written[way] = tensors_in(out)
        healing_of[way] = [row["held_out"] for row in manifest["healing"]]
        gc.collect()
        assert not [*tmp_path.glob(f"cache{way}/healing/*")]
    assert healing_of["--stream"] == pytest.approx(healing_of["--no-stream"], rel=1e-4)
    torch.testing.assert_close(
        written["--stream"], written["--no-stream"], rtol=0, atol=near
    )
