"""How far a pruned model writes what the dense one writes.

Perplexity is measured on text by others; users see what the model itself writes, where
one wrong token leads to the next.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from heapr_lab.models.likelihood import final_states, iter_log_probs
from heapr_lab.models.modes import evaluating
from heapr_lab.progress import Parts, Progress
from heapr_lab.refinement.generation import continuations
from heapr_lab.repr_html import card_html
from heapr_lab.text.calibration import token_windows


@dataclass(frozen=True)
class Agreement:
    """The agreement of two models on greedy continuations of the same prompts."""

    teacher_forced: float
    """Share of the dense model's tokens that the pruned model would write, too, after
    the same tokens."""
    until_difference: float
    """Share of a continuation before the first other token, the mean over prompts."""
    stderr: float
    """Standard error of `until_difference` over prompts."""
    chrf: float
    """chrF (Popović 2015) of the pruned model's continuations against the dense ones,
    from 0 to 100: characters in common, wherever they are."""
    n_prompts: int
    n_new: int
    """Most tokens of a continuation."""

    def _repr_html_(self) -> str:
        return card_html(
            "Agreement with the dense model",
            {
                "same next token, teacher-forced": f"{self.teacher_forced:.2%}",
                "until the first difference": f"{self.until_difference:.2%} ± "
                f"{self.stderr:.2%}",
                "chrF": f"{self.chrf:.1f}",
                "prompts": f"{self.n_prompts} of at most {self.n_new} new tokens",
            },
        )


def evaluate_agreement(
    dense: nn.Module,
    pruned: nn.Module,
    prompts: Any,
    tokenizer: Any,
    *,
    n_new: int = 64,
    batch_size: int = 16,
    progress: Progress | None = None,
) -> Agreement:
    """The agreement of greedy continuations of `pruned` and of `dense`.

    Source: chrF is sacrebleu's.

    Args:
        dense: the dense model.
        pruned: a model with the same tokens, as `prune` or a checkpoint gives it.
        prompts: token ids (n_prompts, L): a tensor, an array or lists.
        tokenizer: decodes the continuations, for chrF.
        n_new: most new tokens of a continuation.
        batch_size: prompts at a time.
        progress: called with (tokens done, tokens in all), of both models.

    Raises:
        SpecError: the prompts are not windows of the models' tokens, or a number is
            not positive.

    Example:
        >>> smaller = compress(model, calibration, ratio=0.4)  # doctest: +SKIP
        >>> prompts = load_windows("ptb", tokenizer, seq_len=64)  # doctest: +SKIP
        >>> evaluate_agreement(
        ...     model, smaller, prompts.ids, tokenizer
        ... )  # doctest: +SKIP
    """
    windows = token_windows(prompts)
    size = len(windows) * n_new
    parts = Parts(2 * size, progress)
    options: Any = {"n_new": n_new, "batch_size": batch_size, "progress": parts}
    wanted = continuations(dense, windows, **options)
    parts.end(size)
    return agreement_with(wanted, pruned, windows, tokenizer, **options)


def agreement_with(
    wanted: list[torch.Tensor],
    pruned: nn.Module,
    prompts: Any,
    tokenizer: Any,
    *,
    n_new: int = 64,
    batch_size: int = 16,
    progress: Progress | None = None,
) -> Agreement:
    """As `evaluate_agreement`, with what the dense model wrote.

    Args:
        wanted: the dense model's tokens after each prompt, as `continuations` gives
            them.
        pruned: as there, or the dense model with a mask or another edit around the
            call.
        prompts: as there.
        tokenizer: as there.
        n_new: that `wanted` was made with.
        batch_size: as there.
        progress: called with (tokens done, tokens in all), of the pruned model.

    Raises:
        SpecError: as there.
    """
    windows = token_windows(prompts)
    written = continuations(
        pruned, windows, n_new=n_new, batch_size=batch_size, progress=progress
    )
    forced = [
        _predicted(pruned, prompt, tokens)
        for prompt, tokens in zip(windows, wanted, strict=True)
    ]
    same = torch.tensor([_same(a, b) for a, b in zip(wanted, written, strict=True)])
    n = len(same)
    return Agreement(
        teacher_forced=sum(int(own.sum()) for own in forced) / sum(map(len, forced)),
        until_difference=float(same.mean()),
        stderr=float(same.std() / n**0.5) if n > 1 else float("nan"),
        chrf=_chrf(tokenizer, wanted, written),
        n_prompts=n,
        n_new=n_new,
    )


def _predicted(
    model: nn.Module, prompt: torch.Tensor, tokens: torch.Tensor
) -> torch.Tensor:
    """Whether `model` would write each of `tokens` after those before it, (N,)."""
    ids = torch.cat([prompt, tokens])[None]
    with evaluating(model):
        states = final_states(model, ids)[:, len(prompt) - 1 : -1]
        found = [log_p.argmax(-1).flatten() for log_p in iter_log_probs(model, states)]
    return torch.cat(found).cpu() == tokens


def _same(wanted: torch.Tensor, written: torch.Tensor) -> float:
    """The share of `wanted` before the first difference."""
    n = min(len(wanted), len(written))
    differ = (wanted[:n] != written[:n]).nonzero()
    return (int(differ[0, 0]) if len(differ) else n) / len(wanted)


def _chrf(
    tokenizer: Any, wanted: list[torch.Tensor], written: list[torch.Tensor]
) -> float:
    """The chrF of all continuations."""
    from sacrebleu.metrics.chrf import CHRF  # slow to import

    dense, pruned = (
        [tokenizer.decode(tokens, skip_special_tokens=True) for tokens in texts]
        for texts in (wanted, written)
    )
    return float(CHRF().corpus_score(pruned, [dense]).score)
