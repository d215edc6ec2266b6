"""The stages through the cache, as notebooks, the panel and the command line use them.

A `Workbench` holds a loaded model with a profile (how much text to calibrate and to
evaluate on); a `Setting` describes how atoms are selected. Every result is computed
once and read from the cache afterwards, by any process.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, TypeVar

import numpy as np
import pandas as pd
import torch
from torch import nn

from heapr_lab import registry
from heapr_lab.evaluation.perplexity import (
    Divergence,
    Perplexity,
    evaluate_divergence,
    evaluate_perplexity,
    exp_nll,
)
from heapr_lab.importance.collect import collect_statistics, statistics_spec
from heapr_lab.importance.estimators import find_estimator
from heapr_lab.importance.resuming import Ranks
from heapr_lab.importance.table import ImportanceTable
from heapr_lab.models.identity import (
    check_unchanged,
    model_identity,
    refuse_disturbed,
    weights_state,
)
from heapr_lab.models.loading import load_model
from heapr_lab.models.named import LAB
from heapr_lab.models.sources import Source, source_of
from heapr_lab.progress import Progress, progress_bar
from heapr_lab.pruning.masks import KeepMask
from heapr_lab.pruning.options import Selection
from heapr_lab.pruning.savings import savings_of
from heapr_lab.pruning.selection import select
from heapr_lab.pruning.surgery import ReplacedDownProj, masking
from heapr_lab.storage import cache
from heapr_lab.storage.hashing import digest
from heapr_lab.text.calibration import (
    CalibrationSet,
    cached_ids,
    load_calibration,
    load_windows,
    tokenizer_fingerprint,
    windows_key,
)
from heapr_lab.text.calibration_spec import OWN_TEXT, Calibration
from heapr_lab.workbench.settings import (
    CONTINUATION,
    DENSE,
    Opening,
    Profile,
    Setting,
    profile_of,
)

T = TypeVar("T")

EVALUATION_SCHEMA = 2
"""Increased whenever results change for the same input."""
OWN_TEXT_SCHEMA = 1
"""Likewise, for self-generated text."""


class Workbench:
    """A model with its importance, masks and evaluations, through the cache.

    Attributes:
        opening: how `open_workbench` opened it; None if it did not.
    """

    def __init__(
        self, model: nn.Module, tokenizer: Any, *, name: str, profile: Profile
    ) -> None:
        """Wrap a loaded model.

        Args:
            model: a causal language model of transformers, in eval mode.
            tokenizer: its tokenizer.
            name: its name in figures and tables.
            profile: how much text to use.
        """
        self.model = model
        self.tokenizer = tokenizer
        self.name = name
        self.profile = profile
        self.opening: Opening | None = None
        self._windows: dict[tuple[Any, ...], CalibrationSet] = {}
        self._last: dict[str, tuple[Any, Any]] = {}

    def __repr__(self) -> str:
        return f"Workbench({self.name!r}, profile {self.profile.name!r})"

    @property
    def tokenizer_id(self) -> str:
        """The fingerprint of the tokenizer in cache keys."""
        state, compute = self._tokenizer_state, tokenizer_fingerprint
        return self._latest("tokenizer", state, lambda: compute(self.tokenizer))

    @property
    def _tokenizer_state(self) -> tuple[Any, int, str]:
        """Changes with the tokenizer, when tokens are added, and with its template."""
        template = getattr(self.tokenizer, "chat_template", None)
        return self.tokenizer, len(self.tokenizer), repr(template)

    @property
    def identity(self) -> dict[str, str]:
        """The identity of the model in cache keys: configuration and current weights.

        It is computed again if they have changed since the last time.

        Raises:
            SpecError: an active mask, autocast or hook changes what the model computes,
                so its results must not enter the cache.
        """
        return dict(self._state_and_identity()[1])

    def _state_and_identity(self) -> tuple[str, dict[str, str]]:
        """The state of the weights, and the identity computed in that state."""
        refuse_disturbed(
            self.model,
            remedy="pass the mask as an argument, as in perplexity(keep, windows), or "
            "None for the dense model",
        )
        state = weights_state(self.model)
        return state, self._latest("model", state, lambda: model_identity(self.model))

    @functools.cached_property
    def source(self) -> Source | None:
        """The files that the model was loaded from; None if not on this machine."""
        return source_of(self.model)

    # --- importance ---

    def calibration_set(
        self,
        calibration: Calibration | str | None = None,
        *,
        progress: Progress | None = None,
    ) -> CalibrationSet:
        """The windows of `calibration` or a corpus; by default of the default corpus.

        Windows that the model writes itself come after those of the corpus; `progress`
        is called with (tokens done, tokens in all) while it does, as a bar is.
        """
        asked = calibration or Calibration()
        if not isinstance(asked, Calibration):
            asked = Calibration(asked)
        asked = self.profile.counted(asked)
        shape: dict[str, Any] = {
            name: getattr(asked, name) for name in ("n_sequences", "seq_len", "seed")
        }
        windows = self._remembered(
            (windows_key(asked.corpus, split="train"), *shape.values()),
            lambda: load_calibration(asked.corpus, self.tokenizer, **shape),
        )
        n_own = asked.n_own(shape["n_sequences"])
        if n_own:
            more = self._own_text(shape | {"n_sequences": n_own}, progress)
            windows = windows.joined(more)
        return windows

    def _own_text(
        self, shape: dict[str, int], progress: Progress | None
    ) -> CalibrationSet:
        """Windows that the model writes itself, from the cache once it has."""
        author = {"model": self.identity, "tokenizer": self.tokenizer_id}

        def write() -> np.ndarray:
            label = f"own text of {self.name}"
            with progress_bar(label, "token", also=progress) as bar:
                write_text = registry.find("text of the model's own")
                text = write_text(self.model, self.tokenizer, **shape, progress=bar)
            ids: np.ndarray = text.ids.numpy()
            return ids

        key = {**shape, **author, "schema": OWN_TEXT_SCHEMA}
        ids = cached_ids(OWN_TEXT, key, write)
        return CalibrationSet(
            torch.from_numpy(ids), {"corpus": OWN_TEXT, "seed": shape["seed"]}
        )

    def importance(
        self, calibration: Calibration | None = None, *, estimator: str = "heapr"
    ) -> ImportanceTable:
        """The statistics of every atom on the windows of `calibration`.

        They include the scores of `eliminate` if `estimator` needs that extra pass.
        """
        windows = self.calibration_set(calibration)
        extra_pass = find_estimator(estimator).extra_pass
        key = digest(self.identity), windows.fingerprint, extra_pass
        measure = self._eliminated if extra_pass else self.measure
        return self._latest("table", key, lambda: measure(windows))

    def table_of(self, setting: Setting) -> ImportanceTable:
        """The table that `setting` selects from."""
        return self.importance(
            setting.calibration, estimator=setting.selection.estimator
        )

    def _eliminated(self, windows: CalibrationSet) -> ImportanceTable:
        """The table of `windows` with the scores of `eliminate`."""
        table = self.measure(windows)
        spec = registry.find("key of elimination")(table, windows)
        eliminate: Callable[..., ImportanceTable] = registry.find("elimination")

        def compute() -> ImportanceTable:
            with progress_bar(f"elimination on {windows.label}", "window") as bar:
                return eliminate(self.model, table, windows, progress=bar)

        return _cached_table(spec, compute)

    def measure(
        self,
        windows: CalibrationSet,
        *,
        batch_size: int | None = None,
        progress: Progress | None = None,
    ) -> ImportanceTable:
        """The statistics of every atom on given windows.

        `progress` is called, as the progress bar is, if they are computed.
        """
        table = self.measure_on(None, windows, batch_size=batch_size, progress=progress)
        assert table is not None  # one process has all of it
        return table

    def measure_on(
        self,
        ranks: Ranks | None,
        windows: CalibrationSet,
        *,
        batch_size: int | None = None,
        progress: Progress | None = None,
    ) -> ImportanceTable | None:
        """As `measure`, by all `ranks` together, each of which has to call this.

        Only rank 0 reads and writes the cache, and gets the table; others get None.
        """
        spec = statistics_spec(self.identity, windows)
        state = cache.cache_path("importance", spec, extension="state")
        options: Any = {"batch_size": batch_size, "state": state, "ranks": ranks}

        def compute() -> ImportanceTable:
            label = f"importance on {windows.label}"
            with progress_bar(label, "window", also=progress) as bar:
                return collect_statistics(self.model, windows, progress=bar, **options)

        store = functools.partial(_cached_table, spec)
        return store(compute) if ranks is None else ranks.stored(store, compute)

    def fitted(self, calibration: Calibration | None = None) -> Any:
        """The model on those windows of `calibration` that `compress` fits to."""
        windows = self.calibration_set(calibration).three_parts()[0]
        key = digest(self.identity), windows.fingerprint
        calibrated = registry.find("sums that weights are fitted with")
        sums = functools.partial(calibrated, self.model, windows, measure=self.measure)
        return self._latest("sums", key, sums)

    def keep(self, setting: Setting | Selection | float) -> KeepMask:
        """The mask that `setting`, or a selection or ratio alone, selects."""
        setting = setting if isinstance(setting, Setting) else Setting(setting)
        return select(self.table_of(setting), setting.selection)

    # --- evaluation ---

    def test_windows(self, corpus: str) -> CalibrationSet:
        """The held-out windows on which the perplexity of `corpus` is measured."""
        seq_len, n_test = self.profile.seq_len, self.profile.n_test
        return self._remembered(
            (windows_key(corpus, split="test"), n_test, seq_len),
            lambda: load_windows(
                corpus, self.tokenizer, seq_len=seq_len, n_sequences=n_test
            ),
        )

    def perplexity(
        self,
        keep: KeepMask | None,
        windows: CalibrationSet,
        *,
        down_projs: ReplacedDownProj | None = None,
        progress: Progress | None = None,
    ) -> Perplexity:
        """Perplexity of the masked model, or of the dense one where `keep` is None.

        With `down_projs`, the new W_down of a `Compensation`, it is always measured:
        what they were fitted with is not part of the cache's keys.

        `progress` is called with (windows done, windows in all) if it is computed; by
        default a progress bar is shown.
        """

        def compute() -> dict[str, Any]:
            # Entered in the thread that runs the model, because masks are per thread.
            pruned = masking(self.model, keep, down_projs)
            with pruned, progress_bar(windows.label, "window") as bar:
                result = evaluate_perplexity(
                    self.model, windows.ids, progress=progress or bar
                )
            return {n: getattr(result, n) for n in ("nll", "n_tokens", "windows")}

        record = self._evaluated(
            "perplexity", keep, windows.fingerprint, compute, stored=down_projs is None
        )
        # Files of earlier versions have no windows.
        losses = tuple(record.get("windows", ()))
        nll = record["nll"]
        return Perplexity(exp_nll(nll), nll, record["n_tokens"], losses)

    def divergence(self, keep: KeepMask, windows: CalibrationSet) -> Divergence:
        """KL(dense || pruned) and top-1 agreement, more sensitive than perplexity."""

        def compute() -> dict[str, Any]:
            with progress_bar(f"KL on {windows.label}", "window") as bar:
                return asdict(
                    evaluate_divergence(self.model, keep, windows.ids, progress=bar)
                )

        record = self._evaluated("divergence", keep, windows.fingerprint, compute)
        return Divergence(**record)

    def task_accuracy(
        self, keep: KeepMask | None, task: str, **options: Any
    ) -> dict[str, Any]:
        """Accuracy on the profile's number of items of a task: value, stderr, n.

        Of the paper's tasks there are also `items`, as in `task_results`, which takes
        the same `options`, `down_projs` and `progress`.
        """
        limit = self.profile.items_of(task)
        rows = self.task_results(keep, task, limit=limit, **options)
        return next(row for row in rows if row["metric"] == "acc")

    def task_results(
        self,
        keep: KeepMask | None,
        task: str,
        *,
        limit: int | None = None,
        down_projs: ReplacedDownProj | None = None,
        progress: Progress | None = None,
    ) -> list[dict[str, Any]]:
        """Every metric of a task: rows of metric, value, stderr, n (items).

        Rows of the paper's tasks also have `items`, 1 for each that is answered rightly
        and 0 for each other. Every mask is asked the same ones, so `paired_difference`
        gives the standard error of a difference.

        Args:
            keep: the mask, or None for the dense model.
            task: a task of the harness, or `continuation`: four-way items of a corpus,
                which is named after a colon, or pydocs.
            limit: so many items, drawn by a fixed seed of the paper's tasks, the first
                of others; by default all, or the profile's number for `continuation`.
                Results are cached for exactly these items.
            down_projs: as `perplexity` takes them.
            progress: called with (answers done, in all) if it is computed.
        """
        data = digest(self.task_key(task, limit))

        def compute() -> list[dict[str, Any]]:
            with masking(self.model, keep, down_projs):
                return self.run_task(task, limit=limit, stored=True, progress=progress)

        stored = down_projs is None
        return list(self._evaluated("tasks", keep, data, compute, stored=stored))

    def run_task(
        self,
        task: str,
        *,
        limit: int | None = None,
        stored: bool = False,
        progress: Progress | None = None,
    ) -> list[dict[str, Any]]:
        """As `task_results`, for what the model computes now, without the cache.

        With `stored`, answers to items of the paper's tasks are kept there, and read.
        """
        run = self._asked(task, limit).run
        with progress_bar(task, "answer") as bar:
            return list(run(self.model, self.tokenizer, progress or bar, stored=stored))

    def task_key(self, task: str, limit: int | None) -> dict[str, Any]:
        """What determines the items of a task and their tokens, in cache keys."""
        return {**self._asked(task, limit).key(), "tokenizer": self.tokenizer_id}

    def _asked(self, task: str, limit: int | None) -> Any:
        """The task, from the wing that runs tasks."""
        return registry.find("tasks")(task, limit, self.profile.n_items)

    def evaluate(self, setting: Setting | None, corpora: Sequence[str]) -> pd.DataFrame:
        """Tidy results of one setting, or of the dense model where it is None.

        Columns: those of `Setting`, achieved_ratio, model, dataset, metric (perplexity,
        nll, accuracy), value, stderr. The dense model has estimator `dense`, ratio 0.

        Args:
            setting: the setting to evaluate.
            corpora: corpora on whose test splits perplexity is measured.
        """
        keep = None if setting is None else self.keep(setting)
        rows: list[tuple[str, str, float, float]] = []
        for corpus in corpora:
            result = self.perplexity(keep, self.test_windows(corpus))
            rows.append((corpus, "perplexity", result.value, math.nan))
            rows.append((corpus, "nll", result.nll, math.nan))
        score = self.task_accuracy(keep, CONTINUATION)
        rows.append((CONTINUATION, "accuracy", score["value"], score["stderr"]))
        frame = pd.DataFrame(rows, columns=["dataset", "metric", "value", "stderr"])
        return frame.assign(**self.columns(setting, keep))

    def savings(self, setting: Setting) -> pd.DataFrame:
        """One row: the parameters, bytes and FLOPs that `setting` saves."""
        keep = self.keep(setting)
        saved = savings_of(keep, self.table_of(setting), source=self.source)
        return pd.DataFrame([saved | self.columns(setting, keep)])

    def columns(self, setting: Setting | None, keep: KeepMask | None) -> dict[str, Any]:
        """The columns of a row of results that describe how its model was made."""
        columns = DENSE if setting is None else setting.columns()
        return {
            **columns,
            "n_sequences": columns["n_sequences"] or self.profile.n_sequences,
            "achieved_ratio": 0.0 if keep is None else keep.achieved_ratio,
            "model": self.name,
        }

    def _latest(self, name: str, key: Any, compute: Callable[[], T]) -> T:
        """What `compute` gave the last time, if the key is the same, or gives now.

        Only the last is kept: tables, with their rankings, and sums can be large.
        """
        if name not in self._last or self._last[name][0] != key:
            self._last[name] = key, compute()
        value: T = self._last[name][1]
        return value

    def _remembered(
        self, key: tuple[Any, ...], compute: Callable[[], CalibrationSet]
    ) -> CalibrationSet:
        """Windows loaded earlier with this tokenizer, or `compute()`."""
        key = *key, *self._tokenizer_state
        if key not in self._windows:
            self._windows[key] = compute()
        return self._windows[key]

    def _evaluated(
        self,
        kind: str,
        keep: KeepMask | None,
        data: str,
        compute: Callable[[], Any],
        *,
        stored: bool = True,
    ) -> Any:
        state, identity = self._state_and_identity()
        key = {
            "schema": EVALUATION_SCHEMA,
            "model": identity,
            "keep": None if keep is None else keep.fingerprint,
            "data": data,
        }

        def of_one_model() -> Any:
            outcome = compute()
            check_unchanged(self.model, state)
            return outcome

        return cache.cached_json(kind, key, of_one_model) if stored else of_one_model()


def _cached_table(
    spec: dict[str, Any], compute: Callable[[], ImportanceTable]
) -> ImportanceTable:
    return cache.cached(
        "importance",
        spec,
        compute,
        read=ImportanceTable.read,
        write=lambda path, table: table.write(path),
    )


def open_workbench(
    name_or_path: str = LAB,
    *,
    profile: str | None = None,
    seq_len: int | None = None,
    device: str = "auto",
    dtype: str = "auto",
    stream: bool | str = "auto",
    host_memory: int | str | None = None,
) -> Workbench:
    """Load a model into a `Workbench`.

    Args:
        name_or_path: as `load_model`.
        profile: a name in `PROFILES`; by default the model's own, else `paper`.
        seq_len: tokens of a window, overriding the profile's.
        device: as `load_model`.
        dtype: as `load_model`.
        stream: as `load_model`.
        host_memory: as `load_model`.

    Raises:
        SpecError: there is no such profile or model.
    """
    chosen = profile_of(name_or_path, profile, seq_len=seq_len)
    loading: dict[str, Any] = {
        "device": device, "dtype": dtype, "stream": stream, "host_memory": host_memory
    }  # fmt: skip
    model, tokenizer = load_model(name_or_path, seq_len=chosen.seq_len, **loading)
    opening = Opening.of(name_or_path, profile=profile, seq_len=seq_len, **loading)
    bench = Workbench(model, tokenizer, name=opening.name, profile=chosen)
    bench.opening = opening
    return bench
