"""NemotronHPuzzle against blocks of Nemotron-H, in the layout that is published."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from families import FAMILIES, tiny_ids, tiny_model
from keeps import logits_of, masked_logits
from methods_by_hand import reloaded
from stored_tensors import changed_json, changed_tensors, configured, tensors_in
from tiny_folder import opened, write_folder
from torch import nn

from heapr_lab import CalibrationSet, Selection, collect_statistics, plan, select
from heapr_lab.checkpoints.save import prune_folder
from heapr_lab.errors import SpecError
from heapr_lab.models.experts import describe
from heapr_lab.recipes.export import check_selection
from heapr_lab.storage.files import read_json

IDS = tiny_ids()
BLOCKS: list[dict[str, Any]] = [
    {"block_type": "mamba"},
    *FAMILIES["nemotron_h_puzzle"]["block_configs"],
    {"block_type": "mlp", "intermediate_size": 12},
]
MTP: list[dict[str, Any]] = [
    {"block_type": "attention"},
    {"block_type": "moe", "moe_intermediate_size": 24, "num_experts_per_tok": 4},
]
SIZES = {
    "n_routed_experts": 4, "moe_shared_expert_intermediate_size": 8,
    "moe_latent_size": 12, "mamba_num_heads": 4, "mamba_head_dim": 8,
    "ssm_state_size": 6, "n_groups": 2, "conv_kernel": 3, "chunk_size": 4,
}  # fmt: skip
CODE = "raise SystemExit('the code of the checkpoint runs')"


def kinds(blocks: list[dict[str, Any]]) -> list[str]:
    """The kind of each block."""
    return [block["block_type"] for block in blocks]


def alone(number: int, block: dict[str, Any]) -> Any:
    """A Nemotron-H of one block, which transformers builds."""
    sizes = SIZES | block | {"layers_block_type": kinds([block])}
    alias = {"num_local_experts": sizes["n_routed_experts"]}
    return tiny_model("nemotron_h", seed=number, **sizes | alias)


@pytest.fixture(scope="module")
def twins() -> list[Any]:
    """One for each block: the first has the embeddings, the last the norm and head."""
    return [alone(number, block) for number, block in enumerate(BLOCKS)]


@pytest.fixture(scope="module")
def hub(twins, tmp_path_factory) -> Path:
    """The blocks in one folder as they are published, with their own code beside."""
    folder = write_folder(tmp_path_factory.mktemp("hub") / "puzzle", twins[0])
    norms = dict.fromkeys(("0.enorm", "0.hnorm", "1.final_layernorm"), (16,))
    shapes = norms | {"0.eh_proj": (16, 32)}
    stored = {f"mtp.layers.{n}.weight": torch.ones(s) for n, s in shapes.items()}
    heads = [alone(9 + number, block) for number, block in enumerate(MTP)]
    for stem, models in (("mtp", heads), ("model", twins)):
        for number, model in enumerate(models):
            model.save_pretrained(folder / "one")
            for name, tensor in tensors_in(folder / "one").items():
                place = name.replace("backbone.layers.0", f"{stem}.layers.{number}")
                if "embeddings" not in name or model is twins[0]:
                    stored[place.replace("backbone.", "model.")] = tensor
    shutil.rmtree(folder / "one")
    with changed_tensors(folder) as tensors:
        tensors |= {name: tensor.double() for name, tensor in stored.items()}
        for name in [name for name in tensors if name.startswith("backbone.")]:
            del tensors[name]
    with changed_json(folder) as config:
        del config["moe_intermediate_size"], config["num_experts_per_tok"]
        config["auto_map"] = {"AutoConfig": "configuration_puzzle.Config"}
        config["architectures"] = ["NemotronHPuzzleForCausalLM"]
        config["model_type"], config["num_hidden_layers"] = "nemotron_h_puzzle", None
        config["block_configs"], config["layers_block_type"] = BLOCKS, kinds(BLOCKS)
        config["mtp_block_configs"], config["mtp_layers_block_type"] = MTP, kinds(MTP)
        config["num_nextn_predict_layers"] = 1
    (folder / "configuration_puzzle.py").write_text(CODE)
    return folder


@torch.no_grad()
def reference(twins: list[Any]) -> torch.Tensor:
    """The logits of IDS, block by block."""
    states = twins[0].get_input_embeddings()(IDS)
    for twin in twins:
        norm, twin.model.norm_f = twin.model.norm_f, nn.Identity()
        states = twin.model(inputs_embeds=states).last_hidden_state
        twin.model.norm_f = norm
    logits: torch.Tensor = twins[-1].lm_head(norm(states))
    return logits.float()


@pytest.mark.parametrize("stream", [False, True])
def test_logits_are_those_of_the_blocks(hub, twins, *, stream):
    """In float64, to the rounding of logits; the folder's code does not run."""
    model = opened(hub, stream=stream)
    close = {"rtol": 1e-6, "atol": 1e-6}
    torch.testing.assert_close(logits_of(model, IDS), reference(twins), **close)


def test_layers_have_sizes_of_their_own(hub):
    """In a table, in the model, and in a plan."""
    model = opened(hub, stream=True)
    table = collect_statistics(model, CalibrationSet.from_ids(IDS))
    assert table.shapes() == {1: (4, 8), 3: (6, 12)}
    assert [shape.top_k for shape in describe(model).layers.values()] == [2, 3]
    needs = plan(hub)
    assert (needs.n_moe_layers, needs.n_layers, needs.n_atoms) == (2, 5, 104)


def test_text_with_a_cache_is_text_without(hub):
    """Eight tokens, greedily."""
    model = opened(hub, stream=False)
    model.set_experts_implementation("eager")
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    texts = [model.generate(IDS[:1], use_cache=c, **options) for c in (True, False)]
    assert torch.equal(*texts)


@pytest.mark.parametrize("structure", ["ragged", "per_layer"])
def test_pruned_and_reloaded(hub, tmp_path, structure):
    """The masked model; of a width for each layer it is stock, as config.json says."""
    model, stock = opened(hub, stream=False), structure == "per_layer"
    table = collect_statistics(model, CalibrationSet.from_ids(IDS))
    keep = select(table, ratio=0.4, structure=structure, multiple=2 if stock else None)
    expected = masked_logits(model, IDS, keep)
    out = prune_folder(hub, keep, tmp_path / "out")
    loaded = reloaded(out)
    torch.testing.assert_close(logits_of(loaded, IDS), expected, rtol=0, atol=1e-5)
    config, tensors = read_json(out / "config.json"), tensors_in(out)
    assert tensors.keys() == tensors_in(hub).keys()
    assert {"auto_map", "moe_intermediate_size"} & config.keys() == set()
    assert config["layers_block_type"] == kinds(BLOCKS)
    assert config["mtp_block_configs"] == MTP
    assert ("quantization_config" in config) != stock
    assert ("ordinary" in (out / "README.md").read_text()) == stock
    for layer in keep.layers if stock else ():
        width = config["block_configs"][layer]["moe_intermediate_size"]
        assert {*keep.by_layer(layer).sum(1)} == {width}
    loaded.save_pretrained(tmp_path / "again")
    assert read_json(tmp_path / "again" / "config.json") == config


def test_one_width_for_all_layers_is_refused(hub):
    """Before anything is measured."""
    with pytest.raises(SpecError, match="have widths of their own, not one"):
        check_selection(hub, Selection(0.25, structure="uniform"), written=True)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("block_configs", None, "block_configs is missing"),
        ("block_configs", [{"block_type": "rwkv"}], "[0] is of type 'rwkv', expected"),
        ("block_configs", [{"block_type": "moe"}], "[0], of type moe, has no moe_inte"),
        (
            "block_configs",
            [BLOCKS[2] | {"sliding_window": 4}],
            "has sliding_window: no",
        ),
        ("layers_block_type", ["moe"], "layers_block_type and block_configs name"),
        ("mtp_block_configs", [], "mtp_block_configs is missing"),
    ],
)
def test_other_lists_are_refused(hub, tmp_path, key, value, message):
    """By name, before a weight is read."""
    folder = Path(shutil.copytree(hub, tmp_path / "moe"))
    configured(**{key: value})(folder)
    with pytest.raises(SpecError, match=re.escape(message)):
        opened(folder, stream=False)
