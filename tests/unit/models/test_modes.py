"""Evaluation mode and gradients: put back, shared by threads, one pass at a time."""

import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pandas as pd
import pytest
import torch
from families import tiny_model, tiny_windows
from keeps import random_keep

from heapr_lab import collect_statistics, evaluate_perplexity, prune
from heapr_lab.errors import LayoutError, SpecError
from heapr_lab.models.modes import evaluating

WINDOWS = tiny_windows(n_sequences=5)
PATIENCE = 30
"""Seconds after which a thread that should have gone on has not."""


# --- threads ----------------------------------------------------------------------


def test_two_threads_evaluate_a_model_in_training_mode():
    """With dropout of a half, both get the perplexity of evaluation mode."""
    model = tiny_model("qwen2_moe", attention_dropout=0.5)
    expected = evaluate_perplexity(model, WINDOWS.ids, batch_size=1)
    model.train()
    started, ended = threading.Event(), threading.Event()

    def until_another_started(_done: int, _total: int) -> None:
        assert started.wait(PATIENCE)

    def after_the_other_ended(_done: int, _total: int) -> None:
        started.set()
        assert ended.wait(PATIENCE)

    def first() -> float:
        result = evaluate_perplexity(
            model, WINDOWS.ids, batch_size=1, progress=until_another_started
        )
        ended.set()
        return result.nll

    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(first)
        second = evaluate_perplexity(
            model, WINDOWS.ids, batch_size=1, progress=after_the_other_ended
        )
        assert other.result() == second.nll == expected.nll
    assert all(module.training for module in model.modules())


def test_two_passes_on_one_model_take_turns(model, caplog):
    """Two threads that collect at the same time get the table of one; one waits."""
    caplog.set_level(logging.INFO, logger="heapr_lab.models.modes")
    alone = collect_statistics(model, WINDOWS, batch_size=1)

    def slowly(_done: int, _total: int) -> None:
        time.sleep(0.05)

    with ThreadPoolExecutor(2) as pool:
        jobs = [
            pool.submit(
                collect_statistics, model, WINDOWS, batch_size=1, progress=slowly
            )
            for _ in range(2)
        ]
        tables = [job.result(PATIENCE) for job in jobs]
    for table in tables:
        pd.testing.assert_frame_equal(table.frame, alone.frame)
    assert "waiting for another pass" in caplog.text
    assert all(p.requires_grad for p in model.parameters())


def test_perplexity_beside_a_pass(model):
    """A thread evaluates in the middle of another's pass; both numbers are right."""
    table = collect_statistics(model, WINDOWS, batch_size=1)
    nll = evaluate_perplexity(model, WINDOWS.ids).nll
    losses = []

    def evaluate_there(done: int, _total: int) -> None:
        if done == 2:
            with ThreadPoolExecutor(1) as pool:
                job = pool.submit(evaluate_perplexity, model, WINDOWS.ids)
                losses.append(job.result(PATIENCE).nll)

    beside = collect_statistics(model, WINDOWS, batch_size=1, progress=evaluate_there)
    assert losses == [nll]
    pd.testing.assert_frame_equal(beside.frame, table.frame)


def test_a_pass_within_a_pass_is_refused(model):
    """In one thread it could only wait for itself."""

    def again(_done: int, _total: int) -> None:
        collect_statistics(model, WINDOWS)

    with pytest.raises(SpecError, match="in this thread already"):
        collect_statistics(model, WINDOWS, progress=again)
    collect_statistics(model, WINDOWS)  # and the model is free again


def test_a_copy_made_beside_a_pass():
    """It waits, and has the modes and flags of the model, and no hook of the pass."""
    model = tiny_model("qwen2_moe").train()
    model.lm_head.weight.requires_grad_(False)
    copies, jobs = [], []

    def prune_there(done: int, _total: int) -> None:
        if done == 2:
            jobs.append(pool.submit(prune, model, random_keep(model)))

    with ThreadPoolExecutor(1) as pool:
        collect_statistics(model, WINDOWS, batch_size=1, progress=prune_there)
        with evaluating(model):
            copies = [jobs[0].result(PATIENCE), prune(model, random_keep(model))]
    for pruned in copies:
        assert all(module.training for module in pruned.modules())
        frozen = {n for n, p in pruned.named_parameters() if not p.requires_grad}
        assert frozen == {"lm_head.weight"}
        assert not pruned.get_input_embeddings()._forward_hooks


# --- inference mode ---------------------------------------------------------------


def test_it_measures_in_inference_mode(model):
    """It does so under no_grad as well, and with windows made in the block."""
    expected = collect_statistics(model, WINDOWS, batch_size=2)
    with torch.inference_mode():
        windows = tiny_windows(n_sequences=5)
        got = collect_statistics(model, windows, batch_size=2)
        nll = evaluate_perplexity(model, windows.ids).nll
    assert windows.ids.is_inference()
    with torch.no_grad():
        without = collect_statistics(model, WINDOWS, batch_size=2)
    pd.testing.assert_frame_equal(without.frame, expected.frame)
    pd.testing.assert_frame_equal(got.frame, expected.frame)
    assert nll == evaluate_perplexity(model, WINDOWS.ids).nll


def test_weights_of_inference_mode_are_refused():
    """No gradient passes them: one line, with what to do."""
    with torch.inference_mode():
        model = tiny_model("qwen2_moe")
    with pytest.raises(LayoutError, match="load the model outside"):
        collect_statistics(model, WINDOWS)
