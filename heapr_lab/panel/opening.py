"""The panel of a model or a table; a model is loaded behind the first picture.

The picture needs the table alone. What was measured of a model is remembered by how it
was opened and the state of its files, so that the table is found again without the
model. Importing this, and finding the table, needs no torch.
"""

import contextlib
import platform
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import ipywidgets as ipw
import msgspec

from heapr_lab.errors import CacheError, CorpusError, SpecError
from heapr_lab.importance.estimators import find_estimator
from heapr_lab.importance.table import ImportanceTable
from heapr_lab.models.named import folder_here
from heapr_lab.models.sources import Source
from heapr_lab.panel.jobs import Job, Report
from heapr_lab.panel.looks import status
from heapr_lab.panel.panel import Explorer
from heapr_lab.panel.session import PruningSession
from heapr_lab.panel.session_file import read_session
from heapr_lab.pruning.options import Selection
from heapr_lab.recipes.describing import calibration_of
from heapr_lab.storage.cache import cache_path
from heapr_lab.storage.files import replacing
from heapr_lab.storage.paths import path_of
from heapr_lab.streaming.plan import size_of
from heapr_lab.tasks.paper_tasks import available_tasks, check_defined, continued
from heapr_lab.text.calibration_spec import Calibration, corpora_of
from heapr_lab.text.corpora import TEST_CORPORA, available_corpora, source_key
from heapr_lab.workbench.settings import Opening, Profile, profile_of

if TYPE_CHECKING:
    from heapr_lab.workbench.workbench import Workbench

KIND: Final = "openings"
"""Folder in the cache."""


class Known(msgspec.Struct, frozen=True):
    """A table that was measured, and the files of its model."""

    table: str
    """Name of its file in the cache."""
    source: Source | None


def remember(
    bench: "Workbench", calibration: Calibration, table: ImportanceTable
) -> None:
    """Have the table of a model found by its name, if it has one and a file."""
    spec = table.metadata.get("spec")
    if bench.opening is None or spec is None:
        return
    path = _path_of(bench.opening, calibration)
    stored = cache_path("importance", spec, extension="parquet")
    if path is None or path.exists() or not stored.exists():
        return
    known = Known(stored.name, bench.source)
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary:
        temporary.write_bytes(msgspec.json.encode(known, enc_hook=str))


class LoadingWorkbench:
    """A workbench whose model is loaded when it is first needed, or by `load`.

    All that is not here is that of the workbench: whoever asks for it waits.

    Attributes:
        opening: how it is opened.
        profile: how much text is used.
        name: the name of the model in figures and tables.
    """

    def __init__(self, name: str, **options: Any) -> None:
        """Nothing is loaded yet.

        Args:
            name: as `open_workbench` takes it.
            **options: the options of `open_workbench`.

        Raises:
            SpecError: there is no such model or profile, or an option has an invalid
                value.
        """
        self.opening = Opening.of(name, **options).check()
        if self.opening.host_memory is not None:
            size_of(self.opening.host_memory, least=0)
        self.name = self.opening.name
        self.profile: Profile = profile_of(
            name, self.opening.profile, seq_len=self.opening.seq_len
        )
        self._lock = threading.Lock()
        self._loaded: Workbench | None = None
        self._known: dict[Path, tuple[Known, Calibration]] = {}

    @property
    def is_loaded(self) -> bool:
        """Whether the model is there."""
        return self._loaded is not None

    @property
    def is_measured(self) -> bool:
        """Whether the table on the default calibration is found without the model."""
        return self._find(None) is not None

    def load(self) -> "Workbench":
        """The workbench, once its model is loaded.

        Raises:
            SpecError: it is not the model that a table is of.
        """
        from heapr_lab.workbench.workbench import open_workbench

        with self._lock:
            if self._loaded is None:
                bench = open_workbench(self.opening.model, **self.opening.given())
                for path, (known, calibration) in self._known.items():
                    _check(bench, path, known, calibration)
                self._loaded = bench
            return self._loaded

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # what is asked of any object
            raise AttributeError(name)
        return getattr(self.load(), name)

    @property
    def source(self) -> Any:
        """As `Workbench.source`; before the model is there, as it was remembered."""
        if self._loaded is None and self._known:
            return next(iter(self._known.values()))[0].source
        return self.load().source

    def importance(
        self, calibration: Calibration | None = None, *, estimator: str = "heapr"
    ) -> ImportanceTable:
        """As `Workbench.importance`, without the model if the table is known.

        Raises:
            CorpusError: a text is not available; it is said before the model is loaded.
        """
        known = None if self._loaded else self._find(calibration)
        if known is not None and not find_estimator(estimator).extra_pass:
            with contextlib.suppress(CacheError):
                return ImportanceTable.read(_table_path(known))
        corpus = (calibration or Calibration()).corpus
        _check_available(corpora_of(corpus), split="train")
        return self.load().importance(calibration, estimator=estimator)

    def _find(self, calibration: Calibration | None) -> Known | None:
        asked = calibration or Calibration()
        path = _path_of(self.opening, asked)
        if path is None or not path.is_file():
            return None
        try:
            known = msgspec.json.decode(path.read_bytes(), type=Known, dec_hook=_read)
        except (OSError, msgspec.MsgspecError):
            return None
        if not _table_path(known).is_file():
            return None
        self._known[path] = known, asked
        return known


def explore(
    source: "Workbench | ImportanceTable | PruningSession | Path | str",
    *,
    corpora: Sequence[str] | None = None,
    tasks: Sequence[str] | None = None,
    selection: Selection | None = None,
    calibration: Calibration | None = None,
    session: Path | str | None = None,
    **options: Any,
) -> Explorer:
    """The panel of a model, or of a table alone.

    Args:
        source: a workbench, which measures the importance unless it is in the cache; a
            table, with which everything works that does not run the model; the path of
            a table's parquet file; or a model as `open_workbench` takes it.
        corpora: perplexity can be measured on their test splits; by default those
            available on this machine.
        tasks: their accuracy can be measured; by default those available here.
        selection: the first one; a workbench measures what its estimator needs.
        calibration: what a workbench measures the importance on.
        session: a file that *Save session* wrote, in place of both: what it has is
            shown again.
        **options: those of `open_workbench`, where `source` is the name of a model.

    Raises:
        SpecError: `source` is of another type, there is no such table, model or task,
            an option has an invalid value, the controls cannot show the selection, the
            session is not of the table, or a selection or a calibration is given
            with it.
        CorpusError: a corpus is not available.

    Example:
        >>> explore("lab")  # doctest: +SKIP
    """
    saved = None if session is None else read_session(session)
    if saved is not None:
        if selection is not None or calibration is not None:
            raise SpecError(
                "a session has a selection and a calibration: give no other"
            )
        # A workbench then measures the table of the session.
        selection, calibration = Selection(0.0, saved.measured_for), saved.calibration
    check_measurable(corpora or (), tasks or ())
    pruning = session_of(source, selection, calibration, **options)
    first = selection or pruning.selection
    pruning.choose(first)
    if pruning.workbench is not None:
        if corpora is None:
            corpora = available_corpora(TEST_CORPORA)[0]
        if tasks is None:
            tasks = "continuation", *available_tasks()
    if corpora is not None:
        pruning.corpora = corpora
    if tasks is not None:
        pruning.tasks = tasks
    panel = Explorer(pruning)
    panel.controls.check_shows(first)
    if saved is not None:
        panel.files.restore(saved)
    return panel


def session_of(
    source: "Workbench | ImportanceTable | PruningSession | Path | str",
    selection: Selection | None = None,
    calibration: Calibration | None = None,
    **options: Any,
) -> PruningSession:
    """The session of any source that `explore` takes, with these arguments of it.

    Raises:
        SpecError: `source` is of another type, there is no such table or model, or an
            option has an invalid value.
    """
    if isinstance(source, str | Path):
        name = str(source)
        if name.startswith("~"):
            name = str(path_of(name))
        if name.endswith(".parquet"):
            return session_of(table_at(Path(name)), selection, calibration)
        loading: Any = LoadingWorkbench(name, **options)
        return session_of(loading, selection, calibration)
    if isinstance(source, PruningSession):
        return source
    if isinstance(source, ImportanceTable):
        recorded = calibration_of(source.calibration) or calibration
        return PruningSession(source, calibration=recorded)
    if not hasattr(source, "importance"):
        raise SpecError(
            f"cannot explore a {type(source).__name__}: expected a Workbench, an "
            "ImportanceTable, the path of a table, or the name of a model"
        )
    estimator = "heapr" if selection is None else selection.estimator
    table = source.importance(calibration, estimator=estimator)
    if not find_estimator(estimator).extra_pass:
        remember(source, calibration or Calibration(), table)
    return PruningSession(table, workbench=source, calibration=calibration)


def table_at(path: Path) -> ImportanceTable:
    """The table in a file.

    Raises:
        SpecError: there is no such file.
    """
    if not path.is_file():
        raise SpecError(f"there is no table {path}; make one with `heapr-lab score`")
    return ImportanceTable.read(path)


def check_measurable(corpora: Sequence[str], tasks: Sequence[str]) -> None:
    """Make sure that there are these corpora and tasks, without reading their text.

    Raises:
        CorpusError: the test split of a corpus, or of a task's, is not available.
        SpecError: there is no such task.
    """
    texts, of_harness = continued(tasks)
    _check_available([*corpora, *texts], split="test")
    check_defined(of_harness)


def _check_available(corpora: Sequence[str], *, split: str) -> None:
    """Make sure that there are these corpora.

    Raises:
        CorpusError: one of them is not available.
    """
    for error in available_corpora(corpora, split=split)[1].values():
        raise CorpusError(error)


def _read(kind: Any, text: Any) -> Any:
    """A value that JSON has no type for, the path of a folder, of its text."""
    return kind(text)


def _check(
    bench: "Workbench", path: Path, known: Known, calibration: Calibration
) -> None:
    from heapr_lab.importance.collect import statistics_spec

    spec = statistics_spec(bench.identity, bench.calibration_set(calibration))
    if cache_path("importance", spec, extension="parquet") != _table_path(known):
        path.unlink(missing_ok=True)
        raise SpecError(
            f"{bench.name} is not the model that the table shown is of, or computes in "
            "another type: open the panel again"
        )


def _table_path(known: Known) -> Path:
    """The file of the table, whose name in the cache is all that was remembered."""
    return cache_path("importance", {}, extension="parquet").with_name(
        Path(known.table).name
    )


def _path_of(opening: Opening, calibration: Calibration) -> Path | None:
    """Where a table is remembered; None for a model without files here."""
    folder = folder_here(opening.model)
    if folder is None:
        return None
    texts = [source_key(name, split="train") for name in corpora_of(calibration.corpus)]
    key = {
        "opening": vars(opening),
        "files": sorted(_states(folder)),
        "calibration": calibration.to_dict(),
        "texts": repr(texts),
        "machine": platform.node(),
    }
    return cache_path(KIND, key, extension="json")


def _states(folder: Path) -> Iterator[list[Any]]:
    """Each file, its size, and when it was changed."""
    for path in folder.iterdir():
        if path.is_file():
            now = path.stat()
            yield [path.name, now.st_size, now.st_mtime_ns]


# --- in a page ------------------------------------------------------------------------


class Measuring(ipw.VBox):
    """How far the scores of a model are; then its panel, in their place.

    Attributes:
        job: measures them, and begins at once.
    """

    def __init__(self, bench: LoadingWorkbench) -> None:
        """Begin to measure.

        Args:
            bench: that of the model.
        """
        self._bench: Any = bench
        text = f"The scores of {bench.name} are not in the cache, so they are measured."
        self.job = Job("Measure", self._measure)
        super().__init__([ipw.HTML(status(text)), self.job])
        self.job.start()

    def _measure(self, report: Report) -> None:
        report(0, 1, "loading the model")
        bench = self._bench.load()
        windows = bench.calibration_set()
        name = f"scores on {windows.label}: window"
        report(0, windows.n_sequences, name)
        bench.measure(windows, progress=lambda done, n: report(done, n, name))
        panel = explore(self._bench)
        self.children = [panel]
        panel.begin()


def opened(name: str, **options: Any) -> ipw.VBox:
    """The panel of a model, or what measures its scores first.

    Args:
        name: as `open_workbench` takes it.
        **options: the options of `open_workbench`.
    """
    bench: Any = LoadingWorkbench(name, **options)
    return explore(bench) if bench.is_measured else Measuring(bench)
