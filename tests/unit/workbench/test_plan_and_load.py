"""What a plan announces is what `load_model` does."""

from pathlib import Path

import pytest
from families import tiny_model
from tiny_folder import write_tokenizer

from heapr_lab.models import loading
from heapr_lab.models.loading import load_model
from heapr_lab.models.streamed import stream_of
from heapr_lab.workbench.footprint import STREAMED
from heapr_lab.workbench.plan import plan


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("share", [0.5, 1.0, 1.24, 1.26, 2.0, 100.0])
def test_both_stream_the_same(
    dtype: str, share: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With room for a share of the weights; a plan may also say that it is too little.

    Weights are streamed where they are more than 80 % of it: up to a share of 1.25.
    """
    model = tiny_model("qwen3_moe")
    model.save_pretrained(tmp_path)
    write_tokenizer(tmp_path)
    size = 4 if dtype == "float32" else 8
    room = int(share * size * sum(p.numel() for p in model.parameters()))
    monkeypatch.setattr(loading, "_free_memory", lambda _device: room)
    loaded, _ = load_model(tmp_path, device="cpu", dtype=dtype)
    streams = stream_of(loaded) is not None
    asked = {"seq_len": 2, "dtype": dtype, "device": "h100", "device_memory": room}
    found, streamed = (plan(tmp_path, stream=way, **asked) for way in ("auto", streams))
    assert streams == (share < 1.25)
    assert (found.engine, found.why) == (streamed.engine, streamed.why)
    assert (found.engine == STREAMED) <= streams
