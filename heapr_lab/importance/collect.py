"""One forward and one backward pass per batch: every atom's statistics.

The loss is the sum over predicted tokens of -log p, so no statistic depends on the
batch size. No weight gradient is computed: parameters do not require grad, the
embedding's output does. Source: HEAPr, Algorithm 1, in the form that is derived in
`heapr_lab.importance`.
"""

import logging
import platform
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
import transformers
from torch import nn

from heapr_lab.errors import CoverageError, whole_number
from heapr_lab.importance.columns import atom_keys
from heapr_lab.importance.resuming import Ranks, SavedSums
from heapr_lab.importance.table import ImportanceTable
from heapr_lab.models.backend import backend_of
from heapr_lab.models.experts import ExpertsLayer, checked_norms, describe, find_experts
from heapr_lab.models.hooks import check_gradients, probed
from heapr_lab.models.identity import check_unchanged, identity_in_force, weights_state
from heapr_lab.models.likelihood import check_fits, input_device, token_nll
from heapr_lab.models.memory import in_batches
from heapr_lab.models.modes import differentiating
from heapr_lab.models.moments import LayerMoments
from heapr_lab.progress import Progress, no_report
from heapr_lab.storage.hashing import digest
from heapr_lab.text.calibration import CalibrationSet

logger = logging.getLogger(__name__)

_MOST_NAMED = 20
"""Experts that a warning names; a model may have tens of thousands."""

STATISTICS_SCHEMA = 1
"""Increased whenever the same input would give other numbers."""
_TOKENS_ON_CPU, _TOKENS_AND_LAYERS = 2048, 2**14
"""On a CPU, at most so many tokens in a batch, and so many tokens times layers: larger
batches take more memory and no less time, because what the backward pass keeps comes in
pages that are zeroed first."""


def statistics_spec(
    identity: dict[str, str], calibration: CalibrationSet
) -> dict[str, Any]:
    """Every field that determines the statistics: the key of the cache.

    `identity` is that of the model, from `identity.identity_in_force`.
    """
    return {
        "schema": STATISTICS_SCHEMA,
        "model": identity,
        "calibration": calibration.fingerprint,
    }


def collect_statistics(
    model: nn.Module,
    calibration: CalibrationSet,
    *,
    batch_size: int | None = None,
    progress: Progress | None = None,
    state: Path | None = None,
    ranks: Ranks | None = None,
) -> ImportanceTable:
    """Measure every atomic expert of `model` on `calibration`.

    Inside `surgery.masking` the masked model is measured, and the table's `spec` says
    so, so that the table is not mistaken for that of the dense model.

    Args:
        model: any transformers causal language model with fused experts; it is used in
            eval mode and is not changed.
        calibration: the windows to measure on.
        batch_size: windows per batch; by default chosen automatically, and halved
            whenever the device runs out of memory.
        progress: called after each batch with (windows done, total windows).
        state: a file in which an unfinished pass is saved, and from which it resumes;
            removed at the end. A pass over a streamed model has a folder beside it
            (`.sweeps`), and resumes at the layer that it had reached.
        ranks: the processes that measure the windows together, all of which call this
            and get the same table; progress and state are those of each one's part.

    Raises:
        SpecError: a token is not in the vocabulary, the batch size is not positive, or
            autocast or foreign hooks are active.
        LayoutError: an experts layer cannot be measured exactly (it is named).
        CoverageError: a layer did not take part in a pass.
        HeaprLabError: a gradient is not finite (layer and batch are named), or the
            weights changed during the pass, or another rank failed.
        CacheError: `state` belongs to another pass, or is damaged.
    """
    if batch_size is not None:  # before all weights are read for their hash
        whole_number(batch_size, name="batch_size")
    check_fits(model, calibration.ids)
    layers = find_experts(model)
    spec = statistics_spec(identity_in_force(model), calibration)
    _warn_of_repeats(calibration.window_fingerprints())
    share = range(calibration.n_sequences)
    if ranks is not None:
        ranks.check_same(digest(spec))
        share = ranks.share(calibration.n_sequences)
        state = None if state is None else ranks.own_state(state)
    run = _Pass(model, layers, calibration, spec, share, progress or no_report, state)
    n_layers = run.model.config.get_text_config().num_hidden_layers
    on_cpu = min(_TOKENS_ON_CPU, _TOKENS_AND_LAYERS // n_layers)
    in_batches(run.measure, model, run.ids, batch_size, on_cpu=on_cpu)
    if ranks is not None:
        ranks.combine([*run.probes.values()])
    table = _table(run)
    if state is not None:
        state.unlink(missing_ok=True)
    return table


@dataclass(eq=False)
class _Pass:
    """HEAPr's forward and backward pass over calibration windows.

    In memory a batch goes through all layers at a time, as in `batches`; the backend of
    a model on disk runs a layer at a time on all batches.
    """

    model: Any
    layers: list[ExpertsLayer]
    calibration: CalibrationSet
    spec: dict[str, Any]
    share: range
    """The windows that are measured here, of which there may be none."""
    progress: Progress
    state: Path | None
    batch_size: int = 0
    resumed_at: int = 0
    done: int = 0
    norms: dict[int, dict[str, torch.Tensor]] = field(default_factory=dict)
    """Squared norms of the weights of each layer's atoms."""
    probes: dict[int, LayerMoments] = field(default_factory=dict)
    """The sums of each layer."""

    def __post_init__(self) -> None:
        self.started = time.perf_counter()
        self.ids = self.calibration.ids[self.share.start : self.share.stop]
        self.key = digest(self.spec)  # by which a saved state is recognised
        self._weights = weights_state(self.model)

    def measure(self, batch_size: int) -> None:
        """Measure all windows not measured before; the probes then have the sums."""
        self.batch_size = batch_size
        with differentiating(self.model), probed(self.layers) as self.probes:
            self._saved = SavedSums(self, self._check_weights)
            self.done = self.resumed_at = self._saved.resume()
            backend_of(self.model).backward(self.model, self)
        self._check_weights()

    def batches(self) -> None:
        """HEAPr on a model in memory: each batch to its loss, and back once."""
        for layer in self.layers:
            self.weighed(layer.layer)
        embeddings = self.model.get_input_embeddings()
        with embeddings.register_forward_hook(_requiring_gradients):
            while self.done < len(self.ids):
                stop = min(self.done + self.batch_size, len(self.ids))
                windows = slice(self.done, stop)
                self.loss(windows).backward()  # and each layer's probe adds its sums
                for layer in self.layers:
                    self.check(layer.layer, windows)
                self.finish(stop)

    def loss(self, windows: slice, states: torch.Tensor | None = None) -> torch.Tensor:
        """The sum over the predicted tokens of some windows of -log p."""
        # A clone is no inference tensor, even if the ids are one.
        ids = self.ids[windows].clone().to(input_device(self.model))
        return token_nll(self.model, ids, states=states).sum()

    def weighed(self, layer: int) -> dict[str, torch.Tensor]:
        """The squared norms of a layer's weights, which are checked to be finite."""
        if layer not in self.norms:
            (experts,) = (e for e in self.layers if e.layer == layer)
            self.norms[layer] = checked_norms(experts)
        return self.norms[layer]

    def finish(self, stop: int, *, save: bool = False) -> None:
        """All windows before `stop` are measured."""
        self.done = stop
        self.progress(stop, len(self.ids))
        self._saved.save(now=save)

    def check(self, number: int, windows: slice) -> None:
        """Check what the probe of a layer has seen of a batch.

        Raises:
            CoverageError: not one backward pass.
            HeaprLabError: gradients that are not finite.
        """
        probe = self.probes[number]
        finite = torch.isfinite(probe.atoms["sum_hg2"]).all()
        first = self.share.start
        where = f"windows {first + windows.start} to {first + windows.stop - 1}"
        check_gradients(number, probe.times, finite=bool(finite), where=where)
        probe.times = 0

    def _check_weights(self) -> None:
        check_unchanged(self.model, self._weights)


def _requiring_gradients(
    _module: nn.Module, _args: Any, output: torch.Tensor
) -> torch.Tensor:
    """What embeddings return, with a gradient wherever gradients are computed."""
    return output.requires_grad_(torch.is_grad_enabled())


def _warn_of_repeats(windows: list[str]) -> None:
    n_repeats = len(windows) - len(set(windows))
    if n_repeats:
        logger.warning(
            "%d of %d calibration windows repeat another, and count as often",
            n_repeats, len(windows),
        )  # fmt: skip


# --- the table of a finished pass -------------------------------------------------


def _table(run: _Pass) -> ImportanceTable:
    """The table of a finished pass, which has every atom and every token."""
    table = ImportanceTable.from_frame(
        _rows(run),
        N=run.calibration.n_predicted,
        spec=run.spec,
        spec_hash=run.key,
        architecture=describe(run.model).to_dict(),
        provenance=_provenance(run),
    )
    check_coverage(table)
    _warn_of_underflow(table)
    return table


def _rows(run: _Pass) -> pd.DataFrame:
    """One row per atom, sorted by (layer, expert, atom).

    Columns are in float64 if the model is, else in float32.
    """
    exact = next(run.model.parameters()).dtype == torch.float64
    real = np.float64 if exact else np.float32
    parts = []
    for layer in run.layers:
        columns = atom_keys(layer.layer, layer.n_experts, layer.d_inter)
        sums = run.probes[layer.layer]
        tokens = np.repeat(sums.tokens.cpu().numpy(), layer.d_inter)
        columns["tokens"] = tokens.astype(np.int64)
        for name, tensor in (sums.atoms | run.weighed(layer.layer)).items():
            columns[name] = tensor.cpu().numpy().reshape(-1).astype(real)
        parts.append(pd.DataFrame(columns))
    return pd.concat(parts, ignore_index=True)


def check_coverage(table: ImportanceTable) -> None:
    """Check that all tokens were measured, before anything is written.

    Raises:
        CoverageError: tokens are missing.
    """
    tokens = table.expert_tokens().groupby("layer")["tokens"].sum()
    top_k = {layer: shape.top_k for layer, shape in table.architecture.layers.items()}
    if (tokens / pd.Series(top_k)).nunique() > 1 or tokens.iloc[0] == 0:
        raise CoverageError(
            f"routed tokens differ from layer to layer: {tokens.to_dict()}"
        )
    unrouted = table.unrouted()
    if len(unrouted):
        first = unrouted.head(_MOST_NAMED).itertuples()
        named = [f"{row.layer}/{row.expert}" for row in first]
        named += ["..."] * (len(unrouted) > len(named))
        logger.warning(
            "%d experts saw no token (layer/expert): %s",
            len(unrouted),
            ", ".join(named),
        )


def _warn_of_underflow(table: ImportanceTable) -> None:
    """Say of how many atoms a square is too small for the type that it is summed in."""
    frame = table.frame
    lost = frame["max_abs_h"].gt(0) & frame["sum_h2"].eq(0)
    lost |= frame["sum_hg"].ne(0) & frame["sum_hg2"].eq(0)
    if lost.any():
        logger.warning(
            "%d of %d atoms have activations or gradients whose squares are 0 in "
            "float32, so that their scores cannot be told apart: load the model with "
            "dtype='float64'",
            lost.sum(), len(frame),
        )  # fmt: skip


def _provenance(run: _Pass) -> dict[str, Any]:
    """What the table says of how it was measured."""
    config = run.model.config
    return {
        "model": getattr(config, "_name_or_path", ""),
        "revision": getattr(config, "_commit_hash", None),
        "calibration": run.calibration.record,
        "device": str(run.layers[0].device),
        "batch_size": run.batch_size,
        "resumed_at": run.resumed_at,
        "seconds": round(time.perf_counter() - run.started, 2),
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    }
