"""Exactly so many atoms go as the ratio says, and the right ones."""

from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pandas as pd
import pytest

from heapr_lab.errors import SpecError
from heapr_lab.importance.table import ImportanceTable
from heapr_lab.models.architecture import Architecture, LayerShape
from heapr_lab.pruning.masks import KeepMask
from heapr_lab.pruning.selection import select


def make_table(
    scores: dict[int, Any], *, extra: dict[str, Any] | None = None, **metadata: Any
) -> ImportanceTable:
    """A table whose heapr scores are `scores`, {layer: (n_experts, d_inter)}."""
    parts = []
    for layer, values in scores.items():
        array = np.array(values, dtype=np.float64)
        expert, atom = np.indices(array.shape)
        keys = {"layer": layer, "expert": expert.ravel(), "atom": atom.ravel()}
        # ½ · 2/1 · g²/1 is g².
        sums = {"tokens": 1, "sum_h2": 2.0, "sum_g2": array.ravel()}
        parts.append(pd.DataFrame({**keys, **sums}))
    frame = pd.concat(parts, ignore_index=True).assign(**(extra or {}))
    return ImportanceTable.from_frame(frame, **metadata)


TWO_LAYERS = {0: [[1, 8, 3, 4], [5, 6, 7, 2]], 1: [[9, 10, 11, 12], [13, 14, 15, 16]]}


def kept(table: ImportanceTable, **settings: Any) -> dict[int, list[list[int]]]:
    """What stays as 0 and 1, by layer."""
    keep = select(table, **settings)
    return {layer: keep.by_layer(layer).astype(int).tolist() for layer in keep.layers}


# --- ragged atoms ---------------------------------------------------------------


def test_global_removes_the_lowest_of_all() -> None:
    """A quarter of 16 atoms goes, all in the layer of low scores."""
    assert kept(make_table(TWO_LAYERS), ratio=0.25) == {
        0: [[0, 1, 0, 0], [1, 1, 1, 0]],
        1: [[1, 1, 1, 1], [1, 1, 1, 1]],
    }


def test_layer_removes_the_same_from_each() -> None:
    """A quarter of each layer's 8 atoms goes."""
    assert kept(make_table(TWO_LAYERS), ratio=0.25, scope="layer") == {
        0: [[0, 1, 1, 1], [1, 1, 1, 0]],
        1: [[0, 0, 1, 1], [1, 1, 1, 1]],
    }


@pytest.mark.parametrize(
    ("ratio", "removed"),
    [
        (0, 0),
        (0.9, 90),  # 0.9 in binary is below 9/10
        (0.29, 29),  # and 0.29 · 100 is below 29
        (np.float32(0.7), 70),
        (np.float64(0.57), 57),
        (Decimal("0.58"), 58),
        (Fraction(1, 3), 33),
        (0.999, 99),
        (1e-3, 0),
    ],
)
def test_ratio_is_the_decimal_it_was_written_as(ratio: Any, removed: int) -> None:
    """Exactly ⌊r · 100⌋ of 100 atoms go, also where all scores are equal."""
    table = make_table({0: np.ones((4, 25))})
    keep = select(table, ratio=ratio)
    assert (keep.n_removed, keep.n_atoms) == (removed, 100)


@pytest.mark.parametrize("ratio", [25, 1, 1.0, -0.1])
def test_ratio_outside_is_refused(ratio: float) -> None:
    """A ratio outside [0, 1) is an error that says how to write it."""
    message = (
        rf"pruning ratio must be in \[0, 1\), got {ratio}; give a fraction \(0.25\), "
        "not per cent"
    )
    with pytest.raises(SpecError, match=message):
        select(make_table(TWO_LAYERS), ratio=ratio)


@pytest.mark.parametrize("ratio", [float("nan"), "0.2", True, None])
def test_ratio_must_be_a_number(ratio: Any) -> None:
    """What is no number is an error."""
    with pytest.raises(SpecError, match="must be a number in"):
        select(make_table(TWO_LAYERS), ratio=ratio)


def test_ties_go_by_layer_expert_atom() -> None:
    """Of equal scores the first rows go."""
    assert kept(make_table({0: [[1, 1], [1, 1]], 1: [[1, 1]]}), ratio=0.5) == {
        0: [[0, 0], [0, 1]],
        1: [[1, 1]],
    }


def test_unrouted_atoms_go_first() -> None:
    """An expert without tokens scores 0 and goes, unless it is protected."""
    table = make_table({0: [[3, 4], [9, 9]]}, extra={"tokens": [1, 1, 0, 0]})
    assert kept(table, ratio=0.5) == {0: [[1, 1], [0, 0]]}
    assert kept(table, ratio=0.5, protect_unrouted=True) == {0: [[0, 0], [1, 1]]}


def test_scores_that_are_not_finite_are_refused() -> None:
    """No mask comes from a score that is not a number."""
    with pytest.raises(SpecError, match="column sum_g2"):
        select(make_table({0: [[1, np.nan]]}), ratio=0.5)


# --- whole experts --------------------------------------------------------------


def test_experts_go_by_the_sum_of_their_atoms() -> None:
    """Sums 16, 20, 42, 58: at least 0.3 of the atoms is the two first experts."""
    keep = select(make_table(TWO_LAYERS), ratio=0.3, granularity="expert")
    assert keep.widths().to_numpy().tolist() == [[0, 0], [4, 4]]
    assert keep.achieved_ratio == 0.5


def test_experts_layer_by_layer() -> None:
    """With scope layer the lowest expert of each layer goes."""
    keep = select(
        make_table(TWO_LAYERS), ratio=0.5, granularity="expert", scope="layer"
    )
    assert keep.widths().to_numpy().tolist() == [[0, 4], [0, 4]]


# --- widths ---------------------------------------------------------------------


def test_aligned_widths_by_hand() -> None:
    """Steps of two from the top; the cheapest per atom go first."""
    # Expert 0: 1, 2 | 3, 9 and expert 1: 4, 4 | 5, 5. Means 1.5, 6, 4, 5.
    table = make_table({0: [[9, 1, 2, 3], [4, 5, 4, 5]]})
    settings = {"structure": "aligned", "multiple": 2}
    assert kept(table, ratio=0.25, **settings) == {0: [[1, 0, 0, 1], [1, 1, 1, 1]]}
    assert kept(table, ratio=0.5, **settings) == {0: [[1, 0, 0, 1], [0, 1, 0, 1]]}
    # 0.6 of 8 atoms is 4.8: three steps go, the third is of mean 5.
    assert kept(table, ratio=0.6, **settings) == {0: [[1, 0, 0, 1], [0, 0, 0, 0]]}


def test_aligned_leaves_the_remainder_at_the_bottom() -> None:
    """Width 5 with multiple 2 shrinks to 4, 2 and 0."""
    table = make_table({0: [[1, 2, 3, 4, 5]]})
    widths = [
        int(select(table, ratio=r, structure="aligned", multiple=2).widths().loc[0, 0])
        for r in (0, 0.2, 0.3, 0.6, 0.7)
    ]
    assert widths == [5, 4, 2, 2, 0]


def test_per_layer_widths() -> None:
    """Each layer has one width, and each expert keeps its own best."""
    # Layer 0 sorted: 1, 3, 4, 8 and 2, 5, 6, 7: steps cost 1.5, 4, 5, 7.5 an atom.
    table = make_table(TWO_LAYERS)
    assert kept(table, ratio=0.2, structure="per_layer") == {
        0: [[0, 1, 0, 1], [0, 1, 1, 0]],
        1: [[1, 1, 1, 1], [1, 1, 1, 1]],
    }
    by_two = select(table, ratio=0.1, structure="per_layer", multiple=2)
    assert by_two.widths().to_numpy().tolist() == [[2, 2], [4, 4]]


def test_steps_of_different_sizes_may_remove_more_than_was_asked() -> None:
    """The cheapest step per atom goes, although a smaller one would have done."""
    # Layer 0 goes in a step of three atoms of 1 each, layer 1 in one of 2.
    table = make_table({0: [[1], [1], [1]], 1: [[2]]})
    keep = select(table, ratio=0.25, structure="per_layer")
    assert keep.layer_ratios().tolist() == [1, 0]


def test_per_layer_within_layers() -> None:
    """With scope layer every layer is cut to the same width."""
    keep = select(
        make_table(TWO_LAYERS), ratio=0.3, structure="per_layer", scope="layer"
    )
    assert set(keep.widths().to_numpy().ravel()) == {2}


def test_uniform_width() -> None:
    """One width for the model, the smallest loss of width that removes the ratio."""
    table = make_table(TWO_LAYERS)
    keep = select(table, ratio=0.3, structure="uniform")
    assert set(keep.widths().to_numpy().ravel()) == {2}
    assert keep.by_layer(0).astype(int).tolist() == [[0, 1, 0, 1], [0, 1, 1, 0]]
    with pytest.raises(SpecError, match=r"0\.8 cannot be had.* possible is 0\.75"):
        select(table, ratio=0.8, structure="uniform")
    with pytest.raises(SpecError, match="layers of one width, got 2, 3"):
        select(make_table({0: [[1, 2]], 1: [[1, 2, 3]]}), ratio=0, structure="uniform")


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


# --- what stays -----------------------------------------------------------------


def test_excluded_layers_are_left_whole() -> None:
    """Scope global takes the whole amount from the others, scope layer does not."""
    table = make_table(TWO_LAYERS)
    keep = select(table, ratio=0.25, exclude_layers=[0])
    assert keep.layer_ratios().tolist() == [0.0, 0.5]
    keep = select(table, ratio=0.25, exclude_layers=[0], scope="layer")
    assert keep.layer_ratios().tolist() == [0.0, 0.25]
    with pytest.raises(SpecError, match=r"0\.6 cannot be had.* possible is 0\.5$"):
        select(table, ratio=0.6, exclude_layers=[0])
    # ⌊0.55 · 16⌋ is the 8 atoms that may go, so it can be had.
    assert select(table, ratio=0.55, exclude_layers=[0]).n_removed == 8


def test_layers_with_their_own_ratio() -> None:
    """The others reach the ratio among themselves."""
    table = make_table(TWO_LAYERS)
    for scope in ("global", "layer"):
        keep = select(table, ratio=0.25, layer_ratios={1: 0.75}, scope=scope)
        assert keep.layer_ratios().tolist() == [0.25, 0.75]
    with pytest.raises(
        SpecError, match=r"layer_ratios\[1\] must be in \[0, 1\), got 3"
    ):
        select(table, ratio=0, layer_ratios={1: 3})
    with pytest.raises(SpecError, match=r"layer_ratios\[1\] 0\.9 .* possible is 0\.5$"):
        select(table, ratio=0, layer_ratios={1: 0.9}, min_atoms=2)


def test_every_expert_keeps_its_least() -> None:
    """A floor keeps an expert's best atoms, and limits the ratio."""
    table = make_table(TWO_LAYERS)
    keep = select(table, ratio=0.5, min_atoms=2)
    assert keep.widths().to_numpy().tolist() == [[2, 2], [2, 2]]
    assert keep.by_layer(0).astype(int).tolist() == [[0, 1, 0, 1], [0, 1, 1, 0]]
    with pytest.raises(SpecError, match=r"0\.6 cannot be had.* possible is 0\.5$"):
        select(table, ratio=0.6, min_atoms=2)
    wide = select(table, ratio=0.2, min_atoms=3, structure="aligned", multiple=1)
    assert wide.widths().to_numpy().min() == 3


def test_outliers_stay() -> None:
    """The share with the largest peaks stays although its scores are lowest."""
    table = make_table({0: [[1, 2, 3, 4]]}, extra={"max_abs_ph": [9.0, 8.0, 1.0, 2.0]})
    assert kept(table, ratio=0.5, protect_outliers=0.5) == {0: [[1, 1, 0, 0]]}
    assert kept(table, ratio=0.5, protect_outliers=0.49) == {0: [[1, 0, 0, 1]]}
    assert kept(
        table, ratio=0.5, protect_outliers=0.25, structure="aligned", multiple=2
    ) == {0: [[1, 0, 0, 1]]}


# --- settings -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"scope": "expert"}, "scope must be one of 'global', 'layer', got 'expert'"),
        ({"structure": "square"}, "structure must be one of"),
        ({"of": "tokens"}, "of must be one of"),
        ({"estimator": "camera"}, "'camera' ranks atoms within a layer"),
        ({"structure": "aligned"}, "'aligned' needs `multiple`"),
        ({"multiple": 4}, "'ragged' does not round widths"),
        ({"structure": "aligned", "multiple": 0}, "multiple must be a whole number"),
        ({"min_atoms": 1.5}, "min_atoms must be a whole number from 0, got 1.5"),
        ({"protect_outliers": 5}, r"protect_outliers must be in \[0, 1\], got 5"),
        ({"granularity": "expert", "structure": "uniform"}, "goes with structure"),
        ({"exclude_layers": [7]}, "no routed experts in layers 7; layers .* 0, 1"),
        ({"exclude_layers": [0, 1]}, "names every layer"),
        ({"exclude_layers": [0], "layer_ratios": {0: 0.1}}, r"layers \[0\] are in"),
        ({"layer_ratios": {0: 0.1}, "of": "model"}, "layer_ratios are shares"),
        ({"layer_ratios": {0: 0.1}, "of": "flops"}, "got of='flops'"),
        ({"price": 1.5}, r"price must be in \[0, 1\], got 1\.5; give a fraction"),
        ({"price": "cheap"}, "price must be a number"),
        ({"exclude_layers": [0], "structure": "uniform"}, "one width for all layers"),
        ({"estimator_options": {"seed": 1}}, "'heapr' has no option seed"),
    ],
)
def test_settings_that_cannot_be_used(settings: dict[str, Any], message: str) -> None:
    """A setting that cannot be used is an error that says what can."""
    with pytest.raises(SpecError, match=message):
        select(make_table(TWO_LAYERS), ratio=0.25, **settings)


def test_options_reach_the_estimator() -> None:
    """Another seed selects other atoms, the same seed the same."""
    table = make_table({0: np.ones((8, 32))})
    a, b, c = (
        select(
            table,
            ratio=0.5,
            estimator="random",
            estimator_options={"seed": np.int64(s)},
        )
        for s in (0, 0, 1)
    )
    assert a == b
    assert a != c
    assert a.settings["estimator_options"] == {"seed": 0}


# --- masks ----------------------------------------------------------------------


def test_mask_counts() -> None:
    """Counts, widths and ratios of a mask written out."""
    keep = KeepMask.from_arrays({5: [[True, False]], 2: [[True, True], [False, False]]})
    assert keep.layers == (2, 5)
    assert (keep.n_atoms, keep.n_kept, keep.n_removed) == (6, 3, 3)
    assert keep.achieved_ratio == 0.5
    assert keep.layer_ratios().to_dict() == {2: 0.5, 5: 0.5}
    assert keep.widths().loc[2].tolist() == [2, 0]
    assert keep.widths().loc[5].isna().tolist() == [False, True]


def test_mask_does_not_change() -> None:
    """A mask copies what it is made of and hands out read-only arrays."""
    array = np.ones((1, 2), bool)
    keep = KeepMask.from_arrays({0: array})
    array[0, 0] = False
    assert keep.n_removed == 0
    with pytest.raises(ValueError, match="read-only"):
        keep.by_layer(0)[0, 0] = False


def test_fingerprint_tells_masks_apart() -> None:
    """Masks are equal by what they keep: bits, shapes and layers, not settings."""
    keep = KeepMask.from_arrays({0: [[True, False]]})
    assert keep == KeepMask.from_arrays({0: [[True, False]]}, ratio=0.5)
    others = [{0: [[False, True]]}, {1: [[True, False]]}, {0: [[True], [False]]}]
    assert all(keep != KeepMask.from_arrays(other) for other in others)
    assert len(keep.fingerprint) == 64


def test_full_mask_keeps_everything() -> None:
    """The full mask has the table's shapes and removes nothing."""
    table = make_table(TWO_LAYERS)
    assert KeepMask.full(table) == select(table, ratio=0)
    assert KeepMask.full(table).n_removed == 0


@pytest.mark.parametrize("array", [[[1, 0]], [True, False], np.ones((0, 2), bool)])
def test_bad_arrays_are_refused(array: Any) -> None:
    """Only bool (n_experts, d_inter) is a mask."""
    with pytest.raises(SpecError, match=r"mask of layer 0 is .* expected bool"):
        KeepMask.from_arrays({0: array})


def test_absent_layers_are_errors() -> None:
    """A mask without layers, or asked for one it lacks, says so."""
    with pytest.raises(SpecError, match="at least one layer"):
        KeepMask.from_arrays({})
    with pytest.raises(SpecError, match="has no layer 3; it has 0"):
        KeepMask.from_arrays({0: [[True]]}).by_layer(3)


def test_mask_display_is_a_summary() -> None:
    """The card says what stays, how it was selected, and draws a bar per layer."""
    html = select(make_table(TWO_LAYERS), ratio=0.25)._repr_html_()
    for text in ("25.00%", "12 of 16", "heapr, global, atom, ragged", "var(--jp-"):
        assert text in html
    assert html.count("layer 0") == html.count("layer 1") == 1
    assert "width:50.0%" in html
    assert "12 of 16" in repr(select(make_table(TWO_LAYERS), ratio=0.25))
