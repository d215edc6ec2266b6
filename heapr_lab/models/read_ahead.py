"""Read the files of what runs next while something else runs."""

import contextlib
import threading
from collections.abc import Sequence

from heapr_lab.models.weights_on_disk import FoundTensor

_AT_ONCE = 2**23
"""Bytes of a read."""


class ReadAhead:
    """A thread that reads files, so that the operating system has them in its cache."""

    def __init__(self) -> None:
        """Nothing is read yet."""
        self._stop = threading.Event()

    def begin(self, tensors: Sequence[FoundTensor]) -> None:
        """Read these tensors' bytes, and no longer those of an earlier call."""
        self._stop.set()
        self._stop = threading.Event()
        if tensors:
            given = list(tensors), self._stop
            threading.Thread(target=_read_bytes, args=given, daemon=True).start()


def _read_bytes(tensors: list[FoundTensor], stop: threading.Event) -> None:
    buffer = memoryview(bytearray(_AT_ONCE))
    with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
        files = {
            path: stack.enter_context(path.open("rb", buffering=0))
            for path in {found.file for found in tensors}
        }
        for found in tensors:
            file, left = files[found.file], found.tensor.n_bytes
            file.seek(found.tensor.start)
            while left > 0 and not stop.is_set():
                n_bytes = file.readinto(buffer[: min(left, _AT_ONCE)])
                if not n_bytes:
                    return
                left -= n_bytes
