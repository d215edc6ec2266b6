"""Windows of text that a model writes itself, to calibrate on besides a corpus.

A corpus shows the model one kind of text, and atoms that only other kinds need look
cheap. What the model writes when nothing is asked covers what it was trained on, needs
no data, and no label.

Source: Liu et al., LLM-QAT (2023), section 3.1, where texts begin with a token drawn
from the vocabulary, too.
"""

from typing import Any

import torch

from heapr_lab.errors import SpecError, whole_number
from heapr_lab.progress import Progress
from heapr_lab.refinement.generation import continuations
from heapr_lab.text.calibration import CalibrationSet
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

    Every other token is drawn from the model's distribution (temperature 1); no window
    has a special token or ends early.

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
        temperature=1.0,
        seed=seed,
        to_the_end=False,
        batch_size=batch_size,
        progress=progress,
    )
    ids = torch.cat([openings, torch.stack(texts)], dim=1)
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
