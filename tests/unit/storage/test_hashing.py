"""One text, and one hash, for everything that is plain data."""

import hashlib
from dataclasses import dataclass

import pytest

from heapr_lab.errors import SpecError
from heapr_lab.storage.hashing import canonical_json, digest


@dataclass(frozen=True)
class Point:
    """Two numbers."""

    y: float
    x: tuple[int, ...]


def test_dataclasses_are_written_as_objects():
    """Also within others, by the names of their fields, which are sorted."""
    assert canonical_json([Point(0.5, (1, 2))]) == '[{"x":[1,2],"y":0.5}]'


@pytest.mark.parametrize(
    "value", [float("nan"), float("inf"), {1, 2}, object(), Point, b"x"]
)
def test_what_is_not_plain_is_refused(value):
    """Wherever it stands; the class of a dataclass is no dataclass."""
    with pytest.raises(SpecError, match=r"cannot write .* as JSON"):
        canonical_json({"a": [value]})


def test_the_digest_is_that_of_the_text():
    """The text is in UTF-8, with letters beyond ASCII escaped."""
    assert canonical_json({"ℓ": 1}) == '{"\\u2113":1}'
    expected = hashlib.sha256(b'{"\\u2113":1}').hexdigest()
    assert digest({"ℓ": 1}) == expected
