"""How much text a run uses, by the name of its model."""

import pytest

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
def test_a_model_has_its_own_profile_unless_one_is_given(
    model: str, given: str | None, expected: str
) -> None:
    """Models that have no name of their own are read as in the paper."""
    assert profile_of(model, given).name == expected


def test_an_unknown_profile_is_refused() -> None:
    """The message has the names there are."""
    with pytest.raises(SpecError, match="'small', 'lab', 'pretrained', 'paper'"):
        profile_of("lab", "large")
