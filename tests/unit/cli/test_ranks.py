"""`torchrun -m heapr_lab score`: several processes, one table."""

import json
import os
import subprocess
import sys
from pathlib import Path

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


def test_the_table_is_that_of_one_process(folder: Path, tmp_path: Path) -> None:
    """One process prints and writes; the cache has the key of one process."""
    args = ("--dtype", "float64", "--n-sequences", "5", "--device", "cpu", "--json")
    command = ("score", folder / "moe", *text_of(folder), *args)
    out = ("--out", tmp_path / "table.parquet")
    done = torchrun(*command, *out, cache=tmp_path / "cache", n=2)
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert ImportanceTable.read(out[1]).metadata["spec_hash"] == facts["spec_hash"]
    kept = [path.name for path in (tmp_path / "cache" / "importance").glob("*.parquet")]
    assert kept == [f"{facts['spec_hash'][:16]}.parquet"]

    assert json.loads(run(*command)) == facts | {"out": None}
