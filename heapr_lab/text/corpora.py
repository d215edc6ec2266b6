"""Named sources of English text, each with a fingerprint and its provenance.

A corpus is a tuple of texts (documents or lines) of one split. Names:

====================== ====================================================
`pydocs`               docstrings of the standard library and of installed
                       scientific packages, harvested on this machine
`pydocs:torch`         the same of one package (`pydocs:stdlib`, ...)
`wikitext2`            WikiText-2, raw
`wikitext2:tokenized`  WikiText-2 with `<unk>`
`ptb`                  Penn Treebank, word level
`c4`                   English C4
a path                 a `.txt`, `.jsonl` or `.parquet` file of your own, of
                       texts (`text`) or of conversations (`messages`)
====================== ====================================================

The named data sets are read from `$HEAPR_DATA_DIR` if it contains their folder, else
from the hub through `datasets`. No corpus is ever replaced by another: one that is not
available raises a `CorpusError` that says how to get it.
"""

import contextlib
import functools
import hashlib
import json
import os
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from heapr_lab import hub
from heapr_lab.errors import CorpusError
from heapr_lab.text.pydocs import PYDOCS_PACKAGES, harvested

_FILE_TYPES = (".txt", ".jsonl", ".parquet")
_CHAT = "messages"
SPLITS = ("train", "validation", "test")
TEST_CORPORA = ("pydocs", "wikitext2", "ptb", "c4")
"""Corpora on whose test splits perplexity is measured, where they are available."""


@dataclass(frozen=True)
class Corpus:
    """One split of one named text source."""

    name: str
    """The name by which it was requested."""
    split: str
    """`train`, `validation` or `test`."""
    texts: tuple[str, ...] = field(repr=False)
    """Documents or lines, in the order of the source."""
    source: str = field(repr=False)
    """Where the texts came from: a folder, a hub data set, package versions."""
    chat: bool = False
    """Whether each text is a conversation as JSON, a list of messages with a `role` and
    a `content`; `joined` makes text of it, with the chat template of a tokenizer."""

    @functools.cached_property
    def fingerprint(self) -> str:
        """SHA-256 over texts, each with a zero byte; and lengths if one has such."""
        sha = hashlib.sha256()
        for text in self.texts:
            sha.update(text.encode())
            sha.update(b"\0")
        if any("\0" in text for text in self.texts):
            sha.update(repr([len(text) for text in self.texts]).encode())
        return sha.hexdigest()

    def joined(self, tokenizer: Any = None) -> str:
        """The whole split as one string, as `tokenizer` is given it.

        Texts are separated by a blank line. Conversations go through the chat template,
        whose special tokens separate them: models that were trained to chat see it at
        run time, so their scores should, too.

        Source: HEAPr, appendix on the calibration data.

        Raises:
            CorpusError: there is no chat template for conversations, or it refuses one.
        """
        if not self.chat:
            return "\n\n".join(self.texts)
        if getattr(tokenizer, "chat_template", None) is None:
            raise CorpusError(
                f"corpus {self.name!r} has conversations, and the tokenizer has no "
                "chat template: give plain text (a 'text' column), or a chat model"
            )
        parts = []
        for number, text in enumerate(self.texts, start=1):
            messages = json.loads(text)
            try:
                part = tokenizer.apply_chat_template(messages, tokenize=False)
            except Exception as error:  # a template is a program of its own
                raise CorpusError(
                    f"corpus {self.name!r}, conversation {number}: the chat template "
                    f"refuses it ({type(error).__name__}: {str(error)[:200]})"
                ) from error
            parts.append(str(part))
        return "".join(parts)

    @property
    def provenance(self) -> dict[str, str | int]:
        """What caches and figures record about this corpus."""
        return {
            "name": self.name,
            "split": self.split,
            "source": self.source,
            "n_texts": len(self.texts),
            "fingerprint": self.fingerprint,
        }


@dataclass(frozen=True)
class _Dataset:
    """The places of a named data set, locally and on the hub."""

    folder: str
    hub_path: str
    hub_name: str | None = None
    hub_revision: str | None = None
    column: str = "text"
    single: bool = False
    """Whether it has only the split `train`, which is divided into three."""
    local_train: str = "train"
    """Name of the local file of that split."""

    def split(self, split: str) -> str:
        """The split of the data set that holds the texts of `split`."""
        return "train" if self.single else split


_DATASETS = {
    "wikitext2": _Dataset(
        folder="wikitext2_raw",
        hub_path="Salesforce/wikitext",
        hub_name="wikitext-2-raw-v1",
        local_train="train_head",
    ),
    "wikitext2:tokenized": _Dataset(
        folder="wikitext2_tokenized",
        hub_path="Salesforce/wikitext",
        hub_name="wikitext-2-v1",
    ),
    "ptb": _Dataset(
        folder="ptb",
        hub_path="ptb-text-only/ptb_text_only",
        # Its main branch is a script, which `datasets` no longer runs.
        hub_revision="refs/convert/parquet",
        column="sentence",
    ),
    # The local sample and the hub's shard have a single split: documents are divided
    # into three by the hash of each, as those of `pydocs` are.
    "c4": _Dataset(
        folder="c4_sample", hub_path="allenai/c4", hub_name="en", single=True
    ),
}
_C4_SHARD = "en/c4-train.00000-of-01024.json.gz"


def corpus_names() -> list[str]:
    """Every name that `load_corpus` knows, including the `pydocs` domains.

    A corpus that is listed here may be unavailable on this machine.
    """
    domains = [f"pydocs:{package}" for package in PYDOCS_PACKAGES]
    return ["pydocs", *domains, *_DATASETS]


def load_corpus(name: str, *, split: str = "train") -> Corpus:
    """The texts of one split of the corpus called `name`.

    Args:
        name: a name from the module's table, or the path of a file. A file has one
            split only, which is used whole for any `split`.
        split: `train`, `validation` or `test`.

    Raises:
        CorpusError: the name is unknown, or the corpus is not available here; the
            message says how to get it.
    """
    if split not in SPLITS:
        raise CorpusError(f"split is {split!r}, expected one of {', '.join(SPLITS)}")
    path = Path(name)
    if path.suffix in _FILE_TYPES:
        texts, chat = _read_texts(path)
        return Corpus(str(path), split, texts, f"file {path.name}, used whole", chat)
    return _named_corpus(name, split, _source_file(name, split))


@dataclass(frozen=True)
class _File:
    """A file or folder in its current state, which differs once it is changed."""

    path: Path
    state: tuple[int, ...]
    """Device, inode, size, and times of changes; empty if it does not exist."""

    @classmethod
    def at(cls, path: Path) -> "_File":
        """The file at `path`, relative to the current folder."""
        path = path.absolute()
        try:
            now = path.stat()
        except (OSError, ValueError):  # reading it raises the error that says why
            return cls(path, ())
        times = now.st_mtime_ns, now.st_ctime_ns
        return cls(path, (now.st_dev, now.st_ino, now.st_size, *times))


def source_key(name: str, *, split: str) -> Hashable:
    """A key that changes when the texts of a corpus may have changed.

    It is made from the state of the file that they are in, without reading them.
    """
    return name, split, _source_file(name, split)


def _source_file(name: str, split: str) -> _File | None:
    """The local file that a corpus is read from, or where `datasets` looks first."""
    if Path(name).suffix in _FILE_TYPES:
        return _File.at(Path(name))
    if name not in _DATASETS:
        return None
    dataset = _DATASETS[name]
    folder = _local_folder(dataset, os.environ.get("HEAPR_DATA_DIR"))
    if folder is None:
        return _File.at(Path(dataset.hub_path))
    stem = dataset.split(split)
    stem = dataset.local_train if stem == "train" else stem
    return _File.at(folder / f"{stem}.parquet")


@functools.lru_cache(maxsize=32)
def _named_corpus(name: str, split: str, file: _File | None) -> Corpus:
    dataset = _DATASETS.get(name)
    harvest, _, package = name.partition(":")
    if harvest == "pydocs":
        texts, source = harvested(package)
    elif dataset is None or file is None:
        raise CorpusError(
            f"corpus {name!r} is unknown: expected one of {', '.join(corpus_names())}, "
            "or the path of a .txt, .jsonl or .parquet file"
        )
    elif file.path.suffix:
        texts = _read_texts(file.path)[0]
        source = f"{dataset.folder}/{file.path.name}"
    else:
        texts, source = _from_hub(name, dataset.split(split), dataset)
    if dataset is None or dataset.single:
        return _hash_split(name, split, texts, source)
    return Corpus(name, split, texts, source)


def _hash_split(name: str, split: str, texts: Iterable[str], source: str) -> Corpus:
    """Divide whole texts into 90/5/5 per cent by a hash of each, so that none leaks."""
    kept = tuple(text for text in texts if _split_of(text) == split)
    return Corpus(name, split, kept, f"{source}; split by hash of each text")


def _split_of(text: str) -> str:
    bucket = int.from_bytes(hashlib.sha256(text.encode()).digest()[:4]) % 100
    return "train" if bucket < 90 else "validation" if bucket < 95 else "test"


# --- data sets --------------------------------------------------------


def _local_folder(dataset: _Dataset, data_dir: str | None) -> Path | None:
    if not data_dir:
        return None
    folder = Path(data_dir) / dataset.folder
    return folder if folder.is_dir() else None


_not_on_hub: dict[tuple[str, Path], str] = {}
"""Errors of data sets that are not available; a second request would be as slow."""


def _from_hub(name: str, split: str, dataset: _Dataset) -> tuple[tuple[str, ...], str]:
    """The texts of a split of a data set on the hub, and their source.

    Raises:
        CorpusError: the hub cannot be reached, or lacks the data set.
    """
    hub.is_reachable()  # if it is not, `datasets` reads local files only
    import datasets  # slow to import; it reads HF_HUB_OFFLINE then

    key = name, Path.cwd()
    if key in _not_on_hub:
        raise CorpusError(_not_on_hub[key])
    try:
        rows = datasets.load_dataset(
            dataset.hub_path,
            None if dataset.single else dataset.hub_name,
            split=split,
            revision=dataset.hub_revision,
            data_files={"train": _C4_SHARD} if dataset.single else None,
        )
    except Exception as error:
        _not_on_hub[key] = (
            f"corpus {name!r} is neither in $HEAPR_DATA_DIR "
            f"(now {os.environ.get('HEAPR_DATA_DIR')!r}; expected the folder "
            f"{dataset.folder!r} in it) nor available from the hub data set "
            f"{dataset.hub_path!r} ({type(error).__name__}: {error}). Set the "
            "variable, or connect to the hub, and start again."
        )
        raise CorpusError(_not_on_hub[key]) from error
    source = f"hub:{dataset.hub_path} {dataset.hub_name or ''} {split}"
    source += f" ({_C4_SHARD})" if dataset.single else ""
    return tuple(rows[dataset.column]), source


def available_corpora(
    names: Sequence[str], *, split: str = "test"
) -> tuple[list[str], dict[str, str]]:
    """The `names` of which a split is available, and the errors of the others.

    What is on this machine is not read for it; data sets of the hub are.
    """
    available, skipped = [], {}
    for name in names:
        try:
            file = _source_file(name, split)
            if name != "pydocs" and not (file and file.path.suffix and file.state):
                load_corpus(name, split=split)
        except CorpusError as error:
            skipped[name] = str(error)
        else:
            available.append(name)
    return available, skipped


# --- files ------------------------------------------------------------


def _read_texts(path: Path) -> tuple[tuple[str, ...], bool]:
    """The texts of a file, and whether they are conversations, as JSON.

    Args:
        path: `.txt`, with blank lines between texts; `.jsonl` or `.parquet`, with a
            field or column of `_READERS`.

    Raises:
        CorpusError: there is no such file, or it has no texts; names the row.
    """
    if not path.is_file():
        raise CorpusError(f"corpus file {str(path)!r} does not exist: check the path")
    if path.suffix == ".txt":
        texts = tuple(text.strip() for text in re.split(r"\n\s*\n", _read_utf8(path)))
        texts, chat = tuple(text for text in texts if text), False
    else:
        texts, chat = _read_rows(path)
    if not texts:
        raise CorpusError(f"corpus file {str(path)!r} holds no text")
    _check_unicode(texts, path)
    return texts, chat


def _check_unicode(texts: tuple[str, ...], path: Path) -> None:
    """Check that every text can be encoded as UTF-8.

    Raises:
        CorpusError: a text has half of a surrogate pair, which JSON allows.
    """
    for number, text in enumerate(texts, start=1):
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise CorpusError(
                f"corpus file {str(path)!r}, text {number}: {error.reason} (character "
                f"{error.start} is half of a surrogate pair); correct the text"
            ) from error


def _read_rows(path: Path) -> tuple[tuple[str, ...], bool]:
    """The texts in the rows of a file; the first one says which field they are in.

    Raises:
        CorpusError: a row has none; its place is named.
    """
    texts: list[str] = []
    field, kind = "text", "JSON object" if path.suffix == ".jsonl" else "row"
    for place, row in _rows(path):
        try:
            cells = json.loads(row) if isinstance(row, str) else row
            if not texts:
                field = next((name for name in _READERS if name in cells), field)
            texts.append(_READERS[field](cells[field]))
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise CorpusError(
                f"{path}, {place}: expected a {kind} with a {field!r} field "
                f"({str(error)[:80] or type(error).__name__})"
            ) from error
    return tuple(texts), field == _CHAT


def _rows(path: Path) -> Iterator[tuple[str, Any]]:
    """The rows of a file, as JSON or as values by column, each with its place.

    Raises:
        CorpusError: the file cannot be read, or has no column of texts.
    """
    if path.suffix == ".jsonl":
        for number, line in enumerate(_read_utf8(path).split("\n"), start=1):
            if line.strip():
                yield f"line {number}", line
        return
    with _readable(path), pq.ParquetFile(path) as file:
        names = file.schema_arrow.names
        columns = [name for name in _READERS if name in names][:1]
        cells = file.read(columns).column(0).to_pylist() if columns else []
    if not columns:
        raise CorpusError(
            f"{path} has the columns {names}, expected one called 'text', or "
            "'messages' for conversations"
        )
    for number, cell in enumerate(cells, start=1):
        yield f"row {number}", {columns[0]: cell}


def _plain_text(value: Any) -> str:
    """`value`, if it is a text.

    Raises:
        TypeError: it is not.
    """
    if not isinstance(value, str):
        raise TypeError(f"a text, not a {type(value).__name__}")
    return value


def _conversation(messages: Any) -> str:
    """A conversation as JSON, in one form; keys without a value are left out.

    Raises:
        TypeError: it is not a list of messages, each with a role.
    """
    turns = messages if isinstance(messages, list) else []
    if not turns or not all(
        isinstance(turn, dict) and isinstance(turn.get("role"), str) for turn in turns
    ):
        raise TypeError("a list of messages, each with a role and a content")
    kept = [{k: v for k, v in turn.items() if v is not None} for turn in turns]
    return json.dumps(kept, sort_keys=True, ensure_ascii=False)


_READERS: dict[str, Callable[[Any], str]] = {
    "text": _plain_text,
    "sentence": _plain_text,
    _CHAT: _conversation,
}
"""Fields and columns of texts, the usual one first, and what checks a text of each."""


@contextlib.contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Errors of reading `path` here become one that names it.

    Raises:
        CorpusError: it is damaged, is not UTF-8, or cannot be opened.
    """
    try:
        yield
    except UnicodeDecodeError as error:
        raise CorpusError(
            f"corpus file {str(path)!r} is not UTF-8 ({error}): convert it"
        ) from error
    except (OSError, pa.ArrowException) as error:
        reason = getattr(error, "strerror", None) or error
        raise CorpusError(
            f"corpus file {str(path)!r} cannot be read ({reason})"
        ) from error


def _read_utf8(path: Path) -> str:
    with _readable(path):
        return path.read_text("utf-8")
