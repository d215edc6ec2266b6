"""How a workbench was opened, so that the same can be done again. Without torch."""

from dataclasses import dataclass
from typing import Any, Self

from heapr_lab.models.named import LAB, dense_of
from heapr_lab.models.paper_models import hub_id


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
        dense = dense_of(self.model) or self.model
        return "lab model" if self.model == LAB else hub_id(dense)

    def given(self) -> dict[str, Any]:
        """The options that are not the defaults."""
        usual = vars(type(self)(self.model))
        return {k: v for k, v in vars(self).items() if v != usual[k]}
