"""What a mask saves, of a model small enough to count by hand."""

from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest
from score_tables import ONE_LAYER

from heapr_lab import ImportanceTable, KeepMask
from heapr_lab.errors import SpecError
from heapr_lab.models.sources import Source
from heapr_lab.pruning.savings import savings_of, summed_scores

KEEP = KeepMask.from_arrays({5: [[True, False], [True, True]]})


def table(**metadata: Any) -> ImportanceTable:
    """A table of `ONE_LAYER`: three tokens in four go to the first expert."""
    frame = pd.DataFrame({"layer": 5, "expert": [0, 0, 1, 1], "atom": [0, 1, 0, 1]})
    frame = frame.assign(tokens=[3, 3, 1, 1], sum_h2=2.0, sum_g2=[9.0, 18, 3, 4])
    sums = frame.assign(sum_ph2=[1.0, 2, 3, 4], max_abs_ph=3.0, w_down_sq=1.0)
    return ImportanceTable.from_frame(
        sums, architecture=ONE_LAYER.to_dict(), N=4, **metadata
    )


def test_all_that_is_saved():
    """Parameters, bytes and operations, before and after, with what they count at."""
    row = savings_of(KEEP, table(), seq_len=6)
    # 2 · 10 weights besides, 2 · 6 · 3 of attention; 2 atoms of 24, and without one of
    # the first expert's 3/4 · 24 less.
    before, after = 20 + 36 + 48, 20 + 36 + 30
    assert row == {
        "parameters_before": 100,
        "parameters_after": 88,
        "parameter_reduction": pytest.approx(0.12),
        "bytes_before": 200,
        "bytes_after": 176,
        "bytes_per_parameter": 2,
        "flops_before": pytest.approx(before),
        "flops_after": pytest.approx(after),
        "flops_reduction": pytest.approx(1 - after / before),
        "routed_flops_reduction": pytest.approx(18 / 48),
        "seq_len": 6,
    }


def test_bytes_are_those_of_the_checkpoint_if_it_is_named():
    """Whole bytes, also of half a byte for each parameter."""
    names = ("bytes_before", "bytes_after", "bytes_per_parameter")
    source = Source(n_bytes=53)
    row = savings_of(KEEP, table(), source=source)
    assert [row[name] for name in names] == [53, 47, 0.53]
    assert row["bytes_before"] == int(row["bytes_before"])
    source = replace(source, dequantised_from="fp8")  # and written in bfloat16
    row = savings_of(KEEP, table(), source=source)
    assert [row[name] for name in names] == [53, 176, 0.53]


def test_the_context_is_the_papers():
    """Whatever the windows were, unless another is asked for."""
    measured = table(provenance={"calibration": {"seq_len": 12}})
    assert savings_of(KEEP, measured)["seq_len"] == 2048
    assert savings_of(KEEP, measured, seq_len=7)["seq_len"] == 7


def test_scores_of_what_goes_are_added_up():
    """The scores are those of the estimator and its options."""
    # ½ · 2/3 · 18/3 = 2.
    assert summed_scores(table(), KEEP, "heapr") == pytest.approx(2)
    camera = {
        alpha: summed_scores(table(), KEEP, "camera", alpha=alpha) for alpha in (0, 1)
    }
    assert camera == {0: pytest.approx(2), 1: pytest.approx(9)}


def test_scores_of_another_model_s_mask_are_refused():
    """The message has both shapes."""
    other = KeepMask.from_arrays({5: np.ones((2, 3), bool)})
    shapes = r"\{5: \(2, 3\)\}, expected those of the table, \{5: \(2, 2\)\}"
    with pytest.raises(SpecError, match=shapes):
        summed_scores(table(), other, "heapr")
