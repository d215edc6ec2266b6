"""The models that have a name: folders found or made, and those of the HEAPr paper.

A wing above this one adds a name with `register`; `heapr_lab/__init__.py` does so for
those of the package. Without torch.
"""

from collections.abc import Callable
from pathlib import Path

from heapr_lab.errors import SpecError
from heapr_lab.storage import paths

LAB = "lab"
"""Name of the bundled model."""

PAPER_MODELS = {
    "DeepSeekMoE-16B-Base": "deepseek-ai/deepseek-moe-16b-base",
    "Qwen1.5-MoE-A2.7B-Chat": "Qwen/Qwen1.5-MoE-A2.7B-Chat",
    "Qwen3-30B-A3B": "Qwen/Qwen3-30B-A3B",
    "Qwen2-57B-A14B": "Qwen/Qwen2-57B-A14B",
}
"""The hub id of each model of the paper, which can be given by either name."""
_BY_NAME = {name.lower(): hub_id for name, hub_id in PAPER_MODELS.items()}

_FOLDERS: dict[str, Callable[[], Path]] = {}


def register(name: str, folder: Callable[[], Path]) -> None:
    """Let `name` be that of the model in `folder()`, a folder in the hub's layout.

    Args:
        name: as it is given to `load_model`; it comes before a local folder.
        folder: called at each use; it makes the folder if there is none yet.
    """
    _FOLDERS[name] = folder


def names() -> list[str]:
    """The names there are.

    Example:
        >>> names()[0]
        'lab'
    """
    return list(_FOLDERS)


def folder_of(name: str) -> Path | None:
    """The folder of the model of that name; None if it is no such name."""
    return _FOLDERS[name]() if name in _FOLDERS else None


def hub_id(name: str) -> str:
    """The hub id of a model of the paper; any other name, or a folder, as it is.

    Example:
        >>> hub_id("deepseekmoe-16b-base")
        'deepseek-ai/deepseek-moe-16b-base'
        >>> hub_id("lab")
        'lab'
    """
    return name if Path(name).is_dir() else _BY_NAME.get(name.lower(), name)


def local_folder(name: str) -> Path | None:
    """The folder of a model whose files are here, found without the network.

    Args:
        name: a path, a hub id in the hub's cache, or `lab`.
    """
    if name == LAB:
        return _lab_folder()
    if Path(name).is_dir():
        return Path(name) if (Path(name) / "config.json").is_file() else None
    from huggingface_hub import try_to_load_from_cache

    try:
        path = try_to_load_from_cache(name, "config.json")
    except ValueError:  # neither a folder nor a hub id
        return None
    return Path(path).parent if isinstance(path, str) else None


def folder_here(name: str) -> Path | None:
    """The folder of a model; of one that is made at first use, the newest."""
    if name == LAB or name not in _FOLDERS:
        return local_folder(name)
    folders = paths.cached_folders("models", name)
    return max(folders, key=lambda folder: folder.stat().st_mtime_ns, default=None)


def what_is_expected() -> str:
    """What can be given as a model, for messages."""
    return (
        "a hub id that can be reached, a local folder in the hub's layout, or one of "
        f"{', '.join(names())}"
    )


def _lab_folder() -> Path:
    """The folder of the bundled model.

    Raises:
        SpecError: it is not there.
    """
    folder = paths.lab_model_dir()
    if not (folder / "config.json").is_file():
        raise SpecError(
            f"the lab model is not in {folder}: it comes with the repository; work in "
            "a clone (pip install -e .), or train it: `python -m benchmarks.lab_model`"
        )
    return folder


register(LAB, _lab_folder)
