"""`torchrun -m heapr_lab score`: several processes, one table."""

import json
import os
from pathlib import Path

from commands import run, text_of
from processes import run_each

import heapr_lab
from heapr_lab.importance.table import ImportanceTable

TORCHRUN = """
import heapr_lab.workbench.workbench
from torch.distributed.run import main
main(["--standalone", "--nproc-per-node=2", "--start-method=fork", *{words!r}])
"""
"""Its two processes are forks of one that has done the imports."""
MAIN = Path(heapr_lab.__file__).with_name("__main__.py")


def test_the_table_is_that_of_one_process(folder, tmp_path):
    """One process prints and writes; the cache has the key of one process."""
    args = ("--dtype", "float64", "--n-sequences", "5", "--device", "cpu", "--json")
    command = ("score", folder / "moe", *text_of(folder), *args)
    out = ("--out", tmp_path / "table.parquet")
    words = ["--run-path", *map(str, (MAIN, *command, *out))]
    env = os.environ | {"HEAPR_CACHE_DIR": str(tmp_path / "cache")}
    facts = json.loads(run_each(TORCHRUN.format(words=words), env=env))
    assert ImportanceTable.read(out[1]).metadata["spec_hash"] == facts["spec_hash"]
    kept = [path.name for path in (tmp_path / "cache" / "importance").glob("*.parquet")]
    assert kept == [f"{facts['spec_hash'][:16]}.parquet"]

    assert json.loads(run(*command)) == facts | {"out": None}
