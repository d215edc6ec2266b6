"""Compensate pruned atoms by least squares: a new W_down in closed form.

Removing atoms R leaves the columns K of W_down. The W' on K that minimises the squared
error of the layer's output over the calibration tokens is

    min ‖Φ_K W'ᵀ − Φ Wᵀ‖² + λ s ‖W' − W_K‖²,   C = Φᵀ Φ,   s = mean diagonal of C_KK
    W'_K = W_K + W_R C_RK (C_KK + λ s I)⁻¹

with features Φ that are routing weight times activation (`activation_grams`). The
ridge λ pulls towards the original weights, so no sum of squares over the calibration
tokens ever increases; it is chosen on tokens held out from the fit. Where no ridge has
a smaller error on them than the original weights, these are kept.

Source: least-squares reconstruction as in OBS (Hassibi & Stork 1993) and CORP-like
structured pruning, with HEAPr's atoms (its appendix leaves this to future work).

Shapes: E n_experts, I d_inter, D d_expert, F features of a problem: I, or E · I.
"""

import hashlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch
from torch import nn

from heapr_lab.errors import LayoutError, SpecError
from heapr_lab.importance.activation_grams import (
    FIT,
    HELD_OUT,
    LayerGrams,
    default_span,
    iter_grams,
)
from heapr_lab.models.experts import ExpertsLayer, find_experts, refuse_broken
from heapr_lab.progress import Progress
from heapr_lab.pruning.masks import KeepMask
from heapr_lab.pruning.surgery import keeps_of, prune
from heapr_lab.repr_html import card_html
from heapr_lab.text.calibration import CalibrationSet

logger = logging.getLogger(__name__)

RIDGES = (1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0)
"""The ridges tried, relative to the mean diagonal."""


@dataclass(frozen=True, eq=False, repr=False)
class Compensation:
    """New columns of W_down for one mask."""

    downs: Mapping[int, torch.Tensor]
    """By layer (E, D, I), 0 for pruned atoms, in the model's dtype."""
    report: pd.DataFrame
    """By layer: ridge, whether the layer was `changed` (not where no ridge has a
    smaller error on held-out tokens than the original weights), `dropped` and
    `compensated` (relative squared error of the output on these, without and with
    compensation), `untouched` experts, and the number of `singular` solves, for which
    Cholesky failed."""
    settings: dict[str, Any]
    """The settings that determine it besides model, mask and text, as plain data."""

    def _facts(self) -> dict[str, str]:
        before, after = (self.report[n].mean() for n in ("dropped", "compensated"))
        return {
            "layers": f"{len(self.report)}",
            "span": str(self.settings["span"]),
            "error of the output, dropped → compensated": f"{before:.3g} → {after:.3g}",
        }

    def __repr__(self) -> str:
        facts = ", ".join(f"{name} {value}" for name, value in self._facts().items())
        return f"Compensation({facts})"

    def _repr_html_(self) -> str:
        return card_html("Compensation", self._facts())

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the new weights."""
        sha = hashlib.sha256()
        for layer, down in self.downs.items():
            sha.update(repr((layer, tuple(down.shape), str(down.dtype))).encode())
            words = down.detach().cpu().contiguous().view(torch.uint8)
            sha.update(words.numpy().tobytes())
        return sha.hexdigest()


def compensate(
    model: nn.Module,
    keep: KeepMask,
    calibration: CalibrationSet,
    *,
    ridge: float | None = None,
    span: str | None = None,
    progress: Progress | None = None,
) -> nn.Module:
    """Prune `model` and compensate the pruned atoms by least squares.

    Args:
        model: the dense model, which is not changed.
        keep: the kept atoms.
        calibration: the windows whose activations are fitted.
        ridge: relative to the mean diagonal; by default chosen for each layer on
            held-out tokens.
        span: "expert" compensates within each expert; with "layer" the experts of a
            layer compensate each other, where a token is routed to both. By default
            "layer" where a layer has at most 4096 atoms and the experts' outputs are
            summed without a norm of their own.
        progress: called with (windows done, windows in all).

    Returns:
        The pruned model, as `prune` makes it. `heapr_report` has the errors, by layer.

    Raises:
        SpecError: `keep` is of another model, the ridge is negative, or the span is
            "layer" for experts with a norm on their output.
        LayoutError: weights are offloaded, or not finite.

    Example:
        >>> smaller = compensate(model, keep, calibration)  # doctest: +SKIP
    """
    found = fit_compensation(
        model, keep, calibration, ridge=ridge, span=span, progress=progress
    )
    pruned = prune(model, keep, downs=found.downs)
    pruned.__dict__["heapr_report"] = found.report
    pruned.__dict__["heapr_weights"] = describe_weights(found, calibration)
    return pruned


def describe_weights(found: Compensation, calibration: CalibrationSet) -> str:
    """The description of the changed weights in a manifest."""
    unchanged = found.report.loc[~found.report["changed"], "layer"].tolist()
    but = f", except in layers {', '.join(map(str, unchanged))}" if unchanged else ""
    return (
        f"W_down compensated by least squares (span {found.settings['span']}) on "
        f"{calibration.n_sequences} windows of {calibration.seq_len} tokens of "
        f"{calibration.label}{but}; all else sliced, otherwise unchanged"
    )


def fit_compensation(
    model: nn.Module,
    keep: KeepMask,
    calibration: CalibrationSet,
    *,
    ridge: float | None = None,
    span: str | None = None,
    progress: Progress | None = None,
) -> Compensation:
    """The new W_down alone, to evaluate with `masking(model, keep, downs)`.

    It costs one forward pass; `activation_grams.iter_grams` describes the case in which
    the sums of all layers together exceed 4 GiB.

    Arguments and errors are those of `compensate`.
    """
    layers = find_experts(model)
    keeps_of(layers, keep)  # checks, before the pass, that it is of this model
    span = span or default_span(layers)
    check_layers(layers, span)
    parts = [
        solve_layers([layer], keep, {layer.layer: grams}, ridge=ridge)
        for layer, grams in iter_grams(model, calibration, span=span, progress=progress)
    ]
    return Compensation(
        {k: down for part in parts for k, down in part.downs.items()},
        pd.concat([part.report for part in parts], ignore_index=True),
        parts[0].settings,
    )


def check_layers(layers: Sequence[ExpertsLayer], span: str) -> None:
    """Check that weights are on a device, and that outputs are linear in them.

    Raises:
        LayoutError: weights are offloaded, or not finite.
        SpecError: the span is "layer", but outputs have a norm.
    """
    for layer in layers:
        if layer.device.type == "meta":
            raise LayoutError(
                f"{layer.name} is offloaded, so its weights cannot be read: load the "
                "whole model onto one device"
            )
        refuse_broken(layer)
        if span == "layer" and layer.module.has_post_expert_norm:
            raise SpecError(
                f"{layer.name} normalises each expert's output, so experts cannot "
                "compensate each other: give span='expert'"
            )


def solve_layers(
    layers: Sequence[ExpertsLayer],
    keep: KeepMask,
    grams: Mapping[int, LayerGrams],
    *,
    ridge: float | None = None,
) -> Compensation:
    """New weights for any mask, from sums that were collected once.

    Raises:
        SpecError: the ridge is negative.
    """
    if ridge is not None and not ridge >= 0:
        raise SpecError(f"ridge is {ridge}, expected a number >= 0, or None")
    downs, rows = {}, []
    for layer in layers:
        kept = torch.from_numpy(keep.by_layer(layer.layer).copy())
        down, row = _solve_layer(layer, kept, grams[layer.layer], ridge)
        downs[layer.layer] = down
        rows.append({"layer": layer.layer, **row})
    span = next(iter(grams.values())).span
    return Compensation(downs, pd.DataFrame(rows), {"span": span, "ridge": ridge})


# --- one layer --------------------------------------------------------------------


@dataclass(frozen=True)
class _Normal:
    """Normal equations over some tokens, for a change X of the free columns."""

    A: torch.Tensor
    """Products of the free features, (f, f)."""
    wanted: torch.Tensor
    """Products of the free features with the output of the pruned ones, (f, D)."""
    dropped: float
    """Σ of squares of the output of the pruned features: the error without X."""

    def error(self, change: torch.Tensor) -> float:
        """Σ of squares of the error with the change X (f, D)."""
        gained = (change * (self.A @ change - 2 * self.wanted)).sum()
        return self.dropped + float(gained)

    def solve(self, ridge: float) -> tuple[torch.Tensor, bool]:
        """The optimal X (f, D) under the ridge; whether the solve was singular."""
        if not len(self.A):
            return self.wanted, False
        pull = ridge * self.A.diagonal().mean()
        return _solve(
            self.A + pull * torch.eye(len(self.A), dtype=self.A.dtype), self.wanted
        )

    def __add__(self, other: "_Normal") -> "_Normal":
        return _Normal(
            self.A + other.A, self.wanted + other.wanted, self.dropped + other.dropped
        )


@dataclass(frozen=True)
class _Problem:
    """Least squares of one expert, or of all experts of a layer."""

    weight: torch.Tensor
    """W_down of its features, (D, F) float64."""
    kept: torch.Tensor
    """Kept features, (F,) bool."""
    free: torch.Tensor
    """Indices of the kept features whose columns may change, (f,)."""
    fit: _Normal
    held_out: _Normal
    output: float
    """Σ of squares of the output itself over the held-out tokens."""

    @classmethod
    def of(
        cls,
        weight: torch.Tensor,
        kept: torch.Tensor,
        free: torch.Tensor,
        sums: torch.Tensor,
    ) -> "_Problem":
        """From weights (D, F), masks (F,) and both parts of the sums (2, F, F)."""
        numbers, gone = free.nonzero()[:, 0], (~kept).nonzero()[:, 0]
        lost = weight[:, gone]
        parts = []
        for part in (sums[FIT], sums[HELD_OUT]):
            rows = part[numbers]
            dropped = float(((lost @ part[gone][:, gone]) * lost).sum())
            parts.append(_Normal(rows[:, numbers], rows[:, gone] @ lost.T, dropped))
        output = float(((weight @ sums[HELD_OUT]) * weight).sum())
        return cls(weight, kept, numbers, parts[0], parts[1], output)

    @property
    def kept_weight(self) -> torch.Tensor:
        """The original weight (D, F), 0 for pruned features."""
        return torch.where(self.kept, self.weight, 0.0)

    def solved(self, ridge: float) -> tuple[torch.Tensor, bool]:
        """The new weight (D, F), fitted to all tokens; whether it was singular."""
        total = self.fit + self.held_out
        change, singular = total.solve(ridge)
        if total.error(change) > total.dropped:
            change = torch.zeros_like(change)  # rounding errors of a singular solve
        new = self.kept_weight
        new[:, self.free] += change.T
        return new, singular


def _solve(A: torch.Tensor, wanted: torch.Tensor) -> tuple[torch.Tensor, bool]:
    """A⁻¹ wanted by Cholesky, else by the pseudo-inverse; whether it was the latter."""
    factor, info = torch.linalg.cholesky_ex(A)
    if not int(info):
        found: torch.Tensor = torch.cholesky_solve(wanted, factor)
        if torch.isfinite(found).all():
            return found, False
    inverse = torch.linalg.pinv(A, hermitian=True)
    return inverse @ wanted, True


@torch.no_grad()
def _solve_layer(
    layer: ExpertsLayer, kept: torch.Tensor, grams: LayerGrams, ridge: float | None
) -> tuple[torch.Tensor, dict[str, Any]]:
    """The layer's new W_down (E, D, I), and its row of the report."""
    enough = grams.tokens.sum(0) >= kept.sum(1)  # (E,)
    problems = _problems(layer, kept, enough, grams)
    tried = RIDGES if ridge is None else (ridge,)
    errors = {ridge: _held_out_error(problems, ridge) for ridge in tried}
    chosen = min(errors, key=errors.__getitem__)
    dropped = sum(own.held_out.dropped for own in problems)
    # A ridge given by the caller is always used.
    changed = ridge is not None or errors[chosen] < dropped
    solved = [
        own.solved(chosen) if changed else (own.kept_weight, False) for own in problems
    ]
    weights, singular = [weight for weight, _ in solved], sum(n for _, n in solved)
    untouched = (~enough).nonzero()[:, 0].tolist()
    warnings = {
        "on held-out tokens no ridge has a smaller error than the original W_down, "
        "which is kept; give more text": dropped and not changed,
        f"{singular} of {len(problems)} solves are singular at ridge {chosen:g} and "
        "use the pseudo-inverse; give a larger ridge or more text": singular,
        f"experts {', '.join(map(str, untouched))} have fewer tokens than kept atoms "
        "and are not compensated; give more text": untouched,
    }
    for text in (text for text, holds in warnings.items() if holds):
        logger.warning("layer %d: %s", layer.layer, text)
    size = max(sum(own.output for own in problems), 1e-300)
    row = {
        "ridge": chosen,
        "changed": changed,
        "dropped": dropped / size,
        "compensated": (errors[chosen] if changed else dropped) / size,
        "untouched": untouched,
        "singular": singular,
    }
    joined = torch.stack(weights)  # (E, D, I) or (1, D, F)
    if grams.span == "layer":
        joined = joined[0].unflatten(1, (layer.n_experts, -1)).movedim(1, 0)
    return joined.to(layer.device, layer.dtype), row


def _problems(
    layer: ExpertsLayer, kept: torch.Tensor, enough: torch.Tensor, grams: LayerGrams
) -> list[_Problem]:
    down = layer.down.detach().to("cpu", torch.float64)  # (E, D, I)
    free = kept & enough[:, None]
    if grams.span == "layer":
        joined = down.movedim(0, 1).flatten(1)  # (D, F)
        flat = kept.flatten(), free.flatten()
        return [_Problem.of(joined, *flat, grams.sums[:, 0])]
    return [
        _Problem.of(down[e], kept[e], free[e], grams.sums[:, e])
        for e in range(layer.n_experts)
    ]


def _held_out_error(problems: list[_Problem], ridge: float) -> float:
    """Σ of squared errors on the held-out tokens, fitted to the others."""
    return sum(own.held_out.error(own.fit.solve(ridge)[0]) for own in problems)
