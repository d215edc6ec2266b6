"""The table in plan.md: what the scores of large models need.

    python docs/plan_table.py

It is made from the configurations in tests/data/shapes, on stated devices, so that it
is the same on every machine.
"""

import re
from pathlib import Path

from heapr_lab.models.footprint import IN_MEMORY, STREAMED
from heapr_lab.models.memory import gigabytes
from heapr_lab.progress import duration
from heapr_lab.storage import paths
from heapr_lab.streaming.plan import Plan, plan

PAGE = Path(__file__).with_name("plan.md")
SHAPES = (
    "DeepSeekMoE-16B-Base",
    "Qwen1.5-MoE-A2.7B-Chat",
    "Qwen3-30B-A3B",
    "Qwen2-57B-A14B",
    "DeepSeek-V3",
    "Kimi-K2",
)
HOST_MEMORY = "64GB"
DEVICE = "h200"
_HEAD = (
    "model", "parameters", "atoms", "table", "in memory", "streamed", "engine",
    "host + file", "FLOPs", "read", "time",
)  # fmt: skip
_BLOCK = re.compile(r"<!-- plans -->\n.*?<!-- end -->", re.DOTALL)


def planned(shape: str) -> Plan:
    """The plan of one of the shapes."""
    config = paths.project_dir() / "tests" / "data" / "shapes" / shape
    return plan(config, device=DEVICE, host_memory=HOST_MEMORY)


def table() -> str:
    """The table in Markdown, a row for each shape."""
    rows = [_row(shape, planned(shape)) for shape in SHAPES]
    lines = [_HEAD, ("---",) * len(_HEAD), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _row(shape: str, found: Plan) -> tuple[str, ...]:
    peaks = {engine: sum(own.values()) for engine, own in found.device_bytes.items()}
    seconds = found.seconds.get("scores")
    return (
        shape,
        f"{found.n_parameters / 1e9:,.1f} B",
        f"{found.n_atoms / 1e6:,.1f} M",
        gigabytes(found.table_bytes),
        gigabytes(peaks[IN_MEMORY]),
        gigabytes(peaks[STREAMED]),
        found.engine,
        f"{gigabytes(found.host_bytes)} + {gigabytes(found.file_bytes)}",
        f"{found.flops['scores']:.2g}",
        gigabytes(found.read_bytes["scores"]),
        "" if seconds is None else duration(seconds),
    )


def with_table(page: str) -> str:
    """The page with the table of now."""
    return _BLOCK.sub(lambda _: f"<!-- plans -->\n{table()}\n<!-- end -->", page)


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text("utf-8")), "utf-8")
