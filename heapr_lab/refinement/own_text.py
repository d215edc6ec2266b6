"""Text that a model writes: windows to calibrate on, and continuations of prompts.

A corpus shows the model one kind of text, and atoms that only other kinds need look
cheap. What the model writes when nothing is asked covers what it was trained on, needs
no data, and no label.

Source: Liu et al., LLM-QAT (2023), section 3.1, where texts begin with a token drawn
from the vocabulary, too.

Shapes: B prompts of L tokens, N new tokens.
"""

from typing import Any

import torch
from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList

from heapr_lab.errors import SpecError, whole_number
from heapr_lab.models.backend import backend_of
from heapr_lab.models.likelihood import check_fits, input_device
from heapr_lab.models.modes import assigned, evaluating
from heapr_lab.progress import Parts, Progress
from heapr_lab.text.calibration import CalibrationSet, token_windows
from heapr_lab.text.calibration_spec import OWN_TEXT, check_seed


def own_text(
    model: Any,
    tokenizer: Any,
    *,
    n_sequences: int = 32,
    seq_len: int = 2048,
    seed: int = 0,
    batch_size: int = 32,
    progress: Progress | None = None,
) -> CalibrationSet:
    """Windows that the model writes, each from a token drawn from the vocabulary.

    Every other token is drawn from the model's distribution (temperature 1), which may
    have special tokens, and rows that the tokenizer has not; no window begins with one
    of them, or ends early.

    Args:
        model: a causal language model of transformers.
        tokenizer: its tokenizer.
        n_sequences: number of windows.
        seq_len: tokens in each.
        seed: the seed of all draws.
        batch_size: windows at a time, which changes what is drawn.
        progress: called with (tokens done, tokens in all).

    Raises:
        SpecError: a number is not positive, the seed is too large, or the tokenizer has
            only special tokens.

    Example:
        >>> windows = own_text(model, tokenizer, seq_len=256)  # doctest: +SKIP
        >>> table = collect_statistics(
        ...     model, calibration.joined(windows)
        ... )  # doctest: +SKIP
    """
    whole_number(n_sequences, name="n_sequences")
    whole_number(seq_len, name="seq_len", least=2)
    check_seed(seed)
    openings = _openings(model, tokenizer, n_sequences, seed)
    texts = continuations(
        model,
        openings,
        n_new=seq_len - 1,
        seed=seed,
        batch_size=batch_size,
        progress=progress,
    )
    ids = torch.cat([openings, texts], dim=1)
    return CalibrationSet(ids, {"corpus": OWN_TEXT, "seed": seed})


def _openings(model: Any, tokenizer: Any, n: int, seed: int) -> torch.Tensor:
    """The first token of each window, (n, 1).

    Raises:
        SpecError: the tokenizer has only special tokens.
    """
    n_tokens = min(len(tokenizer), model.get_input_embeddings().num_embeddings)
    special = set(tokenizer.all_special_ids)
    usual = torch.tensor([token for token in range(n_tokens) if token not in special])
    if not len(usual):
        raise SpecError(
            f"all {n_tokens} tokens of the tokenizer are special ones: no text can "
            "begin with one of them"
        )
    generator = torch.Generator().manual_seed(seed)
    return usual[torch.randint(len(usual), (n, 1), generator=generator)]


# --- continuations ----------------------------------------------------------------


def can_write(model: Any) -> bool:
    """Whether a model writes text; a streamed one would read all layers for a token."""
    return backend_of(model).runs_whole


class Steps(StoppingCriteria):
    """Reports each new token, and stops nothing."""

    def __init__(self, report: Progress, n_prompt: int, n_new: int) -> None:
        """Begin with prompts of `n_prompt` tokens, to each of which `n_new` come."""
        self._report, self._n_prompt, self._n_new = report, n_prompt, n_new

    def __call__(
        self,
        input_ids: Any,
        scores: Any,  # noqa: ARG002 (the interface of stopping criteria)
        **_options: Any,
    ) -> Any:
        """Report the tokens written so far, of all texts of the batch."""
        n_texts, n_tokens = input_ids.shape
        self._report(n_texts * (n_tokens - self._n_prompt), n_texts * self._n_new)
        return torch.zeros(n_texts, dtype=torch.bool, device=input_ids.device)


def continuations(
    model: Any,
    prompts: torch.Tensor,
    *,
    n_new: int,
    seed: int = 0,
    batch_size: int = 16,
    progress: Progress | None = None,
) -> torch.Tensor:
    """What the model continues each prompt with, drawn from its distribution.

    The model's `generation_config` counts only for the tokens that end a text, which
    are never drawn: its penalties, cut-offs and the like would be no property of the
    weights.

    Args:
        model: a causal language model of transformers.
        prompts: token ids, (B, L), of at least one token.
        n_new: tokens of each continuation.
        seed: seeds the draw; the random numbers of the process are left as they are.
        batch_size: prompts at a time.
        progress: called with (tokens done, B × N) at each step.

    Returns:
        The new tokens of each prompt, (B, N).

    Raises:
        SpecError: the prompts are not windows of the model's tokens, a number is not
            positive, or the model is streamed.
    """
    backend_of(model).require_loaded(
        remedy="load it with stream=False (--no-stream) to write text, or calibrate "
        "without text of its own, with own_text=0 (--own-text 0)",
    )
    whole_number(n_new, name="n_new")
    windows = token_windows(prompts, least=1)
    check_fits(model, windows)
    device = input_device(model)
    settings = GenerationConfig(
        max_new_tokens=n_new,
        use_cache=True,
        suppress_tokens=_ends(model) or None,
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
    )
    parts = Parts(len(windows) * n_new, progress)
    rows: list[torch.Tensor] = []
    with (
        torch.random.fork_rng([device] if device.type == "cuda" else []),
        evaluating(model),
        # Arguments of `generate` would only add to the settings of the model.
        assigned([(model, "generation_config", settings)]),
    ):
        torch.manual_seed(seed)
        for batch in windows.split(whole_number(batch_size, name="batch_size")):
            ids = batch.to(device)
            report = parts.part(len(ids) * n_new)
            sequences = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                stopping_criteria=StoppingCriteriaList(
                    [Steps(report, ids.shape[1], n_new)]
                ),
            )
            rows.append(sequences[:, ids.shape[1] :].cpu())
            report(n_new, n_new)
    return torch.cat(rows)


def _ends(model: Any) -> list[int]:
    """The tokens that end a text."""
    ends = model.generation_config.eos_token_id
    if ends is None:
        return []
    return [ends] if isinstance(ends, int) else list(ends)
