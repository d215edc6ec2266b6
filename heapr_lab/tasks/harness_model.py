"""The harness's own model class, except that the choices of an item share prefixes.

A four-way item is four requests, which begin alike. `PackingHFLM` packs them into one
row as a tree: a prefix that they share is there once, and each token attends to those
before it in its own request, at the position it would have alone. This is exact for
models in which every layer is ordinary softmax attention. The first item is also
computed by the harness; if the two differ, or for models of another kind, each request
is a row of its own.

Rows of similar length are run together. Where layers run one after the other, each on
many such batches, each request is a row of its own.

Importing this module imports the harness.
"""

import copy
import itertools
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from lm_eval.models.huggingface import HFLM
from torch import nn

from heapr_lab.models.backend import backend_of
from heapr_lab.models.likelihood import (
    final_states,
    input_device,
    iter_log_probs,
    states_of_all,
)
from heapr_lab.models.memory import halving_batches, tokens_at_first
from heapr_lab.progress import Progress, no_report

logger = logging.getLogger(__name__)

Request = tuple[Any, list[int], list[int]]
"""(key, token ids of the context, token ids of the continuation)."""
Answer = tuple[float, bool]
"""Log-likelihood in nats, and whether greedy decoding yields the continuation."""

_TOKENS_ON_CPU = 1024
"""Tokens in a batch, padding included.

A CPU is not faster with more, and rows of more different lengths need more padding.
"""
_TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-4}
_COARSE = 0.02
"""Relative tolerance of the first item in half precision."""


class PackingHFLM(HFLM):
    """HFLM of a loaded model, without progress bars and with shared prefixes."""

    def __init__(
        self, model: nn.Module, tokenizer: Any, *, progress: Progress | None = None
    ) -> None:
        super().__init__(
            pretrained=model,
            tokenizer=copy.deepcopy(tokenizer),  # it is given a padding token
            softmax_dtype=torch.float32,  # else bfloat16 rounds the likelihoods
        )
        self.tokens_at_once = tokens_at_first(model, on_cpu=_TOKENS_ON_CPU)
        self.progress = progress or no_report
        self.packs = backend_of(model).runs_whole and _attends_plainly(model)
        self._items: list[Any] = []

    def loglikelihood(self, requests: Any, disable_tqdm: bool = True) -> Any:
        """(log-likelihood, is greedy) of each request, in order."""
        del disable_tqdm  # the harness would show its bars by default
        self._items = [(request.task_name, request.doc_id) for request in requests]
        return super().loglikelihood(requests, disable_tqdm=True)

    @torch.no_grad()
    def _loglikelihood_tokens(
        self,
        requests: list[Request],
        disable_tqdm: bool = True,
        override_bs: Any = None,
    ) -> list[Answer]:
        del disable_tqdm, override_bs
        known = len(self._items) == len(requests)  # the windows of a text are others
        rows = self._rows(requests, self._items if known else range(len(requests)))
        report = self.progress if known else no_report
        answers: dict[int, Answer] = {}

        def run(size: int) -> None:
            left = [row for row in rows if row.requests[0] not in answers]
            for batch, states in self._states(_batches(left, size)):
                for index, answer in _answers(self.model, batch, states):
                    answers[index] = answer
                    report(len(answers), len(requests))

        halving_batches(run, self.tokens_at_once, model=self.model)
        return [answers[index] for index in range(len(requests))]

    def _rows(self, requests: list[Request], items: Sequence[Any]) -> list["_Row"]:
        """The rows of all requests: one for each item, or one for each request."""
        runs = itertools.groupby(range(len(requests)), key=items.__getitem__)
        groups = [list(run) for _, run in runs]
        if not self._packs_well(requests, groups):
            groups = [[index] for index in range(len(requests))]
        return [_row(requests, group, self.max_length) for group in groups]

    def _packs_well(self, requests: list[Request], groups: list[list[int]]) -> bool:
        """Whether requests are packed: the first group of several decides for a model.

        Masks change its experts, and not what a token attends to.
        """
        several = [group for group in groups if len(group) > 1]
        if self.packs and several and self.model not in _packing:
            some = [requests[index] for index in several[0]]
            _packing[self.model] = self._agrees(some)
        self.packs = self.packs and _packing.get(self.model, True)
        return self.packs

    def _agrees(self, some: list[Request]) -> bool:
        """Whether packing gives the same answers as the harness."""
        row = _row(some, range(len(some)), self.max_length)
        ours = [answer for _, answer in _answers(self.model, [row], self._run([row]))]
        theirs = super()._loglikelihood_tokens(some, disable_tqdm=True)
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

    def _states(
        self, batches: "list[list[_Row]]"
    ) -> "Iterator[tuple[list[_Row], torch.Tensor]]":
        """Each batch with its final states (B, L, d_model)."""
        states: Iterator[torch.Tensor] = map(self._run, batches)
        if not self.packs:
            states = states_of_all(self.model, [*map(_padded, batches)])
        for batch, of_batch in zip(batches, states, strict=True):
            yield batch, of_batch.to(input_device(self.model))

    def _run(self, batch: "list[_Row]") -> torch.Tensor:
        ids = _padded(batch)
        seen = _seen(batch, ids.shape[1])
        hidden = torch.zeros(seen.shape, dtype=self.model.dtype)
        hidden = hidden.masked_fill(~seen, torch.finfo(hidden.dtype).min)
        return final_states(
            self.model,
            ids,
            position_ids=seen.sum(2) - 1,
            attention_mask=hidden[:, None],
        )


_packing: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()
"""Whether packed requests get the harness's answers, for models that were asked."""


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
class _Row:
    """What the model is fed of one or several requests, as a tree of tokens."""

    requests: list[int]
    """Numbers of the requests."""
    ids: list[int]
    parents: list[int]
    """For each token, the one before it, which is further left; -1 for none."""
    predicts: list[list[int]]
    """For each request, the tokens that predict those of its continuation."""
    targets: list[list[int]]
    """For each request, its continuation."""


def _row(requests: list[Request], group: Sequence[int], max_length: int) -> _Row:
    """All but the last token of each request of a group, cut from the left."""
    tokens: dict[tuple[int, int], int] = {}  # (token before it, id) to its place
    predicts, targets = [], []
    for _, context, continuation in (requests[index] for index in group):
        place, path = -1, []
        for token in [*context, *continuation][-(max_length + 1) : -1]:
            place = tokens.setdefault((place, token), len(tokens))
            path.append(place)
        predicts.append(path[-len(continuation) :])
        targets.append(continuation)
    parents, ids = zip(*tokens, strict=True)
    return _Row(list(group), list(ids), list(parents), predicts, targets)


def _batches(rows: list[_Row], n_tokens: int) -> list[list[_Row]]:
    """Rows of similar length together, at most `n_tokens` padded ones in each batch."""
    batches: list[list[_Row]] = []
    # Longest first, so that a lack of memory shows at once; equal ones are together.
    for row in sorted(rows, key=lambda row: (-len(row.ids), row.ids)):
        if not batches or (1 + len(batches[-1])) * len(batches[-1][0].ids) > n_tokens:
            batches.append([])
        batches[-1].append(row)
    return batches


def _padded(batch: Sequence[_Row]) -> torch.Tensor:
    """The ids with zeros to their right, to at least two tokens: (B, L)."""
    length = max(2, *(len(row.ids) for row in batch))
    return torch.tensor([row.ids + [0] * (length - len(row.ids)) for row in batch])


def _seen(batch: Sequence[_Row], length: int) -> torch.Tensor:
    """Whether a token attends to another: itself and those before it, (B, L, L)."""
    seen = np.tile(np.eye(length, dtype=bool), (len(batch), 1, 1))
    for mask, row in zip(seen, batch, strict=True):
        for token, parent in enumerate(row.parents):
            if parent >= 0:
                mask[token] |= mask[parent]
    return torch.from_numpy(seen)


def _answers(
    model: nn.Module, batch: Sequence[_Row], states: torch.Tensor
) -> Iterator[tuple[int, Answer]]:
    """The number of each request of a batch, and its answer from the final states."""
    length = states.shape[1]
    predicts = [
        number * length + place
        for number, row in enumerate(batch)
        for places in row.predicts
        for place in places
    ]
    targets = [target for row in batch for target in row.targets]
    wanted = torch.tensor(list(itertools.chain.from_iterable(targets)))
    log_p, greedy = _score(model, states.flatten(0, 1), torch.tensor(predicts), wanted)
    sizes = [len(continuation) for continuation in targets]
    scores = zip(log_p.split(sizes), greedy.split(sizes), strict=True)
    indices = [index for row in batch for index in row.requests]
    for index, (values, hits) in zip(indices, scores, strict=True):
        yield index, (float(values.sum()), bool(hits.all()))


def _score(
    model: nn.Module,
    states: torch.Tensor,
    places: torch.Tensor,
    targets: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability of each target, and whether it is the most probable token.

    Shapes: states (n, d_model); places, targets and both results (m,), where several
    targets may be predicted at one place.
    """
    unique, rows = torch.unique(places, return_inverse=True)
    log_p = torch.empty(len(targets), dtype=torch.float64)
    greedy = torch.empty(len(targets), dtype=torch.bool)
    start = 0
    for chunk in iter_log_probs(model, states[unique.to(states.device)]):
        index = ((rows >= start) & (rows < start + len(chunk))).nonzero()[:, 0]
        row, target = ((x[index]).to(chunk.device) for x in (rows - start, targets))
        log_p[index] = chunk[row, target].double().cpu()
        greedy[index] = (chunk.argmax(-1)[row] == target).cpu()
        start += len(chunk)
    return log_p, greedy
