"""What tests of vLLM start from."""

from collections.abc import Iterator

import pytest


@pytest.fixture
def engine(monkeypatch) -> Iterator[None]:
    """The engine in this process, with a small cache."""
    for name, value in {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }.items():
        monkeypatch.setenv(name, value)
    yield
    from vllm.distributed import cleanup_dist_env_and_memory

    cleanup_dist_env_and_memory()
