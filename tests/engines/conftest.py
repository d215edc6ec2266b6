"""What tests of vLLM start from."""

from collections.abc import Iterator

import pytest

from benchmarks.serving import ENVIRONMENT


@pytest.fixture
def engine(monkeypatch) -> Iterator[None]:
    """The engine in this process, with a small cache."""
    for name, value in (ENVIRONMENT | {"VLLM_CPU_KVCACHE_SPACE": "1"}).items():
        monkeypatch.setenv(name, value)
    yield
    from vllm.distributed import cleanup_dist_env_and_memory

    cleanup_dist_env_and_memory()
