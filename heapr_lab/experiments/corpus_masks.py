"""Why calibrating on one corpus hurts another: two masks, and atoms that are put back.

If a mask loses much on a corpus that it was not calibrated on, it may be because of the
atoms that only it removes and the mask of that corpus keeps. This is tested by keeping
these atoms, too, and measuring again: first those that the other mask ranks highest,
beside as many of each layer that are drawn from all that the mask removes.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from heapr_lab.inspection.mask_diff import ScoredMask, check_same_model, ranks
from heapr_lab.pruning.masks import KeepMask
from heapr_lab.workbench.settings import Setting
from heapr_lab.workbench.workbench import Workbench

RATIO = 0.25
SHARES = (0.05, 0.25, 1.0)
"""Shares of the atoms that only one mask removes, which are put back."""
MIXTURE = "mixture"
RANKED, DRAWN = "as the other ranks them", "drawn"
_COLUMNS = ["restored", "share", "n_restored", "draw", "delta_nll", "explained"]


def corpus_masks(
    bench: Workbench, pair: tuple[str, str], *, ratio: float = RATIO
) -> dict[str, ScoredMask]:
    """The masks of two corpora and of half of each, by the corpus and `MIXTURE`.

    All three are measured on the same number of windows.
    """
    texts = {name: name for name in pair} | {MIXTURE: mixture_of(pair)}
    settings = {name: Setting(ratio, text) for name, text in texts.items()}
    return {
        name: ScoredMask.select(name, bench.table_of(setting), setting.selection)
        for name, setting in settings.items()
    }


def mixture_of(pair: tuple[str, str]) -> str:
    """The corpus that is half of each of two."""
    return " + ".join(f"0.5*{name}" for name in pair)


def mask_losses(
    bench: Workbench, masks: Mapping[str, ScoredMask], corpora: Sequence[str]
) -> pd.DataFrame:
    """Δloss of every mask on the test split of every corpus.

    Returns:
        Columns mask, dataset, delta_nll [nats per token].
    """
    rows = [
        (name, corpus, _rise(bench, mask.keep, corpus))
        for name, mask in masks.items()
        for corpus in corpora
    ]
    return pd.DataFrame(rows, columns=["mask", "dataset", "delta_nll"])


def restored_losses(
    bench: Workbench,
    mine: ScoredMask,
    other: ScoredMask,
    corpus: str,
    *,
    shares: Sequence[float] = SHARES,
) -> pd.DataFrame:
    """Δloss as atoms are put back that only one mask removes.

    Args:
        bench: the workbench of the model.
        mine: the mask that removes them.
        other: the mask that keeps them.
        corpus: the loss is measured on its test split.
        shares: shares of the atoms that only `mine` removes; at least one is put back.

    Returns:
        Columns restored (`RANKED`, or `DRAWN`: as many of each layer, from all that
        `mine` removes), share, n_restored, draw (its seed), delta_nll [nats per token],
        explained (the share of Δloss of `mine` that is gone; missing if it has none).
        No rows if `mine` alone removes nothing.

    Raises:
        SpecError: the masks are of different models.
    """
    alone, trials = removed_alone(mine, other), []
    for share in shares if len(alone) else ():
        first = alone[: _n_first(share, alone)]
        trials.append((RANKED, share, 0, first))
        for seed in range(bench.profile.n_seeds):
            trials.append((DRAWN, share, seed, drawn_like(mine.keep, first, seed=seed)))
    rows = [
        {"restored": way, "share": share, "draw": seed}
        | _restored(bench, mine.keep, part, corpus)
        for way, share, seed, part in trials
    ]
    return pd.DataFrame(rows, columns=_COLUMNS)


def kept_of_alone(
    third: KeepMask,
    mine: ScoredMask,
    other: ScoredMask,
    *,
    shares: Sequence[float] = SHARES,
) -> pd.DataFrame:
    """How many of the atoms that only one mask removes a third one keeps.

    Args:
        third: a mask of the same model.
        mine: the mask that removes them.
        other: the mask that keeps them.
        shares: shares of these atoms; first those that `other` ranks highest.

    Returns:
        Columns share, n_atoms, kept (the share of them that `third` keeps).

    Raises:
        SpecError: the masks are of different models.
    """
    check_same_model(third, mine.keep)
    alone = removed_alone(mine, other)
    firsts = [alone[: _n_first(share, alone)] for share in shares if len(alone)]
    rows = [(len(first), third.rows[first].mean()) for first in firsts]
    frame = pd.DataFrame(rows, columns=["n_atoms", "kept"])
    frame.insert(0, "share", shares[: len(frame)])
    return frame


# --- which atoms ------------------------------------------------------------------


def removed_alone(mine: ScoredMask, other: ScoredMask) -> np.ndarray:
    """Rows of the atoms that only `mine` removes, first those `other` ranks highest.

    Shape: int64 (n,).

    Raises:
        SpecError: the masks are of different models.
    """
    rank = ranks(mine, other)[1]
    rows = np.flatnonzero(~mine.keep.rows & other.keep.rows)
    return rows[np.argsort(-rank[rows], kind="stable")]


def drawn_like(keep: KeepMask, rows: np.ndarray, *, seed: int) -> np.ndarray:
    """Rows of removed atoms at random: of each layer as many as `rows` has.

    Shapes: int64 (n,) and (n,).
    """
    rng, layers = np.random.default_rng(seed), _layers_of(keep)
    draws = [
        rng.choice(np.flatnonzero(~keep.rows & (layers == layer)), n, replace=False)
        for layer, n in zip(*np.unique(layers[rows], return_counts=True), strict=True)
    ]
    return np.concatenate(draws)


def with_rows(keep: KeepMask, rows: np.ndarray) -> KeepMask:
    """The mask that keeps the atoms in `rows`, int64 (n,), too."""
    kept = keep.rows.copy()
    kept[rows] = True
    return KeepMask.from_rows(keep, kept)


def _n_first(share: float, rows: np.ndarray) -> int:
    return max(1, round(share * len(rows)))


def _layers_of(keep: KeepMask) -> np.ndarray:
    """The layer of every atom (n_atoms,)."""
    sizes = [n_experts * d_inter for n_experts, d_inter in keep.shapes().values()]
    return np.repeat(keep.layers, sizes)


# --- what it costs ----------------------------------------------------------------


def _restored(
    bench: Workbench, keep: KeepMask, rows: np.ndarray, corpus: str
) -> dict[str, Any]:
    before = _rise(bench, keep, corpus)
    after = _rise(bench, with_rows(keep, rows), corpus)
    explained = 1 - after / before if before > 0 else float("nan")
    return {"n_restored": len(rows), "delta_nll": after, "explained": explained}


def _rise(bench: Workbench, keep: KeepMask, corpus: str) -> float:
    """Δloss of a mask on the test split of a corpus, in nats per token."""
    windows = bench.test_windows(corpus)
    dense = bench.perplexity(None, windows).nll
    return bench.perplexity(keep, windows).nll - dense
