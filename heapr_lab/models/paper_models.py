"""The four models of the HEAPr paper, by the names that it gives them."""

from pathlib import Path

PAPER_MODELS = {
    "DeepSeekMoE-16B-Base": "deepseek-ai/deepseek-moe-16b-base",
    "Qwen1.5-MoE-A2.7B-Chat": "Qwen/Qwen1.5-MoE-A2.7B-Chat",
    "Qwen3-30B-A3B": "Qwen/Qwen3-30B-A3B",
    "Qwen2-57B-A14B": "Qwen/Qwen2-57B-A14B",
}
"""The hub id of each, which can be given by either name."""

_BY_NAME = {name.lower(): hub_id for name, hub_id in PAPER_MODELS.items()}


def hub_id(name: str) -> str:
    """The hub id of a model of the paper; any other name, or a folder, as it is.

    Example:
        >>> hub_id("deepseekmoe-16b-base")
        'deepseek-ai/deepseek-moe-16b-base'
        >>> hub_id("lab")
        'lab'
    """
    return name if Path(name).is_dir() else _BY_NAME.get(name.lower(), name)
