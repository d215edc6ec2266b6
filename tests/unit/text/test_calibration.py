"""Windows as the paper draws them, mixtures, and what cannot be drawn."""

import copy
import math
from pathlib import Path

import pytest
import torch

from heapr_lab import CalibrationSet, load_calibration, load_windows
from heapr_lab.errors import CorpusError, SpecError
from heapr_lab.text.calibration import tokenizer_fingerprint
from heapr_lab.text.calibration_spec import spread


@pytest.fixture
def letters(tmp_path) -> str:
    """A file of 30 paragraphs, each `0a0a`, `1b1b`, ...; 178 characters joined."""
    paragraphs = [f"{i % 10}{chr(ord('a') + i % 26)}" * 2 for i in range(30)]
    path = tmp_path / "letters.txt"
    path.write_text("\n\n".join(paragraphs))
    return str(path)


def test_windows_are_cut_from_the_joined_text(letters, tokenizer):
    """Blank lines between texts, no special tokens, the incomplete rest dropped."""
    windows = load_windows(letters, tokenizer, seq_len=12)
    joined = Path(letters).read_text()
    assert joined.startswith("0a0a\n\n1b1b\n\n")
    assert windows.ids.shape == (len(joined) // 12, 12) == (14, 12)
    cuts = [joined[12 * i : 12 * (i + 1)] for i in range(14)]
    assert [tokenizer.decode(row) for row in windows.ids] == cuts
    some = load_windows(letters, tokenizer, seq_len=12, n_sequences=3)
    assert torch.equal(some.ids, windows.ids[[2, 7, 11]])


@pytest.mark.parametrize("n_available", range(1, 40))
def test_spread_windows_are_the_middles_of_equal_parts(n_available):
    """Each part has one, and all are all."""
    for n in range(1, n_available + 1):
        places = spread(n_available, n)
        middles = [(part + 0.5) * n_available / n for part in range(n)]
        assert places == [math.floor(middle) for middle in middles]
        assert len({*places}) == n
        assert max(places) < n_available
    every = [*range(n_available)]
    assert places == spread(n_available, n_available + 1) == every


def test_calibration_draws_windows_without_replacement(letters, tokenizer):
    """All windows drawn are all windows, in an order that the seed decides.

    A smaller set is the beginning of a larger one.
    """
    every = load_windows(letters, tokenizer, seq_len=12).ids.tolist()
    draws = [
        load_calibration(letters, tokenizer, n_sequences=14, seq_len=12, seed=seed).ids
        for seed in (0, 0, 1)
    ]
    assert all(sorted(draw.tolist()) == sorted(every) for draw in draws)
    assert torch.equal(draws[0], draws[1])
    assert draws[0].tolist() != draws[2].tolist()
    assert draws[0].tolist() != every
    for n in range(1, 14):
        smaller = load_calibration(letters, tokenizer, n_sequences=n, seq_len=12)
        assert torch.equal(smaller.ids, draws[0][:n])


def test_asking_for_too_many_names_the_number(letters, tokenizer):
    """The error says how many windows there are."""
    text = r"has 14 windows of 12 tokens, 15 were requested"
    with pytest.raises(CorpusError, match=text):
        load_calibration(letters, tokenizer, n_sequences=15, seq_len=12)
    with pytest.raises(CorpusError, match=text):
        load_windows(letters, tokenizer, n_sequences=15, seq_len=12)
    with pytest.raises(CorpusError, match=r"has 0 windows of 200 tokens, 1 were"):
        load_windows(letters, tokenizer, seq_len=200)


@pytest.mark.parametrize("numbers", [(0, 12), (-1, 12), (2.0, 12), (3, 1), (3, 0)])
def test_numbers_that_make_no_sense_are_refused(letters, tokenizer, numbers):
    """A window has two tokens at least, a set one window."""
    n_sequences, seq_len = numbers
    for load in (load_calibration, load_windows):
        with pytest.raises(SpecError, match=r"must be a whole number from [12], got"):
            load(letters, tokenizer, n_sequences=n_sequences, seq_len=seq_len)


def test_a_mixture_shares_out_the_windows(tmp_path, letters, tokenizer):
    """0.7 and 0.3 of 5 windows are 3.5 and 1.5: 4 and 1 by the larger remainder."""
    digits = tmp_path / "digits.txt"
    digits.write_text("0123456789" * 20)
    mixture = f"0.7*{letters} + 0.3*{digits}"
    drawn = load_calibration(mixture, tokenizer, n_sequences=5, seq_len=12)
    numeric = [tokenizer.decode(row).isdigit() for row in drawn.ids]
    assert numeric == [False] * 4 + [True]
    assert [s["n_sequences"] for s in drawn.provenance["sources"]] == [4, 1]
    alone = load_calibration(letters, tokenizer, n_sequences=4, seq_len=12)
    assert torch.equal(drawn.ids[:4], alone.ids)
    # Weights are relative: 7 to 3 is 0.7 to 0.3.
    again = load_calibration(
        f"7*{letters}+3*{digits}", tokenizer, n_sequences=5, seq_len=12
    )
    assert again.fingerprint == drawn.fingerprint


@pytest.mark.parametrize(
    ("mixture", "text"),
    [
        ("0.5*pydocs + much*ptb", "cannot read the mixture"),
        ("1.2.3*pydocs + 1*ptb", "cannot read the mixture"),
        ("0.5*ptb + 0.5*ptb", "repeats a corpus"),
        ("0.003*ptb + 0.997*c4", "128 windows .* none of ptb, .*: 334 windows would"),
        ("0*pydocs + 1*ptb", "weight of 0"),
    ],
)
def test_unreadable_mixtures_are_refused(mixture, text, tokenizer):
    """The error comes before any corpus is loaded, and has the mixture."""
    with pytest.raises(SpecError, match=text):
        load_calibration(mixture, tokenizer)


def test_from_ids_takes_what_it_is_given():
    """5 windows of 9 tokens predict 5·8; the fingerprint is that of ids and shape."""
    ids = torch.arange(45).view(5, 9)
    windows = CalibrationSet.from_ids(ids)
    assert (windows.n_sequences, windows.seq_len, windows.n_predicted) == (5, 9, 40)
    assert windows.fingerprint == CalibrationSet.from_ids(ids.clone()).fingerprint
    others = [ids.view(9, 5), ids.roll(1), ids[:4]]
    prints = {CalibrationSet.from_ids(other).fingerprint for other in others}
    assert len(prints | {windows.fingerprint}) == 4


def test_from_ids_converts_whole_numbers():
    """Tensors and arrays of other types, and lists, are the same windows."""
    ids = torch.arange(8).view(2, 4)
    for given in (ids.int(), ids.short(), ids.byte(), ids.tolist(), ids.int().numpy()):
        got = CalibrationSet.from_ids(given)
        assert got.ids.dtype == torch.long
        assert got.fingerprint == CalibrationSet.from_ids(ids).fingerprint


@pytest.mark.parametrize(
    "ids",
    [
        torch.zeros(2, 4),
        torch.zeros(2, 4, dtype=torch.bool),
        [[1.0, 2.0]],
        [[1, 2, 3], [1, 2]],
        [["a", "b"]],
        [[2**70, 1]],
        [],
        None,
        torch.zeros(4, dtype=torch.long),
        torch.zeros(1, 2, 3, dtype=torch.long),
        torch.zeros(2, 1, dtype=torch.long),
        torch.zeros(0, 4, dtype=torch.long),
    ],
)
def test_from_ids_refuses_what_is_not_token_ids(ids):
    """The message gives type and shape, and what was expected."""
    with pytest.raises(SpecError, match=r"expected whole numbers (\(n_win|in wind)"):
        CalibrationSet.from_ids(ids)


def test_a_call_does_not_change_a_tokenizer(letters, tokenizer):
    """One that padded and truncated is the same, and reads the whole corpus."""
    called = copy.deepcopy(tokenizer)
    called.pad_token = called.eos_token
    called(["ab", "abc"], padding=True, truncation=True, max_length=2)
    assert called.backend_tokenizer.truncation is not None
    assert called.backend_tokenizer.padding is not None
    assert tokenizer_fingerprint(called) == tokenizer_fingerprint(tokenizer)
    longer = Path(letters).with_name("longer.txt")
    longer.write_text(Path(letters).read_text() + "\n\nend")
    assert load_windows(str(longer), called, seq_len=12).n_sequences == 183 // 12
