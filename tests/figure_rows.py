"""Small results, as the package and its benchmarks give them, and what was drawn."""

import itertools
import math
from collections.abc import Iterable, Mapping
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

from heapr_lab.inspection.mask_diff import ScoredMask
from heapr_lab.pruning.masks import KeepMask

RATIOS = (0.2, 0.5)

DENSE = {"wikitext2": 20.0, "continuation": 0.5}

ROUTED_SHARE = 0.75

VARIANTS = (
    # how the setting differs from HEAPr, global, atoms; harm per unit of ratio
    ({}, 0.1),
    ({"scope": "layer"}, 0.2),
    ({"granularity": "expert"}, 0.4),
    ({"estimator": "camera", "scope": "layer"}, 0.5),
)


def pruned_to(ratio: float) -> dict[str, Any]:
    """The columns of HEAPr's setting, global, atoms, at a ratio."""
    return {
        "estimator": "heapr",
        "scope": "global",
        "granularity": "atom",
        "structure": "ragged",
        "ratio": ratio,
        "achieved_ratio": ratio,
    }


def evaluation(ratio: float, dataset: str, value: float, **other: Any) -> dict:
    """One evaluation row, a pruned HEAPr model's unless `other` says otherwise."""
    accuracy = dataset == "continuation"
    row = {
        "calibration": "pydocs",
        "n_sequences": 128,
        "seed": 0,
        "dataset": dataset,
        "metric": "accuracy" if accuracy else "perplexity",
        "value": value,
        "stderr": 0.01 if accuracy else math.nan,
    }
    return pruned_to(ratio) | row | other


def evaluation_rows() -> pd.DataFrame:
    """Perplexity 20 · (1 + harm · ratio) and accuracy 0.5 · (1 − harm · ratio)."""
    none = {"estimator": "dense", "scope": "", "granularity": "", "structure": ""}
    rows = [evaluation(0.0, name, value, **none) for name, value in DENSE.items()]
    for (setting, harm), ratio in itertools.product(VARIANTS, RATIOS):
        change = {"wikitext2": 1 + harm * ratio, "continuation": 1 - harm * ratio}
        for name, value in DENSE.items():
            rows.append(evaluation(ratio, name, value * change[name], **setting))
    return pd.DataFrame(rows)


def saving_rows() -> pd.DataFrame:
    """0.75 of the model is routed; atoms save 0.4 of their ratio in FLOPs."""
    shares = {
        "parameter_reduction": ROUTED_SHARE,
        "flops_reduction": 0.4,
        "routed_flops_reduction": 0.5,
    }
    rows = [
        pruned_to(ratio)
        | setting
        | {name: share * ratio for name, share in shares.items()}
        for setting, _ in VARIANTS
        for ratio in RATIOS
    ]
    return pd.DataFrame(rows).assign(seq_len=256)


def window_rows(
    losses: Mapping[tuple[str, float], float], corpus: str = "text"
) -> pd.DataFrame:
    """Four windows of each state, which differ by 1 nat and share their order."""
    rows = [
        (method, ratio, corpus, window, loss + window)
        for (method, ratio), loss in losses.items()
        for window in range(4)
    ]
    return pd.DataFrame(rows, columns=["method", "ratio", "corpus", "window", "nll"])


def item_rows(states: Mapping[tuple[str, float], Iterable[int]]) -> pd.DataFrame:
    """Which items of one task each state has right."""
    rows = [
        {"method": method, "ratio": ratio, "task": "t", "item": item, "acc": right}
        for (method, ratio), answers in states.items()
        for item, right in enumerate(answers)
    ]
    return pd.DataFrame(rows).assign(acc_norm=0.0)


def keep_of(*removed: int) -> KeepMask:
    """One expert of ten atoms a layer, of which so many are removed."""
    return KeepMask({i: [np.arange(10) >= n] for i, n in enumerate(removed, start=1)})


def bins_frame() -> pd.DataFrame:
    """Ten bins by index whose order is spoilt by one swap, ten by score in order."""
    rows = [
        (order, number, 1.0 + number, 2.0 + place)
        for order, first in (("index", (1, 0)), ("score", (0, 1)))
        for number, place in enumerate([*first, *range(2, 10)])
    ]
    columns = ["order", "bin", "score_sum", "delta_nll"]
    return pd.DataFrame(rows, columns=columns).assign(
        estimator="heapr", dataset="pydocs"
    )


def measured_models() -> pd.DataFrame:
    """Two models; on the second HEAPr loses next to nothing at 20 %."""
    rows = [
        ("a", "heapr", 0.2, 0.02), ("a", "heapr", 0.4, 0.1),
        ("a", "compress", 0.2, 0.01), ("a", "compress", 0.4, 0.03),
        ("b", "heapr", 0.2, 0.001), ("b", "heapr", 0.4, 0.3),
        ("b", "compress", 0.2, 0.004), ("b", "compress", 0.4, 0.15),
    ]  # fmt: skip
    columns = ["model", "variant", "ratio", "delta_nll"]
    frame = pd.DataFrame(rows, columns=columns).assign(
        calibration="pydocs",
        test="pydocs",
        seed=0,
        stderr=0.01,
        passes=7.5,
        delta_nll_stderr=0.005,
    )
    other = frame.assign(test="wikitext2", delta_nll=1.0)  # not the calibrated corpus
    return pd.concat([frame, other])


def real_row(method: str, ratio: float, **changes: object) -> dict[str, object]:
    """A state of `benchmarks/real.py`, whose loss on WikiText-2 is its ratio."""
    return {
        "model": "smolmoe",
        "method": method,
        "ratio": ratio,
        "fitted_to": "wikitext2",
        "seed": 0,
        "parameters_saved": ratio / 2,
        "perplexity wikitext2": 20 + 100 * ratio,
        "perplexity ptb": 50 + 100 * ratio,
        "delta_nll wikitext2": ratio,
        "delta_nll ptb": 2 * ratio,
        "shared_delta_nll wikitext2": ratio,
        "shared_delta_nll_stderr wikitext2": ratio / 10,
        "shared_delta_nll ptb": 2 * ratio,
        "shared_delta_nll_stderr ptb": ratio / 10,
        "accuracy": 0.5 - ratio / 10,
        "accuracy_stderr": 0.01,
        "against_dense": -ratio / 10,
        "windows": "16, 16, 16",
        "items": 100,
    } | changes


def measured_methods() -> pd.DataFrame:
    """Two models: atoms removed in three ways.

    Experts are dropped, too, which one model refuses at 50 %.
    """
    losses = {
        # variant: kind, Δloss of model a at 25 and 50 %, seconds
        "random": ("atoms", 0.3, 1.2, 0.1),
        "heapr": ("atoms", 0.1, 0.4, 4.0),
        "compress": ("atoms", 0.05, 0.2, 9.0),
        "reap": ("experts", 0.2, 0.6, 2.0),
    }
    rows = []
    for variant, (kind, *deltas, seconds) in losses.items():
        for ratio, loss in zip((0.25, 0.5), deltas, strict=True):
            for model, times in (("a", 1), ("b", 3)):
                label = {"model": model, "seed": 0, "variant": variant}
                row = {**label, "ratio": ratio, "kind": kind, "refused": None}
                if variant == "reap" and ratio == 0.5 and model == "b":
                    rows.append(row | {"refused": "too many"})
                    continue
                row |= {
                    "achieved_ratio": ratio,
                    "delta_nll pydocs": times * loss,
                    "stderr pydocs": times * 0.01,
                    "delta_nll ptb": 2 * times * loss,
                    "delta_nll c4": 4 * times * loss,
                    "agreement pydocs": 0.75,
                    "parameters_saved": ratio / 2,
                    "routed_flops_saved": ratio,
                }
                if ratio == 0.25:
                    row |= {"fit_seconds": times * seconds, "fit_peak_bytes": 2e6}
                rows.append(row)
    return pd.DataFrame(rows)


def scored_masks() -> tuple[ScoredMask, ScoredMask]:
    """Of 10 atoms in two layers, A removes those of the lowest scores, B others."""
    scores = np.arange(10.0)
    a = KeepMask({2: [[False] * 3 + [True]], 5: [[True] * 3, [True] * 3]})
    b = KeepMask({2: [[True, False, False, False]], 5: [[False, True, True]] * 2})
    return ScoredMask("A", a, scores), ScoredMask("B", b, scores[::-1].copy())


def dots_of(ax: plt.Axes) -> list[Any]:
    """The points of a chart, without lines."""
    lines = [line for line in ax.get_lines() if line.get_linestyle() == "None"]
    return [line for line in lines if len(line.get_xdata())]


def lines_of(ax: plt.Axes) -> dict[str, np.ndarray]:
    """Points (n, 2) of every labelled curve or line of `ax`, by label."""
    return {
        label: (handle[0] if hasattr(handle, "lines") else handle).get_xydata()
        for handle, label in zip(*ax.get_legend_handles_labels(), strict=True)
    }
