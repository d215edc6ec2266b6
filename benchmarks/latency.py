"""Seconds of any work; those of a prefill or of decoding, models taking turns.

In greedy decoding with a cache, only the steps are timed, not the prompt.
"""

import contextlib
import inspect
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from transformers import DynamicCache

Found = TypeVar("Found")
"""What a run returns."""


@torch.inference_mode()
def seconds_of(
    model: Any,
    prompt: torch.Tensor,
    *,
    n_steps: int = 0,
    watched: Callable[[], Any] = contextlib.nullcontext,
) -> float:
    """Seconds of `n_steps` decoding steps, or of the prefill if there are none.

    Args:
        model: a causal language model of transformers.
        prompt: token ids (batch, length), on the model's device.
        n_steps: number of tokens that each sequence gets after its prompt.
        watched: returns the context manager in which the timed part runs.
    """
    cache = DynamicCache(config=model.config) if n_steps else None
    named = inspect.signature(model.forward).parameters
    name = "cache" if "cache" in named else "past_key_values"  # before 5.24
    options = {"use_cache": cache is not None, name: cache}
    ids = prompt
    if cache is not None:
        ids = _next_ids(model, ids, options)
    with watched():
        started = _now(model)
        for _ in range(n_steps or 1):
            ids = _next_ids(model, ids, options)
        return _now(model) - started


def timed(
    work: Callable[[], Found], clock: Callable[[], float] = time.process_time
) -> tuple[Found, float]:
    """What `work` returns, and its seconds: CPU time, if no other clock is given."""
    began = clock()
    found = work()
    return found, clock() - began


def in_turns(
    runs: Sequence[Callable[[], Found]], *, n_rounds: int
) -> list[list[Found]]:
    """The result of each of `runs` in each round, (runs, n_rounds).

    Each round begins with another run; a round before the first is for warming up.
    """
    outcomes: list[list[Found]] = [[] for _ in runs]
    for turn in range(n_rounds + 1):
        for i in ((turn + i) % len(runs) for i in range(len(runs))):
            value = runs[i]()
            if turn > 0:
                outcomes[i].append(value)
    return outcomes


def _next_ids(model: Any, ids: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
    """The most probable next token of each sequence, (batch, 1)."""
    logits: torch.Tensor = model(ids, logits_to_keep=1, **options).logits
    return logits.argmax(-1)


def _now(model: Any) -> float:
    if model.device.type != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter()
