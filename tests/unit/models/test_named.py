"""The four models of the paper: their names, and the sizes in their configurations."""

from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from commands import one_line

from heapr_lab.errors import SpecError
from heapr_lab.models import loading
from heapr_lab.models.experts import describe
from heapr_lab.models.folders import build, read_config
from heapr_lab.models.loading import load_model, model_folder
from heapr_lab.models.named import PAPER_MODELS, hub_id

CONFIGS = Path(__file__).parents[2] / "data" / "shapes"
"""The published config.json of each model."""

PUBLISHED = {
    "DeepSeekMoE-16B-Base": (16_375_728_128, range(1, 28), 64, 1408, 2048, 6),
    "Qwen1.5-MoE-A2.7B-Chat": (14_315_784_192, range(24), 60, 1408, 2048, 4),
    "Qwen3-30B-A3B": (30_532_122_624, range(48), 128, 768, 2048, 8),
    "Qwen2-57B-A14B": (57_408_658_944, range(28), 64, 2560, 3584, 8),
}
"""Parameters; layers with experts; experts, atoms of each, their width, and experts of
a token."""


@pytest.mark.parametrize("name", PAPER_MODELS)
def test_sizes_are_the_published_ones(name):
    """Counted on a model without weights, which transformers builds by itself."""
    config = read_config(CONFIGS / name)
    with torch.device("meta"):
        model = build(config, dtype=config.dtype)
    architecture = describe(model)
    n_parameters, numbers, *shape = PUBLISHED[name]
    assert architecture.n_parameters == n_parameters
    assert architecture.bytes_per_parameter == 2
    assert list(architecture.layers) == list(numbers)
    for layer in architecture.layers.values():
        assert [layer.n_experts, layer.d_inter, layer.d_expert, layer.top_k] == shape


def test_a_folder_of_that_name_is_a_folder(tmp_path, monkeypatch):
    """What is on this machine comes before the hub."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "Qwen3-30B-A3B").mkdir()
    assert hub_id("Qwen3-30B-A3B") == "Qwen3-30B-A3B"


def test_every_entrance_takes_them(monkeypatch):
    """What is asked of the hub is the hub id."""
    download = Mock(side_effect=OSError("the hub cannot be reached"))
    monkeypatch.setattr(loading, "snapshot_download", download)
    with pytest.raises(SpecError, match="cannot get the files"):
        model_folder("qwen3-30b-a3b")
    assert [call.args for call in download.mock_calls] == [("Qwen/Qwen3-30B-A3B",)]
    with pytest.raises(SpecError, match=r"'deepseek-ai/deepseek-moe-16b-base'"):
        load_model("DeepSeekMoE-16B-Base")
    assert "'Qwen/Qwen2-57B-A14B'" in one_line("score", "qwen2-57b-a14b")
