"""The table in plan.md: what the scores of large models need.

    python docs/plan_table.py

It is made from the configurations in tests/data/shapes, for a stated memory, so that it
is the same on every machine.
"""

import re
from pathlib import Path

from heapr_lab.storage import paths
from heapr_lab.streaming.plan import IN_MEMORY, STREAMED, gigabytes, plan

PAGE = Path(__file__).with_name("plan.md")
SHAPES = (
    "DeepSeekMoE-16B-Base",
    "Qwen1.5-MoE-A2.7B-Chat",
    "Qwen3-30B-A3B",
    "Qwen2-57B-A14B",
    "DeepSeek-V3",
    "Kimi-K2",
)
MEMORY = "141GB"
_HEAD = (
    "model", "parameters", "atoms", "checkpoint", "statistics", "in memory", "streamed",
    "states", "engine",
)  # fmt: skip
_BLOCK = re.compile(r"<!-- plans -->\n.*?<!-- end -->", re.DOTALL)


def table() -> str:
    """The table in Markdown, a row for each shape."""
    lines = [_HEAD, ("---",) * len(_HEAD), *map(_row, SHAPES)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _row(shape: str) -> tuple[str, ...]:
    config = paths.project_dir() / "tests" / "data" / "shapes" / shape
    needs = plan(config, memory=MEMORY, dtype="bfloat16")
    return (
        shape,
        f"{needs.n_parameters / 1e9:,.1f} B",
        f"{needs.n_atoms / 1e6:,.1f} M",
        gigabytes(needs.checkpoint_bytes),
        gigabytes(needs.statistics_bytes),
        gigabytes(needs.needed_bytes[IN_MEMORY]),
        gigabytes(needs.needed_bytes[STREAMED]),
        gigabytes(needs.states_bytes),
        needs.engine,
    )


def with_table(page: str) -> str:
    """The page with the table of now."""
    return _BLOCK.sub(lambda _: f"<!-- plans -->\n{table()}\n<!-- end -->", page)


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text("utf-8")), "utf-8")
