"""What the scores of a model need, before a weight is read, and without torch.

The numbers are those by which `load_model` decides whether to stream. A time is not
among them: once a pass has run its first batch, it says what is left.
"""

import dataclasses
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from huggingface_hub import snapshot_download

from heapr_lab import hub, registry
from heapr_lab.errors import LayoutError, SpecError, one_of, whole_number
from heapr_lab.models.dtypes import DTYPES, check_format, format_of
from heapr_lab.models.named import dense_of, folder_of, hub_id, what_is_expected
from heapr_lab.models.safetensors_headers import (
    INDEX,
    SINGLE,
    read_headers,
    read_settings,
)
from heapr_lab.repr_html import card_html
from heapr_lab.streaming.sizes import (
    ATOM_BYTES,
    Shapes,
    gigabytes,
    shapes_in,
    size_of,
    sizes_of,
    text_settings,
    why_streamed,
)

IN_MEMORY, STREAMED = "in memory", "streamed"
_ITEMSIZE = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


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
        model: as `load_model` takes it, or a config.json. The configuration and the
            headers of the files are read. Where there are no files, transformers builds
            the model without weights, which takes torch and some seconds, as reading a
            dense model's configuration does.
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
    gpus = _free_on_gpus()
    here = gpus or int(psutil.virtual_memory().available)
    free = here if memory is None else size_of(memory)
    checkpoint = _read(str(model))
    default = checkpoint.dtype if gpus else "float32"
    kind = default if dtype == "auto" else dtype
    size, sizes = _ITEMSIZE[kind], sizes_of(checkpoint.shapes, checkpoint.config)
    if not sizes.atoms:
        raise LayoutError(f"{model} has no routed experts: expected a MoE")
    why = why_streamed(sizes, size, length, free, method=checkpoint.method)
    return Plan(
        model=str(model),
        engine=IN_MEMORY if why is None else STREAMED,
        why=why or f"{gigabytes(free)} are free",
        n_parameters=sizes.n_parameters,
        n_layers=len(sizes.layers),
        n_moe_layers=len(sizes.atoms),
        n_experts=sizes.n_experts,
        n_atoms=sizes.n_atoms,
        checkpoint_bytes=checkpoint.bytes_of(sizes.n_parameters),
        statistics_bytes=ATOM_BYTES * sizes.n_atoms,
        dtype=kind,
        needed_bytes={
            engine: sizes.needed(size, length, streamed=engine == STREAMED)
            for engine in (IN_MEMORY, STREAMED)
        },
        n_tokens=n_tokens,
        states_bytes=sizes.states(size, n_tokens=n_tokens),
        free_bytes=free,
    )


def _free_on_gpus() -> int | None:
    """Free bytes of all GPUs together, as their driver says; None without any."""
    command = ["nvidia-smi", "--query-gpu=memory.free", "--format=csv,noheader,nounits"]
    if shutil.which(command[0]) is None:
        return None
    output = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    return 2**20 * sum(int(line) for line in output.split() if line.isdigit()) or None


# --- the model ----------------------------------------------------------------------


@dataclass(frozen=True)
class _Model:
    """What is known of a model without its weights."""

    config: dict[str, Any]
    method: str | None
    """The format of quantised weights, if they are."""
    shapes: Shapes
    n_bytes: int | None
    """The size of its weights in files, if these are here."""

    @property
    def dtype(self) -> str:
        """Its own type."""
        configs = (text_settings(self.config), self.config)
        names = [c.get(key) for c in configs for key in ("dtype", "torch_dtype")]
        return next((name for name in names if name in _ITEMSIZE), "float32")

    def bytes_of(self, n_parameters: int) -> int:
        """The size of its weights in files; an estimate where these are not here."""
        itemsize = _ITEMSIZE[self.dtype] if self.method is None else 1
        return self.n_bytes or n_parameters * itemsize


def _read(name: str) -> _Model:
    """The model of that name.

    Raises:
        SpecError: its weights are in a format that cannot be measured.
        LayoutError: it is dense, and `load_model` does not open it as a MoE.
    """
    dense = dense_of(name)
    if dense is not None:  # each MLP is the one expert of its layer
        from heapr_lab.models.folders import read_config

        check = registry.find("configurations of dense models as MoEs")
        check(read_config(_folder(dense)))
        model = _read(dense)
        pairs = model.shapes.items()
        shapes = {n.replace(".mlp.", ".mlp.experts.0."): shape for n, shape in pairs}
        return dataclasses.replace(model, shapes=shapes)
    folder = _folder(name)
    config = read_settings(folder)
    quantised = [c.get("quantization_config") for c in (text_settings(config), config)]
    method = next((format_of(settings) for settings in quantised if settings), None)
    check_format(name, method)
    if not any((folder / file).is_file() for file in (SINGLE, INDEX)):
        return _Model(config, method, _built(folder), None)
    stored, _ = read_headers(folder)
    n_bytes = sum(t.n_bytes for tensors in stored.values() for t in tensors.values())
    return _Model(config, method, shapes_in(stored), n_bytes)


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


def _built(folder: Path) -> Shapes:
    """The shapes of a model whose files are not here, as transformers builds it."""
    from heapr_lab.models.folders import read_config, skeleton_of

    model = skeleton_of(read_config(folder))
    return {name: tuple(tensor.shape) for name, tensor in model.named_parameters()}
