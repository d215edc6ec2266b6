"""The sizes of a model, as it is built without weights; what fits, and is streamed.

The numbers of `plan` are those by which `load_model` decides whether to stream. A time
is not among them: once a pass has run its first batch, it says what is left. Without
torch and pandas until a model is counted.
"""

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from heapr_lab.errors import LayoutError, SpecError, one_of, whole_number
from heapr_lab.models.formats import DEQUANTISED, DTYPES, check_format
from heapr_lab.models.safetensors_headers import INDEX, SINGLE, read_headers
from heapr_lab.models.sources import dtype_name

if TYPE_CHECKING:
    from heapr_lab.models.architecture import Architecture, LayerShape

IN_MEMORY, STREAMED = "in memory", "streamed"
ATOM_BYTES = 56
"""The size of the running sums of one atom: seven columns in float64."""
EXTRA_STATES = 3
"""States other than the outputs of all layers: the first inputs, and two gradients."""
_INDEX_BYTES = 4
_SHARE_OF_MEMORY = 0.75
"""The share of free memory for scores; the rest is for what exists for a moment."""

_SIZE = re.compile(r"(\d+(?:\.\d+)?) *([kmgt])(i?)b")


@dataclass(frozen=True)
class Sizes:
    """Numbers of parameters, and of what a pass keeps.

    Example:
        Two layers, each with 2 experts of 8 atoms, between embeddings and head:

        >>> from heapr_lab.models.architecture import Architecture, LayerShape
        >>> shape = LayerShape(n_experts=2, d_inter=8, d_expert=4)
        >>> model = Architecture(602, 2, 4, {0: shape, 1: shape}, 0, 0)
        >>> sizes = Sizes(model, (200, 200), (100, 100), (4, 0))
        >>> sizes.n_atoms, sizes.outside, sizes.states(2, n_tokens=10)
        (32, 2, 400)
    """

    model: "Architecture"
    """The whole model, and its layers with routed experts."""
    layers: tuple[int, ...]
    """Parameters of each decoder layer."""
    ends: tuple[int, ...]
    """Parameters of the embeddings, and of a head that has weights of its own."""
    state: tuple[int, int]
    """The numbers that `state_of` gives."""

    @property
    def outside(self) -> int:
        """All other parameters: the last norm, and other towers of a wrapper."""
        return self.model.n_parameters - sum(self.layers) - sum(self.ends)

    @property
    def moe(self) -> "tuple[LayerShape, ...]":
        """The routed experts of each MoE layer."""
        return tuple(self.model.layers.values())

    @property
    def n_atoms(self) -> int:
        """Routed atoms of all layers."""
        return sum(shape.n_atoms for shape in self.moe)

    def needed(self, itemsize: int, n_tokens: int, *, streamed: bool = False) -> int:
        """Bytes of weights, of sums, and of what a batch keeps for its backward pass.

        Args:
            itemsize: bytes of a weight in memory.
            n_tokens: of a batch.
            streamed: whether one layer at a time is in memory.
        """
        n_at_once = 1 if streamed else len(self.layers)
        combine = max if streamed else sum
        weights = self.outside + combine((*self.layers, *self.ends))
        kept = n_tokens * n_at_once * self._kept_by_a_layer
        return (weights + kept) * itemsize + ATOM_BYTES * self.n_atoms

    @property
    def _kept_by_a_layer(self) -> int:
        """Numbers that autograd keeps of a token in a layer, at most.

        For each atom that it is routed to, the two projections, their activation and h;
        around the experts sixteen times the width of the model.
        """
        widest = max(shape.top_k * shape.d_inter for shape in self.moe)
        return 16 * self.model.d_model + 4 * widest

    def states(self, itemsize: int, *, n_tokens: int) -> int:
        """Bytes of the states between the layers of a streamed pass."""
        n_states = len(self.layers) + EXTRA_STATES
        return n_states * n_tokens * state_bytes(self.state, itemsize)


def sizes_of(model: Any) -> Sizes:
    """The sizes of a model, which may be on the meta device.

    Raises:
        LayoutError: its experts cannot be measured, are fewer than a token is routed
            to, or its decoder layers are not in one list.
    """
    from heapr_lab.models.experts import describe
    from heapr_lab.streaming.stream import decoder_layers

    ends = [model.get_input_embeddings(), model.get_output_embeddings()]
    weights = {end.weight for end in ends if end is not None}  # tied ones once
    blocks = decoder_layers(model)
    whole = describe(model)
    for number, shape in whole.layers.items():
        if shape.top_k > shape.n_experts:
            raise LayoutError(
                f"layer {number} routes a token to {shape.top_k} experts and has "
                f"{shape.n_experts}: correct num_experts_per_tok in config.json"
            )
    return Sizes(
        model=whole,
        layers=tuple(sum(p.numel() for p in block.parameters()) for block in blocks),
        ends=tuple(weight.numel() for weight in weights),
        state=state_of(model.config),
    )


def state_of(config: Any) -> tuple[int, int]:
    """Numbers of a token that are kept between two layers, and how many in int32.

    The first are in the type of the weights: the state, of which models with
    hyper-connections have several. The others are of indexed attention, at most: the
    tokens that a layer attends to, which it chooses and may hand on.

    Args:
        config: of the model, or of a wrapper around it.
    """
    text = config.get_text_config()
    n_states = getattr(text, "hc_mult", None) or 1
    return text.hidden_size * n_states, 2 * (getattr(text, "index_topk", None) or 0)


def state_bytes(state: tuple[int, int], itemsize: int) -> int:
    """Bytes of what `state_of` counts."""
    return state[0] * itemsize + state[1] * _INDEX_BYTES


# --- memory -----------------------------------------------------------------------


def why_streamed(
    sizes: Sizes, itemsize: int, n_tokens: int, free: float, *, method: str | None
) -> str | None:
    """Why a model is streamed if the caller does not say; None if it is loaded whole.

    Args:
        sizes: of the model.
        itemsize: bytes of a weight in memory.
        n_tokens: of a calibration window.
        free: bytes of the device.
        method: the format of quantised weights, if they are.

    Returns:
        What is wrong with its numbers, and what is done in place of it.
    """
    if method in DEQUANTISED:
        return (
            f"the weights are in {method}: they are dequantised when they are read "
            "from disk, one decoder layer at a time"
        )
    needed = sizes.needed(itemsize, n_tokens)
    if needed <= _SHARE_OF_MEMORY * free:
        return None
    weights = itemsize * sizes.model.n_parameters
    return (
        f"{gigabytes(free)} are free, of which scores may take {_SHARE_OF_MEMORY:.0%}: "
        f"those of a window of {n_tokens:,} tokens need {gigabytes(needed)}, "
        f"{gigabytes(weights)} of it for weights, so decoder layers are "
        "read from disk, one at a time (stream=False loads them all)"
    )


def why_on_disk(
    path: str, config: Any, *, dtype: Any, device: str, n_tokens: int
) -> str | None:
    """Why a model is streamed if the caller does not say.

    Args:
        path: the folder of the model, or its hub id.
        config: its configuration.
        dtype: of the weights in memory; `auto` is the checkpoint's own.
        device: as `load_model`.
        n_tokens: of a calibration window.

    Returns:
        The reason; None if the model fits, is pruned, or has no routed experts.
    """
    import torch

    from heapr_lab.models.folders import quantisation, skeleton_of
    from heapr_lab.models.loading import model_folder

    method = quantisation(config)
    if method not in (None, *DEQUANTISED):
        return None
    if dtype == "auto":
        dtype = getattr(config, "dtype", None) or torch.float32
    try:
        read_headers(model_folder(path))
        sizes = sizes_of(skeleton_of(config))
    except (SpecError, LayoutError):  # of damaged or other files, or a dense model
        return None
    free = free_memory(device)
    return why_streamed(sizes, dtype.itemsize, n_tokens, free, method=method)


def free_memory(device: str) -> int:
    """Free bytes of a GPU, of all GPUs (`auto`), or of the machine."""
    import psutil
    import torch

    gpus: list[Any] = [device] if device.startswith("cuda") else []
    if device == "auto" and torch.cuda.is_available():
        gpus = [*range(torch.cuda.device_count())]
    if not gpus:
        return int(psutil.virtual_memory().available)
    cuda = torch.cuda
    free = sum(cuda.mem_get_info(gpu)[0] for gpu in gpus)
    # What torch's allocator holds, and no tensor has, is free, too.
    return free + sum(cuda.memory_reserved(g) - cuda.memory_allocated(g) for g in gpus)


def gigabytes(n_bytes: float) -> str:
    """A size as text.

    Example:
        >>> gigabytes(1.25e10), gigabytes(2e6)
        ('12.5 GB', '0.002 GB')
    """
    large = n_bytes / 1e9
    return f"{large:,.0f} GB" if large >= 100 else f"{large:.3g} GB"


def size_of(size: int | str, *, least: int = 1) -> int:
    """Bytes, from a number or a text with a unit.

    Raises:
        SpecError: it is neither, or less than `least`.

    Example:
        >>> size_of("24GB"), size_of("1 GiB")
        (24000000000, 1073741824)
    """
    text = str(size).strip().lower()
    match = _SIZE.fullmatch(text)
    n_bytes = int(text) if text.isdecimal() else -1
    if match:
        base = 1024 if match[3] else 1000
        n_bytes = int(float(match[1]) * base ** " kmgt".index(match[2]))
    if n_bytes < least:
        raise SpecError(
            f"a size is {size!r}, expected bytes, or a number with a unit: 16GB, 512MiB"
        )
    return n_bytes


# --- before a weight is read --------------------------------------------------------


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
        needed = {k: gigabytes(n) for k, n in self.needed_bytes.items()}
        facts = {
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
        return "\n".join(f"{name:<12} {text}" for name, text in facts.items())


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
    import torch

    from heapr_lab.models.folders import quantisation, skeleton_of

    folder, config = _read(str(model))
    method = quantisation(config)
    check_format(model, method)
    kind = config.dtype or config.get_text_config().dtype or torch.float32
    stored_size = kind.itemsize if method is None else 1
    if dtype != "auto":
        kind = getattr(torch, dtype)
    elif not torch.cuda.is_available():
        kind = torch.float32
    size, sizes = kind.itemsize, sizes_of(skeleton_of(config))
    free = free_memory("auto") if given is None else given
    why = why_streamed(sizes, size, length, free, method=method)
    n_parameters = sizes.model.n_parameters
    return Plan(
        model=str(model),
        engine=IN_MEMORY if why is None else STREAMED,
        why=why or f"{gigabytes(free)} are free",
        n_parameters=n_parameters,
        n_layers=len(sizes.layers),
        n_moe_layers=len(sizes.moe),
        n_experts=sum(shape.n_experts for shape in sizes.moe),
        n_atoms=sizes.n_atoms,
        checkpoint_bytes=_bytes_in(folder) or stored_size * n_parameters,
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


def _read(name: str) -> tuple[Path, Any]:
    """The folder of a model, with its weights if they are here, and its configuration.

    Raises:
        SpecError: there is no such model.
    """
    from heapr_lab.models.folders import read_config
    from heapr_lab.models.loading import model_folder

    if Path(name).name == "config.json":
        name = str(Path(name).parent)
    folder = model_folder(name, only="config.json")
    return folder, read_config(folder)


def _bytes_in(folder: Path) -> int:
    """The size of all tensors of a checkpoint; 0 if its weights are not here.

    Raises:
        SpecError: a part of it is missing or damaged.
    """
    if not any((folder / name).is_file() for name in (SINGLE, INDEX)):
        return 0
    return sum(tensor.n_bytes for tensor in read_headers(folder).values())
