"""Texts and conversations in files of one's own."""

import contextlib
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from heapr_lab.errors import CorpusError

FILE_TYPES = (".txt", ".jsonl", ".parquet")
_TEXT = ("text", "sentence")
_CHAT = "messages"


def read_texts(path: Path) -> tuple[tuple[str, ...], bool]:
    """The texts of a file, and whether they are conversations, as JSON.

    Args:
        path: `.txt`, with blank lines between texts; `.jsonl` or `.parquet`, with a
            field or column `text` or `messages`.

    Raises:
        CorpusError: there is no such file, or it has no texts; names the row.
    """
    if not path.is_file():
        raise CorpusError(f"corpus file {str(path)!r} does not exist: check the path")
    if path.suffix == ".txt":
        texts = tuple(text.strip() for text in re.split(r"\n\s*\n", _read_utf8(path)))
        texts, chat = tuple(text for text in texts if text), False
    elif path.suffix == ".jsonl":
        texts, chat = _read_jsonl(path)
    else:
        texts, chat = _read_parquet(path)
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


def _read_jsonl(path: Path) -> tuple[tuple[str, ...], bool]:
    texts: list[str] = []
    field = "text"
    for number, line in enumerate(_read_utf8(path).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            if not texts and _CHAT in row and "text" not in row:
                field = _CHAT
            texts.append(_READERS[field](row[field]))
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise CorpusError(
                f"{path}, line {number}: expected a JSON object with a {field!r} field "
                f"({str(error)[:80] or type(error).__name__})"
            ) from error
    return tuple(texts), field == _CHAT


def _plain_text(value: Any) -> str:
    """`value`, if it is a text.

    Raises:
        TypeError: it is not.
    """
    if not isinstance(value, str):
        raise TypeError
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


_READERS: dict[str, Callable[[Any], str]] = {"text": _plain_text, _CHAT: _conversation}


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


def _read_parquet(path: Path) -> tuple[tuple[str, ...], bool]:
    with _readable(path):
        names = pq.read_schema(path).names
    if _CHAT in names and not {*_TEXT} & {*names}:
        return _read_conversations(path), True
    return read_column(path, next((n for n in _TEXT if n in names), "text")), False


def read_column(path: Path, column: str) -> tuple[str, ...]:
    """The texts of a column of a parquet file.

    Raises:
        CorpusError: the file cannot be read, or has no such column of texts.
    """
    cells = _cells(path, column)
    if cells.null_count or not (
        pa.types.is_string(cells.type) or pa.types.is_large_string(cells.type)
    ):
        raise CorpusError(
            f"{path}: column {column!r} has type {cells.type} and lacks "
            f"{cells.null_count} of {len(cells)} values, expected a text in each row"
        )
    with _readable(path):
        return tuple(cells.to_pylist())


def _read_conversations(path: Path) -> tuple[str, ...]:
    texts = []
    with _readable(path):
        rows = _cells(path, _CHAT).to_pylist()
    for number, messages in enumerate(rows, start=1):
        try:
            texts.append(_conversation(messages))
        except TypeError as error:
            raise CorpusError(
                f"{path}, row {number}: expected in {_CHAT!r} {error}"
            ) from error
    return tuple(texts)


def _cells(path: Path, column: str) -> Any:
    with _readable(path), pq.ParquetFile(path) as file:
        names = file.schema_arrow.names
        if column in names:
            return file.read([column])[column]
    raise CorpusError(
        f"{path} has the columns {names}, expected one called 'text', or "
        "'messages' for conversations"
    )
