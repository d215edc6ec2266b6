"""Text that a model continues: greedily to compare models, sampled to calibrate on.

Shapes: B prompts of L tokens, N new tokens.
"""

from typing import Any

import torch

from heapr_lab.errors import whole_number
from heapr_lab.models.likelihood import check_fits, input_device
from heapr_lab.models.modes import evaluating
from heapr_lab.progress import Progress, no_report
from heapr_lab.text.calibration import token_windows


def continuations(
    model: Any,
    prompts: torch.Tensor,
    *,
    n_new: int,
    temperature: float = 0.0,
    seed: int = 0,
    batch_size: int = 16,
    progress: Progress | None = None,
) -> list[torch.Tensor]:
    """What the model continues each prompt with.

    Args:
        model: a causal language model of transformers.
        prompts: token ids, (B, L).
        n_new: tokens of each continuation, fewer where the model ends its text.
        temperature: divides the logits of the distribution that tokens are drawn from;
            with 0 the most probable token is taken.
        seed: of the draw; the random numbers of the process are left as they are.
        batch_size: prompts at a time.
        progress: called with (prompts done, prompts in all).

    Returns:
        The new tokens of each prompt, up to and with the token that ends the text.

    Raises:
        SpecError: the prompts are not windows of the model's tokens, or a number is
            not positive.
    """
    whole_number(n_new, name="n_new")
    windows = token_windows(prompts)
    check_fits(model, windows)
    chosen: dict[str, Any] = {"do_sample": False}
    if temperature:
        chosen = {
            "do_sample": True,
            "temperature": temperature,
            "top_k": 0,
            "top_p": 1.0,
        }
    ends, device = _ends(model), input_device(model)
    report = progress or no_report
    rows: list[torch.Tensor] = []
    with (
        torch.random.fork_rng([device] if device.type == "cuda" else []),
        evaluating(model),
    ):
        torch.manual_seed(seed)
        for batch in windows.split(whole_number(batch_size, name="batch_size")):
            ids = batch.to(device)
            found = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=n_new,
                use_cache=True,
                pad_token_id=ends[0] if ends else 0,
                num_beams=1,
                repetition_penalty=1.0,
                **chosen,
            )
            rows += [_until(row[ids.shape[1] :].cpu(), ends) for row in found]
            report(len(rows), len(windows))
    return rows


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
