"""The one-pass statistics against Algorithm 1 token by token, in float64."""

import numpy as np
import pytest
from families import FAMILIES, tiny_ids, tiny_model
from oracles import token_by_token
from wrappers import WRAPPERS, tiny_wrapper

from heapr_lab.importance.collect import collect_statistics
from heapr_lab.models.experts import find_experts
from heapr_lab.text.calibration import CalibrationSet

pytestmark = pytest.mark.oracle

RELATIVE = 1e-9
"""float64 sums of some hundred terms; measured 1e-13 and below."""


@pytest.mark.parametrize("family", [*FAMILIES, *WRAPPERS])
def test_statistics_equal_token_by_token(family):
    """Every column, and the paper's score, equals the twin's to 1e-9."""
    make = tiny_wrapper if family in WRAPPERS else tiny_model
    model, ids = make(family), tiny_ids()
    # One batch, as the twin's: some routers compute in float32 whatever the model.
    table = collect_statistics(model, CalibrationSet.from_ids(ids), batch_size=3)
    _, records = token_by_token.run(model, ids)
    layers = find_experts(model)
    assert table.frame["layer"].nunique() == len(layers) > 0
    scores = {name: table.score(name) for name in ("heapr", "fisher")}
    compared = 0
    for layer in layers:
        record = records[id(layer.module)]
        for expert in range(layer.n_experts):
            rows = table.frame.query("layer == @layer.layer and expert == @expert")
            if not record.tokens[expert]:
                assert (rows["tokens"] == 0).all()
                assert (scores["heapr"][rows.index] == 0).all()
                continue
            twin = token_by_token.statistics(record, expert)
            columns = rows.columns.intersection(list(twin))
            assert len(columns) > 8
            for column in columns:
                expected = np.broadcast_to(twin[column].numpy(), len(rows))
                np.testing.assert_allclose(
                    rows[column], expected, rtol=RELATIVE, err_msg=column
                )
            N = table.metadata["N"]
            fisher = twin["fisher_sum"] / N
            for name, expected in (
                ("heapr", twin["heapr"]),
                ("fisher", fisher),
            ):
                got = scores[name][rows.index]
                scale = expected.abs().max().item()
                np.testing.assert_allclose(
                    got, expected, rtol=RELATIVE, atol=1e-12 * scale, err_msg=name
                )
            compared += len(rows)
    assert compared >= len(table.frame) / 2
