"""benchmarks/serving.py: its masks, and what it predicts; tests/engines runs it."""

from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from fences import updated
from score_tables import ONE_LAYER

from benchmarks.index import BENCHMARKS
from benchmarks.readme import as_block
from benchmarks.serving import (
    QUICK_SIZES,
    RATIOS,
    SIZES,
    STRUCTURES,
    Load,
    Measured,
    Served,
    costs,
    mask_of,
    row_of,
)
from heapr_lab.pruning.masks import KeepMask
from heapr_lab.storage import paths

PAGE = paths.project_dir() / "docs" / "serving.md"


def routed(*calls: tuple[int, int]) -> pd.DataFrame:
    """The tokens of both experts in each call."""
    rows = [(5, n, k, x) for n, call in enumerate(calls) for k, x in enumerate(call)]
    return pd.DataFrame(rows, columns=["layer", "call", "expert", "tokens"])


@pytest.mark.parametrize("sizes", [SIZES, QUICK_SIZES], ids=["full", "quick"])
@pytest.mark.parametrize("ratio", RATIOS)
def test_structures_keep_the_same_number_of_atoms(ratio, sizes):
    """In widths that vLLM does not pad, except ragged ones."""
    whole = sizes.n_layers * sizes.n_experts * sizes.d_inter
    for structure in STRUCTURES:
        keep = mask_of(sizes, structure, ratio)
        assert int(keep.rows.sum()) == round((1 - ratio) * whole)
        widths = [keep.by_layer(layer).sum(1) for layer in keep.layers]
        n_widths = len({int(width) for layer in widths for width in layer})
        assert n_widths == {"uniform": 1, "per_layer": 2}.get(structure, n_widths)
        if structure == "ragged":
            assert n_widths > sizes.n_experts // 2
        else:
            assert all((layer % 32 == 0).all() for layer in widths)


def test_costs_by_hand():
    """Two sequences of 3 tokens, then a step for each; expert 1 keeps one atom."""
    keep = KeepMask.from_arrays({5: [[True, True], [True, False]]})
    routing = routed((2, 4), (0, 2), (2, 0))
    cost = costs(ONE_LAYER, keep, routing, Load(2, 3, 2), 5)
    head, context = 2 * 5 * 4, 4
    atoms = (2 * 2 + 4 * 1) / 6  # of a mean token
    each = 2 * 10 + 2 * 3 * 3 + atoms * 2 * 12 - head
    assert cost["prefill", "flops"] == pytest.approx(2 * (3 * each + head))
    assert cost["prefill", "bytes"] == 2 * (10 + 12 * (2 + 1))
    atoms = (2 + 1) / 2
    assert cost["decode", "flops"] == 2 * 10 + 2 * context * 3 + atoms * 2 * 12
    assert cost["decode", "bytes"] == 2 * (10 + 12 * (2 + 1) / 2)


def test_a_row_by_hand():
    """The speedup is the median of those of the rounds, against the same round."""
    keep = KeepMask.from_arrays({0: np.ones((2, 3), bool)})
    engine = SimpleNamespace(apply_model=lambda _: [["RaggedMethod"]])
    dense = Measured(
        Served("dense", 0.0, keep, engine),
        [(1.0, 4.0), (2.0, 4.0), (9.0, 4.0)],
        {("prefill", "flops"): 6, ("prefill", "bytes"): 5, ("decode", "bytes"): 8}
        | {("decode", "flops"): 7},
    )
    ragged = Measured(
        Served("ragged", 0.4, keep, engine),
        [(0.5, 1.0), (2.0, 2.0), (3.0, 4.0)],
        {("prefill", "flops"): 2, ("prefill", "bytes"): 5, ("decode", "bytes"): 2}
        | {("decode", "flops"): 7},
    )
    row = row_of(ragged, dense, Load(2, 10, 3), "prefill")
    assert row["mode"] == "prefill_batch_2"
    assert row["experts_by"] == "RaggedMethod"
    assert (row["lowest_speedup"], row["highest_speedup"]) == (1, 3)
    assert (row["speedup_over_dense"], row["tokens_per_second"]) == (2, 10)
    assert (row["predicted_by_flops"], row["predicted_by_bytes"]) == (3, 1)
    assert row["share_of_predicted"] == 0.667
    row = row_of(ragged, dense, Load(2, 10, 3), "decode")
    assert (row["speedup_over_dense"], row["tokens_per_second"]) == (2, 3)
    assert (row["predicted_by_bytes"], row["share_of_predicted"]) == (4, 0.5)


def test_the_page_shows_what_was_measured():
    """The rows at 40 %, from the committed results."""
    row = BENCHMARKS["serving"]
    table = row.table(row.rows())
    block = as_block(table[table["ratio"].eq(0.4)].drop(columns="ratio"))
    assert updated(PAGE, {"throughput": block})["throughput"] == block
    assert block.count("batch") == 6


def test_what_the_page_says_of_ragged_widths_and_bfloat16():
    """Ragged decoding gains least at every ratio; in bfloat16 all gain less."""
    shown = [BENCHMARKS[name] for name in ("serving", "serving_bfloat16")]
    gains = [
        row.table(row.rows()).set_index(["mode", "ratio"]).filter(like="÷ dense")
        for row in shown
    ]
    decode = gains[0][gains[0].index.get_level_values("mode").str.startswith("decode")]
    assert decode.idxmin(axis="columns").eq("ragged ÷ dense ↑").all()
    assert gains[1].lt(gains[0]).to_numpy().all()


def test_decoding_falls_behind_with_the_ratio():
    """From 20 to 60 % it reaches less of its prediction, with every structure."""
    rows = BENCHMARKS["serving"].rows()
    decoded = rows[rows["mode"].str.startswith("decode") & rows["ratio"].gt(0)]
    reached = decoded.pivot(
        index=["mode", "structure"], columns="ratio", values="share_of_predicted"
    )
    assert (reached[0.6] < reached[0.2]).all()
    assert "the further decoding mostly falls behind" in PAGE.read_text("utf-8")
