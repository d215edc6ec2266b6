"""Second moments of the routed activations, for closed-form compensation.

They take one forward pass without gradients. The sums are those of the dense model, so
that the same ones serve for every mask and every ratio. Those of a streamed model, and
its new weights, are kept as the states of its passes are: in memory up to the budget of
the model, in files beyond it, which are removed with the objects here.

Shapes: E n_experts, I d_inter, F = E · I features of a layer, n routed rows of a call.
Letters: h atom activation, p routing weight; the features of a token are p · h for the
experts that it is routed to, and 0 for all others.
"""

import functools
import itertools
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from heapr_lab.errors import LayoutError, SpecError, one_of
from heapr_lab.models.experts import ExpertsLayer, checked_norms, find_experts
from heapr_lab.models.hooks import Routed, observed
from heapr_lab.models.identity import refuse_autocast
from heapr_lab.models.likelihood import check_fits, input_device
from heapr_lab.models.ragged_experts import normalises
from heapr_lab.progress import Parts, Progress
from heapr_lab.refinement.expert_calls import watched
from heapr_lab.streaming.sweep_store import SweepStore, store_beside
from heapr_lab.text.calibration import CalibrationSet

SPANS = ("expert", "layer")
FIT, HELD_OUT = 0, 1
_LARGEST_LAYER = 4096
"""Most features for which products across a layer's experts are the default."""
_AT_ONCE = 4 * 2**30
"""Bytes of sums that are in memory at once."""
_TOKENS_AT_ONCE = 8192
_TIMES_ON_A_GPU = 2
"""So many times as many tokens at once: with few rows of an expert it waits for the
next launch."""
_SMALLEST_BLOCK = 256
"""Features of a block on the diagonal whose products are all computed."""
_numbers = itertools.count()


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


class _Collector:
    """Sums one layer's products during forwards, of which `n_fit` are to be fitted."""

    def __init__(self, layer: ExpertsLayer, *, span: str, n_fit: int) -> None:
        self.layer, self.span, self.n_fit, self.calls = layer, span, n_fit, 0
        n_blocks, size = sizes_of(layer, span)
        # On the device, to avoid waiting for transfers; moved once, at the end.
        wide = torch.float32 if layer.device.type == "mps" else torch.float64
        self.sums = torch.zeros(
            2, n_blocks, size, size, dtype=wide, device=layer.device
        )
        self.tokens = torch.zeros(2, layer.n_experts, dtype=torch.long)

    def __call__(self, call: Routed) -> None:
        """Add the products of one forward."""
        wide = torch.promote_types(call.h.dtype, torch.float32)
        weighted = call.h.detach().to(wide) * call.p.detach().to(wide)[:, None]
        features = weighted.split(call.tokens)
        part = FIT if self.calls < self.n_fit else HELD_OUT
        self.calls += 1
        self.tokens[part] += torch.tensor(call.tokens)
        into = self.sums[part]
        if self.span == "expert":
            for expert, phi in enumerate(features):
                if len(phi):
                    _add_upper(into[expert], phi)
            return
        sizes = self.layer.n_experts, self.layer.d_inter
        blocks = into[0].view(2 * sizes)  # (E, I, E, I)
        for a, b, ours, theirs in _pairs(features, call.rows.split(call.tokens)):
            product = ours.T @ theirs
            blocks[a, :, b] += product
            if a != b:
                blocks[b, :, a] += product.T

    def finished(self) -> LayerGrams:
        """The sums of all forwards."""
        if self.span == "expert":
            _mirror(self.sums)
        # Where solves are fastest, but for devices without float64.
        wide = (
            self.sums if self.sums.dtype == torch.float64 else self.sums.cpu().double()
        )
        return LayerGrams(self.span, wide, self.tokens)


def _add_upper(into: torch.Tensor, phi: torch.Tensor) -> None:
    """Add φᵀφ but for what lies left of blocks on the diagonal, until `_mirror`."""
    size = len(into)
    if size <= _SMALLEST_BLOCK:
        into += phi.T @ phi
        return
    half = size // 2
    left, right = phi[:, :half], phi[:, half:]
    _add_upper(into[:half, :half], left)
    into[:half, half:] += left.T @ right
    _add_upper(into[half:, half:], right)


def _mirror(sums: torch.Tensor) -> None:
    """Fill what `_add_upper` leaves out; sums (…, I, I) are symmetric."""
    size = sums.shape[-1]
    if size <= _SMALLEST_BLOCK:
        return
    half = size // 2
    sums[..., half:, :half] = sums[..., :half, half:].mT
    _mirror(sums[..., :half, :half])
    _mirror(sums[..., half:, half:])


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
    one_of(span, SPANS, name="span")
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


def checked_span(layers: Sequence[ExpertsLayer], span: str | None = None) -> str:
    """The span, or that by default, of layers whose sums serve to compensate.

    Raises:
        LayoutError: weights are offloaded, or not finite.
        SpecError: the span is "layer", but outputs have a norm.
    """
    span = span or default_span(layers)
    for layer in layers:
        if layer.device.type == "meta":
            raise LayoutError(f"{layer.name} is offloaded: load the whole model")
        checked_norms(layer)
        if span == "layer" and normalises(layer.module):
            raise SpecError(
                f"{layer.name} normalises each expert's output, so experts cannot "
                "compensate each other: give span='expert'"
            )
    return span


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


def iter_grams(
    model: nn.Module,
    calibration: CalibrationSet,
    *,
    span: str,
    progress: Progress | None = None,
) -> Iterator[tuple[ExpertsLayer, LayerGrams]]:
    """The products of routed activations, summed over `calibration`, layer by layer.

    Every fourth window is summed separately, as held-out tokens. If the sums of all
    layers fit into 4 GiB, they come from one forward pass. Else layers are run one by
    one, keeping the inputs of each: again the arithmetic of one forward pass, with the
    sums of one layer at a time. If the layers of a model cannot be run separately, each
    group of layers that fits takes a forward pass, and a warning is logged.

    Args:
        model: any transformers causal language model with fused experts.
        calibration: at least two windows.
        span: which features are multiplied, see `LayerGrams`.
        progress: called with (windows done, windows in all), of one pass.

    Raises:
        SpecError: there is only one window, no such span, autocast is on, or a token is
            not in the vocabulary.
        CoverageError: a layer did not take part in a forward.
        LayoutError: the model is streamed, and its layers cannot be run one by one.
    """
    refuse_autocast(model)
    check_fits(model, calibration.ids)
    times = _TIMES_ON_A_GPU if input_device(model).type == "cuda" else 1
    size = max(1, times * _TOKENS_AT_ONCE // calibration.seq_len)
    fit, held_out = (windows.ids.split(size) for windows in calibration.split())
    groups = _groups(find_experts(model), span)
    batches = [*fit, *held_out]

    collector = functools.partial(_Collector, span=span, n_fit=len(fit))

    report = Parts(calibration.n_sequences, progress).part(calibration.n_sequences)
    yield from watched(model, batches, groups, collector, observed, report)


# --- layers of a streamed model ---------------------------------------------------


class StoredLayers(Mapping[int, torch.Tensor]):
    """A tensor by layer, of which the last one that was asked for is in memory."""

    def __init__(self, store: SweepStore, kind: str) -> None:
        """Nothing is kept yet; what is, leaves the store with this object."""
        self._store, self._stem = store, f"{kind}-{next(_numbers)}-"
        self._numbers: list[int] = []
        self._last: Mapping[int, torch.Tensor] = {}
        weakref.finalize(self, store.drop, self._stem)

    def __getitem__(self, number: int) -> torch.Tensor:
        if number not in self._numbers:
            raise KeyError(number)
        last = self._last
        if number not in last:
            self._last = {}  # before the next one is read
            last = self._last = {number: self._store.get(f"{self._stem}{number}")[""]}
        return last[number]

    def __setitem__(self, number: int, tensor: torch.Tensor) -> None:
        self._store.put(f"{self._stem}{number}", {"": tensor})
        self._last = {}
        if number not in self._numbers:
            self._numbers.append(number)

    def __iter__(self) -> Iterator[int]:
        return iter(self._numbers)

    def __len__(self) -> int:
        return len(self._numbers)


ByLayer = dict[int, torch.Tensor] | StoredLayers
"""Tensors by layer, to which those of further layers can be added."""


def by_layer(store: SweepStore | None, kind: str) -> ByLayer:
    """A place for a tensor of each layer: `sums`, or new `down` projections."""
    return {} if store is None else StoredLayers(store, kind)


def layer_store(
    model: nn.Module,
    layers: Sequence[ExpertsLayer],
    *,
    span: str | None,
    copies: int = 1,
) -> SweepStore | None:
    """Where the layers of a streamed model are kept; None if it is in memory.

    Args:
        model: any model.
        layers: all of its layers.
        span: the span of the sums that will be kept; None for new weights alone.
        copies: as many tensors as large as W_down are kept of a layer.

    Raises:
        SpecError: there is no room for what will be kept.
    """
    store = store_beside(model)
    if store is None:
        return None
    n_downs = copies * sum(layer.module.down_proj.nbytes for layer in layers)
    n_sums = sum(bytes_of_sums(layer, span) for layer in layers) if span else 0
    what = "the sums and new weights" if span else "the new weights"
    store.check_room(n_sums + n_downs, what=f"{what} of all layers")
    return store
