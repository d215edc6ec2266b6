"""Parameters, bytes and operations of a model small enough to count by hand."""

import numpy as np
import pandas as pd
import pytest
from score_tables import TWO_KINDS as MODEL

from heapr_lab.errors import SpecError
from heapr_lab.models.architecture import Architecture
from heapr_lab.pruning.masks import KeepMask

KEEP = KeepMask.from_arrays(
    {1: [[True, True, False], [False, False, False]], 3: [[True, True], [True, False]]}
)
TOKENS = pd.DataFrame(
    {"layer": [1, 1, 3, 3], "expert": [0, 1, 0, 1], "tokens": [9, 3, 12, 12]}
)


def test_dense_flops():
    """Before pruning each layer costs top_k experts, however the tokens spread."""
    # Layer 1: 1 · 3 · 24 = 72; layer 3: 2 · 2 · 20 = 80.
    assert MODEL.routed_flops_per_token() == pytest.approx(152)
    assert MODEL.routed_flops_per_token(None, TOKENS) == pytest.approx(152)
    # 2 · 100 other, 2 · 8 · 10 attention.
    assert MODEL.flops_per_token(seq_len=8) == pytest.approx(200 + 160 + 152)


def test_pruned_flops_follow_the_routing():
    """An expert's atoms count as often as tokens were routed to it."""
    # Layer 1: (9 · 2 + 3 · 0) / 12 · 24 = 36.
    # Layer 3: (12 · 2 + 12 · 1) / 12 · 20 = 60.
    assert MODEL.routed_flops_per_token(KEEP, TOKENS) == pytest.approx(96)
    assert MODEL.routed_flops_saved(KEEP, TOKENS) == pytest.approx(1 - 96 / 152)
    # Equal shares: layer 1: (2 + 0) / 2 · 24 = 24.
    assert MODEL.routed_flops_per_token(KEEP) == pytest.approx(24 + 60)
    nowhere = TOKENS.assign(tokens=[0, 0, 12, 12])
    assert MODEL.routed_flops_per_token(KEEP, nowhere) == pytest.approx(24 + 60)


def test_dict_round_trip():
    """An architecture comes back from its plain data; other data is refused."""
    plain = MODEL.to_dict()
    assert list(plain["layers"]) == ["1", "3"]
    assert Architecture.from_dict(plain) == MODEL
    del plain["d_model"]
    with pytest.raises(SpecError, match=r"not an architecture: .*d_model"):
        Architecture.from_dict(plain)


def test_mask_of_another_model_is_refused():
    """A mask with another shape or layer is named."""
    other = KeepMask.from_arrays({1: np.ones((2, 4), bool), 3: np.ones((2, 2), bool)})
    with pytest.raises(
        SpecError, match=r"in layer 1 it has .* \(2, 4\), the model \(2"
    ):
        MODEL.parameters(other)
    with pytest.raises(SpecError, match=r"in layer 3 it has .* None"):
        MODEL.parameters(KeepMask.from_arrays({1: np.ones((2, 3), bool)}))


def test_tokens_of_another_model_are_refused():
    """Tokens that lack an expert are an error."""
    with pytest.raises(SpecError, match="1 rows for layer 3, expected one for each"):
        MODEL.flops_per_token(KEEP, TOKENS.iloc[:3], seq_len=8)
