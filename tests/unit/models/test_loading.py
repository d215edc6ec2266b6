"""Loading from a folder in the hub's layout, and telling models apart."""

from pathlib import Path

import pytest
import torch
from families import tiny_ids, tiny_model
from keeps import logits_of
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from heapr_lab.errors import SpecError
from heapr_lab.models.loading import load_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny qwen2_moe with its tokenizer, saved in several shards."""
    path = tmp_path_factory.mktemp("hub") / "tiny-moe"
    model = tiny_model("qwen2_moe", dtype=torch.bfloat16)
    model.save_pretrained(path, max_shard_size="8KB")
    word_level = Tokenizer(models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    word_level.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=word_level).save_pretrained(path)
    return path


def test_a_sharded_folder_loads(folder: Path) -> None:
    """All shards are read, in eval mode, in float32 on the CPU by default."""
    assert len(list(folder.glob("model-*.safetensors"))) > 1
    model, tokenizer = load_model(folder, device="cpu")
    assert tokenizer("b a b")["input_ids"] == [1, 0, 1]
    assert not model.training
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    saved = tiny_model("qwen2_moe", dtype=torch.bfloat16).float()
    ids = tiny_ids()
    torch.testing.assert_close(
        logits_of(model, ids), logits_of(saved, ids), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("dtype", ["bfloat16", torch.float64])
def test_the_type_can_be_chosen(folder: Path, dtype: str | torch.dtype) -> None:
    """It is given by name or as a type of torch's."""
    model, _ = load_model(str(folder), device="cpu", dtype=dtype)
    expected = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    assert next(model.parameters()).dtype == expected


def test_a_wrong_name_is_an_error_that_says_what_is_expected(tmp_path: Path) -> None:
    """A missing folder, a name that is not on the hub, a folder without a model."""
    for name in ("nobody/no-such-model", str(tmp_path / "absent"), str(tmp_path)):
        with pytest.raises(SpecError) as caught:
            load_model(name)
        message = str(caught.value)
        assert repr(name) in message
        assert "local folder in the hub's layout, or one of lab" in message


# --- identity ---------------------------------------------------------------------
