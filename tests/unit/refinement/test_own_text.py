"""Self-generated text: its shape, its draws, and where it is used."""

from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, Mock

import pytest
import torch
from commands import manifest_of, one_line, run, said, text_of
from families import tiny_model
from heard import Heard, stop_at
from keeps import logits_of
from tiny_folder import D_VOCAB

import heapr_lab
from heapr_lab import Calibration, CalibrationSet, Workbench, open_workbench, own_text
from heapr_lab.errors import SpecError
from heapr_lab.recipes.describing import calibration_of, describe_calibration


def model_of(*, end: int | None = None) -> Any:
    """A tiny model whose texts end with token `end`, if any."""
    model: Any = tiny_model("qwen2_moe", vocab_size=D_VOCAB)
    model.generation_config.eos_token_id = end
    return model


def bench_of(root: Path) -> Workbench:
    """The model with windows of 32 tokens."""
    return open_workbench(str(root / "moe"), profile="small", seq_len=32)


# --- what is written -------------------------------------------------------------


def test_tokens_are_drawn_from_the_models_distribution(tokenizer):
    """Frequencies of the second token, given the first, within five deviations."""
    model, n = model_of(), 6000
    ids = own_text(model, tokenizer, n_sequences=n, seq_len=2, batch_size=n).ids
    assert ids.shape == (n, 2)
    assert set(ids[:, 0].tolist()) == {*range(1, D_VOCAB)}  # all but the special one
    expected = torch.zeros(D_VOCAB, dtype=torch.float64)
    for first in range(1, D_VOCAB):
        p = logits_of(model, torch.tensor([[first]]))[0, 0].double().softmax(-1)
        expected += p * int((ids[:, 0] == first).sum())
    seen = torch.bincount(ids[:, 1], minlength=D_VOCAB)
    assert float(((seen - expected).abs() / expected.sqrt()).max()) < 5


def test_windows_are_whole_although_texts_end(tokenizer):
    """The token that ends a text is never drawn; a draw of it would show."""
    usual = own_text(model_of(), tokenizer, n_sequences=16, seq_len=40)
    end = int(usual.ids[0, 5])
    windows = own_text(model_of(end=end), tokenizer, n_sequences=16, seq_len=40)
    assert windows.ids.shape == (16, 40)
    assert end not in windows.ids[:, 1:]
    assert end in usual.ids[:, 1:]


def test_a_seed_is_one_text(tokenizer):
    """The same again, others with another seed; the process's numbers stay."""
    model = model_of()  # which seeds the process's generator
    before = torch.random.get_rng_state()
    first, again, other = (
        own_text(model, tokenizer, n_sequences=4, seq_len=9, seed=seed).ids
        for seed in (3, 3, 4)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(before, torch.random.get_rng_state())


def test_progress_counts_every_token_and_can_stop(tokenizer):
    """Batch by batch to the end; an exception ends the work."""
    seen = Heard()
    shape = {"n_sequences": 3, "seq_len": 4, "batch_size": 2}
    own_text(model_of(), tokenizer, **shape, progress=seen)
    assert seen == [(n, 9) for n in (2, 4, 6, 6, 7, 8, 9, 9)]
    with pytest.raises(KeyboardInterrupt):
        own_text(model_of(), tokenizer, **shape, progress=stop_at(5))


def test_what_cannot_be_written_is_refused(tokenizer):
    """Numbers that are not positive, and a vocabulary of special tokens."""
    for wrong in ({"n_sequences": 0}, {"seq_len": 1}, {"seed": 2**63}):
        with pytest.raises(SpecError):
            own_text(model_of(), tokenizer, **wrong)
    special = MagicMock(all_special_ids=(0, 1))
    special.__len__.return_value = 2
    with pytest.raises(SpecError, match="special"):
        own_text(model_of(), special, n_sequences=1, seq_len=4)


# --- joined with a corpus --------------------------------------------------------


def test_joined_windows_keep_their_order_and_origin():
    """First one set, then the other; both are named, and held out alike."""
    a, b = (CalibrationSet.from_ids(torch.full((8, 5), n)) for n in (1, 2))
    joined = a.joined(b)
    assert joined.ids[:, 0].tolist() == [1] * 8 + [2] * 8
    assert joined.provenance["joined"] == [b.provenance | {"n_sequences": 8}]
    assert joined.label == f"{a.label} and {b.provenance['corpus']}"
    for part, count in zip(joined.split(), (6, 2), strict=True):
        assert part.ids[:, 0].tolist() == [1] * count + [2] * count
    assert len(joined.joined(a).provenance["joined"]) == 2
    assert "joined" not in a.provenance
    with pytest.raises(SpecError, match="same seq_len"):
        a.joined(CalibrationSet.from_ids(torch.ones(2, 6, dtype=torch.long)))


@pytest.mark.parametrize("share", [-0.1, 8.1, float("nan"), "half", True, None])
def test_a_share_is_a_number(share):
    """It is not so large that the corpus would hardly count."""
    with pytest.raises(SpecError, match="own_text"):
        Calibration(own_text=share)


def test_the_number_of_own_windows_is_rounded():
    """They come in addition."""
    counted = [Calibration(own_text=share).n_own(4) for share in (0, 0.1, 0.2, 0.4, 2)]
    assert counted == [0, 0, 1, 2, 8]


def test_a_workbench_writes_once(root, monkeypatch):
    """It writes one text for a model, shape and seed; other weights write another."""
    text = str(root / "text.txt")
    spec = Calibration(text, n_sequences=8, seq_len=32, own_text=0.25)
    windows = bench_of(root).calibration_set(spec)
    plain = bench_of(root).calibration_set(Calibration(text, 8, 32))
    assert windows.n_sequences == 10
    assert torch.equal(windows.ids[:8], plain.ids)
    never = Mock(side_effect=AssertionError("written again"))
    with monkeypatch.context() as patch:
        patch.setattr("heapr_lab.refinement.own_text.own_text", never)
        assert bench_of(root).calibration_set(spec).fingerprint == windows.fingerprint
        changed = bench_of(root)
        changed.model.lm_head.weight.data.add_(1)
        with pytest.raises(AssertionError, match="again"):
            changed.calibration_set(spec)
    other = Calibration(text, n_sequences=8, seq_len=32, own_text=0.25, seed=1)
    drawn = bench_of(root).calibration_set(other)
    assert not torch.equal(drawn.ids[8:], windows.ids[8:])


def test_a_table_says_what_it_was_measured_on(root, cache):
    """Read back it is the calibration; other joined windows are nobody's.

    A table in the cache may name another file with the same text.
    """
    bench, text = bench_of(root), str(root / "text.txt")
    spec = Calibration(text, n_sequences=8, seq_len=32, own_text=0.25)
    table = bench.importance(spec)
    assert calibration_of(table.calibration) == spec
    told = describe_calibration(table.calibration)
    assert told.startswith("8 windows of 32 tokens of ")
    assert told.endswith("(train), seed 0, and 2 that the model wrote itself")
    assert Calibration.from_dict(spec.to_dict()) == spec
    assert heapr_lab.Setting(0.1, spec).columns()["own_text"] == 0.25
    assert "own_text" not in heapr_lab.Setting(0.1, text).columns()
    windows = bench.calibration_set(Calibration(text, 4, 32))
    mixed = heapr_lab.collect_statistics(bench.model, windows.joined(windows))
    assert calibration_of(mixed.calibration) is None


# --- the command line ------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "share"),
    [
        ((), 0.25),
        (("--method", "paper"), 0),
        (("--method", "paper", "--own-text", 0.5), 0.5),
        (("--estimator", "fisher"), 0),
    ],
)
def test_the_default_is_that_of_compress(root, tmp_path, options, share):
    """A quarter for the default; else the corpus alone, as the paper."""
    out = tmp_path / "out"
    run("prune", root / "moe", "--ratio", 0.4, "--out", out, *text_of(root), *options)
    manifest = manifest_of(out)
    assert manifest["calibrated_on"]["own_text"] == share
    n_own = round(8 * share)
    told = f"and {n_own} that the model wrote itself"
    assert (told in manifest["calibration"]) == (n_own > 0)


def test_a_table_has_its_own_text(root, tmp_path):
    """`score` writes it where asked; with its table nothing can be written any more."""
    table = tmp_path / "table.parquet"
    run("score", root / "moe", "--own-text", 0.25, "--out", table, *text_of(root))
    spec = calibration_of(heapr_lab.ImportanceTable.read(table).calibration)
    assert spec.own_text == 0.25
    base = ("prune", root / "moe", "--ratio", 0.4, "--importance", table)
    assert "leave --importance out" in one_line(*base, "--own-text", 0.5)
    facts = said(*base)
    assert facts["atoms_kept"] < facts["atoms"]
