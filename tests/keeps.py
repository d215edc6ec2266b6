"""Keep masks for tiny models, and the twin that zeroes what a mask drops."""

import copy
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from families import tiny_ids
from oracles.token_by_token import matrices
from torch import nn
from transformers import AutoModelForCausalLM

from heapr_lab import KeepMask, evaluate_perplexity, masking
from heapr_lab.models.experts import find_experts


def random_keep(model: nn.Module, *, seed: int = 0) -> KeepMask:
    """A random mask in which expert 0 of each layer is empty and expert 1 untouched."""
    rng = np.random.default_rng(seed)
    arrays = {}
    for layer in find_experts(model):
        kept = rng.random((layer.n_experts, layer.d_inter)) < 0.5
        kept[0] = False
        kept[1] = True
        arrays[layer.layer] = kept
    return KeepMask.from_arrays(arrays)


def full_keep(model: nn.Module) -> KeepMask:
    """The mask that keeps everything."""
    return KeepMask.full(random_keep(model))


def widths_keep(
    model: nn.Module, *widths: int | Sequence[int], structure: str
) -> KeepMask:
    """A mask of `structure` that keeps so many random atoms of each expert.

    Args:
        model: a tiny model.
        *widths: by layer, in turns: one for all its experts, or one for each.
        structure: what the mask says of itself.
    """
    rng, arrays = np.random.default_rng(0), {}
    for layer, width in zip(find_experts(model), itertools.cycle(widths), strict=False):
        order = rng.random((layer.n_experts, layer.d_inter)).argsort(1)
        arrays[layer.layer] = order < np.reshape(width, (-1, 1))
    return KeepMask(arrays, {"structure": structure})


def zeroed_twin(model: nn.Module, keep: KeepMask) -> nn.Module:
    """A copy of `model` whose dropped columns of W_down are zero, one by one."""
    twin = copy.deepcopy(model)
    for layer in find_experts(twin):
        for expert, kept in enumerate(keep.by_layer(layer.layer)):
            # A view, which keeps to the family's own orientation.
            W_down = matrices(layer.module, expert)["W_down"]
            for atom in np.flatnonzero(~kept):
                W_down.data[:, atom] = 0
    return twin


def check_same_logits(model: nn.Module, dense: Any) -> None:
    """Check that logits are the same to the last bit, for one token and for many.

    Those of a single token may differ by rounding: some processors add up the products
    of a single row in an order that depends on the number of columns.
    """
    for shape in ((1, 1), (1, 300), (3, 100)):
        ids = torch.randint(dense.config.vocab_size, shape)
        near = 1e-5 if ids.numel() == 1 else 0.0
        torch.testing.assert_close(
            logits_of(model, ids), logits_of(dense, ids), rtol=near, atol=2 * near
        )


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """A copy of every stored tensor."""
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@torch.no_grad()
def logits_of(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Logits without a cache, (n_sequences, seq_len, d_vocab)."""
    return model(ids, use_cache=False).logits


def masked_logits(model: nn.Module, ids: torch.Tensor, *mask: Any) -> torch.Tensor:
    """Logits under a mask, and with the W_down that replace the model's, if any."""
    with masking(model, *mask):
        return logits_of(model, ids)


def check_masked(folder: Path, model: nn.Module, keep: KeepMask) -> Any:
    """Check that the checkpoint in `folder` is the masked model, to sums of float32.

    Returns:
        What transformers loads.
    """
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    expected = masked_logits(model, tiny_ids(), keep)
    close = {"rtol": 0, "atol": 1e-5}
    torch.testing.assert_close(logits_of(loaded, tiny_ids()), expected, **close)
    return loaded


def window_nll(model: nn.Module, ids: torch.Tensor, **options: Any) -> torch.Tensor:
    """The mean loss of each window, (n_windows,) float64."""
    losses = evaluate_perplexity(model, ids, **options).windows
    return torch.tensor(losses, dtype=torch.float64)


def masked_nll(model: nn.Module, ids: torch.Tensor, *mask: Any) -> torch.Tensor:
    """The mean loss of each window under a mask, (n_windows,) float64."""
    with masking(model, *mask):
        return window_nll(model, ids)
