"""Streamed models against the same checkpoints in memory, in every family."""

import gc
import os
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from commands import TINY, said, text_of
from families import FAMILIES, HANDING, REPRESENTATIVES, WRAPPERS, tiny_model
from heard import stop_at
from keeps import random_keep, window_nll
from oracles.streamed import (
    ROUNDED,
    WINDOWS,
    both,
    resident,
    same_tables,
    stream,
    weights,
    written,
)
from stored_tensors import changed_json, tensors_in
from tiny_folder import opened, write_folder, write_model, write_text, write_tokenizer

from heapr_lab.checkpoints.save import save_pruned
from heapr_lab.errors import CoverageError, HeaprLabError, SpecError
from heapr_lab.evaluation.perplexity import (
    evaluate_divergence,
    evaluate_perplexity,
)
from heapr_lab.importance.collect import collect_statistics
from heapr_lab.models.backend import backend_of
from heapr_lab.models.experts import describe, find_experts
from heapr_lab.models.folders import skeleton_of
from heapr_lab.models.identity import model_identity, weights_state
from heapr_lab.models.loading import load_model
from heapr_lab.progress import no_report
from heapr_lab.pruning.surgery import masking, prune
from heapr_lab.refinement.compensation import fit_compensation
from heapr_lab.refinement.elimination import eliminate
from heapr_lab.streaming import file_reader, opening, two_sweeps
from heapr_lab.streaming.plan import sizes_of
from heapr_lab.streaming.stream import Stream


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> tuple[Any, Any]:
    """A DeepSeek-V3, whose first layer is dense, in memory and streamed."""
    return both(tmp_path_factory.mktemp("model"), "deepseek_v3")


# --- every family ----------------------------------------------------------------


@pytest.mark.parametrize("family", [*FAMILIES, *WRAPPERS])
def test_every_number_is_that_in_memory(family, tmp_path):
    """Sizes, statistics and their key, losses, divergences, sums, solves; to rounding.

    The last batch is smaller than the others.
    """
    model, streamed = both(tmp_path, family)
    assert sizes_of(skeleton_of(model.config)).model == describe(model)
    tolerance = 1e-4 if family in ROUNDED else 1e-9
    table, again = (
        collect_statistics(net, WINDOWS, batch_size=2) for net in (model, streamed)
    )
    assert again.metadata["spec_hash"] == table.metadata["spec_hash"]
    assert again.metadata["N"] == table.metadata["N"]
    assert again.architecture == table.architecture
    same_tables(again, table, tolerance)
    ids, keep = WINDOWS.ids, random_keep(model)
    kl = [evaluate_divergence(net, keep, ids).kl for net in (model, streamed)]
    assert kl[1] == pytest.approx(kl[0], rel=1e-9)
    assert describe(streamed) == describe(model)  # weights that are tied count once


@pytest.mark.parametrize("family", [*REPRESENTATIVES, *HANDING])
def test_solves_are_those_in_memory(family, tmp_path):
    """Compensated weights, losses with them, and costs of elimination."""
    model, streamed = both(tmp_path, family)
    keep, tolerance = random_keep(model), 1e-4 if family in ROUNDED else 1e-9
    table = collect_statistics(model, WINDOWS, batch_size=2)
    fitted, losses, scores = [], [], []
    for net in (model, streamed):
        fitted.append(fit_compensation(net, keep, WINDOWS).down_projs)
        with masking(net, keep, fitted[-1]):
            losses.append(window_nll(net, WINDOWS.ids, batch_size=3))
        scores.append(eliminate(net, table, WINDOWS).frame["elimination"].to_numpy())
    for layer, down in fitted[0].items():
        assert torch.allclose(fitted[1][layer], down, rtol=tolerance, atol=1e-9)
    assert torch.allclose(*losses, rtol=1e-9)
    np.testing.assert_allclose(*scores, rtol=tolerance, atol=1e-12)


TYPES = [("bfloat16", "float32"), ("bfloat16", "auto"), ("float32", "bfloat16")]


@pytest.mark.parametrize(
    ("family", "stored", "asked"),
    [
        *((name, *t) for name in ("glm4_moe", "gpt_oss", "deepseek_v4") for t in TYPES),
        ("gpt_oss", "float32", "float16"),
    ],
)
def test_weights_have_the_type_that_is_asked_for(family, stored, asked, tmp_path):
    """Every tensor, bit for bit, as in memory; `auto` is float32 on the CPU.

    So are norms, sinks and others that a family keeps in float32, and the losses.
    """
    write_folder(tmp_path, tiny_model(family, dtype=getattr(torch, stored)))
    in_memory, on_disk = (
        opened(tmp_path, dtype=asked, stream=way) for way in (False, True)
    )
    every = (weights(net) for net in (on_disk, in_memory))
    torch.testing.assert_close(*every, rtol=0, atol=0)
    assert model_identity(on_disk) == model_identity(in_memory)
    kind = torch.float32 if asked == "auto" else getattr(torch, asked)
    assert on_disk.dtype == stream(on_disk).dtype == kind
    if family == "deepseek_v4" or asked == "float16":
        assert torch.float32 in {tensor.dtype for tensor in in_memory.parameters()}
    losses = [window_nll(net, WINDOWS.ids) for net in (in_memory, on_disk)]
    assert torch.equal(*losses)


# --- what is in memory, and what is read -----------------------------------------


@pytest.mark.parametrize("family", ["deepseek_v3", "gpt_oss", "qwen3_moe"])
@pytest.mark.parametrize("tied", [False, True])
def test_one_part_is_in_memory_at_a_time(family, tied, tmp_path):
    """Whatever is run; tied embeddings and head are one part, with the same weights."""
    in_memory, on_disk = both(tmp_path, family, tie_word_embeddings=tied)
    seen: set[int] = set()

    def look(_module: Any, _args: Any, _output: Any) -> None:
        now = resident(on_disk)
        assert len(now) <= 1  # none where something stands in for the layers
        seen.update(now)

    parts = stream(on_disk).parts
    for part in parts.values():
        for module in part.modules:
            module.register_forward_hook(look)
    losses = [evaluate_perplexity(net, WINDOWS.ids).nll for net in (in_memory, on_disk)]
    assert losses[0] == losses[1]
    n_layers = in_memory.config.num_hidden_layers
    assert seen == set(parts) == set(range(-1, n_layers + (not tied)))
    assert len(resident(on_disk)) == 1
    assert model_identity(on_disk) == model_identity(in_memory)


def test_each_sweep_reads_each_part_once(pair):
    """Layers twice for the scores, once for a loss, twice for a divergence.

    The embeddings are read once for each sweep forward, the head once for each loss.
    """
    _, model = pair
    model_identity(model)  # which is another sweep, once
    reader: Any = stream(model).reader
    sizes = {
        number: sum(f.n_bytes for f in reader.tensors_of(part.names))
        for number, part in stream(model).parts.items()
    }
    embeddings, *layers, head = (sizes[number] for number in sorted(sizes))

    def read(work: Any) -> int:
        stream(model).fill(1)
        before = stream(model).n_bytes_read
        work()
        return stream(model).n_bytes_read - before

    ids = WINDOWS.ids
    once = embeddings + sum(layers) + head
    assert read(lambda: evaluate_perplexity(model, ids, batch_size=1)) == once
    keep = random_keep(model)
    divergence = 2 * (embeddings + sum(layers)) + head
    assert read(lambda: evaluate_divergence(model, keep, ids)) == divergence
    scores = read(lambda: collect_statistics(model, WINDOWS, batch_size=2))
    assert scores == embeddings + 2 * sum(layers) + head
    # Shapes and sizes are known without any layer.
    assert read(lambda: weights_state(model)) == 0
    assert read(masking(model, keep)(lambda: None)) == 0


def test_a_model_that_nobody_has_is_gone(tmp_path):
    """With the part that was in memory: no cache holds it."""
    model = opened(written(tmp_path, "qwen2_moe"), stream=True)
    collect_statistics(model, WINDOWS)
    assert model_identity(model) == model_identity(model)
    there = weakref.ref(model)
    del model
    gc.collect()
    assert there() is None


# --- how it could go wrong in silence --------------------------------------------


OTHERS = {f"model.layers.{number}.mlp.experts": [8, 0, 4, 2] for number in (0, 1)}


@pytest.mark.parametrize(
    "damage", [{"widths": OTHERS}, {"format_version": 99}, {"format_version": "x"}]
)
def test_what_the_files_have_not_is_refused(damage, tmp_path):
    """By name, in one line: when a layer is read, or the folder is opened."""
    model = tiny_model("qwen3_moe", dtype=torch.float32)
    save_pruned(prune(model, random_keep(model)), tmp_path / "pruned")
    write_tokenizer(tmp_path / "pruned")
    with changed_json(tmp_path / "pruned") as config:
        config["quantization_config"] |= damage
    with pytest.raises(HeaprLabError, match=str(tmp_path / "pruned")) as error:
        stream(opened(tmp_path / "pruned", stream=True)).fill(0)
    assert "\n" not in str(error.value)


def _replaced(path: Path) -> None:
    """Another file of the same name, size and time of writing."""
    other, before = path.with_name("other"), path.stat()
    other.write_bytes(bytes(reversed(path.read_bytes())))
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    other.replace(path)


def _written_to(path: Path) -> None:
    """The same file with other bytes, whose time of writing is set back."""
    before = path.stat()
    path.write_bytes(bytes(reversed(path.read_bytes())))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def file_of_layer(model: Any, number: int) -> Path:
    """A file that has weights of that layer alone."""
    names, reader = stream(model).parts[number].names, stream(model).reader
    rest = model.state_dict().keys() - names
    files = [{stored.file for stored in reader.tensors_of(n)} for n in (names, rest)]
    return min(files[0] - files[1])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_replaced, "has changed"),
        (_written_to, "has changed"),
        (Path.unlink, "was deleted"),
    ],
)
def test_a_shard_that_changes_within_a_pass(change, said, tmp_path):
    """No table of two models, and no traceback: the file is named.

    It shows in the state: weights in memory may be those of the file, and no more read.
    """
    _, model = both(tmp_path, "qwen3_moe")
    before = weights_state(model)
    path, changes = file_of_layer(model, 1), iter([change])

    def progress(_done: int, _total: int) -> None:
        for first in changes:
            first(path)

    with pytest.raises(HeaprLabError, match=f"{path.name} {said} since"):
        collect_statistics(model, WINDOWS, batch_size=1, progress=progress)
    assert weights_state(model) != before


def test_a_shard_that_is_deleted_between_passes(tmp_path):
    """The file is at fault, not how the model calls its layers."""
    _, model = both(tmp_path, "qwen3_moe")
    keep, path = random_keep(model), file_of_layer(model, -1)
    path.unlink()
    with pytest.raises(HeaprLabError, match=rf"^\S*{path.name} was deleted since"):
        fit_compensation(model, keep, WINDOWS)


class _Flipped(two_sweeps._Replayed):
    """Forgets what the first sweep chose: the second best instead of the best."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func not in two_sweeps._TOP_K:
            return func(*args, **(kwargs or {}))
        scores = args[0]
        return func(-scores, *args[1:], **(kwargs or {}))


def test_other_routing_in_the_second_sweep_is_an_error(pair, monkeypatch):
    """The tokens of each expert are compared."""
    monkeypatch.setattr(two_sweeps, "_Replayed", _Flipped)
    with pytest.raises(CoverageError, match="other tokens in the second sweep"):
        collect_statistics(pair[1], WINDOWS, batch_size=2)


def test_routing_is_replayed(pair, monkeypatch):
    """Router weights that change between the sweeps change no expert of a token."""
    model, on_disk = pair
    real = two_sweeps.TwoSweeps.forward

    def disturbed(self: Any) -> Any:
        output = real(self)
        fill = Stream.fill

        def shaken(disk: Stream, number: int) -> None:
            fill(disk, number)
            names = disk.blocks[number].named_parameters() if number in range(3) else []
            for name, weight in names:
                if name.endswith("gate.weight"):
                    weight.data.copy_(torch.randn(weight.shape).double())

        monkeypatch.setattr(Stream, "fill", shaken)
        return output

    monkeypatch.setattr(two_sweeps.TwoSweeps, "forward", disturbed)
    table = collect_statistics(model, WINDOWS, batch_size=2)
    streamed = collect_statistics(on_disk, WINDOWS, batch_size=2)
    assert streamed.frame["tokens"].equals(table.frame["tokens"])
    assert not np.allclose(streamed.frame["sum_ph2"], table.frame["sum_ph2"])
    stream(on_disk)._empty(0)


def test_threads_take_turns(pair):
    """Scores in one thread and losses in others: each is what it is alone."""
    model, streamed = pair
    expected = window_nll(model, WINDOWS.ids)

    def lose() -> list[torch.Tensor]:
        return [window_nll(streamed, WINDOWS.ids) for _ in range(3)]

    with ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(lose) for _ in range(2)]
        table = collect_statistics(streamed, WINDOWS, batch_size=3)
        losses = [loss for run in runs for loss in run.result(timeout=60)]
    assert all(torch.allclose(loss, expected, rtol=1e-9) for loss in losses)
    same_tables(table, collect_statistics(model, WINDOWS, batch_size=3))


def _fingerprint(model: Any, _folder: Path) -> Any:
    stream(model).fingerprint = None
    return model_identity(model)


def _norms(model: Any, _folder: Path) -> Any:
    layers = find_experts(model)
    return [norms.tolist() for m in layers for norms in m.squared_norms().values()]


def _written(model: Any, folder: Path) -> Any:
    backend_of(model).write(model, folder, max_shard_size="", progress=no_report)
    return {name: tensor.tolist() for name, tensor in tensors_in(folder).items()}


@pytest.mark.parametrize(
    ("read", "sliced"),
    [(_fingerprint, False), (_norms, False), (_written, True)],
)
def test_no_thread_drops_a_layer_that_another_reads(
    pair, read, sliced, monkeypatch, tmp_path
):
    """What is taken of a layer is taken before another is read in its place."""
    model = pair[1]
    if sliced:
        model = prune(model, random_keep(model))
    expected = read(model, tmp_path / "alone")
    others: list[threading.Thread] = []

    def drop(source: Stream) -> None:
        with source.lock:
            source.drop()

    def fill(self: Stream, number: int) -> None:
        filled(self, number)
        others.append(threading.Thread(target=drop, args=[self]))
        others[-1].start()
        others[-1].join(0.02)

    filled = Stream.fill
    monkeypatch.setattr(Stream, "fill", fill)
    stream(model).drop()
    assert read(model, tmp_path / "beside") == expected
    assert others
    for thread in others:
        thread.join()


def test_an_interrupted_pass_leaves_the_model_usable(pair):
    """No lock is held, and nothing stands in for its layers."""
    _, model = pair
    with pytest.raises(KeyboardInterrupt):
        collect_statistics(model, WINDOWS, batch_size=1, progress=stop_at(4))
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(evaluate_perplexity, model, WINDOWS.ids).result(timeout=60)
    assert other.nll == evaluate_perplexity(pair[0], WINDOWS.ids).nll


def test_a_layer_that_was_read_in_part_is_dropped(pair, monkeypatch):
    """And read again when it is asked for."""
    _, model = pair
    stream(model).fill(0)
    real = file_reader.convert_and_load_state_dict_in_model

    def stopped(*args: Any) -> None:
        real(*args)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(file_reader, "convert_and_load_state_dict_in_model", stopped)
        with pytest.raises(KeyboardInterrupt):
            stream(model).fill(1)
    assert resident(model) == set()
    stream(model).fill(2)
    assert resident(model) == {2}
    losses = [evaluate_perplexity(net, WINDOWS.ids).nll for net in pair]
    assert losses[0] == losses[1]


def test_advice_about_files_that_are_shorter_or_gone(tmp_path):
    """It is no error: who reads the weights says what is missing."""
    _, model = both(tmp_path, "qwen3_moe")
    reader, names = stream(model).reader, stream(model).parts[1].names
    files = {stored.file for stored in reader.tensors_of(names)}
    for damage in (lambda path: path.write_bytes(b""), Path.unlink):
        for path in files:
            damage(path)
        reader.prepare(names)
    with pytest.raises((HeaprLabError, OSError)):
        reader.read(1, names)


# --- loading ----------------------------------------------------------------------


def test_streams_of_another_kind_are_refused(tmp_path):
    """Before anything is loaded."""
    with pytest.raises(
        SpecError, match="must be one of True, False, 'auto', got 'yes'"
    ):
        load_model(write_model(tmp_path), stream="yes")


# --- the command line --------------------------------------------------------------


def test_each_command_streams(tmp_path, monkeypatch):
    """With --stream it does, and says what it says without."""
    write_model(tmp_path / "moe")
    write_text(tmp_path / "text.txt")
    outputs, streams = [], Mock(wraps=opening.open_streamed)
    monkeypatch.setattr(opening, "open_streamed", streams)
    for way in ("--stream", "--no-stream"):
        monkeypatch.setenv("HEAPR_CACHE_DIR", str(tmp_path / f"cache{way}"))
        mask = tmp_path / f"mask{way}.parquet"
        base = ("prune", tmp_path / "moe", "--ratio", 0.4, "--method", "paper")
        facts = said(*base, "--out", mask, way, *text_of(tmp_path))
        text = ("--kl", "--corpora", tmp_path / "text.txt", *TINY)
        losses = said("evaluate", tmp_path / "moe", "--mask", mask, way, *text)
        scored = said("score", tmp_path / "moe", way, *text_of(tmp_path))
        heapr = ("compare", tmp_path / "moe", "--methods", "heapr", "--ratios", 0.4)
        compared = said(*heapr, *text[1:], way, *text_of(tmp_path))
        outputs.append((facts["atoms_kept"], losses, scored["spec_hash"], compared))
    assert outputs[0] == outputs[1]
    assert streams.call_count == 4
