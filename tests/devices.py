"""The device of the tests that are marked `gpu`.

It is a CUDA device, or with HEAPR_GPU=second one that is made of the CPU.
"""

import os

import pytest

GPU = os.environ.get("HEAPR_GPU", "cuda")
if GPU != "cuda":
    import second_device  # noqa: F401 (registers it)

needs_cuda = pytest.mark.skipif(GPU != "cuda", reason="of kernels that only CUDA has")
