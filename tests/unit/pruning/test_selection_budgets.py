"""Ratios of parameters, bytes and operations, and the prices of atoms."""

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from score_tables import TWO_LAYERS, kept, make_table

from heapr_lab.errors import SpecError
from heapr_lab.importance.table import ImportanceTable
from heapr_lab.models.architecture import Architecture, LayerShape
from heapr_lab.pruning.selection import select

# --- of the model ---------------------------------------------------------------

# Atoms of layer 0 have 3 · 4 = 12 parameters, those of layer 1 have 2 · 4 = 8:
# 8 · 12 + 8 · 8 = 160 of 200 are in routed atoms.
MODEL = Architecture(
    n_parameters=200,
    bytes_per_parameter=4,
    d_model=4,
    layers={
        0: LayerShape(n_experts=2, d_inter=4, d_expert=4),
        1: LayerShape(n_experts=2, d_inter=4, d_expert=4, n_matrices=2),
    },
    other_weights_per_token=40,
    attention_width=0,
)


@pytest.mark.parametrize(
    ("ratio", "removed"),
    # 0.06 · 200 is one atom of layer 0, anything more is two; at 0.52 layer 0 is gone
    # (96) and one atom of layer 1 (8) makes 104.
    [(0, 0), (0.06, 1), (0.061, 2), (0.48, 8), (0.52, 9), (0.8, 16)],
)
def test_ratio_of_the_model(ratio: float, removed: int) -> None:
    """The lowest atoms go until at least the ratio of all parameters is gone."""
    table = make_table(TWO_LAYERS, architecture=MODEL.to_dict())
    keep = select(table, ratio=ratio, of="model")
    assert keep.n_removed == removed
    assert 200 - MODEL.parameters(keep) >= Fraction(str(ratio)) * 200


def test_parameters_beyond_32_bits_are_counted() -> None:
    """Amounts of parameters larger than 2³¹ do not wrap around."""
    shape = LayerShape(n_experts=1, d_inter=4, d_expert=2**31)
    model = Architecture(12 * 2**31, 2, 2**31, {0: shape}, 0, 0)
    table = make_table({0: [[1, 2, 3, 4]]}, architecture=model.to_dict())
    assert kept(table, ratio=0.75, of="model") == {0: [[0, 0, 0, 1]]}


def test_ratio_of_the_model_by_layer() -> None:
    """With scope layer each layer gives the same share of its atoms."""
    table = make_table(TWO_LAYERS, architecture=MODEL.to_dict())
    keep = select(table, ratio=0.4, of="model", scope="layer")
    assert keep.layer_ratios().tolist() == [0.5, 0.5]  # 0.4 · 200 / 160


def test_more_than_the_routed_share_is_refused() -> None:
    """Beyond the routed share the largest possible ratio is stated."""
    table = make_table(TWO_LAYERS, architecture=MODEL.to_dict())
    for scope in ("global", "layer"):
        with pytest.raises(SpecError, match=r"of the model 0\.81 .* possible is 0\.8$"):
            select(table, ratio=0.81, of="model", scope=scope)
    with pytest.raises(SpecError, match="no architecture"):
        select(make_table(TWO_LAYERS), ratio=0.1, of="model")
    partly = make_table({0: TWO_LAYERS[0]}, architecture=MODEL.to_dict())
    with pytest.raises(SpecError, match="a row for each atom of the model"):
        select(partly, ratio=0.1, of="model")


def test_ratio_of_the_bytes() -> None:
    """The share of the bytes is that of the parameters, and named in an error."""
    table = make_table(TWO_LAYERS, architecture=MODEL.to_dict())
    assert select(table, ratio=0.52, of="bytes").n_removed == 9
    with pytest.raises(SpecError, match=r"model's bytes 0\.81 .* possible is 0\.8$"):
        select(table, ratio=0.81, of="bytes")


# --- of the operations, and prices ----------------------------------------------

# Tokens of the experts: 1, 3 in layer 0 and 4, 0 in layer 1. An atom of them costs
# 24, 72 and 64, 0 operations: 4 · (24 + 72 + 64) = 640 in all.
TOKENS = np.repeat([1, 3, 4, 0], 4)


def busy_table(scores: dict[int, Any] = TWO_LAYERS) -> ImportanceTable:
    """A table with `TOKENS`, whose fisher scores are `scores`, 0 without tokens."""
    table = make_table(scores, architecture=MODEL.to_dict(), N=1)
    values = table.frame["sum_g2"]
    frame = table.frame.assign(tokens=TOKENS, sum_hg2=2 * values, w_down_sq=values)
    return ImportanceTable.from_frame(
        frame.assign(w_up_sq=0.0, w_gate_sq=0.0), **table.metadata
    )


@pytest.mark.parametrize(
    ("ratio", "removed"),
    # Unrouted atoms go first and save nothing; then scores 1 to 8, of which 2, 5, 6, 7
    # are the busy expert's: 24, 96, 120, 144, 216, ...
    [(0, 0), (1e-6, 5), (0.0375, 5), (0.0376, 6), (0.15, 6), (0.3375, 9), (0.338, 10)],
)
def test_ratio_of_the_flops(ratio: float, removed: int) -> None:
    """The lowest atoms go until at least the ratio of all operations is gone."""
    table = busy_table()
    keep = select(table, ratio=ratio, of="flops", estimator="fisher")
    assert keep.n_removed == removed
    saved = MODEL.routed_flops_saved(keep, table.expert_tokens())
    assert saved >= ratio - 1e-12


def test_ratio_of_the_flops_by_layer() -> None:
    """Each layer loses the share of its own; others make up for excluded ones."""
    table = busy_table()
    asked = {"of": "flops", "scope": "layer", "estimator": "fisher"}
    # Layer 0: half of 384 is 1 (24), 2 (72), 3, 4 (24 each), 5 (72).
    keep = select(table, ratio=0.5, **asked)
    assert keep.widths().to_numpy().tolist() == [[1, 2], [2, 0]]
    # All of layer 1's 256 are 0.4 of 640.
    keep = select(table, ratio=0.4, exclude_layers=[0], **asked)
    assert keep.layer_ratios().tolist() == [0, 1]
    with pytest.raises(SpecError, match=r"routed FLOPs 0\.41 .* possible is 0\.4$"):
        select(table, ratio=0.41, exclude_layers=[0], **asked)


def test_flops_need_tokens_and_sizes() -> None:
    """Without tokens in some layer, or without sizes, operations are not counted."""
    idle = busy_table().frame.assign(tokens=np.repeat([1, 1, 0, 0], 4))
    table = ImportanceTable.from_frame(idle, architecture=MODEL.to_dict(), N=1)
    with pytest.raises(SpecError, match="no token was routed in layers 1"):
        select(table, ratio=0.1, of="flops")
    for settings in ({"of": "flops"}, {"price": 0.5}):
        with pytest.raises(SpecError, match="no architecture"):
            select(make_table(TWO_LAYERS), ratio=0.1, **settings)
    partly = make_table({0: TWO_LAYERS[0]}, architecture=MODEL.to_dict())
    with pytest.raises(SpecError, match="a row for each atom of the model"):
        select(partly, ratio=0.1, price=0)


def test_prices_by_hand() -> None:
    """By size a large atom may cost more and go first; by traffic a busy one."""
    # Of 160 parameters an atom of layer 0 has 12, of layer 1 it has 8.
    scores = {0: [[11, 90, 90, 90], [30, 90, 90, 90]], 1: [[10, 90, 90, 90], [80] * 4]}
    table = busy_table(scores)
    first = {
        price: [
            (layer, expert)
            for layer, kept in select(
                table, ratio=0.0625, price=price, estimator="magnitude"
            ).arrays.items()
            for expert in np.flatnonzero(~kept.all(axis=1))
        ]
        for price in (None, 0, 0.5, 1)
    }
    # Per parameter 11/12, 30/12, 10/8; per operation 11/24, 30/72, 10/64.
    assert first == {None: [(1, 0)], 0: [(0, 0)], 0.5: [(1, 0)], 1: [(1, 0)]}


def test_atoms_without_traffic_have_no_price_in_operations() -> None:
    """They go first where they score 0, and last where they score more."""
    table = busy_table()
    asked: dict[str, Any] = {"price": 1, "structure": "aligned", "multiple": 2}
    keep = select(table, ratio=0.25, estimator="fisher", **asked)
    assert keep.widths().to_numpy().tolist() == [[4, 4], [4, 0]]
    keep = select(table, ratio=0.75, estimator="magnitude", **asked)
    assert keep.widths().to_numpy().tolist() == [[0, 0], [0, 4]]
    keep = select(table, ratio=0.8, estimator="magnitude", min_atoms=1, price=1)
    assert keep.n_removed == 12  # also where locked atoms of other experts stand before


def test_prices_are_among_the_settings() -> None:
    """A mask says what it was priced by, and the memory of ranks tells prices apart."""
    table = busy_table()
    masks = {
        price: select(table, ratio=0.5, price=price, of="flops")
        for price in (None, 0, 1, Fraction(1, 4))
    }
    assert [mask.settings["price"] for mask in masks.values()] == [None, 0, 1, 0.25]
    assert {mask.settings["of"] for mask in masks.values()} == {"flops"}
    assert masks[0] != masks[1]
