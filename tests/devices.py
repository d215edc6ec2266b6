"""The device of the tests that are marked `gpu`.

It is a CUDA device, or with HEAPR_GPU=second one that is made of the CPU.
"""

import os

import pytest

GPU = os.environ.get("HEAPR_GPU", "cuda")
if GPU != "cuda":
    import second_device  # noqa: F401 (registers it)

needs_cuda = pytest.mark.skipif(GPU != "cuda", reason="of kernels that only CUDA has")

OF_DEVICES = 1e-4 if GPU == "cuda" else 1e-9
"""How near two devices are in float64: transformers has the angles of rotary embeddings
and the softmax of routers in float32, which CUDA rounds in another way."""
