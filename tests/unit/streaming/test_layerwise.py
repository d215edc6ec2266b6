"""Decoder layers run one by one: what is run to find how a model calls them."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from families import tiny_model
from torch import nn

from heapr_lab.errors import LayoutError, SpecError
from heapr_lab.evaluation.perplexity import evaluate_perplexity
from heapr_lab.models.likelihood import final_states
from heapr_lab.models.modes import evaluating
from heapr_lab.streaming.layerwise import LayerByLayer, walk_over
from heapr_lab.streaming.opening import open_streamed

IDS = torch.arange(60).view(6, 10) % 48


@pytest.fixture
def model() -> Iterator[nn.Module]:
    """A model of two layers in float64."""
    model = tiny_model("qwen3_moe")
    with evaluating(model):
        yield model


def walk(model: nn.Module) -> LayerByLayer:
    """A walk over two batches of four and two windows."""
    return LayerByLayer(model, list(IDS.split(4)))


def finished(model: nn.Module) -> torch.Tensor:
    """The final states of all windows, by a walk."""
    walker = walk(model)
    for number in range(walker.n_layers):
        walker.run(number)
    pairs = zip(IDS.split(4), walker.states, strict=True)
    return torch.cat([walker.finished(ids, states) for ids, states in pairs])


def test_only_one_window_is_run_to_begin_with(model):
    """It is run twice; every batch then goes through each layer once."""
    rows: list[int] = []
    model.model.layers[1].mlp.register_forward_pre_hook(
        lambda _module, args: rows.append(len(args[0]))
    )
    walker = walk(model)
    assert rows == [1, 1]
    for number in range(walker.n_layers):
        walker.run(number)
    assert rows == [1, 1, 4, 2]


def test_other_threads_do_not_run_what_is_in_place_of_layers(model):
    """They are refused while it is."""
    with ThreadPoolExecutor(1) as pool:
        model.model.layers[1].mlp.register_forward_pre_hook(
            lambda _module, _args: pool.submit(evaluate_perplexity, model, IDS).result()
        )
        with pytest.raises(SpecError, match="another thread has replaced modules"):
            walk(model)


def test_layers_have_their_own_forward_again(model):
    """Also one that somebody else has put in its place, and after an error."""
    first, second = model.model.layers
    original = second.forward
    second.forward = put = lambda *args, **options: original(*args, **options)

    ran: list[nn.Module] = []
    first.mlp.register_forward_pre_hook(lambda module, _args: ran.append(module))

    def fail_unless_run(_module: nn.Module, _args: Any) -> None:
        if not ran:
            raise ValueError("not run")
        ran.clear()

    for _ in range(2):  # without the error, and with it
        walk(model)
        assert "forward" not in first.__dict__
        assert second.__dict__["forward"] is put
        second.register_forward_pre_hook(fail_unless_run)


def test_arguments_that_depend_on_states(model):
    """They are recorded with all layers run: a mask made of a layer's states."""
    plain = finished(model)
    body, second = model.model, model.model.layers[1]
    seen: list[torch.Tensor] = []
    body.layers[0].register_forward_hook(
        lambda _module, _args, states: seen.append(states)
    )
    original = second.forward

    def forward(states: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        return original(states, *args, **options) + options["extra"].mean()

    def before(_module: nn.Module, args: Any, options: Any) -> Any:
        return args, {"extra": seen[-1], **options}

    second.forward = forward
    second.register_forward_pre_hook(before, with_kwargs=True)
    with torch.no_grad():
        expected = torch.cat([final_states(model, ids) for ids in IDS.split(4)])
    assert not torch.allclose(plain, expected)
    torch.testing.assert_close(finished(model), expected)


def test_arguments_that_depend_on_more_than_the_shape(model):
    """Two batches of one shape show it."""
    numbers = iter(range(1000))

    def before(_module: nn.Module, args: Any, options: Any) -> Any:
        return args, {**options, "number": next(numbers)}

    model.model.layers[0].register_forward_pre_hook(before, with_kwargs=True)
    batches = list(IDS.split(3))
    with pytest.raises(LayoutError, match="differ between two batches of one shape"):
        LayerByLayer(model, batches)


def test_another_number_of_layers(model, caplog):
    """Than the configuration has; nothing is said of streaming."""
    model.config.num_hidden_layers = 3
    assert walk_over(model, [IDS], n_passes=2) is None
    assert "no list of 3 decoder layers" in caplog.text
    assert "streamed" not in caplog.text


def test_streamed_layers_in_another_order(model, tmp_path):
    """The message names the model, and how to load it."""
    model.save_pretrained(tmp_path)
    streamed = open_streamed(tmp_path, dtype=None, device=torch.device("cpu"))
    streamed.model.layers = nn.ModuleList(reversed(streamed.model.layers))
    message = "Qwen3MoeForCausalLM .*once each, in order.*load.*stream=False"
    with pytest.raises(LayoutError, match=message):
        walk(streamed)
