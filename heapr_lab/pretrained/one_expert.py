"""A dense Llama as a MoE with one expert a layer, which computes the same.

Mixtral is Llama with routed experts. With one expert the router's softmax is 1 whatever
its weights, which are 0 here, so that the atomic experts are the neurons of the FFN.

Logits are the dense model's to the last bit in float32 on a CPU if the width of the FFN
is a multiple of 32, as it usually is. Otherwise SiLU, which sees the gate's rows apart
here, rounds the last values of each in another way, by 1e-7 of them; and for a single
token some processors add up products in another order.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import LlamaConfig, MixtralConfig
from transformers.conversion_mapping import get_model_conversion_mapping

from heapr_lab.errors import LayoutError, SpecError
from heapr_lab.models.folders import (
    quantisation,
    read_config,
    read_tokenizer,
    skeleton_of,
)
from heapr_lab.models.safetensors_headers import SINGLE, Stored, read_headers
from heapr_lab.storage.cache import cached_folder
from heapr_lab.streaming.file_reader import check_whole, find_tensors
from heapr_lab.streaming.on_disk import write_index

VERSION = 1
"""Increased whenever the files of a converted model change."""
_FAMILIES = ("llama", "mistral")
_ROPE = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")
SHARED = sorted(LlamaConfig.__annotations__.keys() & MixtralConfig.__annotations__)
"""Settings of Llama that Mixtral has too."""
_BLOCK = "block_sparse_moe"
_FFN = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
_SAMPLE = "In 1984, café 漢字 🙂 cost\n\n\t$3.50 = <x> </s>"
_CARD = """# {name} as a MoE with one expert a layer

The dense `{family}` model {name}, whose weights are unchanged: each FFN is the one
expert of a Mixtral layer, and the routers are zero. Made by heapr_lab for use on this
machine; the licence is that of the dense model.
"""


def one_expert_folder(source: Path, *, name: str) -> Path:
    """The folder of the dense model in `source` as a MoE, made in the cache at first.

    Its weights are copied in their own type, a file at a time.

    Args:
        source: a folder in the hub's layout, with safetensors files.
        name: the name of the new folder.

    Raises:
        SpecError: the files are damaged or incomplete, or there is no room for them.
        LayoutError: it is of a form that Mixtral does not have.
    """
    config = read_config(source)
    one_expert_config(config)
    state = [(p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in _files(source)]
    key = {"source": str(source.resolve()), "files": state, "version": VERSION}
    return cached_folder(
        "models", key, lambda folder: _convert(source, config, folder, name), name=name
    )


def one_expert_config(config: Any) -> Any:
    """The configuration of the MoE of a dense model.

    Raises:
        LayoutError: the dense model is of a form that Mixtral does not have.
    """
    why = _what_differs(config)
    if why is not None:
        raise LayoutError(
            f"the model ({config.model_type}) cannot be opened as a MoE with one "
            f"expert: {why}; expected a dense model of the family "
            f"{' or '.join(_FAMILIES)} with silu and without biases"
        )
    shared: dict[str, Any] = {name: getattr(config, name, None) for name in SHARED}
    return MixtralConfig(
        **shared,
        sliding_window=getattr(config, "sliding_window", None),
        num_local_experts=1,
        num_experts_per_tok=1,
        dtype=config.dtype,
        architectures=["MixtralForCausalLM"],
    )


def _what_differs(config: Any) -> str | None:
    """What Mixtral cannot express of a model; None if it can express all."""
    if config.model_type not in _FAMILIES:
        return "it is of another family"
    if quantisation(config) is not None:
        return f"its weights are quantised ({quantisation(config)})"
    biased = [n for n in ("attention_bias", "mlp_bias") if getattr(config, n, False)]
    if biased:
        return f"it has {' and '.join(biased)}"
    if config.hidden_act not in {"silu", "swish"}:
        return f"its activation is {config.hidden_act}"
    rope = (config.rope_parameters or {}).get("rope_type", "default")
    return None if rope in _ROPE else f"its rope_type is {rope!r}"


def one_expert_tensors(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors of Llama by their names in Mixtral's files, and the routers.

    The router of a layer, (1, D), comes with its down_proj, (D, I).
    """
    weights = {}
    for name, tensor in tensors.items():
        stem, _, end = name.partition(".mlp.")
        projection, _, kind = end.partition(".")
        if not end:
            weights[name] = tensor
            continue
        weights[f"{stem}.{_BLOCK}.experts.0.{_FFN[projection]}.{kind}"] = tensor
        if projection == "down_proj":
            zeros = torch.zeros(1, len(tensor), dtype=tensor.dtype)
            weights[f"{stem}.{_BLOCK}.gate.weight"] = zeros
    return weights


# --- files ------------------------------------------------------------------------


def _files(source: Path) -> list[Path]:
    """What determines the model in a folder."""
    paths = [*source.glob("*.safetensors"), *source.glob("*.json")]
    return sorted([*paths, *source.glob("*.model"), *source.glob("*.jinja")])


def _convert(source: Path, config: Any, folder: Path, name: str) -> None:
    """Write the MoE of the dense model in `source` to an empty folder."""
    one_expert_config(config).save_pretrained(folder)
    for path, parameters in _parameters(config, read_headers(source)).items():
        tensors = one_expert_tensors(_read(path, parameters))
        save_file(tensors, folder / path.name, metadata={"format": "pt"})
    if not (folder / SINGLE).is_file():
        write_index(folder)
    _copy_rest(source, folder)
    text = _CARD.format(name=name, family=config.model_type)
    (folder / "README.md").write_text(text, encoding="utf-8")


def _parameters(config: Any, stored: Stored) -> dict[Path, dict[str, str]]:
    """The parameter that each tensor in each file becomes.

    What transformers leaves out too, such as rotary frequencies in older files, is not
    among them.

    Raises:
        LayoutError: a tensor is missing, has another shape, or is none of the model's,
            such as a bias that the configuration does not tell of.
    """
    skeleton: Any = skeleton_of(config)
    conversions = get_model_conversion_mapping(skeleton)
    every = list(find_tensors(skeleton, conversions, stored))
    check_whole(skeleton, every)
    known = skeleton.state_dict()
    parameters: dict[Path, dict[str, str]] = {}
    for entry in every:
        if entry.parameter in known:
            names = parameters.setdefault(entry.file, {})
            names[entry.name] = entry.parameter
    return parameters


def _read(path: Path, parameters: Mapping[str, str]) -> dict[str, torch.Tensor]:
    """The tensors of a file that become parameters, by parameter."""
    with safe_open(path, framework="pt") as file:
        return {new: file.get_tensor(name) for name, new in parameters.items()}


def _copy_rest(source: Path, folder: Path) -> None:
    """Write the tokenizer and the settings of generation.

    Raises:
        SpecError: the tokenizer is another one when it is read with the MoE.
    """
    tokenizer = read_tokenizer(source)
    tokenizer.save_pretrained(folder)
    generation = source / "generation_config.json"
    if generation.is_file():
        text = generation.read_text(encoding="utf-8")
        (folder / generation.name).write_text(text, encoding="utf-8")
    again = read_tokenizer(folder)
    ids = tokenizer(_SAMPLE)["input_ids"]
    if again(_SAMPLE)["input_ids"] != ids or again.decode(ids) != tokenizer.decode(ids):
        raise SpecError(
            f"the tokenizer of {source} ({type(tokenizer).__name__}) is another one "
            f"({type(again).__name__}) when it is read with a Mixtral: it cannot be "
            "opened as a MoE with one expert; give a tokenizer.json that says its class"
        )
