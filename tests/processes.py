"""Processes for tests, which start quickly because imports are done once for all."""

import multiprocessing
import subprocess
import sys
from pathlib import Path
from typing import Any

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["heapr_lab.workbench.workbench"])

_EACH = """
import os, sys
import accelerate, torch._dynamo
assert not {"transformers", "heapr_lab"} & sys.modules.keys()
for code in sys.argv[1:]:
    child = os.fork()
    if not child:
        exec(code, {})
        sys.stdout.flush()
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        sys.exit(f"failed: {code}")
"""


def says(*words: str, **options: Any) -> str:
    """What a Python of its own prints, which has to succeed."""
    done = subprocess.run(
        [sys.executable, *words], check=False, capture_output=True, text=True, **options
    )
    assert done.returncode == 0, done.stderr
    return str(done.stdout)


def run_each(*codes: str, cwd: Path | None = None) -> str:
    """What pieces of code print, each run in a process of its own.

    These have imported torch and what it needs, but nothing of transformers.
    """
    return says("-c", _EACH, *codes, cwd=cwd)
