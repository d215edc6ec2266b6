"""Dynamic skipping against loops over single tokens, in memory and from files."""

import json
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from families import tiny_ids, tiny_model
from keeps import logits_of
from oracles.token_by_token import atom_activations, matrices
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from heapr_lab import methods
from heapr_lab.errors import SpecError
from heapr_lab.methods.composed_experts import ComposedExperts, composed_experts
from heapr_lab.methods.compression import ExpertComposition
from heapr_lab.methods.dropping import drop_experts
from heapr_lab.models.experts import describe, find_experts
from heapr_lab.storage.files import read_json
from heapr_lab.text.calibration import CalibrationSet

pytestmark = pytest.mark.oracle

FAMILIES = ("qwen2_moe", "qwen3_moe", "mixtral", "deepseek_v2")
WINDOWS = CalibrationSet.from_ids(tiny_ids(n_sequences=4, seq_len=9))
IDS = tiny_ids(seed=5)
CLOSE = {"rtol": 1e-9, "atol": 1e-9}
IN_SINGLE = {"rtol": 1e-5, "atol": 1e-6}
"""Routers compute a softmax in float32, and so are ratios of its weights."""
THREE = {
    "num_experts": 6,
    "num_local_experts": 6,
    "n_routed_experts": 6,
    "num_experts_per_tok": 3,
}
TWO = {**THREE, "num_experts_per_tok": 2}
RATIO = 0.34
"""Two of six experts go."""

Ratios = dict[int, list[list[float]]]
"""The p_j / p_1 of each token's ranks from 2, by layer."""


def fitted(model: nn.Module, ratio: float = RATIO) -> ExpertComposition:
    """What NAEE with skipping finds."""
    fit = methods.get("naee").fit(model, WINDOWS, ratio=ratio, skipping=True)
    assert isinstance(fit, ExpertComposition)
    return fit


class ByLoops:
    """A model that drops experts, whose tokens skip experts one after the other."""

    def __init__(self, model: nn.Module, kept: Any) -> None:
        self.model: Any = drop_experts(model, kept)
        self.layers = {id(moe.module): moe.layer for moe in find_experts(self.model)}
        self.thresholds: dict[int, list[float]] = {}
        self.ratios: Ratios = defaultdict(list)
        self.rows: Counter[tuple[int, int]] = Counter()
        """Tokens that each (layer, expert) is run on."""

    def logits(self, ids: torch.Tensor) -> torch.Tensor:
        """The logits; `ratios` and `rows` are those of these tokens."""
        self.ratios.clear()
        self.rows.clear()
        ALL_EXPERTS_FUNCTIONS.register("skipping_by_loops", self._experts)
        self.model.set_experts_implementation("skipping_by_loops")
        return logits_of(self.model, ids)

    def _experts(self, module: Any, x: Any, index: Any, weights: Any) -> torch.Tensor:
        layer = self.layers[id(module)]
        pairs = zip(index.tolist(), weights.double().tolist(), strict=True)
        return torch.stack(
            [
                self._token(module, layer, x[t], dict(zip(*pair, strict=True)))
                for t, pair in enumerate(pairs)
            ]
        )

    def _token(
        self, module: Any, layer: int, x: torch.Tensor, p: dict[int, float]
    ) -> torch.Tensor:
        best, *others = sorted(p, key=lambda expert: (-p[expert], expert))
        self.ratios[layer].append([p[e] / p[best] for e in others])
        left = [best]
        for rank, expert in enumerate(others):
            beta = self.thresholds.get(layer, [0.0] * len(others))[rank]
            if not p[expert] < beta * p[best]:
                left.append(expert)
        scale = sum(p.values()) / sum(p[e] for e in left)
        total = torch.zeros_like(x)
        for expert in left:
            self.rows[layer, expert] += 1
            w = matrices(module, expert)
            total += p[expert] * scale * (w["W_down"] @ atom_activations(module, x, w))
        return total


def by_hand(ratios: Ratios) -> dict[int, list[float]]:
    """The median of each rank."""
    return {
        layer: [statistics.median(rank) for rank in zip(*tokens, strict=True)]
        for layer, tokens in ratios.items()
    }


@pytest.mark.parametrize("sizes", [TWO, THREE], ids=["two", "three"])
@pytest.mark.parametrize("family", FAMILIES)
def test_thresholds_are_medians(family: str, sizes: dict[str, int]) -> None:
    """The medians of all calibration tokens, in the model without dropped experts."""
    model = tiny_model(family, **sizes)
    fit = fitted(model)
    loops = ByLoops(model, fit.kept)
    loops.logits(WINDOWS.ids)
    expected = by_hand(loops.ratios)
    assert fit.compositions.keys() == expected.keys()
    for layer, composition in fit.compositions.items():
        assert composition.skipping == pytest.approx(expected[layer], rel=1e-6)
        assert len(composition.skipping) == sizes["num_experts_per_tok"] - 1
        skips = [
            r < beta
            for token in loops.ratios[layer]
            for r, beta in zip(token, composition.skipping, strict=True)
        ]
        slots = len(loops.ratios[layer]) * sizes["num_experts_per_tok"]
        assert fit.skipped[layer] == sum(skips) / slots
        assert 0.2 < fit.skipped[layer] <= 0.5


@pytest.mark.parametrize("ratio", [0.0, RATIO])
@pytest.mark.parametrize("family", FAMILIES)
def test_it_is_the_loops(family: str, ratio: float, tmp_path: Path) -> None:
    """Applied, materialised, saved, loaded, and saved and loaded again."""
    model = tiny_model(family, **THREE)
    dense = logits_of(model, IDS)
    fit = fitted(model, ratio)
    loops = ByLoops(model, fit.kept)
    without = loops.logits(IDS)
    loops.thresholds = {k: [*layer.skipping] for k, layer in fit.compositions.items()}
    expected = loops.logits(IDS)
    assert (expected - without).abs().max() > 1e-3
    with fit.apply(model):
        applied = logits_of(model, IDS)
    torch.testing.assert_close(applied, expected, **IN_SINGLE)
    assert torch.equal(logits_of(model, IDS), dense)
    small = fit.materialise(model)
    torch.testing.assert_close(logits_of(small, IDS), applied, **CLOSE)
    folder = fit.save(model, tmp_path / "once", base="")
    loaded = reloaded(folder)
    torch.testing.assert_close(logits_of(loaded, IDS), applied, **CLOSE)
    loaded.save_pretrained(tmp_path / "twice")
    again = reloaded(tmp_path / "twice")
    torch.testing.assert_close(logits_of(again, IDS), applied, **CLOSE)
    assert "experts are skipped" in (folder / "README.md").read_text()
    assert read_json(folder / "heapr_manifest.json")["skips_experts"]


def reloaded(folder: Path) -> Any:
    """The model of a folder, in float64, as transformers loads it."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[tuple[int, int]]]:
    """Rows that composed experts are run on, by module and expert."""
    counts: Counter[tuple[int, int]] = Counter()
    original = ComposedExperts._expert

    def count(self: ComposedExperts, expert: int, x: torch.Tensor) -> Any:
        counts[id(self), expert] += len(x)
        return original(self, expert, x)

    monkeypatch.setattr(ComposedExperts, "_expert", count)
    return counts


@pytest.mark.parametrize("family", FAMILIES)
def test_skipped_experts_are_not_run(
    family: str, rows: Counter[tuple[int, int]]
) -> None:
    """Each expert is run on as many tokens as in the loops; operations are as many."""
    model = tiny_model(family, **THREE)
    fit = fitted(model)
    loops = ByLoops(model, fit.kept)
    loops.thresholds = {k: [*layer.skipping] for k, layer in fit.compositions.items()}
    small = fit.materialise(model)
    names = {layer.name: layer.layer for layer in find_experts(model)}
    numbers = {id(experts): names[k] for k, experts in composed_experts(small).items()}
    loops.logits(IDS)
    logits_of(small, IDS)
    run = {(numbers[module], expert): n for (module, expert), n in rows.items()}
    assert run == dict(loops.rows)
    assert sum(run.values()) < 0.85 * 3 * IDS.numel() * len(numbers)


@pytest.mark.parametrize("family", FAMILIES)
def test_operations_are_those_of_the_rows(
    family: str, rows: Counter[tuple[int, int]]
) -> None:
    """Exactly where no layer before skips; parameters are those of dropping alone."""
    model = tiny_model(family, **THREE)
    fit, plain = fitted(model), methods.get("naee").fit(model, WINDOWS, ratio=RATIO)
    shapes = describe(model).layers
    small = fit.materialise(model)
    logits_of(small, WINDOWS.ids)
    counts: Counter[int] = Counter()
    for (module, _), n in rows.items():
        counts[module] += n
    run = [counts[id(experts)] for experts in composed_experts(small).values()]
    slots = 3 * WINDOWS.ids.numel()
    expected = [slots * (1 - share) for share in fit.skipped.values()]
    assert run[0] == pytest.approx(expected[0], abs=1e-6)
    assert run == pytest.approx(expected, abs=0.05 * slots)
    saved, dropped = fit.savings(model), plain.savings(model)
    assert saved.parameters == dropped.parameters
    assert saved.bytes == dropped.bytes
    assert fit.achieved_ratio == plain.achieved_ratio
    by_layer = [
        3 * shape.d_inter * shape.atom_flops * (1 - fit.skipped[k])
        for k, shape in shapes.items()
    ]
    assert saved.routed_flops[0] == dropped.routed_flops[0]
    assert saved.routed_flops[1] == pytest.approx(sum(by_layer))
    assert saved.routed_flops[1] < 0.85 * dropped.routed_flops[1]


def test_a_token_with_one_expert_has_none_to_skip() -> None:
    """The option is refused, not ignored."""
    model = tiny_model("qwen2_moe", num_experts_per_tok=1)
    with pytest.raises(SpecError, match="never skips the best"):
        fitted(model)


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    """Thresholds of another number or range, or of a module without a plan."""
    model = tiny_model("mixtral", **THREE)
    folder = fitted(model).save(model, tmp_path / "out", base="")
    path = folder / "config.json"
    whole = json.loads(path.read_text())
    assert whole["quantization_config"]["format_version"] == 2

    def refused(message: str, **changes: Any) -> None:
        changed = json.loads(json.dumps(whole))
        changed["quantization_config"].update(changes)
        path.write_text(json.dumps(changed))
        with pytest.raises(ValueError, match=message):
            AutoModelForCausalLM.from_pretrained(folder)

    name, (beta, _) = next(iter(whole["quantization_config"]["skipping"].items()))
    refused(r"expected 2 numbers from 0 to 1", skipping={name: [beta]})
    refused(r"expected 2 numbers from 0 to 1", skipping={name: [beta, beta, beta]})
    refused(r"expected 2 numbers from 0 to 1", skipping={name: [beta, 1.5]})
    refused(r"expected 2 numbers from 0 to 1", skipping={name: [beta, "low"]})
    refused("has no plan", skipping={"model.norm": [beta, beta]})
    refused("upgrade heapr_lab", format_version=3)
    refused("format version '3', .* up to 2", format_version="3")
