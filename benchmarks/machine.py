"""Writing results to files, with the machine and versions they were measured on."""

import json
import os
import platform
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pandas as pd
import torch
import transformers

RESULTS = Path(__file__).parent / "results"
_OF_TEXT = {"test_windows", "n_test", "n_items", "n_windows", "seq_len"}
"""Details that say which text rows were measured on."""


def write_results(
    name: str, rows: list[dict[str, Any]], details: dict[str, Any], out: Path = RESULTS
) -> None:
    """Write the table to NAME.csv and what it was measured on to NAME.json."""
    out.mkdir(parents=True, exist_ok=True)
    pd.DataFrame(rows).to_csv(out / f"{name}.csv", index=False)
    text = json.dumps(details, indent=2, ensure_ascii=False)
    (out / f"{name}.json").write_text(text + "\n", encoding="utf-8")


class Rows:
    """A table of results that is written row by row, so that a stopped run can resume.

    Attributes:
        rows: those measured so far, in this run or an earlier one.
    """

    def __init__(self, name: str, out: Path = RESULTS) -> None:
        """Read NAME.csv in the folder `out`, if there is one."""
        self.name, self.out = name, out
        path = out / f"{name}.csv"
        self.rows: list[dict[str, Any]] = []
        self.details: dict[str, Any] = {}
        if path.exists():
            self.rows = pd.read_csv(path).to_dict("records")
            text = path.with_suffix(".json").read_text(encoding="utf-8")
            # Before the windows were spread, they were the first ones of a split.
            self.details = {"test_windows": "the first"} | json.loads(text)

    def has(self, key: dict[str, Any]) -> bool:
        """Whether there is a row with these values."""
        return any(all(row[k] == v for k, v in key.items()) for row in self.rows)

    def add(self, rows: Iterable[dict[str, Any]], details: dict[str, Any]) -> None:
        """Add rows and write the files.

        Raises:
            ValueError: the rows that are there were measured on other text.
        """
        told = machine() | details
        for key in _OF_TEXT & told.keys():
            if (before := self.details.get(key, told[key])) != told[key]:
                raise ValueError(
                    f"{self.name}.csv has rows of {key} {before!r}, these are of "
                    f"{told[key]!r}: move it away and measure all again"
                )
        self.rows += rows
        self.details = told
        write_results(self.name, self.rows, told, self.out)


def machine(device: str = "cpu") -> dict[str, Any]:
    """Date, device, load, versions and which windows, as stored beside a table."""
    return {
        "test_windows": "spread evenly",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": _processor() if device == "cpu" else torch.cuda.get_device_name(),
        "n_cpus": os.cpu_count(),
        "load_average": os.getloadavg(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    }


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
