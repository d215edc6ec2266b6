"""`heapr-lab plan`."""

import json
import shutil
from pathlib import Path

from commands import one_line, run

from heapr_lab.storage import paths

SHAPES = paths.project_dir() / "tests" / "data" / "shapes"


def test_a_plan_is_printed(tmp_path: Path) -> None:
    """Only config.json is there: as lines, and as one JSON object."""
    config = Path(shutil.copy(SHAPES / "DeepSeek-V3" / "config.json", tmp_path))
    options = ("plan", config, "--memory", "141GB", "--dtype", "bfloat16")
    lines = run(*options)
    assert "671 B parameters" in lines
    assert "in memory or in files" in lines
    found = json.loads(run(*options, "--json"))
    assert (found["engine"], found["free_bytes"]) == ("streamed", 141 * 10**9)
    message = one_line("plan", config, "--memory", "24 bananas")
    assert "'24 bananas', expected bytes, or a number with a unit" in message
