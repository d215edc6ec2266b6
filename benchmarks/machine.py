"""What measured numbers depend on besides the code, and where they are written down."""

import json
import os
import platform
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pandas as pd
import torch
import transformers

RESULTS = Path(__file__).parent / "results"


def write_results(
    name: str, rows: list[dict[str, Any]], details: dict[str, Any], out: Path = RESULTS
) -> None:
    """Write NAME.csv, the table, and NAME.json, what it was measured on."""
    out.mkdir(parents=True, exist_ok=True)
    pd.DataFrame(rows).to_csv(out / f"{name}.csv", index=False)
    text = json.dumps(details, indent=2, ensure_ascii=False)
    (out / f"{name}.json").write_text(text + "\n", encoding="utf-8")


def machine(device: str = "cpu") -> dict[str, Any]:
    """Date, device, load and versions, to be written down beside a table."""
    return {
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
