"""Read a model's folder through transformers: complete, and without its code.

This is the only module that lets transformers read a folder or build a model. So
everywhere in the package code that comes with a model is never run, a damaged file is
named, and no missing weight is initialised at random.
"""

import contextlib
import copy
import logging
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    AutoTokenizer,
    GenerationConfig,
)
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING

from heapr_lab import registry
from heapr_lab.errors import SpecError
from heapr_lab.models.formats import (
    DEQUANTISED,
    check_format,
    format_of,
    refuse_by_name,
    stays_float32,
)
from heapr_lab.models.named import what_is_expected
from heapr_lab.models.ragged_experts import EARLIER, check_no_missing_weights
from heapr_lab.models.safetensors_headers import names_in, read_object, read_settings

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "chat_template.json",
)
_VOCABULARIES = (
    "tokenizer.json",
    "tekken.json",
    "vocab.json",
    "vocab.txt",
    "*.model",
    "*.spm",
    "*.tiktoken",
)
"""Without any of them, transformers may make a tokenizer with an empty vocabulary."""
_RAISED = re.compile(r"^ValueError: (.*)$", re.MULTILINE)
"""What a conversion of weights raised, in transformers' table."""
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


def read_config(source: str | Path) -> Any:
    """The configuration of the model in a folder, or of a hub id.

    Raises:
        SpecError: there is none, it is damaged, it requires code that is not in
            transformers, or it is of a format that is no longer read.
    """
    folder, settings = Path(source), dict[str, Any]()
    if folder.is_dir():
        settings = read_settings(folder)
        if not isinstance(settings.get("model_type"), str):
            raise SpecError(
                f"{folder / 'config.json'} names no model_type: expected the "
                "configuration of a transformers model; download it again"
            )
        _check_depth(settings, names_in(folder), folder)
    with _named(source, "config.json"):
        config = AutoConfig.from_pretrained(source, trust_remote_code=False)
    inner = config.get_text_config()
    if inner is not config and getattr(inner, "quantization_config", None) is not None:
        config.quantization_config = inner.quantization_config  # of a wrapper
        del inner.quantization_config
    beside = settings.get("quantization_config")
    if beside and getattr(config, "quantization_config", None) is None:
        config.quantization_config = beside
    if hasattr(config, "less_is_moe"):
        raise SpecError(
            f"{source} is written in Less-is-MoE's format, which {EARLIER} reads and "
            "this version does not: convert it with that (heapr-lab convert --format "
            "heapr), or prune the base model again"
        )
    return config


def build(config: Any, **options: Any) -> Any:
    """An untrained model with the configuration `config`.

    Raises:
        SpecError: transformers cannot build one.
        LayoutError: the family is refused by name.
    """
    refuse_by_name(config)
    source = getattr(config, "_name_or_path", "") or type(config).__name__
    with _named(source, "config.json"):
        return _auto_class(config).from_config(
            config, trust_remote_code=False, **options
        )


def unquantised(config: Any) -> Any:
    """A copy of a configuration, of weights in floats."""
    plain = copy.deepcopy(config)
    if getattr(plain, "quantization_config", None) is not None:
        del plain.quantization_config
    return plain


def skeleton_of(config: Any) -> nn.Module:
    """The model of `config` without weights, on the meta device.

    Raises:
        SpecError: transformers cannot build one.
        LayoutError: the family is refused by name.
    """
    with torch.device("meta"):
        model: nn.Module = build(config)
    return model


def is_native(config: Any) -> bool:
    """Whether transformers has the class of a configuration, without heapr_lab."""
    return type(config).__module__.startswith("transformers.")


def _auto_class(config: Any) -> Any:
    """The class of transformers that builds the whole model of a configuration.

    For some wrappers, which have a vision tower, say, around a language model,
    `AutoModelForCausalLM` would build the language model alone.
    """
    known = AutoModelForMultimodalLM._model_mapping
    if type(config) not in known:
        return AutoModelForCausalLM
    whole: Any = known[type(config)]
    text: Any = AutoModelForCausalLM._model_mapping.get(type(config), whole)
    if text is not whole and text.__name__ in (
        getattr(config, "architectures", None) or ()
    ):
        return AutoModelForCausalLM
    return AutoModelForMultimodalLM


def read_tokenizer(source: str | Path) -> Any:
    """The tokenizer of the model in a folder, or of a hub id.

    Raises:
        SpecError: there is none, it is damaged, or it requires code that is not in
            transformers.
    """
    folder = Path(source)
    if folder.is_dir() and not has_tokenizer(folder):
        raise SpecError(
            f"there is no tokenizer in {folder}: expected one of "
            f"{', '.join(_VOCABULARIES)}; copy the base model's files there"
        )
    with _named(source, *_TOKENIZER_FILES):
        return AutoTokenizer.from_pretrained(source, trust_remote_code=False)


def read_gguf(path: Path) -> tuple[Any, Any]:
    """The model in a GGUF file with its weights in float32, and its tokenizer.

    Raises:
        SpecError: the file is damaged, or holds another kind of model.
    """
    with _named(path, path.name):
        model = AutoModelForCausalLM.from_pretrained(
            path.parent,
            gguf_file=path.name,
            dtype=torch.float32,
            trust_remote_code=False,
        )
        return model, AutoTokenizer.from_pretrained(
            path.parent, gguf_file=path.name, trust_remote_code=False
        )


def read_mtp(kind: Any, trunk: Any, device: torch.device) -> Any:
    """The layer that predicts a further token, of the files that `trunk` names.

    Args:
        kind: transformers' `MtpModel`, or a class derived from it.
        trunk: the model that it belongs to.
        device: of its weights.

    Raises:
        RuntimeError: a part of it is missing.
    """
    return kind.from_pretrained(trunk, device_map={"": device}, trust_remote_code=False)


def has_tokenizer(folder: Path) -> bool:
    """Whether `folder` contains the vocabulary of a tokenizer."""
    return any(any(folder.glob(name)) for name in _VOCABULARIES)


def quantisation(config: Any) -> str | None:
    """The name of the format of quantised, or of pruned, weights; else None."""
    settings = getattr(config, "quantization_config", None)
    if settings is None:
        return None
    return format_of(settings if isinstance(settings, dict) else settings.to_dict())


def read_generation(folder: Path) -> Any:
    """The settings of generation in a model's folder; None if it has none.

    Raises:
        SpecError: they are damaged.
    """
    path = folder / "generation_config.json"
    if not path.is_file():
        return None
    settings = read_object(path)
    with _named(folder, path.name):
        return GenerationConfig.from_dict(settings)


def refuse_format(folder: Path | str, config: Any) -> None:
    """Check that weights can be read as numbers that can be pruned.

    Raises:
        SpecError: they are quantised in a format that is not dequantised.
    """
    kind = quantisation(config)
    ours = getattr(AUTO_QUANTIZER_MAPPING.get(str(kind)), "__module__", "")
    if not ours.startswith("heapr_lab."):
        check_format(folder, kind)


def read_weights(source: str | Path, **options: Any) -> Any:
    """The model in a folder, or of a hub id, with every weight read from its files.

    Args:
        source: the folder or hub id.
        options: as for transformers' `from_pretrained`.

    Raises:
        SpecError: there is no such model, its files are damaged, a weight is missing or
            has another shape, or it requires code that is not in transformers.
        LayoutError: the family is refused by name.
    """
    config = read_config(source)
    refuse_by_name(config)
    read_generation(Path(source))  # of which transformers ignores a damaged one
    kind = quantisation(config)
    stored = getattr(config, "quantization_config", None)
    settings = stored
    if stored and kind in DEQUANTISED:
        settings = registry.find("settings of quantised weights")(stored)
    if settings is not stored:  # they are read by us
        config.quantization_config = settings
        options["config"] = config
    with _named(source, "weights or config.json"), _without_report():
        loaded: Any = _auto_class(config).from_pretrained(
            source,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # refused below, by name
            trust_remote_code=False,
            **options,
        )
    model, info = loaded
    for name, weight in model.named_parameters() if settings is not stored else ():
        dtype = model.config.dtype  # transformers leaves some in their own
        wide = torch.promote_types(dtype, torch.float32)
        weight.data = weight.data.to(wide if stays_float32(model, name) else dtype)
    if kind is not None and not hasattr(model, "hf_quantizer"):
        model._weight_conversions = None  # with which it would be quantised when saved
    try:
        check_no_missing_weights(
            model,
            missing=info["missing_keys"],
            mismatched={name for name, *_ in info["mismatched_keys"]},
            unexpected=info["unexpected_keys"],
        )
    except ValueError as error:
        raise SpecError(f"{source}: {error}") from error
    return model


def _check_depth(config: dict[str, Any], names: Collection[str], folder: Path) -> None:
    """Check that the files have as many layers as config.json says.

    Otherwise transformers would first allocate them all.

    Raises:
        SpecError: the files have fewer layers.
    """
    inner = config.get("text_config")
    depth = (inner if isinstance(inner, dict) else config).get("num_hidden_layers")
    numbers = [int(match[1]) for match in map(_LAYER.search, names) if match]
    if isinstance(depth, int) and numbers and depth > 1 + max(numbers):
        raise SpecError(
            f"{folder / 'config.json'} says num_hidden_layers {depth}, but the files "
            f"of weights have {1 + max(numbers)} layers: the checkpoint is incomplete, "
            "or config.json belongs to another model; download both again"
        )


@contextlib.contextmanager
def _named(source: str | Path, *names: str) -> Iterator[None]:
    """Turns any error of transformers about the files `names` into one that names them.

    Raises:
        SpecError: transformers raised an error; the first damaged file is named.
    """
    try:
        yield
    except Exception as error:  # a damaged file may cause any of them
        for path in [Path(source) / name for name in names]:
            if path.is_file():
                read_object(path)
        text = " ".join(str(error).split())
        if not isinstance(error, OSError | ValueError):
            text = f"{type(error).__name__}: {text}"
        raise SpecError(
            f"cannot load the model {str(source)!r}: {names[0]}: {text}. Expected "
            f"{what_is_expected()}"
        ) from error


@contextlib.contextmanager
def _without_report() -> Iterator[None]:
    """Suppresses transformers' table of missing weights, which are an error here.

    Raises:
        ValueError: a conversion raised one, which otherwise is in the table alone.
        RuntimeError: transformers raised it for another reason.
    """
    logger, whys = logging.getLogger("transformers.modeling_utils"), list[str]()

    def keep(record: logging.LogRecord) -> bool:
        text = record.getMessage()
        whys.extend(_RAISED.findall(text))
        return "LOAD REPORT" not in text

    logger.addFilter(keep)
    try:
        yield
    except RuntimeError as error:
        if whys:
            raise ValueError(whys[0]) from error
        raise
    finally:
        logger.removeFilter(keep)
