"""What is measured of a model on calibration windows is measured once."""

import functools
from unittest.mock import Mock

import pytest
import torch
from families import tiny_windows

from heapr_lab import Selection, collect_statistics, select
from heapr_lab.refinement import activation_grams
from heapr_lab.refinement.calibrated import CalibratedModel
from heapr_lab.refinement.compensation import fit_compensation
from heapr_lab.refinement.elimination import eliminate

WINDOWS = tiny_windows(n_sequences=8, seq_len=12)


@pytest.mark.parametrize("largest", [0, 4096])
@pytest.mark.parametrize("estimator", ["heapr", "fisher", "elimination"])
def test_masks_and_weights_are_those_of_single_steps(
    model, estimator, largest, monkeypatch
):
    """Steps: `eliminate`, `select` and `fit_compensation`, for both spans."""
    monkeypatch.setattr(activation_grams, "_LARGEST_LAYER", largest)
    calibrated = CalibratedModel(model, WINDOWS)
    assert calibrated.span == ("layer" if largest else "expert")
    selection = Selection(0.5, estimator=estimator)
    table = eliminate(model, collect_statistics(model, WINDOWS), WINDOWS)
    expected = select(table, selection)
    keep, weights = calibrated.compensated(selection)
    assert keep.fingerprint == expected.fingerprint
    once = fit_compensation(model, expected, WINDOWS)
    torch.testing.assert_close(weights.down_projs, once.down_projs)


def test_statistics_come_from_elsewhere_once(model):
    """They come from a cache, say; elimination and compensation use the same ones."""
    measure = Mock(wraps=functools.partial(collect_statistics, model))
    calibrated = CalibratedModel(model, WINDOWS, measure=measure)
    for estimator in ("elimination", "heapr", "fisher"):
        calibrated.compensated(Selection(0.5, estimator=estimator))
    assert [call.args for call in measure.mock_calls] == [(WINDOWS,)]
