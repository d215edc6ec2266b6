"""What is active around a call never passes for the model as it is."""

import copy
import functools
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from families import tiny_ids, tiny_model, tiny_windows
from keeps import full_keep, random_keep
from tiny_folder import write_model, write_text
from torch import nn

from heapr_lab.errors import HeaprLabError, LayoutError, SpecError
from heapr_lab.evaluation.perplexity import evaluate_perplexity
from heapr_lab.importance.collect import collect_statistics
from heapr_lab.models.experts import find_experts
from heapr_lab.models.hooks import masked
from heapr_lab.models.identity import (
    architecture_identity,
    check_unchanged,
    identity_in_force,
    model_identity,
    refuse_autocast,
    refuse_disturbed,
    weights_state,
)
from heapr_lab.models.weights_hash import block_sums
from heapr_lab.pruning.surgery import masking
from heapr_lab.refinement.compensation import fit_compensation
from heapr_lab.refinement.compress import fit_compression
from heapr_lab.refinement.elimination import eliminate
from heapr_lab.workbench.settings import Setting
from heapr_lab.workbench.workbench import Workbench, open_workbench

WINDOWS = tiny_windows(n_sequences=6)


@pytest.fixture
def model() -> nn.Module:
    """A tiny qwen2_moe in float32."""
    return tiny_model("qwen2_moe", dtype=torch.float32)


@pytest.fixture
def bench(cache, tmp_path) -> Workbench:
    """A workbench with a cache of its own."""
    return open_workbench(str(write_model(tmp_path / "moe")), profile="small")


def spec_of(model: nn.Module) -> dict[str, Any]:
    """What a table that is measured now says it is of."""
    return collect_statistics(model, WINDOWS).metadata["spec"]


# --- tables -----------------------------------------------------------------------


def test_a_table_of_a_masked_model_says_so(model):
    """Its identity is that in force; a mask that keeps all leaves the dense one.

    A mask within itself is itself; within another it is both.
    """
    dense, keep = spec_of(model), random_keep(model)
    with masking(model, keep):
        masked = identity_in_force(model)
        assert masked.keys() - dense["model"].keys() == {"active"}
        assert spec_of(model) == dense | {"model": masked}
        with masking(model, keep):
            assert identity_in_force(model) == masked
        with masking(model, random_keep(model, seed=1)):
            assert identity_in_force(model) != masked
    with masking(model, full_keep(model)):
        assert spec_of(model) == dense
    assert identity_in_force(model) == dense["model"] != masked


# --- the workbench ----------------------------------------------------------------


def calls(bench: Workbench) -> dict[str, Callable[[], Any]]:
    """Everything of a workbench that is kept in the cache."""
    keep, text = random_keep(bench.model), tiny_windows(seed=3)
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
    answers = {name: call() for name, call in calls(bench).items()}
    return {
        name: result.frame.to_csv() if hasattr(result, "frame") else result
        for name, result in answers.items()
    }


def test_a_workbench_refuses_inside_a_mask(bench):
    """Every call, whether its result is in the cache or not; nothing is stored."""
    for when in ("before", "after"):
        with masking(bench.model, random_keep(bench.model)):
            for call in calls(bench).values():
                with pytest.raises(SpecError, match="pass the mask as an argument"):
                    call()
        if when == "before":
            first = numbers(bench)
    assert numbers(bench) == first
    assert first["perplexity"] == evaluate_perplexity(bench.model, tiny_ids(seed=3))


def test_weights_changed_in_place_are_another_model(bench):
    """Every number is that of the weights as they are; back again, as before."""
    first = numbers(bench)
    layer = find_experts(bench.model)[0]
    kept = layer.down.detach().clone()
    with torch.no_grad():
        layer.down.mul_(3)
    changed = numbers(bench)
    assert changed["perplexity"] == evaluate_perplexity(bench.model, tiny_ids(seed=3))
    different = {name for name in first if first[name] != changed[name]}
    assert different >= {"perplexity", "divergence", "measure", "importance"}
    with torch.no_grad():
        layer.down.copy_(kept)
    assert numbers(bench) == first


def test_routing_is_of_the_model(bench):
    """Tokens routed to one expert are another model's; back again, as before."""
    model, first = bench.model, numbers(bench)
    identity = model_identity(model)
    routers: list[Any] = [m for m in model.modules() if hasattr(m, "top_k")]
    (before,) = {router.top_k for router in routers}
    for router in routers:
        router.top_k = 1
    changed = evaluate_perplexity(model, tiny_ids(seed=3))
    assert bench.perplexity(None, tiny_windows(seed=3)) == changed
    assert changed != first["perplexity"]
    assert model_identity(model).keys() - identity.keys() == {"routing"}
    for router in routers:
        router.top_k = before
    model.train().eval()
    assert (numbers(bench), model_identity(model)) == (first, identity)


# --- autocast and hooks -----------------------------------------------------------


def test_autocast_is_refused(bench):
    """All that keeps its results refuses it; the message names dtype and remedy."""
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


# --- while it runs ----------------------------------------------------------------


def test_weights_that_change_during_a_pass(bench, tmp_path, monkeypatch):
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


# --- its parts --------------------------------------------------------------------


def keep(*dropped: int) -> torch.Tensor:
    """The atoms of a layer without some of its first expert's."""
    kept = torch.ones(4, 8, dtype=torch.bool)
    kept[0, list(dropped)] = False
    return kept


def active(model: nn.Module, *masks: Any, first: int = 0) -> str | None:
    """What is active under masks of layers from the first on."""
    keeps, down_projs = zip(*masks, strict=True)
    layers = find_experts(model)[first : first + len(masks)]
    with masked(layers, keeps, down_projs):
        return identity_in_force(model).get("active")


# --- masks ------------------------------------------------------------------------


def test_what_an_active_mask_is_known_by(model):
    """Layer, atoms and replaced weights; a layer that keeps all is as without."""
    down = find_experts(model)[0].down.detach()
    some, all_of_it = (keep(3), None), (keep(), None)
    assert active(model, all_of_it, all_of_it) is None
    first = active(model, some)
    assert first == active(model, some, all_of_it)
    different = [
        first,
        active(model, some, first=1),
        active(model, (keep(4), None)),
        active(model, (keep(3, 4), None)),
        active(model, some, some),
        active(model, (keep(3), down)),
        active(model, (keep(), down)),
        active(model, (keep(), 2 * down)),
    ]
    assert None not in different
    assert len(set(different)) == len(different)


def test_a_disturbed_model_is_refused(model):
    """The layers that a mask edits are named, and what to do."""
    layers = find_experts(model)
    refuse_disturbed(model, remedy="ask")
    with masked(layers, [keep(), keep()]):
        refuse_disturbed(model, remedy="ask")
    message = r"it edits 1 layers \(model\.layers\.1\.mlp\.experts\), .* and ask again$"
    with (
        masked(layers, [keep(), keep(1)]),
        pytest.raises(SpecError, match=message),
    ):
        refuse_disturbed(model, remedy="ask again")


# --- hooks and autocast -----------------------------------------------------------


class Watcher:
    """A hook that is no function."""

    def __call__(self, *_: object) -> None:
        """Do nothing."""


def watch(*_: object) -> None:
    """A hook that is a function."""


@pytest.mark.parametrize(
    ("hook", "name"),
    [(Watcher(), "Watcher"), (watch, "watch"), (functools.partial(watch), "watch")],
)
@pytest.mark.parametrize(
    "kind", ["forward", "forward_pre", "full_backward", "full_backward_pre"]
)
def test_hooks_are_named(model, hook, name, kind):
    """Their module is named, also where it is the model itself."""
    for module, called in ((model, "model"), (model.lm_head, "lm_head")):
        message = f"module '{called}' has a hook, {name}, which"
        with getattr(module, f"register_{kind}_hook")(hook):
            with pytest.raises(SpecError, match=message):
                refuse_disturbed(model, remedy="ask")
            with pytest.raises(SpecError, match=message):
                identity_in_force(model)
    refuse_disturbed(model, remedy="ask")


@pytest.mark.parametrize(
    "package", ["accelerate", "heapr_lab", "torch", "transformers"]
)
def test_hooks_of_these_packages_are_known(model, monkeypatch, package):
    """They watch, or belong to how the model runs; as do those of transformers."""
    model(tiny_ids(), output_hidden_states=True, output_attentions=True)
    model.enable_input_require_grads()
    assert any(module._forward_hooks for module in model.modules())
    monkeypatch.setattr(watch, "__module__", f"{package}.somewhere")
    model.lm_head.register_forward_hook(watch)
    refuse_disturbed(model, remedy="ask")
    monkeypatch.setattr(watch, "__module__", f"{package}_of_another")
    with pytest.raises(SpecError, match="has a hook, watch"):
        refuse_disturbed(model, remedy="ask")


def test_autocast_of_another_device_does_not_matter():
    """Only autocast of the devices that the weights are on matters."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        refuse_autocast(nn.Linear(1, 1, device="meta"))
        message = "autocast to bfloat16 is on.*load the model with dtype='bfloat16'"
        with pytest.raises(SpecError, match=message):
            refuse_autocast(nn.Linear(1, 1))


# --- the state of weights ---------------------------------------------------------


class Weights(nn.Module):
    """Some tensors, and a configuration."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.matrix = nn.Parameter(torch.arange(12.0).reshape(3, 4))
        self.vector = nn.Parameter(torch.arange(3.0))
        self.column = nn.Parameter(torch.ones(3, 1))
        self.row = nn.Parameter(torch.ones(1, 3))
        self.register_buffer("number", torch.tensor(1.0))


@pytest.fixture
def weights() -> Weights:
    """Weights with a tiny configuration."""
    return Weights(tiny_model("mixtral").config)


def test_writing_by_data_is_seen_in_rows_and_columns(weights):
    """The first value of each is seen, and all values of what is no matrix."""
    state = weights_state(weights)
    assert state == weights_state(weights)
    for tensor, place in [
        (weights.matrix, (2, 0)),
        (weights.matrix, (0, 3)),
        (weights.vector, (2,)),
        (weights.column, (2, 0)),
        (weights.row, (0, 2)),
        (weights.number, ()),
    ]:
        before = tensor.data[place].clone()
        tensor.data[place] = 77.0
        assert weights_state(weights) != state
        with pytest.raises(HeaprLabError, match="weights of the model changed"):
            check_unchanged(weights, state)
        tensor.data[place] = before
        assert weights_state(weights) == state
    check_unchanged(weights, state)


def test_what_torch_counts_is_seen_wherever_it_is(weights):
    """The same values may be written again, or lie elsewhere."""
    states = [weights_state(weights)]
    with torch.no_grad():
        weights.matrix[1, 1] = weights.matrix[1, 1]
        states.append(weights_state(weights))
        weights.matrix.data = weights.matrix.data.clone()
        states.append(weights_state(weights))
        weights.config.rms_norm_eps = 0.5
        states.append(weights_state(weights))
    assert len(set(states)) == 4


def test_weights_without_values_or_versions(weights):
    """Weights on the meta device, which are named, and those of inference mode."""
    state = weights_state(weights)
    assert weights_state(weights.to("meta")) != state
    with pytest.raises(LayoutError, match=r"^column is offloaded, its values are not"):
        model_identity(weights)
    with torch.inference_mode():
        twin = Weights(weights.config)
    assert weights_state(twin) == weights_state(twin)


# --- identity ---------------------------------------------------------------------


def test_the_parts_of_an_identity(model):
    """Class, configuration, type, and a hash of every tensor with name and shape."""
    identity = model_identity(model)
    assert identity.keys() == {"class", "config", "weights", "dtype"}
    assert (identity["class"], identity["dtype"]) == ("Qwen2MoeForCausalLM", "float32")
    sha = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        sha.update(f"{name}{tuple(tensor.shape)}".encode())
        sha.update(block_sums(tensor))
    assert identity["weights"] == f"v2:{sha.hexdigest()}"
    assert architecture_identity(model).items() < identity.items()
    with torch.no_grad():
        model.lm_head.weight[1, 1] += 1
    other = model_identity(model)
    assert {name for name in identity if identity[name] != other[name]} == {"weights"}


def test_what_of_a_configuration_is_the_models(weights, monkeypatch):
    """Not where it was read from, with what, in which type, or its entries' order."""
    weights.config.own = {"a": 1, "b": Path("x")}
    before = architecture_identity(weights)
    changed = copy.deepcopy(weights)
    changed.config.own = {"b": Path("x"), "a": 1}
    changed.config._name_or_path = "elsewhere"
    changed.config.dtype = torch.float16
    changed.config._other = 1
    monkeypatch.setattr("transformers.configuration_utils.__version__", "0")
    assert changed.config.to_dict()["transformers_version"] == "0"
    assert architecture_identity(changed) == before
    changed.config.rms_norm_eps = 0.5
    assert architecture_identity(changed)["config"] != before["config"]
    assert architecture_identity(changed)["class"] == before["class"] == "Weights"
