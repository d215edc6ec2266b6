"""How much text a run uses, by the name of its model."""

import pytest

from heapr_lab import Selection, Setting
from heapr_lab.errors import SpecError
from heapr_lab.workbench.settings import profile_of


@pytest.mark.parametrize(
    ("model", "given", "expected"),
    [
        ("lab", None, "lab"),
        ("smolmoe", None, "pretrained"),
        ("smollm2", None, "pretrained"),
        ("smollm2", "small", "small"),
        ("an/other", None, "paper"),
    ],
)
def test_a_model_has_its_own_profile_unless_one_is_given(model, given, expected):
    """Models that have no name of their own are read as in the paper."""
    assert profile_of(model, given).name == expected


def test_an_unknown_profile_is_refused():
    """The message has the names there are."""
    with pytest.raises(SpecError, match="'small', 'lab', 'pretrained', 'paper'"):
        profile_of("lab", "large")


def test_parts_of_a_setting_are_enough(bench, root, monkeypatch):
    """A selection or a ratio where nothing else is asked for, a corpus alone."""
    windows = bench.calibration_set(str(root / "text.txt"))
    monkeypatch.setattr(bench, "table_of", lambda _setting: bench.measure(windows))
    keep = bench.keep(Setting(0.25))
    assert bench.keep(Selection(0.25)) == bench.keep(0.25) == keep
    with pytest.raises(SpecError, match="got 'abc'"):
        bench.keep("abc")  # type: ignore[arg-type]
    with pytest.raises(SpecError, match="corpus must be a name or a path, got 5"):
        bench.calibration_set(5)  # type: ignore[arg-type]
