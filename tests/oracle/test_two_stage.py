"""The paper's two-stage algorithm of the benchmark against the one-pass statistics."""

import numpy as np
import pytest
from families import tiny_model, tiny_windows
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.two_stage import two_stage_scores
from heapr_lab.importance.collect import collect_statistics


@pytest.mark.parametrize(
    "family", ["qwen2_moe", "gpt_oss", "nemotron_h", "deepseek_v3"]
)
@pytest.mark.parametrize("as_published", [False, True])
def test_two_stage_scores_equal_one_pass(family, as_published):
    """Algorithm 1 with its matrices gives the scores that one pass gives."""
    model, calibration = tiny_model(family), tiny_windows()
    table = collect_statistics(model, calibration, batch_size=2)
    two_stage = two_stage_scores(
        model, calibration, batch_size=2, as_published=as_published
    )
    where = ["layer", "expert", "atom"]
    np.testing.assert_array_equal(two_stage.scores[where], table.frame[where])
    expected = table.score("heapr").to_numpy()
    assert (expected > 0).mean() > 0.5
    near = 1e-12 * expected.max()
    np.testing.assert_allclose(two_stage.scores["heapr"], expected, 1e-9, near)


@pytest.mark.parametrize("as_published", [False, True])
@pytest.mark.parametrize("trained", [False, True])
def test_two_stage_leaves_the_model_as_it_was(trained, as_published):
    """Implementation, modes and requirements of gradients are put back."""
    model = tiny_model("qwen2_moe").train().requires_grad_(trained)
    calibration = tiny_windows()
    two_stage_scores(model, calibration, batch_size=3, as_published=as_published)
    assert model.config._experts_implementation == "eager"
    assert model.training
    for parameter in model.parameters():
        assert parameter.requires_grad == trained
        assert parameter.grad is None


def test_published_work_has_gradients_of_all_weights():
    """They are a third more operations in stage 1, and the head in stage 2."""
    model, calibration = tiny_model("qwen2_moe"), tiny_windows()
    counts = {}
    for as_published in (False, True):
        with FlopCounterMode(display=False) as counter:
            two_stage_scores(
                model, calibration, batch_size=2, as_published=as_published
            )
        counts[as_published] = counter.get_total_flops()
    assert counts[True] > 4 / 3 * counts[False]


def test_state_holds_a_matrix_per_expert():
    """Bytes of state are those of G, of the sums of h² and of the counts."""
    model = tiny_model("qwen3_moe")  # 2 layers, 4 experts, d_model 16, d_inter 8
    calibration = tiny_windows()
    two_stage = two_stage_scores(model, calibration, batch_size=3)
    assert two_stage.state_bytes == 2 * 4 * (16 * 16 + 8 + 1) * 8
