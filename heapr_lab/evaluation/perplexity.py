"""Perplexity on held-out tokens, and the divergence of a pruned model.

Windows do not overlap; losses are summed over tokens, so that neither the batch size
nor a smaller last batch changes the result.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from heapr_lab.models.likelihood import (
    check_fits,
    input_device,
    iter_log_probs,
    states_of_all,
    token_nll,
)
from heapr_lab.models.memory import in_batches
from heapr_lab.models.modes import evaluating
from heapr_lab.progress import Progress, no_report
from heapr_lab.pruning.masks import KeepMask
from heapr_lab.pruning.surgery import masking
from heapr_lab.text.calibration import token_windows


@dataclass(frozen=True)
class Perplexity:
    """The perplexity of a model on windows of tokens."""

    value: float
    """exp(nll)."""
    nll: float
    """Mean negative log-likelihood per predicted token, in nats."""
    n_tokens: int
    """Number of predicted tokens: all but the first of each window."""
    windows: tuple[float, ...] = field(default=(), repr=False)
    """The mean loss of each window, in nats per token; empty if it is not known."""


@dataclass(frozen=True)
class Divergence:
    """The divergence of a pruned model's predictions from the dense model's."""

    kl: float
    """Mean KL(dense || pruned) per predicted token, in nats."""
    top1_agreement: float
    """Share of the predicted tokens whose most probable token is the same."""
    n_tokens: int
    """Number of predicted tokens: all but the first of each window."""


def evaluate_perplexity(
    model: nn.Module,
    ids: Any,
    *,
    batch_size: int | None = None,
    progress: Progress | None = None,
) -> Perplexity:
    """The perplexity of `model` on `ids`: exp of the mean nats per predicted token.

    Shapes: ids (n_windows, seq_len).
    Source: HEAPr, section on the experiments.

    Args:
        model: a causal language model of transformers.
        ids: token ids in non-overlapping windows: a tensor, an array or lists.
        batch_size: windows per forward pass; by default as many as fit in memory.
        progress: called after each batch.

    Raises:
        SpecError: the ids are not windows of the model's tokens, or the batch size is
            not positive.
    """
    total, windows = 0.0, []

    def add(batch: torch.Tensor, states: torch.Tensor) -> None:
        nonlocal total
        nll = token_nll(model, batch, states=states)
        total += nll.sum(dtype=torch.float64).item()
        windows.extend(nll.mean(1, dtype=torch.float64).tolist())

    n_tokens = _for_batches(model, add, ids, batch_size=batch_size, progress=progress)
    nll = total / n_tokens
    return Perplexity(exp_nll(nll), nll, n_tokens, tuple(windows))


def evaluate_divergence(
    model: nn.Module,
    keep: KeepMask,
    ids: Any,
    *,
    batch_size: int | None = None,
    progress: Progress | None = None,
) -> Divergence:
    """The divergence of the predictions when `model` is pruned to `keep`.

    It is more sensitive than perplexity. The weights are not changed.

    Shapes: ids (n_windows, seq_len).

    Args:
        model: the dense model.
        keep: the kept atoms.
        ids: token ids in non-overlapping windows: a tensor, an array or lists.
        batch_size: windows per forward pass; by default as many as fit in memory.
        progress: called after each batch.

    Raises:
        SpecError: the ids are not windows of the model's tokens, the batch size is not
            positive, or `keep` is of another model.
    """
    kl, agreeing = 0.0, 0

    def add(_batch: torch.Tensor, *states: torch.Tensor) -> None:
        nonlocal kl, agreeing
        dense, pruned = (hidden[:, :-1] for hidden in states)
        batch_kl, batch_agreeing = 0.0, 0
        for log_p, log_q in zip(
            iter_log_probs(model, dense), iter_log_probs(model, pruned), strict=True
        ):
            batch_kl += kl_divergence(log_p, log_q).sum(dtype=torch.float64).item()
            batch_agreeing += int((log_p.argmax(-1) == log_q.argmax(-1)).sum())
        # Only at the end, so that a batch that is repeated is not counted twice.
        kl, agreeing = kl + batch_kl, agreeing + batch_agreeing

    n_tokens = _for_batches(
        model, add, ids, masks=(None, keep), batch_size=batch_size, progress=progress
    )
    return Divergence(kl / n_tokens, agreeing / n_tokens, n_tokens)


def kl_divergence(log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    """KL(p || q) = Σ p·(log p − log q) over the last axis, in nats.

    Shapes: log_p, log_q (..., d_vocab); result (...).
    """
    p = log_p.exp()
    # Terms with p = 0 are 0, also where q = 0: there the difference of the logarithms
    # would be undefined.
    terms = torch.where(p > 0, p * (log_p - log_q), 0.0)
    return terms.sum(-1)


def _for_batches(
    model: nn.Module,
    work: Callable[..., None],
    ids: Any,
    *,
    masks: Sequence[KeepMask | None] = (None,),
    batch_size: int | None,
    progress: Progress | None,
) -> int:
    """Call `work` on each batch of windows, on smaller ones if memory runs out.

    It is called with the batch, and with its final states (B, L, d_model) under each of
    the masks.

    Returns the number of predicted tokens: all but the first of each window.
    """
    windows = token_windows(ids)
    check_fits(model, windows)
    n_windows, seq_len = windows.shape
    report = progress or no_report
    done = 0

    def run(size: int) -> None:
        nonlocal done
        batches = windows[done:].split(size)
        passes = [(keep, states_of_all(model, batches)) for keep in masks]
        for batch in batches:
            by_mask = []
            for keep, states in passes:
                with masking(model, keep):
                    by_mask.append(next(states).to(input_device(model)))
            work(batch, *by_mask)
            done += len(batch)
            report(done, n_windows)

    with evaluating(model):
        in_batches(run, model, windows, batch_size)
    return n_windows * (seq_len - 1)


def exp_nll(nll: float) -> float:
    """The perplexity of a mean loss in nats; infinite if it overflows."""
    try:
        return math.exp(nll)
    except OverflowError:
        return math.inf
