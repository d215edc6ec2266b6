"""Files: parquet, JSON and safetensors, written whole and checked when read.

A file is written under a temporary name and renamed when it is complete, so that it is
never seen half-written. Reading a file that is truncated, damaged, foreign or of a
newer version raises a `CacheError` that names it. Nothing is ever unpickled.
"""

import contextlib
import hashlib
import json
import os
import secrets
import stat
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from heapr_lab.errors import CacheError
from heapr_lab.storage.hashing import canonical_json
from heapr_lab.storage.paths import cache_dir, writable

SCHEMA_VERSION = 1
"""Increased whenever files of an older version can no longer be read."""

_KEY, _CRC = "heapr_lab", "crc32"


def remedy(path: Path) -> str:
    """What to do about an unusable file; only files in the cache are made again."""
    if path.absolute().is_relative_to(cache_dir().absolute()):
        return "move it away or delete it, and it will be made again"
    return "give another file, or make it again with the command that wrote it"


@contextlib.contextmanager
def replacing(path: Path | str) -> Iterator[Path]:
    """A temporary name beside `path` that becomes `path` if the block succeeds.

    If `path` is a symbolic link, its target is replaced, and the link is kept.
    The temporary name begins with `.partial-` and ends like `path`, so that writers
    which look at the extension see the right one. If the block raises, the temporary
    file is removed and `path` is unchanged.

    Raises:
        SpecError: it cannot be written, as where the disk is full.
    """
    path = Path(os.path.realpath(path))
    temporary = path.with_name(f".partial-{secrets.token_hex(4)}-{path.name}")
    with writable(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            mode = _mode_of_new(temporary)
            yield temporary
            if temporary.is_file():  # safetensors' are readable by their owner only
                temporary.chmod(mode)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)


def checksum(path: Path) -> str:
    """SHA-256 of a file, as 64 hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def share_mode(folder: Path, like: Path) -> None:
    """Give the files in `folder` the permissions of the file `like`.

    Safetensors writes files that only their owner may read, whatever the umask.
    """
    mode = stat.S_IMODE(like.stat().st_mode)
    for path in folder.iterdir():
        if path.is_file():
            path.chmod(mode)


def _mode_of_new(path: Path) -> int:
    """The permissions of a new file at `path`, which is removed again."""
    path.touch(exist_ok=False)
    mode = stat.S_IMODE(path.stat().st_mode)
    path.unlink()
    return mode


# --- parquet --------------------------------------------------------------------


def write_frame(
    path: Path | str, frame: pd.DataFrame, metadata: Mapping[str, Any]
) -> None:
    """Write `frame` as parquet (zstd), with `metadata` as JSON in the schema.

    Floats are split into byte streams, all else is dictionary-encoded, and every page
    carries a checksum.

    Args:
        path: the file; an existing one is replaced atomically.
        frame: any frame with string column names; its index is kept.
        metadata: plain data.
    """
    header = {"schema": SCHEMA_VERSION, "metadata": dict(metadata)}
    table = pa.Table.from_pandas(frame)
    table = table.replace_schema_metadata(
        {**(table.schema.metadata or {}), _KEY.encode(): canonical_json(header)}
    )
    floats = [field.name for field in table.schema if pa.types.is_floating(field.type)]
    with replacing(path) as temporary:
        pq.write_table(
            table,
            temporary,
            compression="zstd",
            use_dictionary=[name for name in table.column_names if name not in floats],
            use_byte_stream_split=floats,
            write_page_checksum=True,
        )


def read_frame(
    path: Path | str, columns: Sequence[str] | None = None, *, kind: str | None = None
) -> tuple[pd.DataFrame, dict[str, Any]]:
    """The frame and the metadata that `write_frame` wrote to `path`.

    Args:
        path: the file.
        columns: read only these (and the index); by default all.
        kind: what the metadata has to say that the file holds; by default anything.

    Raises:
        CacheError: the file is truncated or damaged, was not written by this package,
            was written by a newer version of it, is of another kind, or lacks one of
            the columns.
    """
    path = Path(path)
    with (
        readable(path),
        pq.ParquetFile(path, memory_map=True, page_checksum_verification=True) as file,
    ):
        schema = file.schema_arrow
        metadata = _header((schema.metadata or {}).get(_KEY.encode()), path)["metadata"]
        if kind is not None and metadata.get("kind") != kind:
            raise CacheError(
                f"{path} holds {metadata.get('kind') or 'another kind of table'}, "
                f"expected {kind}; give the path of a file that {kind}.write or the "
                "command line made"
            )
        missing = [name for name in columns or () if name not in schema.names]
        if missing:
            raise CacheError(
                f"{path} has no column {', '.join(missing)}; it has "
                f"{', '.join(schema.names)}"
            )
        table = file.read(
            columns=None if columns is None else list(columns), use_pandas_metadata=True
        )
    try:
        return _to_pandas(table), metadata
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise CacheError(
            f"{path} is damaged: the description of its columns cannot be read "
            f"({error}); {remedy(path)}"
        ) from error


def _to_pandas(table: pa.Table) -> pd.DataFrame:
    """The frame of `table`, which is consumed, with every column writable."""
    # Columns that share Arrow's memory cannot be assigned to. Copied one by one, each
    # frees its Arrow memory before the next: the peak stays near one table.
    frame = table.to_pandas(split_blocks=True, self_destruct=True)
    for position in range(frame.shape[1]):
        frame.isetitem(position, frame.iloc[:, position].copy())
    return frame


def read_metadata(path: Path | str) -> dict[str, Any]:
    """The metadata of a file of `write_frame`, without reading any row.

    Raises:
        CacheError: as `read_frame`.
    """
    path = Path(path)
    with readable(path):
        entries = pq.read_schema(path, memory_map=True).metadata or {}
    metadata: dict[str, Any] = _header(entries.get(_KEY.encode()), path)["metadata"]
    return metadata


@contextlib.contextmanager
def readable(path: Path) -> Iterator[None]:
    """Errors of reading `path` here become one that names it.

    Raises:
        CacheError: it is truncated, damaged or of another kind.
        FileNotFoundError: there is no such file.
    """
    try:
        yield
    except (FileNotFoundError, CacheError):
        raise
    except (pa.ArrowException, OSError, SafetensorError, UnicodeDecodeError) as error:
        raise CacheError(
            f"{path} cannot be read: it is truncated, damaged or of another kind "
            f"({str(error).strip()}); {remedy(path)}"
        ) from error


def _header(text: bytes | str | None, path: Path) -> dict[str, Any]:
    """The header of a file that heapr_lab wrote, with its `metadata`.

    Raises:
        CacheError: heapr_lab did not write it, or a newer version did.
    """
    if text is None:
        raise CacheError(
            f"{path} was not written by heapr_lab: it has no {_KEY!r} metadata; "
            f"{remedy(path)}"
        )
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        content = None
    header = content if isinstance(content, dict) else {}
    schema = header.get("schema")
    if not isinstance(schema, int) or not isinstance(header.get("metadata"), dict):
        raise CacheError(
            f"{path} is damaged: its {_KEY!r} metadata is no JSON object with schema "
            f"and metadata; {remedy(path)}"
        )
    if schema > SCHEMA_VERSION:
        raise CacheError(
            f"{path} has schema version {schema}, this heapr_lab reads up to "
            f"{SCHEMA_VERSION}: it was written by a newer one; upgrade heapr_lab"
        )
    return header


# --- JSON -----------------------------------------------------------------------


def write_json(path: Path | str, value: Any) -> None:
    """Write plain data and dataclasses as indented JSON, atomically."""
    text = json.dumps(json.loads(canonical_json(value)), indent=2, ensure_ascii=False)
    with replacing(path) as temporary:
        temporary.write_text(f"{text}\n", encoding="utf-8")


def read_json(path: Path | str) -> Any:
    """The plain data in a JSON file.

    Raises:
        CacheError: the file is truncated or is not JSON.
    """
    path = Path(path)
    with readable(path):
        text = path.read_text(encoding="utf-8")
    try:
        return json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise CacheError(
            f"{path} is truncated or is not JSON ({error}); {remedy(path)}"
        ) from error


def read_object(path: Path | str) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        CacheError: the file is truncated, is not JSON, or holds something else.
    """
    content = read_json(path)
    if not isinstance(content, dict):
        raise CacheError(
            f"{path} is damaged: expected a JSON object, found a "
            f"{type(content).__name__}; {remedy(Path(path))}"
        )
    return content


# --- states of interrupted passes -----------------------------------------------


def save_state(
    path: Path | str, arrays: Mapping[str, np.ndarray], meta: Mapping[str, Any]
) -> None:
    """Write named arrays and plain `meta` as safetensors, atomically."""
    whole = {name: np.asarray(array, order="C") for name, array in arrays.items()}
    with replacing(path) as temporary:
        save_file(whole, temporary, metadata=sealed(whole, meta))


def load_state(path: Path | str) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """The arrays and the meta that `save_state` wrote to `path`.

    Raises:
        CacheError: the file is truncated or damaged, or was not written by
            `save_state`.
    """
    path = Path(path)
    with readable(path), safe_open(path, framework="numpy") as file:
        arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        return arrays, unsealed(file.metadata(), arrays, path)


def sealed(arrays: Mapping[str, np.ndarray], meta: Mapping[str, Any]) -> dict[str, str]:
    """The metadata of a safetensors file: `meta`, with a checksum of all of it."""
    header = {"schema": SCHEMA_VERSION, "metadata": dict(meta)}
    return {_KEY: canonical_json(header | {_CRC: _crc(arrays, meta)})}


def unsealed(
    metadata: Mapping[str, str] | None, arrays: Mapping[str, np.ndarray], path: Path
) -> dict[str, Any]:
    """The `meta` that `arrays` were sealed with in the file `path`.

    Raises:
        CacheError: the arrays or the meta are not those that were sealed, or an earlier
            version wrote them, without a checksum.
    """
    header = _header((metadata or {}).get(_KEY), path)
    meta: dict[str, Any] = header["metadata"]
    if header.get(_CRC) != _crc(arrays, meta):
        raise CacheError(
            f"{path} is damaged: its checksum ({header.get(_CRC, 'none')}) is not that "
            f"of its contents; {remedy(path)}"
        )
    return meta


def _crc(arrays: Mapping[str, np.ndarray], meta: Mapping[str, Any]) -> int:
    """CRC-32 of names, types, shapes and values, and of `meta`."""
    crc = zlib.crc32(canonical_json(dict(meta)).encode())
    for name, array in sorted(arrays.items()):
        crc = zlib.crc32(f"{name} {array.dtype} {array.shape}".encode(), crc)
        crc = zlib.crc32(np.ascontiguousarray(array).data, crc)
    return crc
