"""The one-pass statistics against Algorithm 1 token by token, in float64."""

import numpy as np
import pytest
from families import FAMILIES, WRAPPERS, tiny_ids, tiny_model
from oracles import token_by_token

from heapr_lab import CalibrationSet, collect_statistics
from heapr_lab.importance.columns import MAXIMA, SUMS
from heapr_lab.models.experts import find_experts

RELATIVE = 1e-9
"""float64 sums of some hundred terms; measured 1e-13 and below."""

SCORES = ("heapr", "fisher_sum")
"""What is computed of the columns."""


@pytest.mark.parametrize("family", [*FAMILIES, *WRAPPERS])
def test_statistics_equal_token_by_token(family):
    """Every column, and the paper's score, equals the twin's to 1e-9."""
    model, ids = tiny_model(family), tiny_ids()
    # One batch, as the twin's: some routers compute in float32 whatever the model.
    table = collect_statistics(model, CalibrationSet.from_ids(ids), batch_size=3)
    records = token_by_token.run(model, ids)
    layers = find_experts(model)
    assert table.frame["layer"].nunique() == len(layers) > 0
    fisher = table.score("fisher") * table.metadata["N"]
    frame = table.frame.assign(heapr=table.score("heapr"), fisher_sum=fisher)
    compared = 0
    for layer in layers:
        record = records[id(layer.module)]
        for expert in range(layer.n_experts):
            rows = frame.query("layer == @layer.layer and expert == @expert")
            if not record[expert]:
                assert (rows[["tokens", *SCORES]] == 0).all(axis=None)
                continue
            twin = token_by_token.statistics(record, expert)
            columns = rows.columns.intersection(list(twin))
            assert {*SUMS, *MAXIMA} < {*columns}
            for column in columns:
                expected = np.broadcast_to(twin[column].numpy(), len(rows))
                near = 1e-12 * abs(expected).max() if column in SCORES else 0
                np.testing.assert_allclose(
                    rows[column], expected, rtol=RELATIVE, atol=near, err_msg=column
                )
            compared += len(rows)
    assert compared >= len(frame) / 2
