"""Quantise a GGUF file with llama.cpp's library, into the type that is asked for.

llama.cpp stores the rows of a matrix as blocks of 32 or 256 weights. If the rows do not
divide into blocks, it takes another type and says so in its log alone; here that is an
error, before anything is written.
"""

import ctypes
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from heapr_lab.checkpoints.gguf import read_gguf, write_gguf
from heapr_lab.errors import SpecError
from heapr_lab.progress import Progress
from heapr_lab.storage.cache import writing
from heapr_lab.storage.files import replacing

_PLAIN = ("F32", "F16", "BF16")
_KEPT = ("_norm.weight", "ffn_gate_inp.weight", "ssm_conv1d.weight")
"""Matrices that llama.cpp does not quantise, by the end of their names."""


@dataclass(frozen=True)
class BlockType:
    """A type of quantised weights."""

    setting: str
    """llama.cpp's name of files with it."""
    block: int
    """Weights in a block, of which rows are multiples."""
    stored: str
    """Its name in a file."""


TYPES: Mapping[str, BlockType] = MappingProxyType(
    {
        "q8_0": BlockType("LLAMA_FTYPE_MOSTLY_Q8_0", 32, "Q8_0"),
        "q4_0": BlockType("LLAMA_FTYPE_MOSTLY_Q4_0", 32, "Q4_0"),
        "q4_k": BlockType("LLAMA_FTYPE_MOSTLY_Q4_K_S", 256, "Q4_K"),
    }
)
"""By the names that `--quantise` takes."""


def quantise_gguf(source: Path | str, path: Path | str, kind: str) -> Path:
    """Write the model in a GGUF file again, with every matrix of the type `kind`.

    Routers, norms and vectors stay as they are. `llama-quantize` makes mixtures of
    types, such as q4_k_m, too.

    Args:
        source: a GGUF file, not quantised, as `write_gguf` writes.
        path: the file to write; it gets this name when it is complete.
        kind: q8_0, q4_0 or q4_k.

    Returns:
        `path`.

    Raises:
        SpecError: there is no such type, rows of a matrix do not divide into its
            blocks, `source` is quantised, `path` exists or is being written by another
            process, llama.cpp cannot quantise the file, or the package
            llama-cpp-python is not installed.

    Source: llama.cpp `src/llama-quant.cpp`.

    Example:
        >>> quantise_gguf("pruned.gguf", "pruned-q4_k.gguf", "q4_k")  # doctest: +SKIP
    """
    source, path, kind_of = Path(source), Path(path), _known(kind)
    tensors = read_gguf(source).tensors
    before = _types(tensors)
    _check_rows(source, tensors, kind)
    with writing(path):
        if path.exists():
            raise SpecError(f"{path} exists already: give a new name, or delete it")
        with replacing(path) as temporary:
            _quantise(source, temporary, kind_of)
            for name, stored in _types(read_gguf(temporary).tensors).items():
                if stored not in (before[name], kind_of.stored):
                    raise SpecError(
                        f"llama.cpp stored {name} as {stored}, expected {kind}: its "
                        "version is not supported; quantise with llama-quantize"
                    )
    return path


def write_quantised(
    folder: Path | str, path: Path | str, kind: str, *, progress: Progress | None = None
) -> Path:
    """Write the checkpoint in `folder` as a GGUF file of the type `kind`.

    It is written beside `path` in its own dtype first.

    Args and errors: as of `write_gguf` and `quantise_gguf`.
    """
    path = Path(path)
    _known(kind)
    _llama_cpp()
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".partial-") as place:
        plain = write_gguf(folder, Path(place) / "plain.gguf", progress=progress)
        return quantise_gguf(plain, path, kind)


def _known(kind: str) -> BlockType:
    if kind not in TYPES:
        raise SpecError(f"there is no type {kind!r}, expected {', '.join(TYPES)}")
    return TYPES[kind]


def _check_rows(source: Path, tensors: Iterable[Any], kind: str) -> None:
    """Check that the rows of every matrix of `source` divide into blocks of `kind`.

    Raises:
        SpecError: one does not, or it is quantised.
    """
    block = TYPES[kind].block
    for name, stored, row in _matrices(tensors):
        if stored not in _PLAIN:
            raise SpecError(
                f"{name} in {source} is quantised as {stored}, expected "
                f"{', '.join(_PLAIN)}: quantise the file that write_gguf wrote"
            )
        if row % block:
            raise SpecError(
                f"{name} has rows of {row} weights, and blocks of {kind} have {block}, "
                f"so that llama.cpp would take another type: {_remedy(name, block)}"
            )


def _remedy(name: str, block: int) -> str:
    others = [kind for kind, known in TYPES.items() if known.block < block]
    other = f"take {' or '.join(others)}" if others else "leave it as it is"
    if "_exps" not in name or "down" not in name:
        return other
    engine = "llama.cpp-q4_k" if block == 256 else "llama.cpp"
    return f"prune with --for {engine} (widths in multiples of {block}), or {other}"


def _matrices(tensors: Iterable[Any]) -> Iterator[tuple[str, str, int]]:
    """Name, type and weights in a row of each matrix that llama.cpp quantises."""
    for tensor in tensors:
        matrix = len(tensor.shape) > 1 and tensor.name.endswith(".weight")
        if matrix and not tensor.name.endswith(_KEPT):
            yield tensor.name, tensor.tensor_type.name, int(tensor.shape[0])


def _types(tensors: Iterable[Any]) -> dict[str, str]:
    """The type of each of the tensors of a file, by name."""
    return {t.name: t.tensor_type.name for t in tensors}


def _quantise(source: Path, path: Path, kind: BlockType) -> None:
    library = _llama_cpp()
    library.llama_backend_init()
    settings = library.llama_model_quantize_default_params()
    settings.ftype, settings.pure = getattr(library, kind.setting), True
    failed = library.llama_model_quantize(
        str(source).encode(), str(path).encode(), ctypes.byref(settings)
    )
    if failed:
        raise SpecError(
            f"llama.cpp cannot quantise {source} (its log says why): expected a file "
            "that write_gguf wrote"
        )


def _llama_cpp() -> Any:
    """llama.cpp's library, an optional extra.

    Raises:
        SpecError: it is not installed.
    """
    try:
        import llama_cpp
    except ImportError as error:
        raise SpecError(
            "the package llama-cpp-python is not installed: pip install "
            "'heapr-lab[llama]'"
        ) from error
    return llama_cpp
