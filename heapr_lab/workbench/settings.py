"""How much text a run uses, and how a pruned model is made."""

from dataclasses import asdict, dataclass

from heapr_lab.errors import SpecError
from heapr_lab.models.loading import LAB
from heapr_lab.repr_html import card_html


@dataclass(frozen=True)
class Profile:
    """How much text a run calibrates and evaluates on."""

    name: str
    n_sequences: int
    """Calibration windows."""
    seq_len: int
    """Tokens of each window, calibration and test."""
    n_test: int | None
    """Test windows of each corpus; None takes all."""
    n_items: int
    """Items of the continuation task."""
    n_seeds: int = 3
    """Calibration draws where error bars are shown."""

    def _repr_html_(self) -> str:
        test = "all" if self.n_test is None else f"{self.n_test:,}"
        facts = {
            "calibration windows": f"{self.n_sequences:,} of {self.seq_len:,} tokens",
            "test windows of a corpus": test,
            "items of the continuation task": f"{self.n_items:,}",
            "calibration draws": f"{self.n_seeds}",
        }
        return card_html(f"Profile {self.name}", facts)


PROFILES = {
    "small": Profile("small", 8, 64, 4, 8, n_seeds=2),
    "lab": Profile("lab", 128, 256, 32, 80),
    "paper": Profile("paper", 128, 2048, None, 500),
}
"""`small` for tests, `lab` for the lab model, `paper` as the paper calibrates."""


@dataclass(frozen=True)
class Setting:
    """How a pruned model is made: what is measured, how atoms are ranked and cut."""

    ratio: float
    estimator: str = "heapr"
    scope: str = "global"
    granularity: str = "atom"
    structure: str = "ragged"
    multiple: int | None = None
    calibration: str = "pydocs"
    n_sequences: int | None = None
    """Calibration windows; None takes the profile's number."""
    seed: int = 0

    def _repr_html_(self) -> str:
        facts = {
            name.replace("_", " "): str(value)
            for name, value in asdict(self).items()
            if value is not None
        }
        return card_html("Setting", facts)


def profile_of(name_or_path: str, profile: str | None) -> Profile:
    """The profile of that name; by default `lab` for the lab model, else `paper`.

    Raises:
        SpecError: there is no such profile.
    """
    chosen = profile or ("lab" if name_or_path == LAB else "paper")
    if chosen not in PROFILES:
        raise SpecError(f"profile is {chosen!r}, expected one of {', '.join(PROFILES)}")
    return PROFILES[chosen]
