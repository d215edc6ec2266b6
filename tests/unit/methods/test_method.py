"""Fitting: what is checked before anything is run, and what is measured once."""

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from families import tiny_model, tiny_windows
from keeps import full_keep, random_keep

from heapr_lab import methods
from heapr_lab.checkpoints.provenance import read_provenance
from heapr_lab.checkpoints.save import save_pruned
from heapr_lab.errors import HeaprLabError, LayoutError, SpecError
from heapr_lab.evaluation.perplexity import evaluate_perplexity
from heapr_lab.importance.collect import collect_statistics
from heapr_lab.methods import collectors
from heapr_lab.methods.collectors import Measurements
from heapr_lab.models.identity import identity_in_force
from heapr_lab.pruning.surgery import masking, prune

WINDOWS = tiny_windows()


def test_each_measurement_takes_one_pass(model, monkeypatch):
    """All methods at two ratios: one table, and one pass through the layers."""
    measure = Mock(wraps=functools.partial(collect_statistics, model))
    collect = Mock(wraps=collectors.iter_expert_calls)
    monkeypatch.setattr(collectors, "iter_expert_calls", collect)
    shared = Measurements(model, WINDOWS, measure=measure)
    for name in methods.names():
        shared.expect(methods.get(name).collectors)
    for name in set(methods.names()) - {"compress"}:
        for ratio in (0.25, 0.5):
            methods.get(name).fit(model, WINDOWS, ratio=ratio, shared=shared)
    assert [call.args for call in measure.mock_calls] == [(WINDOWS,)]
    collect.assert_called_once()


def test_measurements_of_something_else_are_refused(model):
    """Other windows, another model, and the same model with other weights."""
    twin = tiny_model("qwen2_moe")
    shared = Measurements(twin, WINDOWS)
    fit = functools.partial(methods.get("reap").fit, ratio=0.25, shared=shared)
    fit(twin, WINDOWS)
    for net, windows in ((twin, tiny_windows(seed=2)), (model, WINDOWS)):
        with pytest.raises(SpecError, match="shared measurements are of another"):
            fit(net, windows)
    with torch.no_grad():
        twin.lm_head.weight.mul_(2)  # type: ignore[operator, union-attr]
    with pytest.raises(SpecError, match="shared measurements are of another"):
        fit(twin, WINDOWS)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("reap", {"ratio": 25}, r"ratio must be in \[0, 1\), got 25"),
        ("reap", {"ratio": 0.2, "seed": -1}, "seed must be a whole number from 0"),
        ("mone", {"ratio": 0.2, "alpha": 1}, "no option alpha; it has score, scope"),
        ("naee", {"ratio": 0.2, "most_tokens": "all"}, "is 'all', expected int"),
        ("naee", {"ratio": 0.2, "most_tokens": True}, "is True, expected int"),
        ("naee", {"ratio": 0.2, "most_tokens": 0}, "is 0, expected int from 1"),
        ("camera-p", {"ratio": 0.2, "alpha": float("nan")}, "is nan, expected float"),
        ("camera-p", {"ratio": 0.2, "alpha": False}, "is False, expected float"),
        ("camera-p", {"ratio": 0.2, "alpha": float("inf")}, "is inf, expected float"),
        ("camera-p", {"ratio": 0.2, "alpha": 2.0}, r"a number in \[0, 1\], got 2.0"),
        ("reap", {"ratio": 0.75}, "leave layer 0 1 of 4 .* possible ratio is 0.5"),
        ("ream", {"ratio": 0.34, "group_size": 1}, "group_size .* give at least 2"),
        ("mc-smoe", {"ratio": 0.95}, r"largest possible ratio is 0\.75$"),
        ("evoesap", {"ratio": 0.9}, r"largest possible ratio is 0\.5$"),
        ("evoesap", {"ratio": 0.2, "population": 4}, "population must be .* from 5"),
        ("moe-svd-like", {"ratio": 0.2, "most_of_layer": 0.0}, "most_of_layer is 0.0"),
        ("moe-svd-like", {"ratio": 0.2, "most_of_layer": 1.5}, "most_of_layer is 1.5"),
    ],
)
def test_invalid_requests_are_refused(model, name, options, message):
    """The message says what is wrong, and what is expected."""
    with pytest.raises(SpecError, match=message):
        methods.get(name).fit(model, WINDOWS, **options)


def test_masks_and_methods_exclude_each_other(model):
    """It would be fitted to the masked model; and a mask is of all experts."""
    reap = methods.get("reap")
    compression = reap.fit(model, WINDOWS, ratio=0.25)
    with masking(model, random_keep(model)):
        with pytest.raises(SpecError, match="fit the method to the dense model"):
            reap.fit(model, WINDOWS, ratio=0.25)
        with pytest.raises(SpecError, match="replace experts of the dense model"):
            compression.apply(model).__enter__()
    with (
        compression.apply(model),
        pytest.raises(SpecError, match=r"has shape \(4, 8\), expected \(3, 8\)"),
    ):
        masking(model, full_keep(tiny_model("qwen2_moe"))).__enter__()


@pytest.mark.parametrize("name", ["reap", "hc-smoe"])
def test_other_threads_are_refused_while_it_is_applied(model, name):
    """Modules change in all threads, so nothing of them passes for the model."""
    compression = methods.get(name).fit(model, WINDOWS, ratio=0.5)
    before, keep = identity_in_force(model), full_keep(model)
    calls: list[Callable[[], Any]] = [
        lambda: evaluate_perplexity(model, WINDOWS.ids),
        lambda: prune(model, keep),
        lambda: masking(model, None).__enter__(),
        lambda: identity_in_force(model),
        lambda: collect_statistics(model, WINDOWS),
        lambda: compression.apply(model).__enter__(),
    ]
    with ThreadPoolExecutor(1) as pool:
        with compression.apply(model):
            for call in calls:
                with pytest.raises(SpecError, match="another thread has replaced"):
                    pool.submit(call).result()
            here = evaluate_perplexity(model, WINDOWS.ids)
        there = pool.submit(evaluate_perplexity, model, WINDOWS.ids).result()
    assert there == evaluate_perplexity(model, WINDOWS.ids) != here
    assert identity_in_force(model) == before


def test_what_runs_while_a_method_is_applied_is_invalid(model):
    """The second of two batches was that of other experts, which are gone again."""
    compression = methods.get("reap").fit(model, WINDOWS, ratio=0.5)

    def apply() -> None:
        with compression.apply(model):
            pass

    with ThreadPoolExecutor(1) as pool:

        def apply_there(_done: int, _total: int) -> None:
            pool.submit(apply).result()

        with pytest.raises(HeaprLabError, match="result is invalid; run it again"):
            evaluate_perplexity(model, WINDOWS.ids, progress=apply_there)


def test_groups_of_experts_are_refused_before_text_is_read():
    """Methods that drop experts refuse them by name; the others take the model."""
    grouped = tiny_model("deepseek_v3", n_group=2, topk_group=1)
    for name in ("reap", "naee"):
        with pytest.raises(LayoutError, match=r"gate .* of 2 groups .*num_group=2"):
            methods.get(name).fit(grouped, WINDOWS, ratio=0.25, progress=_never)
    assert methods.get("heapr").fit(grouped, WINDOWS, ratio=0.25).achieved_ratio == 0.25


def _never(_done: int, _total: int) -> None:
    raise AssertionError("text was read")


# --- checkpoints ------------------------------------------------------------------


def test_the_manifest_says_how_it_was_made(model, tmp_path):
    """Method, ratio, seed and options; a card names the method."""
    camera = methods.get("camera-p")
    small = camera.fit(model, WINDOWS, ratio=0.25, seed=3).materialise(model)
    manifest = read_provenance(save_pruned(small, tmp_path / "small"))
    assert manifest["method"] == "camera-p"
    assert manifest["selection"] == {
        "method": "camera-p",
        "ratio": 0.25,
        "seed": 3,
        "options": dict(camera.options),
    }
    card = (tmp_path / "small" / "README.md").read_text("utf-8")
    assert "selected by the\nmethod `camera-p` of heapr_lab" in card
    drawn = methods.get("random").fit(model, WINDOWS, ratio=0.25, seed=3)
    drawn_folder = save_pruned(drawn.materialise(model), tmp_path / "drawn")
    manifest = read_provenance(drawn_folder)
    assert (manifest["method"], manifest["selection"]["seed"]) == ("random", 3)


def test_savings_are_counted_where_they_are(model):
    """Atoms save operations, experts save none: a token uses as many as before."""
    atoms = methods.get("intdim-e").fit(model, WINDOWS, ratio=0.5).savings(model)
    whole = methods.get("frequency").fit(model, WINDOWS, ratio=0.5).savings(model)
    assert atoms.routed_flops[1] == pytest.approx(atoms.routed_flops[0] / 2)
    assert whole.routed_flops[1] == pytest.approx(whole.routed_flops[0])
