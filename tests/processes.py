"""Processes for tests, which start quickly because imports are done once for all."""

import atexit
import functools
import json
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["heapr_lab.workbench.workbench"])

_SERVER = """
import json, os, sys
import accelerate, torch._dynamo
assert not {"transformers", "heapr_lab"} & sys.modules.keys()
while line := sys.stdin.readline():
    code, folder, variables, *outputs = json.loads(line)
    child = os.fork()
    if not child:
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(variables)
        for number, output in enumerate(outputs, start=1):
            os.dup2(os.open(output, os.O_WRONLY | os.O_APPEND), number)
        exec(code, {})
        sys.stdout.flush()
        os._exit(0)
    print(os.waitpid(child, 0)[1], flush=True)
"""


def interpreted(code: str, beside: str) -> None:
    """Run code with Triton's interpreter, which can import what is beside a file."""
    variables = os.environ | {"TRITON_INTERPRET": "1"}
    paths = [Path(beside).parent, *sys.path]
    variables["PYTHONPATH"] = os.pathsep.join(map(str, paths))
    subprocess.run([sys.executable, "-c", code], check=True, env=variables)


def says(*words: str, **options: Any) -> str:
    """What a Python of its own prints, which has to succeed."""
    done = subprocess.run(
        [sys.executable, *words], check=False, capture_output=True, text=True, **options
    )
    assert done.returncode == 0, done.stderr
    return str(done.stdout)


@functools.cache
def _server() -> Any:
    """A Python that has imported torch, and runs code in processes of their own."""
    command = [sys.executable, "-c", _SERVER]
    pipe = subprocess.PIPE
    server = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
    atexit.register(server.communicate)  # which ends it
    return server


def run_each(
    *codes: str, cwd: Path | None = None, env: Mapping[str, str] = os.environ
) -> str:
    """What pieces of code print, each run in a process of its own.

    These have imported torch and what it needs, but nothing of transformers.
    """
    server, folder = _server(), str(cwd or Path.cwd())
    with NamedTemporaryFile("r") as output, NamedTemporaryFile("r") as errors:
        for code in codes:
            request = [code, folder, dict(env), output.name, errors.name]
            json.dump(request, server.stdin)
            print(file=server.stdin, flush=True)
            assert server.stdout.readline() == "0\n", errors.read() + f"failed: {code}"
        return output.read()
