"""The layers that predict further tokens (MTP): scored, and pruned as all others are.

The slow twin runs a layer's modules one token of loss at a time, in float64.
"""

import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import one_line, run, text_of
from families import D_VOCAB, WRAPPERS, tiny_ids, tiny_model, tiny_windows
from keeps import logits_of, random_keep, widths_keep, zeroed_twin
from methods_by_hand import reloaded
from quantised_folder import (
    POWERS,
    WIDE,
    in_fp4,
    in_fp8,
    in_pairs,
    of_each_weight,
    with_twin,
)
from stored_tensors import changed_tensors, same_bits, same_tensors, tensors_in
from tiny_folder import SIZES, write_text, write_tokenizer
from torch import nn

from heapr_lab.checkpoints import mtp_head
from heapr_lab.checkpoints.mtp_head import (
    MtpHead,
    head_after,
    highest,
    open_head,
)
from heapr_lab.checkpoints.predicting import by_layer, narrowed, predicting_heads
from heapr_lab.checkpoints.save import prune_folder, save_pruned
from heapr_lab.checkpoints.uniform import stock_model
from heapr_lab.errors import LayoutError, SpecError
from heapr_lab.importance.collect import collect_statistics
from heapr_lab.importance.table import ImportanceTable
from heapr_lab.models.experts import find_experts
from heapr_lab.models.folders import read_config, read_weights, skeleton_of
from heapr_lab.pruning.options import Selection
from heapr_lab.pruning.surgery import prune
from heapr_lab.recipes.export import check_selection
from heapr_lab.storage.files import read_json
from heapr_lab.text.calibration import CalibrationSet

UNDER_MTP = {
    "enorm": "pre_fc_norm_embedding",
    "hnorm": "pre_fc_norm_hidden",
    "eh_proj": "fc",
    "shared_head.norm": "norm",
}
"""Names of what the layer has besides a decoder layer, where it is under `mtp.`."""
LAST = "model.layers.3."
TEXT = tiny_windows()
FAMILIES = {
    "deepseek_v3": LAST,
    "deepseek_v32": LAST,
    "glm4_moe": LAST,
    "glm_moe_dsa": LAST,
    "qwen3_next": "mtp.layers.0.",
    "qwen3_5_moe_text": "mtp.layers.0.",
    "qwen3_5_moe": "mtp.layers.0.",
}
"""Where the layer is in the files of each family, as it is published."""
OTHER = {"qwen4_exp_text": "mtp.layers.0.", "ernie4_5_moe": "mtp_block.0."}
"""The same of layers that transformers cannot run: several streams, other names."""
COUNTS = {
    "deepseek_v3": "num_nextn_predict_layers",
    "glm4_moe": "num_nextn_predict_layers",
    "qwen3_next": "mtp_num_hidden_layers",
}
"""The key of families whose configuration counts such layers."""
WIDTH = 4


def source_of(folder: Path, family: str, *, n_heads: int = 1, **sizes: Any) -> Path:
    """A tiny model with such layers, whose tensors are random."""
    count = {COUNTS.get(family, "num_nextn_predict_layers"): n_heads}
    model = tiny_model(family, **count, **sizes)
    model.save_pretrained(folder)
    config = model.config.get_text_config()
    inside = "language_model." if family in WRAPPERS else ""
    last = f"model.{inside}layers.{config.num_hidden_layers - 1}."
    first = (FAMILIES | OTHER)[family]
    number = int(first.split(".")[-2])
    with changed_tensors(folder) as stored:
        for k in range(n_heads):
            new = first.replace(f".{number}.", f".{number + k}.")
            shapes = shapes_of(stored, {last: new}) | joined(config.hidden_size, new)
            stored |= random_tensors(shapes, model.dtype)
    return folder


Shapes = dict[str, tuple[int, ...]]


def shapes_of(stored: dict[str, torch.Tensor], places: dict[str, str]) -> Shapes:
    """The shapes of layers, by the names that these have in other places."""
    return {
        name.replace(old, new): tuple(tensor.shape)
        for name, tensor in stored.items()
        for old, new in places.items()
        if name.startswith(old)
    }


def joined(d_model: int, layer: str) -> Shapes:
    """What joins the states with the embeddings, and the norm at the end."""
    shapes = dict.fromkeys(UNDER_MTP, (d_model,)) | {"eh_proj": (d_model, 2 * d_model)}
    if layer.startswith("mtp"):
        return {f"mtp.{UNDER_MTP[n]}.weight": shape for n, shape in shapes.items()}
    return {f"{layer}{name}.weight": shape for name, shape in shapes.items()}


def random_tensors(shapes: Shapes, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Random tensors, of other values for each layer."""
    return {
        name: (torch.randn(shape) * (0.4 if len(shape) > 1 else 0.1)).to(dtype)
        for name, shape in shapes.items()
    }


def extra_in(folder: Path, family: str) -> set[str]:
    """The names of the layer's tensors."""
    first = FAMILIES[family].partition("layers.0.")[0]
    return {name for name in tensors_in(folder) if name.startswith(first)}


def opened(folder: Path) -> tuple[Any, ...]:
    """The model in a folder in float64, and its layers."""
    model = read_weights(folder, dtype=torch.float64)
    model.set_experts_implementation("eager")
    n_blocks = 2 if model.config.model_type == "nemotron_h" else 1
    layers = by_layer(predicting_heads(model, str(folder)), n_blocks)
    return model, *(open_head(model, heads) for heads in layers.values())


def trunk_states(model: Any, window: torch.Tensor) -> torch.Tensor:
    """The trunk's states of a window, (L, D)."""
    with torch.no_grad():
        trunk = model(window[None], output_hidden_states=True, use_cache=False)
    return trunk.hidden_states[-1][0]


def slow_states(
    model: Any, layer: Any, before: torch.Tensor, window: torch.Tensor
) -> torch.Tensor:
    """The layer's states (L - 1, D) of a window (L,), in words of the paper of MTP."""
    mtp = layer.layers[0]
    embedded = model.get_input_embeddings()(window[1:])
    joined = torch.cat([mtp.enorm(embedded), mtp.hnorm(before[:-1])], dim=-1)
    n = len(joined)
    positions = torch.arange(1, n + 1)[None]
    turned = model.get_decoder().rotary_emb(joined[None], position_ids=positions)
    causal = torch.full((n, n), -torch.inf, dtype=torch.float64).triu(1)
    states = mtp.mtp_block(
        mtp.eh_proj(joined)[None],
        attention_mask=causal[None, None],
        position_embeddings=turned,
        position_ids=positions,
    )
    return mtp.post_norm(states)[0]


def summed_nll(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The loss of each target, one by one."""
    pairs = zip(logits, targets, strict=False)
    return sum(nn.functional.cross_entropy(row, target) for row, target in pairs)


def slow_nll(model: Any, layers: list[Any], window: torch.Tensor) -> torch.Tensor:
    """The summed loss of the last of the layers on one window (L,)."""
    states = trunk_states(model, window)
    for k, layer in enumerate(layers):
        states = slow_states(model, layer, states.detach(), window[k:])
    return summed_nll(model.lm_head(states), window[len(layers) + 1 :])


def assert_are_of(
    table: ImportanceTable, head: MtpHead, trunk: Any, layers: list[Any]
) -> None:
    """Sum h·g of every atom is the derivative of the loss by the atom's size."""
    (experts,) = find_experts(head)
    weight = experts.module.down_proj.requires_grad_()
    sum(slow_nll(trunk, layers, window) for window in tiny_ids()).backward()
    change = (weight.detach() * weight.grad).sum(
        2 if experts.module.is_transposed else 1
    )
    sums = table.frame["sum_hg"].to_numpy().reshape(change.shape)
    np.testing.assert_allclose(sums, change.numpy(), rtol=1e-9, atol=1e-14)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_uniform_checkpoint_has_it_as_narrow_as_all_others(tmp_path, family):
    """Each keeps its atoms of the highest scores; it computes what zeroed columns do.

    Sum h·g of every atom is the derivative of the layer's own loss by the atom's size,
    on the states of the narrow layers before it.
    """
    n_heads = 2 if family in ("deepseek_v3", "qwen3_next") else 1
    source = source_of(tmp_path / "source", family, n_heads=n_heads)
    model, *layers = opened(source)
    assert len(layers) == n_heads
    keep = widths_keep(model, WIDTH, structure="uniform")
    out = prune_folder(source, keep, tmp_path / "out", calibration=TEXT)
    options = {"base": str(source), "calibration": TEXT}
    same_tensors(out, save_pruned(prune(model, keep), tmp_path / "saved", **options))
    head, later = trunk, _ = zeroed_twin(model, keep), TEXT
    for k, layer in enumerate(layers):
        head, later = head_after(head, layer, later)
        table = collect_statistics(head, later, batch_size=1)
        assert_are_of(table, head, trunk, layers[: k + 1])
        assert table.metadata["N"] == tiny_ids().numel() - (k + 2) * len(tiny_ids())
        mask = highest(table, WIDTH)
        assert set(mask.by_layer(0).sum(1)) == {WIDTH}
        head = zeroed_twin(head, mask)
        layers[k] = head.body.layer
    pruned, *narrow = opened(out)
    window = tiny_ids(seed=7)[0]
    expected = slow_nll(trunk, layers, window)
    torch.testing.assert_close(slow_nll(pruned, narrow, window), expected)
    note = read_json(out / "heapr_manifest.json")["also pruned"]
    assert "by its own loss on token ids" in note
    assert f"| also pruned | {note} |" in (out / "README.md").read_text()


def fused(tensors: dict[str, torch.Tensor], layer: str) -> dict[str, torch.Tensor]:
    """Tensors with those of a layer's experts in one each, as Qwen3.5 has them."""
    stem = f"{layer}mlp.experts."
    together = {n: t for n, t in tensors.items() if not n.startswith(stem)}
    for end in {n.partition(".weight")[2] for n in tensors if n.startswith(stem)}:
        gate, up, down = (
            torch.stack([tensors[f"{stem}{e}.{name}.weight{end}"] for e in range(4)])
            for name in ("gate_proj", "up_proj", "down_proj")
        )
        together[f"{stem}gate_up_proj{end}"] = torch.cat([gate, up], dim=1)
        together[f"{stem}down_proj{end}"] = down
    return together


@pytest.mark.parametrize("family", ["qwen3_5_moe_text", "deepseek_v3 in FP8"])
def test_fused_experts_are_sliced_as_single_ones(tmp_path, family):
    """They keep the same atoms, whichever form they are stored in."""
    family, _, in_blocks = family.partition(" in ")
    sizes = {"dtype": torch.bfloat16, "moe_intermediate_size": 24} if in_blocks else {}
    layer = FAMILIES[family]
    source = source_of(tmp_path / "source", family, **sizes)
    if in_blocks:
        in_fp8(source, (4, 4))
    width = 2 * WIDTH if in_blocks else WIDTH
    keep = widths_keep(tiny_model(family, **sizes), width, structure="uniform")
    single = prune_folder(source, keep, tmp_path / "single", calibration=TEXT)
    with changed_tensors(source) as stored:
        together = fused(stored, layer)
        stored.clear()
        stored |= together
    out = prune_folder(source, keep, tmp_path / "out", calibration=TEXT)
    same_bits(tensors_in(out), fused(tensors_in(single), layer))


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "aria_text", "nemotron_h"])
def test_fused_matrices_are_sliced_in_the_orientation_of_the_family(family):
    """Rows of an atom may be apart or side by side, and rows may be columns."""
    model = tiny_model(family)
    keep = widths_keep(model, WIDTH, structure="uniform")
    stock = stock_model(prune(model, keep), WIDTH)
    for layer, narrow in zip(find_experts(model), find_experts(stock), strict=True):
        kept = torch.tensor(keep.by_layer(layer.layer))
        for number in (0, 1):
            tensor = layer.projections[number].detach()
            sliced = narrowed(tensor, kept, layer, is_down=bool(number))
            assert torch.equal(sliced, narrow.projections[number])


def blocks_of(folder: Path, n_heads: int = 1) -> Path:
    """A tiny Nemotron-3 with such layers: a block that attends, one of experts."""
    model = tiny_model("nemotron_h", num_nextn_predict_layers=n_heads)
    model.save_pretrained(folder)
    with changed_tensors(folder) as stored:
        for k in range(0, 2 * n_heads, 2):
            first, second = (f"mtp.layers.{number}." for number in (k, k + 1))
            trunk = {"backbone.layers.1.": first, "backbone.layers.0.": second}
            ends = dict.fromkeys((f"{first}enorm", f"{first}hnorm"), (16,))
            ends |= {f"{first}eh_proj": (16, 32), f"{second}final_layernorm": (16,)}
            shapes = {f"{name}.weight": shape for name, shape in ends.items()}
            shapes |= shapes_of(stored, trunk)
            stored |= random_tensors(shapes, model.dtype)
    return folder


def blocks_states(
    folder: Path, model: Any, before: torch.Tensor, window: torch.Tensor, first: int
) -> torch.Tensor:
    """The states (L - 1, D) of such a layer: its blocks are a model of two layers."""
    stored, kinds = tensors_in(folder), ["attention", "moe"]
    width = len(stored["mtp.layers.1.mixer.experts.0.up_proj.weight"])
    sizes = {"num_hidden_layers": 2, "moe_intermediate_size": width}
    twin = tiny_model("nemotron_h", layers_block_type=kinds, **sizes)
    twin.save_pretrained(folder / "twin")
    with changed_tensors(folder / "twin") as own:
        for name in [name for name in own if "backbone.layers." in name]:
            block, rest = name.removeprefix("backbone.layers.").split(".", 1)
            own[name] = stored[f"mtp.layers.{first + int(block)}.{rest}"]
        norm = stored[f"mtp.layers.{first + 1}.final_layernorm.weight"]
        own["backbone.norm_f.weight"] = norm
    twin = reloaded(folder / "twin")

    def normed(states: torch.Tensor, name: str) -> torch.Tensor:
        weight = stored[f"mtp.layers.{first}.{name}.weight"]
        return nn.functional.rms_norm(states, (16,), weight, eps=1e-5)

    embedded = normed(model.get_input_embeddings()(window[1:]), "enorm")
    weight = stored[f"mtp.layers.{first}.eh_proj.weight"]
    joined = torch.cat([embedded, normed(before[:-1], "hnorm")], dim=-1)
    with torch.no_grad():
        return twin.get_decoder()(inputs_embeds=joined[None] @ weight.T)[0][0]


def blocks_nll(
    folder: Path, model: Any, window: torch.Tensor, n_heads: int
) -> torch.Tensor:
    """The summed loss of the last of such layers."""
    states = trunk_states(model, window)
    for k in range(n_heads):
        states = blocks_states(folder, model, states, window[k:], 2 * k)
    return summed_nll(states @ model.lm_head.weight.T, window[n_heads + 1 :])


@pytest.mark.parametrize("n_heads", [1, 2])
def test_of_blocks_it_is_pruned_as_a_model_of_them(tmp_path, n_heads):
    """Nemotron-3, which transformers does not run: its loss is that of its blocks."""
    source, window = blocks_of(tmp_path / "source", n_heads), tiny_ids(seed=7)[0]
    model, *layers = opened(source)
    assert len(layers) == n_heads
    keep = widths_keep(model, WIDTH, structure="uniform")
    head, later = model, CalibrationSet.from_ids(window[None])
    for layer in layers:
        head, later = head_after(head, layer, later)
    with torch.no_grad():
        logits = head(later.ids).logits[0]
        expected = blocks_nll(source, model, window, n_heads)
    torch.testing.assert_close(summed_nll(logits, window[n_heads + 1 :]), expected)
    out = prune_folder(source, keep, tmp_path / "out", calibration=TEXT)
    head, later = trunk, _ = zeroed_twin(model, keep), TEXT
    with changed_tensors(source) as stored:
        for k, layer in enumerate(layers):
            head, later = head_after(head, layer, later)
            mask = highest(collect_statistics(head, later), WIDTH)
            head = zeroed_twin(head, mask)
            for expert, kept in enumerate(mask.by_layer(0)):
                down = f"mtp.layers.{2 * k + 1}.mixer.experts.{expert}.down_proj.weight"
                stored[down][:, torch.tensor(~kept)] = 0
    pruned, *_ = opened(out)
    with torch.no_grad():
        expected = blocks_nll(source, trunk, window, n_heads)
        torch.testing.assert_close(blocks_nll(out, pruned, window, n_heads), expected)
    assert "also pruned" in read_json(out / "heapr_manifest.json")


PUBLISHED = {
    r"^model\.embed_tokens\.": "embed.",
    r"^lm_head\.": "head.",
    r"^model\.hc_head\.hc_": "hc_head_",
    r"^model\.": "",
}
"""Names of DeepSeek-V4 that transformers writes, and what published files have."""


def streams_of(folder: Path) -> Path:
    """A tiny DeepSeek-V4 as published; such a layer attends to a window alone."""
    model = tiny_model("deepseek_v4", dtype=torch.bfloat16, **WIDE)
    model.save_pretrained(folder)
    with changed_tensors(folder) as stored:
        for name, tensor in [*stored.items()]:
            del stored[name]
            for old, new in PUBLISHED.items():
                name = re.sub(old, new, name)
            stored[name] = tensor
            if name.startswith("layers.2.") and ".compressor." not in name:
                stored[name.replace("layers.2.", "mtp.0.")] = tensor
            if name.startswith("hc_head_"):
                stored[f"mtp.0.{name}"] = tensor
        shapes = dict.fromkeys(("enorm", "hnorm", "norm"), (32,))
        shapes |= dict.fromkeys(("e_proj", "h_proj"), (32, 32))
        shapes = {f"mtp.0.{name}.weight": shape for name, shape in shapes.items()}
        stored |= random_tensors(shapes, model.dtype)
    return folder


HALF = r"predicts a further token.*download"
OF_EXPERTS = "of 3 experts, expected 4.*download"
OF_LAST = r"layers\.3\..*download"
LACKING = "has 1 of 2 layers that predict"


@pytest.mark.parametrize(
    ("form", "structure", "lost", "message"),
    [
        ("single", "ragged", f"{LAST}mlp.experts.2.up_proj", OF_LAST),
        ("single", "uniform", f"{LAST}mlp.experts.2.up_proj", OF_LAST),
        ("single", "ragged", f"{LAST}self_attn", OF_LAST),
        ("single", "uniform", f"{LAST}eh_proj", OF_LAST),
        ("two", "ragged", "model.layers.3.", LACKING),
        ("two", "uniform", "model.layers.4.", LACKING),
        ("two", "uniform", "model.layers.4.eh_proj", HALF),
        ("fused", "uniform", f"{LAST}mlp.experts.down_proj", HALF),
        ("blocks", "uniform", "mtp.layers.1.mixer.gate.weight", HALF),
        ("two of blocks", "uniform", "mtp.layers.3.mixer.gate.weight", HALF),
        ("streams", "ragged", "mtp.0.ffn.experts.2.w2.weight", OF_EXPERTS),
    ],
)
def test_half_of_it_is_refused_before_anything_is_done(
    tmp_path, form, structure, lost, message
):
    """Of any form, by name; so is one of two that the configuration counts.

    The error of the command is one line.
    """
    source, n_heads = tmp_path / "source", 2 if "two" in form else 1
    if "blocks" in form:
        blocks_of(source, n_heads)
    elif form == "streams":
        streams_of(source)
    else:
        write_tokenizer(source_of(source, "glm4_moe", n_heads=n_heads, **SIZES))
    keep = widths_keep(read_weights(source), WIDTH, structure=structure)
    with changed_tensors(source) as stored:
        together = fused(stored, LAST) if form == "fused" else dict(stored)
        stored.clear()
        stored |= {n: t for n, t in together.items() if not n.startswith(lost)}
        assert len(stored) < len(together)
    with pytest.raises(LayoutError, match=message):
        prune_folder(source, keep, tmp_path / "out", calibration=TEXT)
    if form == "single":
        chosen = ("--ratio", 0.5, "--structure", structure, "--corpus", "pydocs")
        error = one_line("prune", source, *chosen, "--out", tmp_path / "out")
        assert "layers.3." in error
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_speculative_decoding_with_the_pruned_ones(tmp_path):
    """Transformers drafts with both, and decodes what it does without."""
    source = source_of(tmp_path / "source", "glm4_moe", n_heads=2)
    model = read_weights(source, dtype=torch.float32)
    keep = widths_keep(model, WIDTH, structure="uniform")
    prune_folder(source, keep, tmp_path / "out", calibration=TEXT)
    again = read_weights(tmp_path / "out", dtype=torch.float32)
    # The class has the numbers of the layer in models of the published sizes.
    again._keys_to_ignore_on_load_unexpected = {r"model\.layers\.[34]\..*"}
    options = {"max_new_tokens": 12, "do_sample": False, "use_cache": True}
    prompt = tiny_ids(n_sequences=1)
    plain = again.generate(prompt, **options)
    assert plain.tolist() == again.generate(prompt, use_mtp=True, **options).tolist()
    assert int(plain.max()) < D_VOCAB


@pytest.mark.parametrize("method", ["paper", "best"])
def test_on_the_command_line(tmp_path, method):
    """It uses the text that atoms were scored on, for either way to make weights."""
    source = source_of(tmp_path / "source", "glm4_moe", **SIZES)
    write_tokenizer(source)
    write_text(tmp_path / "text.txt")
    chosen = ("--ratio", 0.5, "--method", method, "--structure", "uniform")
    run("prune", source, *chosen, "--out", tmp_path / "out", *text_of(tmp_path))
    note = read_json(tmp_path / "out" / "heapr_manifest.json")["also pruned"]
    assert "by its own loss on" in note
    shapes = {
        tensor.shape
        for name, tensor in tensors_in(tmp_path / "out").items()
        if "experts.0.up_proj" in name
    }
    assert shapes == {(WIDTH, 16)}


PAIRS = {"vocab_size": D_VOCAB, "dtype": torch.bfloat16, **WIDE}


def pruned_heads(
    folder: Path, layout: str, structure: str
) -> tuple[dict[str, torch.Tensor], list[dict[str, torch.Tensor]]]:
    """A quantised model, and its layer once pruned, and that of its twin in floats."""
    source = source_of(folder / "source", "glm4_moe", **PAIRS)
    quantise = in_fp8 if layout == "fp8" else partial(in_pairs, layout=layout)
    twin, before = with_twin(source, quantise, torch.bfloat16), tensors_in(source)
    assert any("scale" in name for name in before if name.startswith(LAST))
    keep = widths_keep(tiny_model("glm4_moe", **PAIRS), 2 * WIDTH, structure=structure)
    heads = []
    for place in (source, twin):
        out = prune_folder(place, keep, place / "out", calibration=TEXT)
        heads.append({n: t for n, t in tensors_in(out).items() if n.startswith(LAST)})
    return before, heads


def test_in_fp8(tmp_path):
    """Pruned, it is in FP8 as all others are."""
    before, (head, floats) = pruned_heads(tmp_path, "fp8", "uniform")
    assert head.keys() == {name for name in before if name.startswith(LAST)}
    for name, tensor in head.items():
        assert tensor.dtype == before[name].dtype
        if ".experts." not in name:
            assert torch.equal(tensor, before[name]), name
        elif name in floats:
            each = of_each_weight(head[f"{name}_scale_inv"], tensor.shape, (4, 4))
            apart = (tensor.float() * each - floats[name]).abs()
            assert (apart <= floats[name].abs() / 15 + each / 1000).all(), name
    assert floats[f"{LAST}mlp.experts.3.up_proj.weight"].shape == (2 * WIDTH, 32)


def test_of_streams_it_is_kept_in_floats(tmp_path):
    """DeepSeek-V4's, with experts in FP4 and other matrices in FP8, as published."""
    source = streams_of(tmp_path / "source")
    plain, exact = tensors_in(source), in_fp4(source)
    assert sum(name.startswith("mtp.") for name in exact) == 4 * 3 + 5 + 2
    model = skeleton_of(read_config(source))
    keep = widths_keep(model, 2 * WIDTH, structure="ragged")
    out = prune_folder(source, keep, tmp_path / "out")
    head = {n: t for n, t in tensors_in(out).items() if n.startswith("mtp.")}
    assert head.keys() == {name for name in plain if name.startswith("mtp.")}
    for name, tensor in head.items():
        assert tensor.dtype == plain[name].dtype, name
        assert torch.equal(tensor.double(), exact.get(name, plain[name]).double()), name
    assert "kept" in read_json(out / "heapr_manifest.json")
    assert logits_of(reloaded(out), tiny_ids()).isfinite().all()


@pytest.mark.parametrize(
    ("layout", "structure"),
    [("fp8", "ragged"), (POWERS, "ragged"), ("modelopt", "uniform")],
)
def test_dequantised(tmp_path, layout, structure):
    """Kept, it is dequantised as all else; pruned, so are the layers before."""
    _, heads = pruned_heads(tmp_path, layout, structure)
    torch.testing.assert_close(*heads, rtol=0, atol=0)
    assert f"{LAST}mlp.experts.3.down_proj.weight" in heads[0]


def test_scales_that_do_not_fit_are_refused_first(tmp_path):
    """By name, as those of other layers are, before anything is measured."""
    in_fp4(streams_of(tmp_path))
    with changed_tensors(tmp_path) as stored:
        stored["mtp.0.h_proj.scale"] = stored["mtp.0.h_proj.scale"].repeat(2, 1)
    with pytest.raises(LayoutError, match="1 x 1 for blocks of 128"):
        check_selection(tmp_path, Selection(0.5), written=True)


def test_windows_that_differ_in_the_first_token_are_refused(tmp_path):
    """The layer begins at the second token, and would take the states of the other."""
    model, layer = opened(source_of(tmp_path, "glm4_moe"))
    ids = tiny_ids()[[0, 0, 1]]
    collect_statistics(*head_after(model, layer, CalibrationSet.from_ids(ids)))
    ids[1, 0] += 1
    with pytest.raises(SpecError, match="leave one of them out"):
        head_after(model, layer, CalibrationSet.from_ids(ids))


@pytest.mark.parametrize("family", [*OTHER, "glm4_moe"])
def test_of_another_form_it_is_left_out(tmp_path, caplog, monkeypatch, family):
    """What transformers cannot run is dropped, as without text to score it on."""

    def refuse(*_):
        raise SpecError("it cannot be read")

    if family == "glm4_moe":  # whose form is known
        monkeypatch.setattr(mtp_head, "read_mtp", refuse)
    source = source_of(tmp_path / "source", family)
    keep = widths_keep(read_weights(source), WIDTH, structure="uniform")
    prune_folder(source, keep, tmp_path / "out", calibration=TEXT)
    place = (FAMILIES | OTHER)[family]
    assert not [name for name in tensors_in(tmp_path / "out") if place in name]
    assert "dropped" in read_json(tmp_path / "out" / "heapr_manifest.json")
    assert "an MTP layer, is left out: " in caplog.text


# --- kept as it is, or left out ---------------------------------------------------


@pytest.mark.parametrize("structure", ["ragged", "uniform"])
@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_next"])
def test_without_text_it_is_kept_or_left_out(tmp_path, family, structure):
    """It is kept bit for bit, or gone; configuration and card say which.

    A stock configuration has one width for the experts of all layers.
    """
    source = source_of(tmp_path / "source", family)
    model, before = reloaded(source), tensors_in(source)
    extra, whole = extra_in(source, family), structure == "ragged"
    narrow = widths_keep(model, WIDTH, structure=structure)
    keep = random_keep(model) if whole else narrow
    saved = save_pruned(prune(model, keep), tmp_path / "saved", base=str(source))
    sliced = prune_folder(source, keep, tmp_path / "sliced")
    same_tensors(saved, sliced)
    expected = logits_of(zeroed_twin(model, keep), tiny_ids())
    for folder in (saved, sliced):
        tensors = tensors_in(folder)
        assert tensors.keys() & extra == (extra if whole else set())
        assert all(torch.equal(tensors[n], before[n]) for n in extra & tensors.keys())
        assert read_json(folder / "config.json")[COUNTS[family]] == whole
        verb = "kept" if whole else "dropped"
        note = read_json(folder / "heapr_manifest.json")[verb]
        assert note.startswith(f"{len(extra)} tensors of layers")
        assert f"| {verb} | {note} |" in (folder / "README.md").read_text()
        logits = logits_of(reloaded(folder), tiny_ids())
        assert torch.allclose(logits, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("structure", ["ragged", "uniform"])
def test_without_experts_they_are_kept(tmp_path, structure):
    """As in MiMo: there is nothing to prune, and no width to have in common."""
    model = tiny_model("mimo_v2_flash")
    model.save_pretrained(tmp_path / "source")
    with changed_tensors(tmp_path / "source") as stored:
        first = {n: t for n, t in stored.items() if n.startswith("model.layers.0.")}
        assert not any(".experts." in name for name in first)
        extra = {
            name.replace("model.layers.0.", f"model.mtp.layers.{layer}."): tensor
            for name, tensor in first.items()
            for layer in range(3)
        }
        stored |= extra
    keep = widths_keep(model, 4, structure=structure)
    out = prune_folder(tmp_path / "source", keep, tmp_path / "out")
    after = tensors_in(out)
    assert all(torch.equal(after[name], tensor) for name, tensor in extra.items())
    assert "kept" in read_json(out / "heapr_manifest.json")


def test_quantised_ones_are_left_out(tmp_path):
    """They would be numbers without their scales' meaning beside other weights."""
    source = source_of(tmp_path / "source", "glm4_moe")
    extra = extra_in(source, "glm4_moe")
    with changed_tensors(source) as stored:
        for name in extra:
            if name.endswith("down_proj.weight"):
                stored[name] = stored[name].to(torch.float8_e4m3fn)
    model = read_weights(source, dtype=torch.float64)
    pruned = prune(model, random_keep(model))
    out = save_pruned(pruned, tmp_path / "out", base=str(source))
    assert not tensors_in(out).keys() & extra
    assert "dropped" in read_json(out / "heapr_manifest.json")
    assert read_json(out / "config.json")[COUNTS["glm4_moe"]] == 0
