"""Files of before the package had wings are read, and found in the cache, as they were.

`tests/data/earlier` was written by version 0.1.0 of November 2026, whose modules all
stood side by side: a tiny model, what was cached for it, and what was saved of it.
"""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from keeps import logits_of, masked_logits
from stored_tensors import changed_json
from tiny_folder import write_text
from transformers import AutoModelForCausalLM

import heapr_lab
from heapr_lab import ImportanceTable, KeepMask, Selection, Setting, open_workbench
from heapr_lab.errors import SpecError
from heapr_lab.models.loading import load_model
from heapr_lab.models.ragged_experts import EARLIER
from heapr_lab.text.calibration import CalibrationSet

ROOT = Path(__file__).parents[2]
FILES = ROOT / "tests" / "data" / "earlier"
COMPOSED = {"quant_method": "heapr_composed"}
"""The format of then for what other papers' methods leave."""
REMOVED = (
    "own_layers", "price", "protect_outliers", "protect_unrouted", "layer_ratios"
)  # fmt: skip
"""What settings had then, at the values of which they chose nothing."""


@pytest.fixture
def earlier(tmp_path, monkeypatch) -> Path:
    """A copy of the files, in use as the cache, beside the text of then."""
    folder = tmp_path / "earlier"
    shutil.copytree(FILES, folder)
    write_text(folder / "text.txt")
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HEAPR_CACHE_DIR", str(folder / "cache"))
    return folder


def test_an_earlier_cache_answers(earlier, monkeypatch):
    """Statistics and perplexity are found under the keys of then."""
    bench = open_workbench(str(earlier / "dense"), profile="small")
    for name in ("collect_statistics", "evaluate_perplexity"):  # not computed again
        monkeypatch.setattr(f"heapr_lab.workbench.workbench.{name}", None)
    keep = bench.keep(Setting(0.5, calibration="text.txt"))
    assert keep.fingerprint == KeepMask.read(earlier / "mask.parquet").fingerprint
    # The test windows of then were the first ones.
    every = heapr_lab.load_windows("text.txt", bench.tokenizer, seq_len=64)
    windows = CalibrationSet(every.ids[:4], every.provenance)
    perplexity = bench.perplexity(keep, windows)
    assert perplexity.n_tokens == 252


def test_earlier_tables_and_masks_are_read(earlier):
    """The table selects the mask that was selected then."""
    table = ImportanceTable.read(earlier / "importance.parquet")
    mask = KeepMask.read(earlier / "mask.parquet")
    keep = heapr_lab.select(table, ratio=0.5)
    assert keep.fingerprint == mask.fingerprint
    of_then = {k: v for k, v in mask.settings.items() if k not in REMOVED}
    assert keep.settings == of_then
    chosen = {k: v for k, v in mask.settings.items() if k != "table"}
    assert Selection.from_dict(chosen) == Selection(0.5)


def test_an_earlier_checkpoint_is_loaded(earlier):
    """Its logits are those of the dense model of then under its mask."""
    pruned = AutoModelForCausalLM.from_pretrained(earlier / "ragged")
    dense, _ = heapr_lab.load_model(str(earlier / "dense"))
    ids = torch.arange(12).reshape(2, 6)
    mask = KeepMask.read(earlier / "ragged" / "heapr_keep.parquet")
    expected = masked_logits(dense, ids, mask)
    torch.testing.assert_close(logits_of(pruned, ids), expected)


@pytest.mark.parametrize(
    ("own", "what"),
    [
        ({"output_bias": True, "format_version": 2}, "output biases"),
        ({"quantised": "int8", "format_version": 3}, "whose weights are integers"),
        ({**COMPOSED, "experts": {"x": {}}}, "that share matrices, or are factors"),
        ({**COMPOSED, "n_kept": {"x": 3}}, "keep different numbers of experts"),
        ({**COMPOSED, "skipping": {"x": [0.5]}}, "thresholds of dynamic skipping"),
    ],
)
def test_experts_of_before_are_refused_by_name(own, what, earlier):
    """One line says what reads them; by transformers, in memory, and streamed."""
    path = earlier / "ragged" / "config.json"
    with changed_json(path) as config:
        config["quantization_config"] |= own
    why = rf"{what}, which {re.escape(EARLIER)} .* again from the base model"
    with pytest.raises(ValueError, match=why):
        AutoModelForCausalLM.from_pretrained(path.parent)
    for stream in (False, True):
        with pytest.raises(SpecError, match=why) as error:
            load_model(path.parent, device="cpu", stream=stream)
        assert "\n" not in str(error.value)


def test_what_reads_them_can_be_checked_out():
    """All refusals name one commit, which has the formats; it calls itself 0.1."""
    commit = re.findall("git checkout ([0-9a-f]+)", EARLIER)
    with pytest.raises(SpecError) as error:
        Selection.from_dict({"ratio": 0.5, "price": 1.0})
    page = (ROOT / "docs" / "checkpoints.md").read_text("utf-8")
    with pytest.raises(SpecError) as other:
        Selection.from_dict({"ratio": 0.5, "estimator": "shrunk", "of": "flops"})
    for text in (str(error.value), str(other.value), page):
        assert re.findall("git checkout ([0-9a-f]+)", text) == commit
    settings = _of_commit(f"{commit[0]}:pyproject.toml")
    assert re.search(r'^version = "0\.1\.', settings, re.MULTILINE)
    names = _of_commit(f"{commit[0]}:heapr_lab/models/").split()
    assert {"less_is_moe.py", "composed_files.py"} <= {*names}


def _of_commit(place: str) -> str:
    """A file of the repository as it was in a commit, if its history is here."""
    command = ["git", "-C", str(ROOT), "show", place]
    shown = subprocess.run(command, check=False, capture_output=True, text=True)
    if shown.returncode:
        pytest.skip(f"no clone, or a shallow one: {shown.stderr.strip()}")
    return shown.stdout


def test_this_version_is_another():
    """What refuses a file does not have the number of what it says to take."""
    numbers = [
        re.search(
            r'^version(?: =|:) "?([\d.]+)"?$', path.read_text("utf-8"), re.MULTILINE
        )
        for path in (ROOT / "pyproject.toml", ROOT / "CITATION.cff")
    ]
    ours = {number and number[1] for number in numbers}
    assert len(ours) == 1
    assert not str(*ours).startswith("0.1.")


def test_the_format_of_less_is_moe_is_refused_by_name(earlier):
    """The error says what reads it; in memory, streamed, and as a configuration."""
    why = rf"Less-is-MoE's format, which {re.escape(EARLIER)} reads"
    for stream in (False, True):
        with pytest.raises(SpecError, match=why):
            load_model(earlier / "less_is_moe", device="cpu", stream=stream)
