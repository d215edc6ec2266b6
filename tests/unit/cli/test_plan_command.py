"""`heapr-lab plan`."""

import json
from pathlib import Path

from commands import one_line, run

from heapr_lab.storage import paths


def test_a_plan_is_printed(tmp_path: Path) -> None:
    """Only config.json is there: as lines, and as one JSON object."""
    source = (
        paths.project_dir()
        / "tests"
        / "data"
        / "shapes"
        / "DeepSeek-V3"
        / "config.json"
    )
    config = tmp_path / "config.json"
    config.write_text(source.read_text("utf-8"))
    options = ("plan", config, "--device", "h200", "--host-memory", "64GB")
    lines = run(*options)
    assert "671.0 B parameters" in lines
    assert "177 GB in files" in lines
    found = json.loads(run(*options, "--device-memory", "20GB", "--json"))
    assert found["engine"] == "infeasible"
    assert found["device_memory"] == 20 * 10**9
    message = one_line("plan", config, "--device-memory", "24 bananas")
    assert "'24 bananas', expected bytes, or a number with a unit" in message
