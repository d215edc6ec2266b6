"""Second moments of the routed activations, for closed-form compensation.

They take one forward pass without gradients. The sums are those of the dense model, so
that the same ones serve for every mask and every ratio.

Shapes: E n_experts, I d_inter, F = E · I features of a layer, n routed rows of a call.
Letters: h atom activation, p routing weight; the features of a token are p · h for the
experts that it is routed to, and 0 for all others.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from heapr_lab.errors import CoverageError, SpecError
from heapr_lab.models.backend import backend_of
from heapr_lab.models.experts import ExpertsLayer, find_experts
from heapr_lab.models.hooks import observed
from heapr_lab.models.identity import refuse_autocast
from heapr_lab.models.likelihood import check_fits, final_states
from heapr_lab.models.modes import evaluating
from heapr_lab.models.ragged_experts import normalises
from heapr_lab.progress import Progress
from heapr_lab.streaming.layerwise import LayerByLayer, walk_over
from heapr_lab.text.calibration import CalibrationSet

SPANS = ("expert", "layer")
FIT, HELD_OUT = 0, 1
_LARGEST_LAYER = 4096
"""Most features for which products across a layer's experts are the default."""
_AT_ONCE = 4 * 2**30
"""Bytes of sums that are in memory at once."""
_TOKENS_AT_ONCE = 4096


@dataclass(frozen=True)
class LayerGrams:
    """Sums over the calibration tokens of one layer, separately for two parts."""

    span: str
    """`expert`: a block for each expert; `layer`: also products across experts."""
    sums: torch.Tensor
    """Σ φ φᵀ, float64: (2, E, I, I) for `expert`, (2, 1, F, F) for `layer`."""
    tokens: torch.Tensor
    """Tokens routed to each expert, (2, E)."""

    @property
    def total(self) -> torch.Tensor:
        """Sums over all tokens, (E, I, I) or (1, F, F)."""
        return self.sums.sum(0)

    def within_experts(self) -> "LayerGrams":
        """The same sums without the products across experts."""
        if self.span == "expert":
            return self
        n_experts = self.tokens.shape[1]
        blocks = (
            self.sums[:, 0].unflatten(2, (n_experts, -1)).unflatten(1, (n_experts, -1))
        )
        diagonal = blocks.diagonal(dim1=1, dim2=3).movedim(-1, 1)  # (2, E, I, I)
        return LayerGrams("expert", diagonal.contiguous(), self.tokens)


class _Collector:
    """Sums one layer's products during forwards."""

    def __init__(self, layer: ExpertsLayer, span: str) -> None:
        self.n_experts, self.d_inter = layer.n_experts, layer.d_inter
        self.span = span
        self.part = FIT
        self.calls = 0
        n_blocks, size = sizes_of(layer, span)
        # On the device, to avoid waiting for transfers; moved once, at the end.
        wide = torch.float32 if layer.device.type == "mps" else torch.float64
        self.sums = torch.zeros(
            2, n_blocks, size, size, dtype=wide, device=layer.device
        )
        self.tokens = torch.zeros(2, self.n_experts, dtype=torch.long)

    def observe(
        self, h: torch.Tensor, *, p: torch.Tensor, rows: torch.Tensor, tokens: list[int]
    ) -> None:
        """Add the products of one forward."""
        wide = torch.promote_types(h.dtype, torch.float32)
        features = (h.detach().to(wide) * p.detach().to(wide)[:, None]).split(tokens)
        self.calls += 1
        self.tokens[self.part] += torch.tensor(tokens)
        into = self.sums[self.part]
        if self.span == "expert":
            for expert, phi in enumerate(features):
                if len(phi):
                    into[expert] += phi.T @ phi
            return
        blocks = into[0].view(2 * (self.n_experts, self.d_inter))  # (E, I, E, I)
        for a, b, ours, theirs in _pairs(features, rows.split(tokens)):
            product = ours.T @ theirs
            blocks[a, :, b] += product
            if a != b:
                blocks[b, :, a] += product.T

    def finished(self, layer: ExpertsLayer, calls: int) -> LayerGrams:
        """The sums of all `calls` forwards.

        Raises:
            CoverageError: the layer did not take part in all of them.
        """
        if self.calls != calls:
            raise CoverageError(
                f"layer {layer.layer} took part in {self.calls} of {calls} forwards, "
                "expected all"
            )
        # Where solves are fastest, but for devices without float64.
        wide = (
            self.sums if self.sums.dtype == torch.float64 else self.sums.cpu().double()
        )
        return LayerGrams(self.span, wide, self.tokens)


def _pairs(
    features: tuple[torch.Tensor, ...], rows: tuple[torch.Tensor, ...]
) -> Iterator[tuple[int, int, torch.Tensor, torch.Tensor]]:
    """Each pair of experts, with their rows for the tokens that are routed to both.

    A token has few experts, so this is much cheaper than products of all features.
    """
    n_tokens = 1 + max(int(tokens.max()) for tokens in rows if len(tokens))
    for a, ours in enumerate(rows):
        if not len(ours):
            continue
        yield a, a, features[a], features[a]
        where = ours.new_full((n_tokens,), -1)
        where[ours] = torch.arange(len(ours), device=ours.device)
        for b in range(a + 1, len(rows)):
            places = where[rows[b]]
            shared = places >= 0
            if shared.any():
                yield a, b, features[a][places[shared]], features[b][shared]


def sizes_of(layer: ExpertsLayer, span: str) -> tuple[int, int]:
    """Number of blocks in the sums of a layer, and their size.

    Raises:
        SpecError: there is no such span.
    """
    if span not in SPANS:
        raise SpecError(f"span is {span!r}, expected one of {', '.join(SPANS)}")
    if span == "expert":
        return layer.n_experts, layer.d_inter
    return 1, layer.n_experts * layer.d_inter


def bytes_of_sums(layer: ExpertsLayer, span: str) -> int:
    """Bytes of `LayerGrams.sums` of a layer.

    Raises:
        SpecError: there is no such span.
    """
    n_blocks, size = sizes_of(layer, span)
    return 2 * 8 * n_blocks * size * size


def default_span(layers: Sequence[ExpertsLayer]) -> str:
    """`layer` if the products of all its atoms are few enough, else `expert`.

    Experts whose outputs are normalised before they are summed cannot compensate for
    each other linearly.
    """
    largest = max(layer.n_experts * layer.d_inter for layer in layers)
    normed = any(normalises(layer.module) for layer in layers)
    return "layer" if largest <= _LARGEST_LAYER and not normed else "expert"


def fits_in_memory(layers: Sequence[ExpertsLayer], span: str) -> bool:
    """Whether the sums of all layers are kept in memory at once, below 4 GiB."""
    return len(_groups(layers, span)) == 1


def _groups(layers: Sequence[ExpertsLayer], span: str) -> list[list[ExpertsLayer]]:
    """Groups of consecutive layers whose sums are in memory at once."""
    groups: list[list[ExpertsLayer]] = []
    room = 0
    for layer in layers:
        needed = bytes_of_sums(layer, span)
        if needed > room:
            groups.append([])
            room = _AT_ONCE
        groups[-1].append(layer)
        room -= needed
    return groups


def collect_grams(
    model: nn.Module,
    calibration: CalibrationSet,
    *,
    span: str = "expert",
    layers: list[ExpertsLayer] | None = None,
    progress: Progress | None = None,
) -> dict[int, LayerGrams]:
    """Sum the products of routed activations over `calibration`, by layer.

    Every fourth window is summed separately, as held-out tokens. The sums of all layers
    are in memory at once; `iter_grams` needs memory for one layer only.

    Args:
        model: any transformers causal language model with fused experts.
        calibration: at least two windows.
        span: which features are multiplied, see `LayerGrams`.
        layers: those to measure; by default all.
        progress: called after each batch with (windows done, total windows).

    Raises:
        SpecError: there is only one window, no such span, or autocast is on.
        CoverageError: a layer did not take part in a forward.
    """
    chosen = find_experts(model) if layers is None else layers
    _check(model, calibration)
    collectors = [_Collector(layer, span) for layer in chosen]
    done = 0
    with evaluating(model), observed(chosen, collectors):
        for part, ids in _batches(calibration):
            for collector in collectors:
                collector.part = part
            final_states(model, ids)
            done += len(ids)
            if progress is not None:
                progress(done, calibration.n_sequences)
    calls = len(list(_batches(calibration)))
    return {
        layer.layer: collector.finished(layer, calls)
        for layer, collector in zip(chosen, collectors, strict=True)
    }


def iter_grams(
    model: nn.Module,
    calibration: CalibrationSet,
    *,
    span: str,
    progress: Progress | None = None,
) -> Iterator[tuple[ExpertsLayer, LayerGrams]]:
    """The sums of one layer after the other, as `collect_grams` computes them.

    If the sums of all layers fit into 4 GiB, they come from one forward pass. Else
    layers are run one by one, keeping the inputs of each: again the arithmetic of one
    forward pass, with the sums of one layer at a time. If the layers of a model cannot
    be run separately, each group of layers that fits takes a forward pass, and a
    warning is logged.

    Arguments and errors are those of `collect_grams`; progress is always reported in
    windows of one pass.

    Raises:
        LayoutError: the model is streamed, and its layers cannot be run one by one.
    """
    layers = find_experts(model)
    _check(model, calibration)
    groups = _groups(layers, span)
    if len(groups) > 1 or not backend_of(model).runs_whole:
        batches = [ids for _, ids in _batches(calibration)]
        walk = walk_over(model, batches, n_passes=len(groups))
        if walk is not None:
            yield from _stepped(model, calibration, walk, layers, span, progress)
            return
    for number, group in enumerate(groups):

        def report(done: int, total: int, number: int = number) -> None:
            if progress is not None:
                progress((number * total + done) // len(groups), total)

        grams = collect_grams(
            model, calibration, span=span, layers=group, progress=report
        )
        yield from ((layer, grams[layer.layer]) for layer in group)


def _stepped(
    model: nn.Module,
    calibration: CalibrationSet,
    walk: LayerByLayer,
    layers: Sequence[ExpertsLayer],
    span: str,
    progress: Progress | None,
) -> Iterator[tuple[ExpertsLayer, LayerGrams]]:
    """The sums of each layer, computed by running its inputs through it."""
    with_experts = {layer.layer: layer for layer in layers}
    parts = [part for part, _ in _batches(calibration)]
    for number, run in walk.layers():
        watched = [with_experts[number]] if number in with_experts else []
        collectors = [_Collector(layer, span) for layer in watched]
        with evaluating(model), observed(watched, collectors):
            for part in parts:
                for collector in collectors:
                    collector.part = part
                next(run)
        if progress is not None:
            total = calibration.n_sequences
            progress((number + 1) * total // walk.n_layers, total)
        while collectors:  # those of the layer before are dropped here
            yield watched[0], collectors.pop().finished(watched[0], len(parts))


def _check(model: nn.Module, calibration: CalibrationSet) -> None:
    """Check that the sums can be computed, in the model's own dtype.

    Raises:
        SpecError: there is only one window, autocast is on, or the model has no such
            tokens.
    """
    refuse_autocast(model)
    check_fits(model, calibration.ids)
    if calibration.n_sequences < 2:
        raise SpecError(
            f"{calibration.n_sequences} windows, expected at least 2, of which one is "
            "held out: give more text"
        )


def _batches(calibration: CalibrationSet) -> Iterator[tuple[int, torch.Tensor]]:
    """Batches of windows: the part that they belong to, and their ids."""
    size = max(1, _TOKENS_AT_ONCE // calibration.seq_len)
    for part, windows in zip((FIT, HELD_OUT), calibration.split(), strict=True):
        ids: Any
        for ids in windows.ids.split(size):
            yield part, ids
