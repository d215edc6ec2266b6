"""One forward and one backward pass per batch: every atom's statistics.

The loss is the sum over predicted tokens of -log p, so no statistic depends on the
batch size. No weight gradient is computed: parameters do not require grad, the
embedding's output does. Source: HEAPr, Algorithm 1, in the form that is derived in
`heapr_lab.importance`.
"""

import contextlib
import logging
import platform
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
import transformers
from torch import nn

from heapr_lab.errors import (
    CacheError,
    CoverageError,
    HeaprLabError,
    SpecError,
    whole_number,
)
from heapr_lab.importance.distributed import Ranks
from heapr_lab.importance.streamed_pass import StreamedPass
from heapr_lab.importance.table import ImportanceTable
from heapr_lab.models.experts import ExpertsLayer, describe, find_experts, refuse_broken
from heapr_lab.models.hooks import Probe, probed
from heapr_lab.models.identity import check_unchanged, identity_in_force, weights_state
from heapr_lab.models.likelihood import (
    check_fits,
    input_device,
    sampled_targets,
    token_nll,
)
from heapr_lab.models.memory import halving_batches, starting_batch_size
from heapr_lab.models.modes import differentiating
from heapr_lab.models.moments import EXPERT_SUMS
from heapr_lab.models.streamed import stream_of
from heapr_lab.progress import Progress
from heapr_lab.storage import files
from heapr_lab.storage.hashing import digest
from heapr_lab.text.calibration import CalibrationSet

logger = logging.getLogger(__name__)

STATISTICS_SCHEMA = 1
"""Increased whenever the same input would give other numbers."""
TOKENS_PER_BATCH = {"cpu": 2048, "cuda": 32768}
"""Tokens in the first batch, by type of device.

On a CPU larger ones take more memory and no less time: what the backward pass keeps is
handed out by the system in pages that it zeroes first.
"""
_SAVE_SECONDS = 60.0
_SAVE_SHARE = 0.02


LABELS = ("data", "model")


def statistics_spec(
    identity: dict[str, str], calibration: CalibrationSet, *, labels: str = "data"
) -> dict[str, Any]:
    """Every field that determines the statistics: the key of the cache.

    `identity` is that of the model, from `identity.identity_in_force`.
    """
    spec = {
        "schema": STATISTICS_SCHEMA,
        "model": identity,
        "calibration": calibration.fingerprint,
    }
    return spec if labels == "data" else spec | {"labels": labels}


def collect_statistics(
    model: nn.Module,
    calibration: CalibrationSet,
    *,
    labels: str = "data",
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
        labels: the next tokens in the loss: those of the text ("data", as in the
            paper), or drawn from the model's predictions with a fixed seed ("model"),
            as in the definition of the Fisher information; the latter takes another
            forward pass.
        batch_size: windows per batch; by default chosen automatically, and halved
            whenever the device runs out of memory.
        progress: called after each batch with (windows done, total windows).
        state: a file in which an unfinished pass is saved, and from which it resumes;
            removed at the end. A pass over a streamed model has a folder beside it
            (`.sweeps`), and resumes at the layer that it had reached.
        ranks: the processes that measure the windows together, all of which call this
            and get the same table; progress and state are those of each one's part.

    Raises:
        SpecError: the labels are unknown, a token is not in the vocabulary, the batch
            size is not positive, or autocast or foreign hooks are active.
        LayoutError: an experts layer cannot be measured exactly (it is named).
        CoverageError: a layer did not take part in a pass.
        HeaprLabError: a gradient is not finite (layer and batch are named), or the
            weights changed during the pass, or another rank failed.
        CacheError: `state` belongs to another pass, or is damaged.
    """
    if labels not in LABELS:
        raise SpecError(f"labels is {labels!r}, expected one of {', '.join(LABELS)}")
    if batch_size is not None:
        whole_number(batch_size, name="batch_size")
    check_fits(model, calibration.ids)
    started = time.perf_counter()
    layers = find_experts(model)
    streamed = stream_of(model) is not None
    norms = {} if streamed else {k.layer: refuse_broken(k) for k in layers}
    architecture = describe(model).to_dict()
    spec = statistics_spec(identity_in_force(model), calibration, labels=labels)
    windows = calibration.window_fingerprints()
    _warn_of_repeats(windows)
    share = range(calibration.n_sequences)
    if ranks is not None:
        ranks.check_same(digest(spec))
        share = ranks.share(calibration.n_sequences)
        state = None if state is None else ranks.own_state(state)
    run = _Pass(
        model=model,
        ids=calibration.ids[share.start : share.stop],
        first=share.start,
        layers=layers,
        labels=labels,
        progress=progress,
        state=state,
        key=digest(spec),
        weights=weights_state(model),
        norms=norms,
    )
    probes = _run_all(run) if batch_size is None else run.run(batch_size)
    if ranks is not None:
        ranks.combine([probe.moments for probe in probes.values()])
    frame = _frame(layers, probes, run.norms, model)
    provenance = _provenance(model, calibration, run, time.perf_counter() - started)
    table = ImportanceTable.from_frame(
        frame,
        N=calibration.n_predicted,
        windows=windows,
        spec=spec,
        spec_hash=digest(spec),
        architecture=architecture,
        provenance=provenance,
    )
    _check_coverage(table, layers)
    if state is not None:
        state.unlink(missing_ok=True)
    return table


def _warn_of_repeats(windows: list[str]) -> None:
    n_repeats = len(windows) - len(set(windows))
    if n_repeats:
        logger.warning(
            "%d of %d calibration windows repeat another, and count as often",
            n_repeats, len(windows),
        )  # fmt: skip


def _run_all(run: "_Pass") -> dict[int, Probe]:
    """The probes of a pass with batches as large as memory allows."""
    size = starting_batch_size(run.model, *run.ids.shape, tokens=TOKENS_PER_BATCH)
    return halving_batches(run.run, size, model=run.model)


@dataclass(kw_only=True, eq=False)
class _Pass:
    """One pass over calibration windows, which can be interrupted and resumed."""

    model: Any
    ids: torch.Tensor
    """The windows (B, L), of which there may be none."""
    first: int
    """Number of the first of them among those of all ranks."""
    layers: list[ExpertsLayer]
    labels: str
    progress: Progress | None
    state: Path | None
    key: str
    """Hash of the specification, by which a saved state is recognised."""
    weights: str
    """The model's `weights_state`, which must not change."""
    norms: dict[int, dict[str, torch.Tensor]]
    """Squared norms of the weights of each layer's atoms."""
    batch_size: int = 0
    resumed_at: int = 0

    def run(self, batch_size: int) -> dict[int, Probe]:
        """Measure all windows not measured before; returns each layer's probe."""
        self.batch_size = batch_size
        if stream_of(self.model) is not None:
            return self._streamed()
        total = len(self.ids)
        with (
            differentiating(self.model),
            _gradients_from_embedding_on(self.model),
            probed(self.layers) as probes,
        ):
            done = self.resumed_at = self._resume(probes)
            saved_at, save_cost = time.perf_counter(), 0.0
            while done < total:
                batch = self.ids[done : done + batch_size]
                self._step(batch, probes, done)
                done += len(batch)
                if self.progress is not None:
                    self.progress(done, total)
                waited = time.perf_counter() - saved_at
                due = waited >= _SAVE_SECONDS
                if self.state is not None and due and save_cost <= _SAVE_SHARE * waited:
                    begun = time.perf_counter()
                    self._save(probes, done)
                    saved_at = time.perf_counter()
                    save_cost = saved_at - begun
        check_unchanged(self.model, self.weights)
        return probes

    def _streamed(self) -> dict[int, Probe]:
        """Measure all windows a layer at a time."""
        with differentiating(self.model), probed(self.layers) as probes:
            if not len(self.ids):
                self.norms = {k.layer: refuse_broken(k) for k in self.layers}
                return probes
            sweeps = StreamedPass(
                model=self.model,
                layers=self.layers,
                ids=self.ids,
                first=self.first,
                batch_size=self.batch_size,
                sampled=self.labels == "model",
                state=None if self.state is None else self.state.with_suffix(".sweeps"),
                key=self.key,
                progress=self.progress,
            )

            def check(number: int, windows: slice) -> None:
                where = self._named(windows.start, windows.stop - windows.start)
                self._check(probes[number], number, where)

            self.norms = sweeps.run(probes, check)
        check_unchanged(self.model, self.weights)
        return probes

    def _step(self, ids: torch.Tensor, probes: dict[int, Probe], done: int) -> None:
        # A clone is no inference tensor, even if the ids are one.
        ids = ids.clone().to(input_device(self.model))
        targets = None
        if self.labels == "model":
            start = self.first + done
            numbers = range(start, start + len(ids))
            targets = sampled_targets(self.model, ids, seeds=numbers)
        token_nll(self.model, ids, targets=targets).sum().backward()
        for number, probe in probes.items():
            self._check(probe, number, self._named(done, len(ids)))

    def _named(self, done: int, n: int) -> str:
        """The `n` windows after the first `done`, as text."""
        start = self.first + done
        return f"windows {start} to {start + n - 1}"

    def _check(self, probe: Probe, number: int, where: str) -> None:
        if probe.backwards != 1:
            raise CoverageError(
                f"layer {number} took part {probe.backwards} times in the pass "
                f"over {where}, expected once; this model does not run each "
                "experts module once per forward"
            )
        if not torch.isfinite(probe.moments.atoms["sum_hg2"]).all():
            raise HeaprLabError(
                f"non-finite gradients in layer {number} on {where}: use bfloat16 "
                "or float32 weights, or check these windows"
            )
        probe.backwards = 0

    def _save(self, probes: dict[int, Probe], done: int) -> None:
        check_unchanged(self.model, self.weights)
        arrays = {
            f"{number}.{name}": tensor.numpy()
            for number, probe in probes.items()
            for name, tensor in probe.moments.state().items()
        }
        if self.state is not None:
            files.save_state(self.state, arrays, {"key": self.key, "done": done})

    def _resume(self, probes: dict[int, Probe]) -> int:
        if self.state is None or not self.state.exists():
            return 0
        arrays, meta = files.load_state(self.state)
        if meta.get("key") != self.key:
            raise CacheError(
                f"{self.state} is the state of another pass (another model or "
                "calibration set); delete it, or give another file"
            )
        for number, probe in probes.items():
            own = {
                name.partition(".")[2]: torch.from_numpy(array)
                for name, array in arrays.items()
                if name.startswith(f"{number}.")
            }
            probe.moments.load_state(own)
        logger.info("resumed %s at window %d", self.state, meta["done"])
        return int(meta["done"])


@contextlib.contextmanager
def _gradients_from_embedding_on(model: Any) -> Iterator[None]:
    """The embedding's output requires a gradient wherever gradients are computed."""
    hook = model.get_input_embeddings().register_forward_hook(
        lambda _module, _args, output: output.requires_grad_(torch.is_grad_enabled())
    )
    try:
        yield
    finally:
        hook.remove()


def _frame(
    layers: list[ExpertsLayer],
    probes: dict[int, Probe],
    norms: dict[int, dict[str, torch.Tensor]],
    model: nn.Module,
) -> pd.DataFrame:
    """One row per atom, sorted by (layer, expert, atom)."""
    exact = next(model.parameters()).dtype == torch.float64
    real = np.float64 if exact else np.float32
    parts = []
    for layer in layers:
        n_experts, d_inter = layer.n_experts, layer.d_inter
        columns: dict[str, np.ndarray] = {
            "layer": np.full(n_experts * d_inter, layer.layer, np.int16),
            "expert": np.repeat(np.arange(n_experts, dtype=np.int16), d_inter),
            "atom": np.tile(np.arange(d_inter, dtype=np.int32), n_experts),
        }
        moments = probes[layer.layer].moments
        for name in EXPERT_SUMS:
            values = np.repeat(moments.experts[name].cpu().numpy(), d_inter)
            columns[name] = values.astype(np.int64 if name == "tokens" else real)
        atoms = moments.atoms | norms[layer.layer]
        for name, tensor in atoms.items():
            columns[name] = tensor.cpu().numpy().reshape(-1).astype(real)
        parts.append(pd.DataFrame(columns))
    return pd.concat(parts, ignore_index=True)


def _check_coverage(table: ImportanceTable, layers: list[ExpertsLayer]) -> None:
    """Check that all atoms and all tokens were measured, before anything is written.

    Raises:
        CoverageError: rows or tokens are missing.
    """
    rows = sum(layer.n_experts * layer.d_inter for layer in layers)
    if len(table.frame) != rows:
        raise CoverageError(f"measured {len(table.frame)} atoms, expected {rows}")
    experts = table.frame.drop_duplicates(["layer", "expert"])
    tokens = experts.groupby("layer")["tokens"].sum()
    if tokens.nunique() > 1 or tokens.iloc[0] == 0:
        raise CoverageError(
            f"routed tokens differ from layer to layer: {tokens.to_dict()}"
        )
    unrouted = table.unrouted()
    if len(unrouted):
        named = [f"{row.layer}/{row.expert}" for row in unrouted.itertuples()]
        logger.warning(
            "%d experts saw no token (layer/expert): %s", len(named), ", ".join(named)
        )


def _provenance(
    model: nn.Module, calibration: CalibrationSet, run: _Pass, seconds: float
) -> dict[str, Any]:
    return {
        "model": getattr(model.config, "_name_or_path", ""),
        "revision": getattr(model.config, "_commit_hash", None),
        "calibration": calibration.provenance
        | {"n_sequences": calibration.n_sequences, "seq_len": calibration.seq_len},
        "device": str(run.layers[0].device),
        "batch_size": run.batch_size,
        "resumed_at": run.resumed_at,
        "seconds": round(seconds, 2),
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    }
