"""Processes for tests, which start quickly because imports are done once for all."""

import multiprocessing

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["heapr_lab.workbench.workbench"])
