"""Text that a model continues: greedily to compare models, sampled to calibrate on.

Shapes: B prompts of L tokens, N new tokens.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from heapr_lab.errors import whole_number
from heapr_lab.models.likelihood import check_fits, input_device
from heapr_lab.models.modes import evaluating
from heapr_lab.progress import Progress, no_report
from heapr_lab.text.calibration import token_windows


def greedy(
    model: nn.Module,
    prompts: torch.Tensor,
    *,
    n_new: int,
    batch_size: int = 16,
    progress: Progress | None = None,
) -> list[torch.Tensor]:
    """The most probable token after each prompt, and so on.

    Args:
        model: a causal language model of transformers.
        prompts: token ids, (B, L).
        n_new: tokens of each continuation, fewer where the model ends its text.
        batch_size: prompts at a time.
        progress: called with (prompts done, prompts in all).

    Returns:
        The new tokens of each prompt, up to and with the token that ends the text.

    Raises:
        SpecError: the prompts are not windows of the model's tokens, or a number is
            not positive.
    """
    parts = _continued(
        model,
        prompts,
        n_new=n_new,
        batch_size=batch_size,
        progress=progress,
        do_sample=False,
    )
    return [row for part in parts for row in part]


def sampled(
    model: nn.Module,
    prompts: torch.Tensor,
    *,
    n_new: int,
    temperature: float = 1.0,
    seed: int = 0,
    batch_size: int = 16,
    progress: Progress | None = None,
) -> list[torch.Tensor]:
    """Continuations drawn from the model's own distribution.

    Arguments, result and errors are those of `greedy`, besides:

    Args:
        model: a causal language model of transformers.
        prompts: token ids, (B, L).
        n_new: tokens of each continuation.
        temperature: divides the logits.
        seed: of the draw; the random numbers of the process are left as they are.
        batch_size: prompts at a time.
        progress: called with (prompts done, prompts in all).
    """
    device = input_device(model)
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        parts = _continued(
            model,
            prompts,
            n_new=n_new,
            batch_size=batch_size,
            progress=progress,
            do_sample=True,
            temperature=temperature,
            top_k=0,
            top_p=1.0,
        )
        return [row for part in parts for row in part]


def _continued(
    model: Any,
    prompts: torch.Tensor,
    *,
    n_new: int,
    batch_size: int,
    progress: Progress | None,
    **options: Any,
) -> Iterator[list[torch.Tensor]]:
    """The new tokens of each prompt, a batch at a time."""
    whole_number(n_new, name="n_new")
    windows = token_windows(prompts)
    check_fits(model, windows)
    ends = _ends(model)
    report = progress or no_report
    done = 0
    for batch in windows.split(whole_number(batch_size, name="batch_size")):
        ids = batch.to(input_device(model))
        with evaluating(model):
            found = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=n_new,
                use_cache=True,
                pad_token_id=ends[0] if ends else 0,
                num_beams=1,
                repetition_penalty=1.0,
                **options,
            )
        done += len(batch)
        report(done, len(windows))
        yield [_until(row[ids.shape[1] :].cpu(), ends) for row in found]


def _ends(model: Any) -> list[int]:
    """The tokens that end a text."""
    found = model.generation_config.eos_token_id
    if found is None:
        return []
    return [found] if isinstance(found, int) else list(found)


def _until(tokens: torch.Tensor, ends: list[int]) -> torch.Tensor:
    """`tokens` up to and with the first of `ends`; what follows is padding."""
    is_end = torch.isin(tokens, torch.tensor(ends, dtype=tokens.dtype))
    at = is_end.nonzero()
    return tokens[: int(at[0, 0]) + 1] if len(at) else tokens
