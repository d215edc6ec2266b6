"""Opening the model that a command is about."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from heapr_lab.workbench.workbench import Workbench


def open_bench(
    model: str,
    profile: str | None,
    seq_len: int | None,
    device: str,
    dtype: str,
    stream: bool | None,
    host_memory: str | None,
) -> "Workbench":
    """The workbench that the options of these names ask for."""
    from heapr_lab.workbench.workbench import open_workbench

    return open_workbench(
        model,
        profile=profile,
        seq_len=seq_len,
        device=device,
        dtype=dtype,
        stream="auto" if stream is None else stream,
        host_memory=host_memory,
    )
