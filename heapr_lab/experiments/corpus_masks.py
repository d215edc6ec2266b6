"""Masks of two corpora and of a mixture of both, and what each loses on either."""

from collections.abc import Mapping, Sequence

import pandas as pd

from heapr_lab.inspection.mask_diff import ScoredMask
from heapr_lab.pruning.masks import KeepMask
from heapr_lab.workbench.settings import Setting
from heapr_lab.workbench.workbench import Workbench

MIXTURE = "mixture"


def corpus_masks(
    bench: Workbench, pair: tuple[str, str], *, ratio: float = 0.25
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


def _rise(bench: Workbench, keep: KeepMask, corpus: str) -> float:
    """Δloss of a mask on the test split of a corpus, in nats per token."""
    windows = bench.test_windows(corpus)
    dense = bench.perplexity(None, windows).nll
    return bench.perplexity(keep, windows).nll - dense
