"""A carved model in a small file, and as a stock model of transformers."""

import pytest
import torch
from carved_models import dense_model, described, one_expert_state, student_of
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

from benchmarks.lab_model.carved_ffn import ternary
from heapr_lab.errors import SpecError
from heapr_lab.pretrained.carved import Carved, Layout, as_glm4_moe

_IDS = torch.arange(24).view(2, 12) % 31


@pytest.mark.parametrize("name", ["s4e5x4k3", "s8e8x2k2", "s4e5x4k5"])
def test_the_stock_model_computes_what_was_trained(name):
    """The logits of transformers' glm4_moe are those of the wide layers."""
    dense = dense_model()
    student, carved = described(dense, Layout.named(name))
    stock = as_glm4_moe(carved, one_expert_state(dense), dense.config, torch.float64)
    stock.set_experts_implementation("eager")  # the only one in float64
    with torch.no_grad():
        expected, logits = student(_IDS).logits, stock(_IDS).logits
    assert logits.dtype == torch.float64
    # Norms and routers of the stock model compute in float32 in any case.
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=2e-6)


def test_all_experts_without_routing_are_the_dense_model():
    """Every expert is active, and routers are 0."""
    dense = dense_model()
    layout = Layout.named("s4e5x4k5")
    student = student_of(dense, layout)
    for layer in student.model.layers:
        layer.mlp.router.data.zero_()
    with torch.no_grad():
        expected, logits = dense(_IDS).logits, student(_IDS).logits
    torch.testing.assert_close(logits, expected, rtol=1e-9, atol=1e-9)


def test_a_written_file_is_read_again(tmp_path):
    """It makes the same weights."""
    dense = dense_model()
    _, carved = described(dense, Layout.named("s4e5x4k3"))
    path = tmp_path / "delta.safetensors"
    carved.write(path)
    copy = Carved.read(path)
    assert (copy.layout, copy.base) == (carved.layout, carved.base)
    state = one_expert_state(dense)
    expected, again = (
        as_glm4_moe(source, state, dense.config, torch.float32).state_dict()
        for source in (carved, copy)
    )
    assert expected.keys() == again.keys()
    for name, tensor in expected.items():
        # Routers are kept in bfloat16, all else in float32.
        rounding = 2**-8 if "gate.weight" in name else 1e-6
        torch.testing.assert_close(again[name], tensor, rtol=rounding, atol=1e-7)


def test_a_damaged_file_is_named(tmp_path):
    """The error says what to do."""
    path = tmp_path / "delta.safetensors"
    path.write_bytes(b"damaged")
    with pytest.raises(SpecError, match=r"delta\.safetensors cannot be read .*git"):
        Carved.read(path)


@pytest.mark.parametrize("entry", ["0.order", "1.up.scale", "norm"])
def test_a_file_that_lacks_an_entry_is_named(entry, tmp_path):
    """Of any layer: the last one is not taken for one that the model has not."""
    _, carved = described(dense_model(), Layout.named("s4e5x4k3"))
    assert len(carved.layers) == 2
    path = tmp_path / "delta.safetensors"
    carved.write(path)
    with safe_open(path, "pt") as stored:
        metadata = stored.metadata()
        tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
    del tensors[entry]
    save_file(tensors, path, metadata)
    with pytest.raises(SpecError, match=rf"cannot be read .*{entry}.*git"):
        Carved.read(path)


def test_a_name_that_is_no_layout_is_refused():
    """The error gives an example of one."""
    with pytest.raises(SpecError, match="s192e21x64k16"):
        Layout.named("16x64")


# --- changes in three levels, five values a byte ----------------------------------


def test_three_levels_are_exact():
    """A matrix that has no more comes back as it was; a row of zeros has no scale."""
    rows = [0.5, -0.5, 0.0, 0.5, 0.0, 0.0], [2.0, 0, 0, -2.0, 2.0, 2.0], [0.0] * 6
    matrix = torch.tensor(rows)
    assert torch.equal(ternary(matrix).values(), matrix)


def test_a_gaussian_keeps_four_fifths_of_its_energy():
    """The error is that of the best three levels."""
    matrix = torch.randn(8, 4096, generator=torch.Generator().manual_seed(0))
    error = (ternary(matrix).values() - matrix).square().sum() / matrix.square().sum()
    assert abs(float(error) - 0.19) < 0.01  # the optimum of three levels


@given(st.integers(1, 5), st.integers(1, 13), st.integers(0, 99))
def test_signs_and_scale_are_those_of_the_matrix(rows, columns, seed):
    """A byte has five values, whatever the shape."""
    matrix = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    delta = ternary(matrix)
    values = delta.values()
    assert delta.packed.numel() == -(-rows * columns // 5)
    assert bool(((values == 0) | (values.sign() == matrix.sign())).all())
    scales = delta.scale.float()[:, None].expand_as(values)
    assert torch.equal(values.abs()[values != 0], scales[values != 0])
