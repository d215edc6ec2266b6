"""Pruning and saving streamed models, against the same of models in memory."""

import pytest
import torch
from families import REPRESENTATIVES
from keeps import masked_nll, random_keep, widths_keep, window_nll
from oracles.streamed import ROUNDED, WINDOWS, both, resident, stream
from stored_tensors import same_tensors
from tiny_folder import opened

from heapr_lab.checkpoints.save import save_pruned
from heapr_lab.errors import SpecError
from heapr_lab.models.identity import model_identity
from heapr_lab.pruning.options import Selection
from heapr_lab.pruning.surgery import prune
from heapr_lab.refinement import activation_grams
from heapr_lab.refinement.calibrated import CalibratedModel
from heapr_lab.refinement.compensation import fit_compensation
from heapr_lab.refinement.own_text import continuations


@pytest.mark.parametrize(
    ("family", "made"),
    [
        ("qwen2_moe", "ragged"),
        *((family, "compensated") for family in REPRESENTATIVES),
        *((family, "uniform") for family in ("gpt_oss", "deepseek")),
    ],
)
def test_a_streamed_model_is_pruned_and_saved(family, made, tmp_path):
    """The same files, to the bit, as of the model in memory; both load as masked.

    W_down of compensation replaces the file's; a uniform mask gives a stock checkpoint.
    The part of the dense model that was read last is not taken for the rest, and stays
    in memory, where it may be running.
    """
    models = both(tmp_path / "dense", family)
    keep, down_projs = random_keep(models[0]), None
    if made == "compensated":
        down_projs = fit_compensation(models[0], keep, WINDOWS).down_projs
    elif made != "ragged":
        keep = widths_keep(models[0], 4, structure=made)
    stream(models[1]).fill(0)
    pruned = [prune(model, keep, down_projs=down_projs) for model in models]
    assert resident(models[1]) == {0}
    folders = [save_pruned(net, tmp_path / f"{n}") for n, net in enumerate(pruned)]
    same_tensors(*folders)
    first, second = (
        {path.name for path in folder.iterdir() if path.suffix != ".safetensors"}
        for folder in folders
    )
    assert first <= second <= first | {"model.safetensors.index.json"}
    masked = masked_nll(models[1], WINDOWS.ids, keep, down_projs)
    tolerance = 1e-4 if family in ROUNDED else 1e-9
    for net in (*pruned, *(opened(folders[1], stream=way) for way in (False, True))):
        assert torch.allclose(window_nll(net, WINDOWS.ids), masked, rtol=tolerance)


def test_layers_are_read_once_for_compensation(tmp_path, monkeypatch):
    """For all batches at once; the mask and weights are those in memory."""
    models = both(tmp_path / "dense", "qwen3_moe")
    half, reads = Selection(0.5, estimator="elimination"), []
    kept, expected = CalibratedModel(models[0], WINDOWS).compensated(half)
    model_identity(models[1])  # which is another sweep, once
    for n_tokens in (16, 80):  # in a batch: five batches, and two
        monkeypatch.setattr(activation_grams, "_TOKENS_AT_ONCE", n_tokens)
        before = stream(models[1]).n_bytes_read
        keep, weights = CalibratedModel(models[1], WINDOWS).compensated(half)
        reads.append(stream(models[1]).n_bytes_read - before)
        assert keep.fingerprint == kept.fingerprint
        for number, down in expected.down_projs.items():
            assert torch.allclose(weights.down_projs[number], down, rtol=1e-9)
    assert reads[0] == reads[1]


def test_the_dense_model_stays_what_it_was(tmp_path):
    """Its weights, its configuration and its loss."""
    in_memory, dense = both(tmp_path / "dense", "gpt_oss")
    before = model_identity(in_memory)
    pruned = prune(dense, random_keep(dense), inplace=True)
    window_nll(pruned, WINDOWS.ids)
    assert model_identity(dense) == before
    assert torch.equal(
        window_nll(dense, WINDOWS.ids), window_nll(in_memory, WINDOWS.ids)
    )
    assert stream(pruned).n_bytes_read > 0


def test_what_cannot_be_done_is_refused(tmp_path):
    """Writing text with weights that are on disk; the message says what to do."""
    _, model = both(tmp_path, "qwen3_moe")
    with pytest.raises(SpecError, match=r"on disk.*stream=False.* to write text"):
        continuations(model, WINDOWS.ids, n_new=2)
