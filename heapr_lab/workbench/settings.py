"""How a model is opened, how much text a run uses, and how the model is pruned.

Without torch.
"""

from dataclasses import dataclass, replace
from typing import Any, Self

from heapr_lab.errors import one_of, whole_number
from heapr_lab.models.formats import DTYPES, device_name
from heapr_lab.models.named import LAB, hub_id
from heapr_lab.models.safetensors_headers import check_there
from heapr_lab.pruning.options import Selection, fields_given, selection_of
from heapr_lab.text.calibration_spec import DEFAULT_CORPUS, Calibration


@dataclass(frozen=True)
class Opening:
    """The arguments of `open_workbench`, as plain values; the model is as it was named.

    Example:
        >>> Opening.of("lab", profile="small", device="cpu").given()
        {'profile': 'small', 'device': 'cpu'}
    """

    model: str
    profile: str | None = None
    seq_len: int | None = None
    device: str = "auto"
    dtype: str = "auto"
    stream: bool | str = "auto"
    host_memory: int | str | None = None

    @classmethod
    def of(cls, model: object, **options: Any) -> Self:
        """The same for any path, device and dtype, which torch has objects for."""
        for name in {"device", "dtype"} & options.keys():
            options[name] = str(options[name]).removeprefix("torch.")
        return cls(str(model), **options)

    @property
    def name(self) -> str:
        """Name of the model in figures and tables."""
        return "lab model" if self.model == LAB else hub_id(self.model)

    def check(self) -> Self:
        """Itself, if the model can be found, and the options are some that there are.

        What the device and the memory are is not asked: that needs torch.

        Raises:
            SpecError: there is no such model, or an option has an invalid value.
        """
        one_of(self.dtype, DTYPES, name="dtype")
        device_name(self.device)
        one_of(self.stream, (True, False, "auto"), name="stream")
        if self.seq_len is not None:
            whole_number(self.seq_len, name="seq_len", least=2)
        check_there(self.model)
        return self

    def given(self) -> dict[str, Any]:
        """The options that are not the defaults."""
        usual = vars(type(self)(self.model))
        return {k: v for k, v in vars(self).items() if v != usual[k]}


@dataclass(frozen=True)
class Profile:
    """The amount of text for calibration and evaluation."""

    name: str
    n_sequences: int
    """Calibration windows."""
    seq_len: int
    """Tokens of each calibration and test window."""
    n_test: int | None
    """Test windows of each corpus, spread over its split; None takes all."""
    n_items: int
    """Items of the continuation task."""
    n_task_items: int = 50
    """Items of any other task: of the paper's drawn ones, the same for every model."""
    n_seeds: int = 3
    """Random calibration sets, where error bars are shown."""

    def items_of(self, task: str) -> int:
        """The number of items of a task."""
        return self.n_items if task.startswith(CONTINUATION) else self.n_task_items

    def counted(self, calibration: Calibration) -> Calibration:
        """`calibration` with the numbers of windows and tokens that it leaves open."""
        return replace(
            calibration,
            n_sequences=calibration.n_sequences or self.n_sequences,
            seq_len=calibration.seq_len or self.seq_len,
        )


CONTINUATION = "continuation"
"""The name of the task that is made of any corpus."""
_ALWAYS_SHOWN = ("estimator", "scope", "granularity", "structure", "multiple")
_SHOWN_APART = {"ratio", "estimator_options", *_ALWAYS_SHOWN}
"""Fields of a selection that have a column in any case, or never have one."""

PROFILES = {
    "small": Profile("small", 8, 64, 4, 8, n_seeds=2),
    "lab": Profile("lab", 128, 256, 32, 80),
    "pretrained": Profile("pretrained", 32, 512, 4, 8, n_seeds=2),
    "paper": Profile("paper", 128, 2048, None, 500, 500),
}
"""`small` for tests, `lab` for the lab model, `pretrained` for models of some hundred
million parameters on a CPU, `paper` as the paper calibrates."""
_BY_MODEL = {LAB: "lab", "smollm2": "pretrained", "smolmoe": "pretrained"}
"""The profiles of models that have a name of their own."""


@dataclass(frozen=True, init=False)
class Setting:
    """How a model is pruned: how atoms are selected, and on what they are measured.

    Example:
        Short for `Setting(Selection(0.25, scope="layer"), Calibration("ptb", seed=1))`:

        >>> setting = Setting(0.25, Calibration("ptb", seed=1), scope="layer")
        >>> setting.selection.scope, setting.calibration.corpus
        ('layer', 'ptb')
    """

    selection: Selection
    calibration: Calibration

    def __init__(
        self,
        selection: Selection | float,
        calibration: Calibration | str = DEFAULT_CORPUS,
        **options: Any,
    ) -> None:
        """Pair a selection with a calibration.

        Args:
            selection: the selection, or its ratio, with `options`.
            calibration: the calibration, or its corpus.
            **options: the other fields of `Selection`.

        Raises:
            SpecError: a field has an invalid value.
            TypeError: an option is given beside a `Selection`.
        """
        selection = selection_of(selection, options)
        if not isinstance(calibration, Calibration):
            calibration = Calibration(calibration)
        object.__setattr__(self, "selection", selection)
        object.__setattr__(self, "calibration", calibration)

    def at(self, ratio: float) -> Self:
        """The same setting at another ratio."""
        return replace(self, selection=replace(self.selection, ratio=ratio))

    def columns(self) -> dict[str, Any]:
        """The columns of a row of results; rarely used options only if they are set."""
        selection, calibration = self.selection, self.calibration
        given = fields_given(selection).items()
        return {
            "ratio": float(selection.ratio),
            **{name: getattr(selection, name) for name in _ALWAYS_SHOWN},
            "calibration": calibration.corpus,
            "n_sequences": calibration.n_sequences,
            "seed": calibration.seed,
            **({"own_text": calibration.own_text} if calibration.own_text else {}),
            **{k: v for k, v in given if k not in _SHOWN_APART},
        }


DENSE = Setting(0.0).columns() | {"estimator": "dense"}
"""The columns of a row of results of the dense model."""


def profile_of(
    name_or_path: str, profile: str | None, *, seq_len: int | None = None
) -> Profile:
    """The profile of that name; by default the model's own, else `paper`.

    `seq_len` overrides the tokens of its windows.

    Raises:
        SpecError: there is no such profile.
    """
    chosen = profile or _BY_MODEL.get(name_or_path, "paper")
    usual = PROFILES[one_of(chosen, PROFILES, name="profile")]
    return usual if seq_len is None else replace(usual, seq_len=seq_len)
