"""Dynamic skipping: experts of a token that its best expert outweighs are not run.

The experts of a token are ranked by their weights p_1 ≥ … ≥ p_K, equal ones by their
numbers, so that the order of the slots does not matter. The expert of rank j is skipped
where p_j / p_1 < β_j, and the others' weights are scaled so that the sum is the same.

Source: NAEE (Lu et al. 2024, arXiv:2402.14800), which has K = 2.

Shapes: T tokens, K experts of each.
"""

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F

from heapr_lab.errors import SpecError

Thresholds = tuple[float, ...]
"""β_j of the ranks 2 to K; empty where nothing is skipped."""


def median_ratios(top_k_weights: torch.Tensor) -> Thresholds:
    """The median of p_j / p_1 over all tokens, for each rank; weights (T, K)."""
    ranked = top_k_weights.sort(dim=-1, descending=True).values
    return tuple(np.median(_ratios(ranked).double().cpu().numpy(), axis=0).tolist())


def skipped(
    top_k_index: torch.Tensor, top_k_weights: torch.Tensor, thresholds: Thresholds
) -> torch.Tensor:
    """Which slots are skipped, bool (T, K); index and weights (T, K)."""
    order = _by_rank(top_k_index, top_k_weights)
    ratios = _ratios(top_k_weights.gather(-1, order))
    gone = F.pad(ratios < ratios.new_tensor(thresholds), (1, 0))  # never rank 1
    return torch.zeros_like(gone).scatter(-1, order, gone)


def scaled(top_k_weights: torch.Tensor, gone: torch.Tensor) -> torch.Tensor:
    """The weights with 0 where slots are `gone`, and each token's sum unchanged."""
    weights = top_k_weights.to(_wide(top_k_weights))
    left = weights.masked_fill(gone, 0)
    scale = weights.sum(-1, keepdim=True) / left.sum(-1, keepdim=True)
    touched = gone.any(-1, keepdim=True)
    return torch.where(touched, left * scale, left).to(top_k_weights.dtype)


def check_thresholds(thresholds: Sequence[object], n_per_token: int) -> None:
    """Check that there is one from 0 to 1 for each rank but the first.

    Raises:
        SpecError: there are more or fewer, or one is no such number.
    """
    valid = all(isinstance(b, int | float) and 0 <= b <= 1 for b in thresholds)
    if not valid or len(thresholds) != n_per_token - 1:
        raise SpecError(
            f"the thresholds of dynamic skipping are {list(thresholds)}, expected "
            f"{n_per_token - 1} numbers from 0 to 1, one for each of the "
            f"{n_per_token} experts of a token but the best"
        )


def _by_rank(index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The slots of each token by rank, (T, K)."""
    by_number = index.argsort(dim=-1)
    ordered = weights.gather(-1, by_number)
    by_weight = ordered.argsort(dim=-1, descending=True, stable=True)
    return by_number.gather(-1, by_weight)


def _ratios(ranked: torch.Tensor) -> torch.Tensor:
    """p_j / p_1 of the ranks 2 to K, (T, K - 1); 1 where p_1 is 0, as all are equal."""
    p = ranked.to(_wide(ranked))
    return torch.where(p[:, :1] > 0, p[:, 1:] / p[:, :1], 1.0)


def _wide(weights: torch.Tensor) -> torch.dtype:
    return torch.promote_types(weights.dtype, torch.float32)
