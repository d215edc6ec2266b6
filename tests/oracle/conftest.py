"""What several oracle tests start from."""

from typing import Any

import pytest
from tiny_folder import write_tokenizer
from transformers import AutoTokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A tokenizer of bytes."""
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return AutoTokenizer.from_pretrained(folder)
