"""`torchrun -m heapr_lab score`: several processes, one table."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from commands import run, text_of

from heapr_lab.importance.table import ImportanceTable

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone")


def torchrun(
    *arguments: object, cache: Path, n: int
) -> subprocess.CompletedProcess[str]:
    """The command line in `n` processes, with a cache of their own."""
    command = [*TORCHRUN, f"--nproc-per-node={n}", "-m", "heapr_lab", *arguments]
    return subprocess.run(
        [str(part) for part in command],
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"HEAPR_CACHE_DIR": str(cache)},
    )


def test_the_table_is_that_of_one_process(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They agree to rounding; one process prints, and the cache has the key of one."""
    args = ("--dtype", "float64", "--n-sequences", "5", "--device", "cpu", "--json")
    command = ("score", folder / "moe", *text_of(folder), *args)
    out = tmp_path / "together.parquet"
    done = torchrun(*command, "--out", out, cache=tmp_path / "cache", n=2)
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    again = ImportanceTable.read(out)
    kept = [path.name for path in (tmp_path / "cache" / "importance").glob("*.parquet")]
    assert kept == [f"{facts['spec_hash'][:16]}.parquet"]

    expected = json.loads(run(*command))
    assert facts | {"out": None} == expected
    monkeypatch.setenv("HEAPR_CACHE_DIR", str(tmp_path / "cache"))
    assert json.loads(run(*command)) == expected
    monkeypatch.undo()
    run(*command, "--out", tmp_path / "alone.parquet")
    table = ImportanceTable.read(tmp_path / "alone.parquet")
    for name in table.frame:
        np.testing.assert_allclose(
            again.column(name), table.column(name), rtol=1e-12, atol=1e-18
        )
