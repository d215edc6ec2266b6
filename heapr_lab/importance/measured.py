"""The table of a finished pass: its rows, what they have to cover, and their source."""

import logging
import platform
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pandas as pd
import torch
import transformers
from torch import nn

from heapr_lab.errors import CoverageError
from heapr_lab.importance.columns import atom_keys
from heapr_lab.importance.table import ImportanceTable
from heapr_lab.models.experts import ExpertsLayer
from heapr_lab.models.moments import LayerMoments
from heapr_lab.text.calibration import CalibrationSet

logger = logging.getLogger(__name__)


def rows_of(
    model: nn.Module,
    layers: Sequence[ExpertsLayer],
    moments: Mapping[int, LayerMoments],
    norms: Mapping[int, Mapping[str, torch.Tensor]],
) -> pd.DataFrame:
    """One row per atom, sorted by (layer, expert, atom).

    Args:
        model: the model; columns are in float64 if it is, else in float32.
        layers: all of its MoE layers.
        moments: the sums of each layer.
        norms: the squared norms of the weights of each layer's atoms.
    """
    exact = next(model.parameters()).dtype == torch.float64
    real = np.float64 if exact else np.float32
    parts = []
    for layer in layers:
        columns = atom_keys(layer.layer, layer.n_experts, layer.d_inter)
        sums = moments[layer.layer]
        tokens = np.repeat(sums.tokens.cpu().numpy(), layer.d_inter)
        columns["tokens"] = tokens.astype(np.int64)
        atoms = sums.atoms | dict(norms[layer.layer])
        for name, tensor in atoms.items():
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
        named = [f"{row.layer}/{row.expert}" for row in unrouted.itertuples()]
        logger.warning(
            "%d experts saw no token (layer/expert): %s", len(named), ", ".join(named)
        )


def warn_of_underflow(table: ImportanceTable) -> None:
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


def provenance_of(
    model: Any, calibration: CalibrationSet, **facts: Any
) -> dict[str, Any]:
    """What the table says of how it was measured: `facts` of the pass, and versions."""
    return {
        "model": getattr(model.config, "_name_or_path", ""),
        "revision": getattr(model.config, "_commit_hash", None),
        "calibration": calibration.provenance
        | {"n_sequences": calibration.n_sequences, "seq_len": calibration.seq_len},
        **facts,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    }
