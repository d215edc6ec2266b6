"""Text files of one's own that are not as they should be: an error that says where."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from heapr_lab.errors import CorpusError
from heapr_lab.text.corpora import load_corpus


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("[" * 100_000, "maximum recursion depth"),
        ('{"text": ' * 100_000, "maximum recursion depth"),
        ('{"text": ' + "9" * 5000 + "}", "integer string"),
    ],
)
def test_a_line_that_is_no_object_with_a_text(
    tmp_path: Path, line: str, said: str
) -> None:
    """However it is none; the line is named."""
    path = tmp_path / "texts.jsonl"
    path.write_text('{"text": "good"}\n' + line + "\n")
    with pytest.raises(CorpusError, match=rf"texts\.jsonl, line 2: .*{said}"):
        load_corpus(str(path))


def test_half_of_a_surrogate_pair(tmp_path: Path) -> None:
    """JSON can say it; UTF-8, and so a hash of the text, cannot."""
    path = tmp_path / "texts.jsonl"
    lines = [
        json.dumps({"text": text}) for text in ("a pair: \U0001f600", "half \ud83d")
    ]
    path.write_text("\n".join(lines))
    with pytest.raises(
        CorpusError, match=r"texts\.jsonl', text 2: surrogates.*correct"
    ):
        load_corpus(str(path))


def test_bytes_in_parquet_that_are_not_utf8(tmp_path: Path) -> None:
    """Arrow does not look at them when it reads."""
    offsets = pa.array([0, 4], pa.int32()).buffers()[1]
    buffers = [None, offsets, pa.py_buffer(b"\xff\xfe\xfd\xfc")]
    column = pa.Array.from_buffers(pa.string(), 1, buffers)
    path = tmp_path / "texts.parquet"
    pq.write_table(pa.table({"text": column}), path)
    with pytest.raises(CorpusError, match=r"column 'text' is not UTF-8"):
        load_corpus(str(path))


def test_a_file_that_the_system_will_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is there, and that is all."""
    path = tmp_path / "text.txt"
    path.write_text("some text")

    def fail(*_args: object, **_options: object) -> str:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_text", fail)
    with pytest.raises(CorpusError, match=r"text\.txt' cannot be read \(Permission"):
        load_corpus(str(path))
