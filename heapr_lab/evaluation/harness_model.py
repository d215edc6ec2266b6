"""The harness's own model class, except that choices share their context.

A four-way item is four requests with the same context. `PackingHFLM` packs the context
and all continuations into one row; each continuation attends only to the context and to
itself, at the positions it would have alone. This is exact for models in which every
layer is ordinary softmax attention. The first item is also computed by the harness; if
the two differ, or for models of another kind, the harness computes all items.

The layers of a streamed model run on the batches of all requests, one layer after the
other, so that it is read once and not for every batch; contexts are not shared then.

Importing this module imports the harness.
"""

import copy
import itertools
import logging
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lm_eval.api.model import CacheHook
from lm_eval.models.huggingface import HFLM
from torch import nn

from heapr_lab.importance.sweep_store import budget_of
from heapr_lab.models.layerwise import swept_states
from heapr_lab.models.likelihood import final_states, iter_log_probs
from heapr_lab.models.streamed import Stream, stream_of
from heapr_lab.progress import Progress

logger = logging.getLogger(__name__)

Request = tuple[Any, list[int], list[int]]
"""(key, token ids of the context, token ids of the continuation)."""
Answer = tuple[float, bool]
"""Log-likelihood in nats, and whether greedy decoding yields the continuation."""

_TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-4}
_COARSE = 0.02
"""Relative tolerance of the first item in half precision."""


class _Counter(CacheHook):
    """Counts answered requests, through the callback that the harness provides."""

    def __init__(self, n_requests: int, progress: Progress) -> None:
        super().__init__(None)
        self.done, self.n_requests, self.progress = 0, n_requests, progress

    def add_partial(self, *_request: Any) -> None:
        self.done += 1
        self.progress(self.done, self.n_requests)


class PackingHFLM(HFLM):
    """HFLM of a loaded model, without progress bars and with shared contexts."""

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any,
        *,
        n_requests_at_once: int = 16,
        progress: Progress | None = None,
    ) -> None:
        super().__init__(
            pretrained=model,
            tokenizer=copy.deepcopy(tokenizer),  # it is given a padding token
            batch_size=n_requests_at_once,
            softmax_dtype=torch.float32,  # else bfloat16 rounds the likelihoods
        )
        self.progress = progress
        self.packs = _attends_plainly(model)

    def loglikelihood(self, requests: Any, disable_tqdm: bool = True) -> Any:
        """(log-likelihood, is greedy) of each request, in order."""
        del disable_tqdm  # the harness would show its bars by default
        if self.progress is not None:
            self.set_cache_hook(_Counter(len(requests), self.progress))
        return super().loglikelihood(requests, disable_tqdm=True)

    def _loglikelihood_tokens(
        self,
        requests: list[Request],
        disable_tqdm: bool = True,
        override_bs: Any = None,
    ) -> list[Answer]:
        del disable_tqdm, override_bs
        stream = stream_of(self.model)
        if stream is not None:
            return self._swept(requests, stream)
        groups = self._groups(requests) if self.packs else []
        answers: dict[int, Answer] = {}
        for batch in _batches(requests, groups, self.batch_size):
            if not answers and not self._agrees(requests, batch[0]):
                break
            packed = [_pack([requests[i] for i in group]) for group in batch]
            found = _packed_answers(self.model, packed)
            for index, answer in zip(_flat(batch), found, strict=True):
                answers[index] = answer
                self.cache_hook.add_partial("loglikelihood", requests[index][0], answer)
        rest = [index for index in range(len(requests)) if index not in answers]
        alone = super()._loglikelihood_tokens(
            [requests[index] for index in rest], disable_tqdm=True
        )
        answers.update(zip(rest, alone, strict=True))
        return [answers[index] for index in range(len(requests))]

    @torch.no_grad()
    def _swept(self, requests: list[Request], stream: Stream) -> list[Answer]:
        """The answers of a streamed model, which is read once for many batches."""
        rows = [_row(request, self.max_length) for request in requests]
        # Longest first, as the harness does it; equal ones are together.
        order = sorted(range(len(rows)), key=lambda i: (-len(rows[i]), rows[i]))
        size = self.batch_size
        batches = [order[i : i + size] for i in range(0, len(order), size)]
        # Of a token: the states between two layers, and the last ones.
        d_model = self.model.config.get_text_config().hidden_size
        n_bytes = 2 * d_model * stream.dtype.itemsize
        answers: dict[int, Answer] = {}
        for group in _within(budget_of(stream) // n_bytes, batches, rows):
            ids = [_padded([rows[i] for i in batch]) for batch in group]
            swept = swept_states(self.model, ids)
            for batch, states in zip(group, swept, strict=True):
                wanted = [requests[i][2] for i in batch]
                ends = [
                    own[len(rows[i]) - len(continuation) : len(rows[i])]
                    for own, i, continuation in zip(states, batch, wanted, strict=True)
                ]
                last = torch.cat(ends).to(stream.device)
                found = _answers(self.model, last, wanted)
                answers |= zip(batch, found, strict=True)
        ordered = [answers[index] for index in range(len(requests))]
        for request, answer in zip(requests, ordered, strict=True):
            self.cache_hook.add_partial("loglikelihood", request[0], answer)
        return ordered

    def _groups(self, requests: list[Request]) -> list[list[int]]:
        """Indices of the requests of each context that several requests share."""
        by_context: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)
        for index, (_, context, continuation) in enumerate(requests):
            if len(context) + len(continuation) <= self.max_length:
                by_context[tuple(context)].append(index)
        return [group for group in by_context.values() if len(group) > 1]

    def _agrees(self, requests: list[Request], group: list[int]) -> bool:
        """Whether packing gives the same answers for `group` as the harness."""
        some = [requests[index] for index in group]
        ours = _packed_answers(self.model, [_pack(some)])
        counter = self.cache_hook
        self.set_cache_hook(CacheHook(None))  # these requests come again
        theirs = super()._loglikelihood_tokens(some, disable_tqdm=True)
        self.set_cache_hook(counter)
        tolerance = _TOLERANCES.get(self.model.dtype, _COARSE)
        agree = all(
            abs(a - b) <= tolerance * max(1.0, abs(b))
            for (a, _), (b, _) in zip(ours, theirs, strict=True)
        )
        if not agree:
            logger.warning(
                "%s does not support packed contexts: each choice is run separately",
                type(self.model).__name__,
            )
        return agree


def _attends_plainly(model: Any) -> bool:
    """Whether our attention mask determines what every layer attends to."""
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    window = getattr(config, "sliding_window", None)
    return (
        kinds == {"full_attention"}
        and (not window or hasattr(config, "layer_types"))
        and not getattr(model, "_is_stateful", False)
        and config._attn_implementation in {"sdpa", "eager"}
    )


@dataclass(frozen=True, eq=False)
class _Packed:
    """A context and its continuations in one row."""

    ids: list[int]
    positions: list[int]
    blocks: list[int]
    """0 for the context, then 1, 2, ... for the continuations."""
    predicts: list[list[int]]
    """For each continuation, the positions that predict its tokens."""
    targets: list[list[int]]


def _pack(requests: Sequence[Request]) -> _Packed:
    context = requests[0][1]
    n_context = len(context)
    ids, positions = list(context), list(range(n_context))
    blocks = [0] * n_context
    predicts, targets = [], []
    for block, (_, _, continuation) in enumerate(requests, start=1):
        fed = continuation[:-1]  # nothing is predicted from the last token
        predicts.append([n_context - 1, *range(len(ids), len(ids) + len(fed))])
        targets.append(continuation)
        ids += fed
        positions += range(n_context, n_context + len(fed))
        blocks += [block] * len(fed)
    return _Packed(ids, positions, blocks, predicts, targets)


def _batches(
    requests: list[Request], groups: list[list[int]], n_requests: int
) -> list[list[list[int]]]:
    """Groups of similar length together, about `n_requests` requests in each batch."""

    def length(group: list[int]) -> int:
        context = len(requests[group[0]][1])
        return context + sum(len(requests[index][2]) for index in group)

    batches: list[list[list[int]]] = []
    room = 0
    # Longest first, so that a lack of memory shows at once.
    for group in sorted(groups, key=length, reverse=True):
        if room < len(group):
            batches.append([])
            room = max(n_requests, len(group))
        batches[-1].append(group)
        room -= len(group)
    return batches


@torch.no_grad()
def _packed_answers(model: Any, packed: Sequence[_Packed]) -> list[Answer]:
    """The answers to every continuation of every row, in order."""
    ids, positions, blocks = (
        nn.utils.rnn.pad_sequence(
            [torch.tensor(getattr(row, name)) for row in packed],
            batch_first=True,
            padding_value=padding,
        )
        for name, padding in (("ids", 0), ("positions", 0), ("blocks", -1))
    )
    states = final_states(
        model,
        ids,
        position_ids=positions,
        attention_mask=_attention_mask(blocks, model.dtype),
    )
    predicts = [torch.tensor(_flat(row.predicts)) for row in packed]
    rows = torch.cat([s[p.to(s.device)] for s, p in zip(states, predicts, strict=True)])
    return _answers(model, rows, [own for row in packed for own in row.targets])


def _row(request: Request, max_length: int) -> list[int]:
    """What the model is fed of a request: all but the last token, cut from the left."""
    return [*request[1], *request[2]][-(max_length + 1) : -1]


def _padded(rows: Sequence[list[int]]) -> torch.Tensor:
    """Rows with zeros to their right, to at least two tokens: (B, L)."""
    length = max(2, *map(len, rows))
    return torch.tensor([row + [0] * (length - len(row)) for row in rows])


def _within(
    n_tokens: int, batches: Sequence[list[int]], rows: Sequence[list[int]]
) -> Iterator[list[list[int]]]:
    """Groups of consecutive batches of at most `n_tokens` tokens, or of one batch."""
    group: list[list[int]] = []
    room = n_tokens
    for batch in batches:
        size = len(batch) * len(rows[batch[0]])  # the longest
        if group and size > room:
            yield group
            group, room = [], n_tokens
        group.append(batch)
        room -= size
    if group:
        yield group


def _answers(
    model: nn.Module, rows: torch.Tensor, continuations: Sequence[list[int]]
) -> list[Answer]:
    """The answers to continuations from the states (n, d_model) before their tokens."""
    targets = torch.tensor(_flat(continuations), device=rows.device)
    log_p, greedy = _score(model, rows, targets)
    sizes = [len(continuation) for continuation in continuations]
    return [
        (float(values.sum()), bool(hits.all()))
        for values, hits in zip(log_p.split(sizes), greedy.split(sizes), strict=True)
    ]


def _score(
    model: nn.Module, rows: torch.Tensor, targets: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability of each target, and whether it is the most probable token."""
    log_p, greedy, start = [], [], 0
    for chunk in iter_log_probs(model, rows):
        wanted = targets[start : start + len(chunk)].to(chunk.device)
        log_p.append(chunk.gather(1, wanted[:, None])[:, 0].double().cpu())
        greedy.append((chunk.argmax(-1) == wanted).cpu())
        start += len(chunk)
    return torch.cat(log_p), torch.cat(greedy)


def _flat(lists: Sequence[list[int]]) -> list[int]:
    return list(itertools.chain.from_iterable(lists))


def _attention_mask(blocks: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The additive attention mask: 0 where a token may attend.

    Shapes: blocks (B, L); result (B, 1, L, L).
    """
    same = blocks[:, :, None] == blocks[:, None, :]
    context = blocks[:, None, :] == 0
    earlier = torch.ones(blocks.shape[1], blocks.shape[1], dtype=torch.bool).tril()
    allowed = (same | context) & earlier
    hidden = torch.zeros(allowed.shape, dtype=dtype)
    return hidden.masked_fill(~allowed, torch.finfo(dtype).min)[:, None]
