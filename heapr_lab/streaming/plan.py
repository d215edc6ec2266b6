"""What the scores of a model need, before a weight is read.

The numbers are those by which `load_model` decides whether to stream. A time is not
among them: once a pass has run its first batch, it says what is left.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub import snapshot_download

from heapr_lab import hub, registry
from heapr_lab.errors import SpecError, one_of, whole_number
from heapr_lab.models.formats import DTYPES, check_format
from heapr_lab.models.named import dense_of, folder_of, hub_id, what_is_expected
from heapr_lab.models.safetensors_headers import INDEX, SINGLE, read_headers
from heapr_lab.models.sources import dtype_name
from heapr_lab.repr_html import card_html
from heapr_lab.streaming.sizes import (
    ATOM_BYTES,
    Sizes,
    gigabytes,
    size_of,
    sizes_of,
    why_streamed,
)

if TYPE_CHECKING:
    import torch

IN_MEMORY, STREAMED = "in memory", "streamed"


@dataclass(frozen=True, repr=False)
class Plan:
    """What the scores of a model need; `str` gives it as lines, `to_dict` as data."""

    model: str
    engine: str
    """in memory or streamed, as `load_model` would open it."""
    why: str
    n_parameters: int
    n_layers: int
    """Decoder layers."""
    n_moe_layers: int
    n_experts: int
    """Routed experts of all layers."""
    n_atoms: int
    checkpoint_bytes: int
    statistics_bytes: int
    """The running sums of all atoms; the table is smaller."""
    dtype: str
    """The type of the weights in memory."""
    needed_bytes: Mapping[str, int]
    """Memory for one window at a time, by engine."""
    n_tokens: int
    """The tokens of all windows."""
    states_bytes: int
    """What a streamed pass keeps between layers: in memory, or in files."""
    free_bytes: int

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data."""
        return dataclasses.asdict(self)

    def __repr__(self) -> str:
        return f"Plan({self.model}: {self.engine}, {self.n_parameters:,} parameters)"

    def __str__(self) -> str:
        return "\n".join(f"{k:<12} {v}" for k, v in self._facts().items())

    def _repr_html_(self) -> str:
        return card_html(f"Plan for {self.model}", self._facts())

    def _facts(self) -> dict[str, str]:
        needed = {k: gigabytes(n) for k, n in self.needed_bytes.items()}
        return {
            "model": f"{self.model}, {self.n_parameters / 1e9:,.3g} B parameters",
            "MoE layers": f"{self.n_moe_layers} of {self.n_layers}, with "
            f"{self.n_experts:,} experts of {self.n_atoms:,} atoms in all",
            "checkpoint": gigabytes(self.checkpoint_bytes),
            "statistics": f"{gigabytes(self.statistics_bytes)} of sums",
            IN_MEMORY: f"{needed[IN_MEMORY]} in {self.dtype}, a window at a time",
            STREAMED: f"{needed[STREAMED]}, and {gigabytes(self.states_bytes)} of "
            f"states of {self.n_tokens:,} tokens, in memory or in files",
            "engine": f"{self.engine}: {self.why}",
            "time": "what is left is shown after the first batch",
        }


def plan(
    model: str | Path,
    *,
    n_sequences: int = 128,
    seq_len: int = 2048,
    memory: int | str | None = None,
    dtype: str = "auto",
) -> Plan:
    """What the scores of `model` need.

    Args:
        model: as `load_model` takes it, or a config.json, of which transformers builds
            the model without weights. Of its files, if they are here, the headers are
            read.
        n_sequences: calibration windows.
        seq_len: tokens of each.
        memory: of the device, in bytes or with a unit ("24GB"); by default what is free
            on the GPUs, or on the machine if there are none.
        dtype: of the weights in memory; `auto` is the checkpoint's own on a GPU and
            float32 on the CPU.

    Raises:
        SpecError: there is no such model, type or size, or its weights are in a format
            that cannot be measured.
        LayoutError: it has no routed experts, cannot be built, or cannot be opened as a
            MoE.
    """
    one_of(dtype, DTYPES, name="dtype")
    length = whole_number(seq_len, name="seq_len", least=2)
    n_tokens = length * whole_number(n_sequences, name="n_sequences")
    given = None if memory is None else size_of(memory)
    checkpoint = _read(str(model))
    free, kind = _device(given, dtype, checkpoint)
    size, sizes = kind.itemsize, checkpoint.sizes
    why = why_streamed(sizes, size, length, free, method=checkpoint.method)
    return Plan(
        model=str(model),
        engine=IN_MEMORY if why is None else STREAMED,
        why=why or f"{gigabytes(free)} are free",
        n_parameters=sizes.model.n_parameters,
        n_layers=len(sizes.layers),
        n_moe_layers=len(sizes.moe),
        n_experts=sum(shape.n_experts for shape in sizes.moe),
        n_atoms=sizes.n_atoms,
        checkpoint_bytes=checkpoint.n_bytes,
        statistics_bytes=ATOM_BYTES * sizes.n_atoms,
        dtype=dtype_name(kind),
        needed_bytes={
            engine: sizes.needed(size, length, streamed=engine == STREAMED)
            for engine in (IN_MEMORY, STREAMED)
        },
        n_tokens=n_tokens,
        states_bytes=sizes.states(size, n_tokens=n_tokens),
        free_bytes=free,
    )


def _device(
    given: int | None, dtype: str, checkpoint: "_Model"
) -> "tuple[int, torch.dtype]":
    """Bytes that are given or free, and the type of the weights in memory."""
    import torch

    from heapr_lab.streaming.opening import free_memory

    free = free_memory("auto") if given is None else given
    if dtype != "auto":
        return free, getattr(torch, dtype)
    return free, checkpoint.dtype if torch.cuda.is_available() else torch.float32


# --- the model ----------------------------------------------------------------------


@dataclass(frozen=True)
class _Model:
    """What is known of a model without its weights."""

    sizes: Sizes
    dtype: "torch.dtype"
    """Its own type."""
    method: str | None
    """The format of quantised weights, if they are."""
    n_bytes: int
    """The size of its weights in files; an estimate where these are not here."""


def _read(name: str) -> _Model:
    """The model of that name.

    Raises:
        SpecError: its weights are in a format that cannot be measured.
        LayoutError: it is dense, and `load_model` does not open it as a MoE; or its
            experts cannot be measured.
    """
    dense = dense_of(name)
    folder = _folder(name if dense is None else dense)
    import torch

    from heapr_lab.models.folders import quantisation, read_config, skeleton_of

    config = read_config(folder)
    if dense is not None:  # each MLP is the one expert of its layer
        config = registry.find("configurations of dense models as MoEs")(config)
    method = quantisation(config)
    check_format(name, method)
    dtype = config.dtype or config.get_text_config().dtype or torch.float32
    sizes = sizes_of(skeleton_of(config))
    itemsize = dtype.itemsize if method is None else 1
    n_bytes = _bytes_in(folder) or itemsize * sizes.model.n_parameters
    return _Model(sizes, dtype, method, n_bytes)


def _bytes_in(folder: Path) -> int:
    """The size of all tensors in a folder; 0 if it has no safetensors files."""
    if not any((folder / name).is_file() for name in (SINGLE, INDEX)):
        return 0
    return sum(tensor.n_bytes for tensor in read_headers(folder).values())


def _folder(name: str) -> Path:
    """The folder with a model's config.json, and with its weights if they are here.

    Raises:
        SpecError: there is no such model.
    """
    path = Path(name)
    folder = folder_of(name) or (path.parent if path.name == "config.json" else path)
    try:
        if not folder.is_dir():
            hub.is_reachable()  # if it does not, only local files are used
            folder = Path(snapshot_download(hub_id(name), allow_patterns="config.json"))
        (folder / "config.json").stat()
    except (OSError, ValueError) as error:
        raise SpecError(
            f"there is no model {name!r} ({error}): expected a config.json, or "
            f"{what_is_expected()}"
        ) from error
    return folder
