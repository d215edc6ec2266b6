"""The paper's experiments: the settings of each, and the frame of its results.

Each function takes a `Workbench` and returns the tidy frame that a data function of
`heapr_lab.figures` reads. Everything is cached by the workbench, so that notebooks, the
command line and `reproduce` share their work.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np
import pandas as pd

from heapr_lab import methods
from heapr_lab.errors import CorpusError
from heapr_lab.figures.curves import paper_table, plain_name
from heapr_lab.importance.estimators import ESTIMATORS
from heapr_lab.inspection.mask_diff import ScoredMask
from heapr_lab.models.named import PAPER_MODELS
from heapr_lab.pruning.masks import KeepMask
from heapr_lab.pruning.options import Selection
from heapr_lab.pruning.selection import select
from heapr_lab.tasks.paper_tasks import PAPER_TASKS
from heapr_lab.text.calibration import CalibrationSet
from heapr_lab.text.calibration_spec import DEFAULT_CORPUS, Calibration
from heapr_lab.text.corpora import TEST_CORPORA, available_corpora
from heapr_lab.workbench.settings import Setting
from heapr_lab.workbench.workbench import Workbench

logger = logging.getLogger(__name__)

BOUNDARY_RATIOS = (0.1, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
"""Ratios of the pruning boundary, including the paper's 25 and 50 %."""
METHOD_RATIOS = (0.2, 0.4)
"""Those of the paper's ablations on DeepSeekMoE-16B."""
LOSS_RATIOS = (0.2, 0.25, 0.4)
"""The ratios of `window_losses`."""
LAYER_RATIOS = (0.25, 0.5)
"""The ratios whose removed shares by layer the paper draws."""
CALIBRATION_SIZES = (8, 32, 128)
CALIBRATION_RATIO = 0.2
C4 = "c4"
PAPER_TEXTS = ("wikitext2", C4)
"""What the paper calibrates on, one beside the other."""


def test_corpora() -> tuple[list[str], dict[str, str]]:
    """The available test corpora, and why the others are skipped."""
    return available_corpora(TEST_CORPORA)


COMPARED: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "heapr": {},
        "heapr-l": {"scope": "layer"},
        "heapr-expert": {"granularity": "expert"},
        "camera-p": {"estimator": "camera", "scope": "layer"},
    }
)
"""The methods that the paper compares within one table of scores, by their names."""


def calibration_pair(bench: Workbench) -> tuple[str, str]:
    """Two corpora with enough windows; the second may be a domain of pydocs."""
    for name in ("wikitext2", "wikitext2:tokenized", C4):
        if _can_calibrate(bench, name):
            return DEFAULT_CORPUS, name
    return DEFAULT_CORPUS, f"{DEFAULT_CORPUS}:stdlib"


def _can_calibrate(bench: Workbench, corpus: str) -> bool:
    try:
        bench.calibration_set(Calibration(corpus))
    except CorpusError as error:
        logger.info("not calibrating on %s: %s", corpus, error)
        return False
    return True


def boundary_settings() -> list[Setting]:
    """The paper's method over the ratios."""
    return [Setting(ratio) for ratio in BOUNDARY_RATIOS]


def method_settings() -> list[Setting]:
    """Every estimator without an extra pass, at two ratios, in its widest scope."""
    return [
        Setting(
            ratio, estimator=name, scope="layer" if estimator.within_layer else "global"
        )
        for name, estimator in ESTIMATORS.items()
        if not estimator.extra_pass
        for ratio in METHOD_RATIOS
    ]


def ablation_settings() -> list[Setting]:
    """Layer-wise ranking, and whole experts, at two ratios."""
    layer_wise = [Setting(ratio, scope="layer") for ratio in METHOD_RATIOS]
    whole = [Setting(ratio, granularity="expert") for ratio in METHOD_RATIOS]
    return [*layer_wise, *whole]


def all_settings() -> list[Setting]:
    """Every setting of the figures with a single calibration, without repetition."""
    settings = [*boundary_settings(), *method_settings(), *ablation_settings()]
    return list(dict.fromkeys(settings))


def results(
    bench: Workbench, settings: Iterable[Setting], corpora: Sequence[str]
) -> pd.DataFrame:
    """Evaluation rows of the dense model, then of `settings`."""
    frames = [bench.evaluate(setting, corpora) for setting in (None, *settings)]
    return pd.concat(frames, ignore_index=True)


def savings(bench: Workbench, settings: Iterable[Setting]) -> pd.DataFrame:
    """Parameters, bytes and FLOPs saved by each setting."""
    frames = [bench.savings(setting) for setting in settings]
    return pd.concat(frames, ignore_index=True)


def window_losses(bench: Workbench, corpora: Sequence[str]) -> pd.DataFrame:
    """The loss on every test window of the dense model and of `COMPARED`.

    Returns:
        Columns method ("dense" or a name in `COMPARED`), ratio, corpus, window, nll
        [nats per token].
    """
    masks: dict[tuple[str, float], KeepMask | None] = {("dense", 0.0): None}
    for name, fields in COMPARED.items():
        for ratio in LOSS_RATIOS:
            masks[name, ratio] = bench.keep(Setting(ratio, **fields))
    rows = [
        (window, *state, corpus, nll)
        for state, keep in masks.items()
        for corpus in corpora
        for window, nll in enumerate(
            bench.perplexity(keep, bench.test_windows(corpus)).windows
        )
    ]
    return pd.DataFrame(rows, columns=["window", "method", "ratio", "corpus", "nll"])


def layer_masks(bench: Workbench) -> dict[float, KeepMask]:
    """Global masks at the paper's 25 and 50 %."""
    return {ratio: bench.keep(Setting(ratio)) for ratio in LAYER_RATIOS}


def layer_shares(bench: Workbench) -> pd.DataFrame:
    """The share that each layer loses, for every draw of the default corpus.

    Returns:
        Columns seed, ratio, layer, share.
    """
    frames = []
    for seed in range(bench.profile.n_seeds):
        table = bench.importance(Calibration(seed=seed))
        for ratio in LAYER_RATIOS:
            shares = select(table, Selection(ratio)).layer_ratios().rename("share")
            frames.append(shares.reset_index().assign(seed=seed, ratio=ratio))
    return pd.concat(frames, ignore_index=True)


# --- calibration size -----------------------------------------------------------


def calibration_corpora(bench: Workbench) -> list[str]:
    """The two of the paper, or `calibration_pair` where one of them is missing."""
    there = all(_can_calibrate(bench, name) for name in PAPER_TEXTS)
    return list(PAPER_TEXTS if there else calibration_pair(bench))


def calibration_draws(bench: Workbench) -> list[Calibration]:
    """A calibration for each corpus and seed, at the largest size."""
    return [
        Calibration(corpus, seed=seed)
        for corpus in calibration_corpora(bench)
        for seed in range(bench.profile.n_seeds)
    ]


def calibration_results(bench: Workbench, draws: Iterable[Calibration]) -> pd.DataFrame:
    """Results of the dense model, then at every calibration size of each draw.

    The draws are nested: the windows of a smaller size are the first of a larger one.
    """
    calibrated = calibration_corpora(bench)
    corpora = [corpus for corpus in calibrated if not corpus.startswith("pydocs:")]
    selection = Selection(CALIBRATION_RATIO)
    largest = bench.profile.n_sequences
    sizes = [size for size in CALIBRATION_SIZES if size <= largest] or [largest]
    frames = [bench.evaluate(None, corpora)]
    for draw in draws:
        for size in sizes:
            setting = Setting(selection, replace(draw, n_sequences=size))
            frames.append(bench.evaluate(setting, corpora))
    return pd.concat(frames, ignore_index=True)


# --- predicted and measured loss ------------------------------------------------


def bin_results(bench: Workbench) -> pd.DataFrame:
    """Loss change when a tenth of the atoms is pruned, for ten tenths in two orders.

    The orders are the original index, as in the paper's figure, and the score rank. As
    in the paper, the loss is measured on calibration windows, as many as a test has.

    Columns: order (`index`, `score`), bin, score_sum (sum of the bin's scores),
    delta_nll (nats per token), estimator, dataset.
    """
    calibration = bench.calibration_set()
    ids = calibration.ids[: bench.profile.n_test]
    windows = CalibrationSet(ids, calibration.provenance)
    table = bench.importance()
    scores = table.score("heapr").to_numpy()
    dense = bench.perplexity(None, windows).nll
    by_score = np.argsort(scores, kind="stable")  # ties by index
    rows = []
    for order, ranks in {"index": np.arange(len(scores)), "score": by_score}.items():
        for index, atoms in enumerate(np.array_split(ranks, 10)):
            kept = ~np.isin(np.arange(len(scores)), atoms)
            pruned = bench.perplexity(KeepMask.from_rows(table, kept), windows)
            rows.append(
                {
                    "order": order,
                    "bin": index,
                    "score_sum": float(scores[atoms].sum(dtype=np.float64)),
                    "delta_nll": pruned.nll - dense,
                    "estimator": "heapr",
                    "dataset": windows.label,
                }
            )
    return pd.DataFrame(rows)


# --- masks of two corpora -----------------------------------------------------------

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


# --- Table 1 ------------------------------------------------------------------------
#
# On any model. The rows of rivals in the paper are quoted from other papers, which
# calibrated them on text of their own; here all are fitted to the same windows.

TABLE1_TEXT = "wikitext2"
TABLE1_CORPORA = ("wikitext2", "ptb", C4)
"""The paper's, and C4, which nothing is calibrated on."""
TABLE1_BESIDE = ("heapr-l", "camera-p", "reap", "compress")
"""Methods that are compared with those of the table: of its other tables, of a later
paper, and the default here."""
TABLE1_RATIOS = (0.2, 0.25, 0.4, 0.5)
"""The ratios for models that are not in the paper: all that the paper has."""
NOT_COMPARABLE = (
    "not comparable with the above: model, windows, items and calibration may "
    "differ, and the rows of rivals are quoted from their papers"
)
"""What is said of the rows of the paper."""
_ORIGINAL = "Original"
"""The paper's name of the dense model."""


def methods_of_table1() -> dict[str, str | None]:
    """The names of the methods here by their names in the paper, None if missing.

    One that is called "-like" follows the paper's text, because there is no code of its
    authors to check it against.
    """
    here = {plain_name(name): name for name in methods.names()}
    named = paper_table("main_results")["method"].drop_duplicates()
    return {name: here.get(plain_name(name)) for name in named if name != _ORIGINAL}


def ratios_of_table1(model: str) -> tuple[float, ...]:
    """The ratios that the paper has for the model of that hub id, or else all."""
    rows = paper_table("main_results")
    pruned = rows[rows["model"].map(PAPER_MODELS).eq(model) & rows["ratio"].gt(0)]
    return tuple(pruned["ratio"].drop_duplicates().astype(float)) or TABLE1_RATIOS


def published_rows(model: str) -> pd.DataFrame:
    """The rows of the paper for the model of that hub id, or for all that it has.

    Returns:
        The columns of `main_results.csv`, and `published` (true).
    """
    rows = paper_table("main_results")
    matches = rows[rows["model"].map(PAPER_MODELS).eq(model)]
    shown = rows if matches.empty else matches
    return shown.reset_index(drop=True).assign(published=True)


def as_table1(results: pd.DataFrame) -> pd.DataFrame:
    """Results of `compare_methods` in the columns of the paper's table.

    Returns:
        A row for each method and ratio, the dense model first: `method`, `ratio`,
        `achieved_ratio`, the perplexity of each corpus, as `wikitext2_ppl`, the
        accuracy (`acc`) of each task, `average` where all seven of the paper are
        measured, and `parameters`.
    """
    lines: dict[tuple[str, float], dict[str, Any]] = {}
    for row in results.to_dict("records"):
        labels = {name: row[name] for name in ("method", "ratio", "achieved_ratio")}
        line = lines.setdefault((row["method"], row["ratio"]), labels)
        if pd.notna(row.get("perplexity")):
            line[f"{row['dataset']}_ppl"] = row["perplexity"]
        else:
            line[row["dataset"]] = row.get("acc")
    frame = pd.DataFrame(lines.values())
    if {*PAPER_TASKS} <= {*frame.columns}:
        frame["average"] = frame[[*PAPER_TASKS]].mean(axis=1, skipna=False)
    sizes = results.drop_duplicates(["method", "ratio"])["parameters"]
    return frame.assign(parameters=sizes.to_numpy())
