"""Log-likelihoods of token ids, without holding all logits in memory at once.

A causal language model is a *body* (ids to final hidden states) and a *head* (hidden
states to logits: the output embedding, and in some families a scale or a soft cap).
The body runs once; the head, which is the family's own `forward` with the body
replaced by a replay of its output, runs on a few tokens at a time. So logits are
processed as the family does it, and a vocabulary of 150k fits into memory.

Shapes: B windows, L tokens in each; d_model, d_vocab. Units: nats.
"""

import functools
import inspect
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_outputs import MoeModelOutputWithPast

from heapr_lab.errors import HeaprLabError, LayoutError, SpecError
from heapr_lab.models.backend import backend_of
from heapr_lab.models.grouped_linear import accumulating_dtype
from heapr_lab.text.calibration import token_windows

logger = logging.getLogger(__name__)

_POSITIONS = re.compile(r"pos|wpe")
"""Part of the name of an embedding of learned positions."""

LOGITS_AT_ONCE = {"cpu": 2**20, "cuda": 2**25}
"""Elements of a chunk of logits: 4 and 128 MiB in float32.

On a CPU larger ones leave the caches, and the system hands out zeroed pages for each.
"""

TOKENS_AT_LEAST = 128
"""Tokens of a chunk of any size, because each chunk reads the whole head."""


def token_nll(
    model: nn.Module, ids: torch.Tensor, *, states: torch.Tensor | None = None
) -> torch.Tensor:
    """Negative log-likelihood of each token given those before it, in nats.

    It can be differentiated with respect to the hidden states; with gradients enabled
    the head of each chunk is run again in the backward pass instead of being kept.

    Shapes: ids (B, L); result (B, L - 1), in float32 or the model's float64.

    Args:
        model: a causal language model of transformers.
        ids: token ids.
        states: their final states, (B, L, d_model); by default they are computed.

    Raises:
        HeaprLabError: the log-likelihood of a token is not finite.
    """
    states = (final_states(model, ids) if states is None else states)[:, :-1]
    targets = ids[:, 1:].to(states.device)
    n_tokens = targets.numel()
    chunk = _chunk_tokens(model)
    head = _head(model)
    parts: list[torch.Tensor] = []
    for rows, labels in zip(
        states.flatten(0, 1).split(chunk), targets.flatten().split(chunk), strict=True
    ):
        if torch.is_grad_enabled() and n_tokens > chunk:
            part = checkpoint(
                _nll, head, rows, labels, use_reentrant=False, preserve_rng_state=False
            )
        else:
            part = _nll(head, rows, labels)
        parts.append(part)
    nll: torch.Tensor = torch.cat(parts).unflatten(0, targets.shape)
    _check_finite(nll)
    return nll


def final_states(
    model: nn.Module,
    ids: torch.Tensor,
    *,
    position_ids: torch.Tensor | None = None,
    attention_mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """The output of the body: the hidden states after the last norm.

    Shapes: ids, position_ids (B, L); attention_mask (B, 1, L, L), added to the scores;
    result (B, L, d_model), in the model's dtype.

    Args:
        model: a causal language model of transformers.
        ids: token ids.
        position_ids: position of each token; by default 0, 1, 2, ...
        attention_mask: the tokens that each token attends to; by default causal.

    Raises:
        SpecError: `ids` are not whole numbers of shape (B, at least 2), or the model
            has no such tokens or positions.
    """
    check_fits(model, token_windows(ids), position_ids=position_ids)
    device = input_device(model)
    given = {"position_ids": position_ids, "attention_mask": attention_mask}
    inputs = {name: x.to(device) for name, x in given.items() if x is not None}
    output = _body(model)(input_ids=ids.to(device), **inputs, **_options(model))
    states: torch.Tensor = output.last_hidden_state
    return states


def states_of_all(
    model: nn.Module, batches: Sequence[torch.Tensor], *, share: float = 1.0
) -> Iterator[torch.Tensor]:
    """`final_states` of each batch, one after the other; they may be on the CPU.

    Those of a streamed model are computed together, for as many batches as fit into a
    share of its room, when the first of them is asked for.
    """
    run = functools.partial(final_states, model)
    return backend_of(model).final_states(model, batches, run, share)


def check_fits(
    model: Any, ids: torch.Tensor, *, position_ids: torch.Tensor | None = None
) -> None:
    """Check that `model` has the tokens and the positions of `ids`.

    If positions go beyond the model's maximum and are not learned (rotary, say), a
    warning is logged once for each model.

    Shapes: ids, position_ids (B, L).

    Raises:
        SpecError: an id is not in the vocabulary, or positions are learned and there
            are too few of them.
    """
    d_vocab = model.get_input_embeddings().weight.shape[0]
    outside = (ids < 0) | (ids >= d_vocab)
    if outside.any():
        window, position = outside.nonzero()[0].tolist()
        raise SpecError(
            f"token id {int(ids[window, position])} at window {window}, position "
            f"{position} is not in the model's vocabulary of {d_vocab} (0 to "
            f"{d_vocab - 1}); tokenise with the model's own tokenizer"
        )
    length = ids.shape[1] if position_ids is None else int(position_ids.max()) + 1
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if limit is not None and length > limit:
        _beyond(model, length, limit)


_warned: WeakSet[nn.Module] = WeakSet()


def _beyond(model: nn.Module, length: int, limit: int) -> None:
    """Refuse windows longer than the model's `limit`, or warn of them once.

    Raises:
        SpecError: the model has a learned embedding for each position.
    """
    text = f"windows of {length} tokens are longer than the {limit} positions that "
    if any(
        isinstance(module, nn.Embedding) and _POSITIONS.search(name)
        for name, module in model.named_modules()
    ):
        raise SpecError(f"{text}the model has learned; give seq_len={limit} or less")
    if model not in _warned:
        _warned.add(model)
        logger.warning("%s%s was made for", text, type(model).__name__)


def input_device(model: Any) -> torch.device:
    """The device on which `model` expects its ids."""
    device = backend_of(model).device(model.get_input_embeddings().weight)
    # Weights that accelerate offloads are on the meta device until they are used.
    return torch.device("cpu") if device.type == "meta" else device


def iter_log_probs(model: nn.Module, states: torch.Tensor) -> Iterator[torch.Tensor]:
    """Log-probabilities of the next token, one chunk of positions after the other.

    Two calls with the same number of states give chunks of the same positions.

    Shapes: states (..., d_model); each result (n_chunk, d_vocab), in float32 or the
    model's float64.
    """
    head = _head(model)
    rows = states.flatten(0, -2)
    for part in rows.split(_chunk_tokens(model)):
        logits = head(part)
        yield logits.to(accumulating_dtype(logits)).log_softmax(-1)


def _nll(
    head: Callable[[torch.Tensor], torch.Tensor],
    rows: torch.Tensor,
    targets: torch.Tensor,
) -> torch.Tensor:
    logits = head(rows)
    logits = logits.to(accumulating_dtype(logits))
    return nn.functional.cross_entropy(
        logits, targets.to(logits.device), reduction="none"
    )


def _check_finite(nll: torch.Tensor) -> None:
    bad = ~torch.isfinite(nll.detach())
    if bad.any():
        window, position = bad.nonzero()[0].tolist()
        raise HeaprLabError(
            f"{int(bad.sum())} of {nll.numel()} tokens have no finite log-likelihood, "
            f"the first at window {window}, position {position + 1}: the model's "
            "logits are not finite there. Load it in bfloat16 or float32, or check "
            "its weights."
        )


def _chunk_tokens(model: Any) -> int:
    """Tokens whose logits are in memory together."""
    weight = model.get_output_embeddings().weight
    device = backend_of(model).device(weight)
    elements = LOGITS_AT_ONCE.get(device.type, LOGITS_AT_ONCE["cuda"])
    return int(max(TOKENS_AT_LEAST, elements // weight.shape[0]))


# --- the body and the head of a model ---------------------------------------------


class _States(MoeModelOutputWithPast):
    """An output of any body: heads of wrappers also read what only a wrapper has."""

    def __getattr__(self, name: str) -> None:
        """Nothing, in place of a field.

        Raises:
            AttributeError: the name is not one of a field.
        """
        if name.startswith("_"):
            raise AttributeError(name)


class _Replay(nn.Module):
    """Replaces the body: gives known states to the head."""

    states: torch.Tensor

    def forward(self, *_args: Any, **_kwargs: Any) -> Any:
        return _States(last_hidden_state=self.states)


def _head(model: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    """The family's own map from hidden states (n, d_model) to logits (n, d_vocab).

    It runs on a shallow copy, which shares every weight, so that no hook or assignment
    changes a model that other threads may be running.
    """
    body, replay = _body(model), _Replay()
    twin = object.__new__(type(model))
    twin.__dict__.update(model.__dict__)
    twin.__dict__["_modules"] = {
        name: replay if child is body else child
        for name, child in model.named_children()
    }
    no_ids, options = torch.zeros(1, 1, dtype=torch.long), _options(model)

    def head(rows: torch.Tensor) -> torch.Tensor:
        replay.states = rows[None]
        output: Any = type(model).forward(twin, input_ids=no_ids, **options)
        logits: torch.Tensor = output.logits
        return logits[0]

    return head


def _options(model: nn.Module) -> dict[str, bool]:
    """Arguments of a forward: what it need not keep, as far as the family knows it."""
    accepted = inspect.signature(type(model).forward).parameters
    names = {"use_cache", "output_router_logits"} & accepted.keys()
    return dict.fromkeys(names, False)


def _body(model: Any) -> nn.Module:
    """The child of `model` that contains everything but the head.

    Raises:
        LayoutError: there is no such child.
    """
    decoder = getattr(model, "get_decoder", lambda: None)()
    for body in (decoder, getattr(model, "base_model", None)):
        if any(child is body for child in model.children()):
            assert isinstance(body, nn.Module)
            return body
    raise LayoutError(
        f"{type(model).__name__} has no body apart from its head; expected a "
        "causal language model of transformers (a ...ForCausalLM)"
    )
