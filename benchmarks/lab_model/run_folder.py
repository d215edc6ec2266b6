"""A training run's folder: settings, tokenizer, token streams, state, and result."""

import json
import re
import shutil
import zlib
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from benchmarks.lab_model.recipes import TrainSpec
from heapr_lab.errors import CacheError
from heapr_lab.models.folders import read_weights
from heapr_lab.refinement.healing import restore_training, save_training
from heapr_lab.storage.files import share_mode
from heapr_lab.storage.hashing import canonical_json, digest
from heapr_lab.text.calibration import tokenise
from heapr_lab.text.corpora import Corpus

END_OF_TEXT = "<|endoftext|>"
UPCYCLED_NOISE = 0.02
"""The noise of copies of an expert, in standard deviations of its weights."""


def fitted_tokenizer(
    work: Path, spec: TrainSpec, corpora: dict[str, Corpus]
) -> PreTrainedTokenizerFast:
    """A byte-level BPE fitted to the mixture; the one in `work` if there is one."""
    path = work / "tokenizer.json"
    if not path.exists():
        bpe = Tokenizer(models.BPE())
        bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        bpe.decoder = decoders.ByteLevel()
        bpe.post_processor = processors.ByteLevel(trim_offsets=False)
        trainer = trainers.BpeTrainer(
            vocab_size=spec.d_vocab,
            special_tokens=[END_OF_TEXT],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        )
        texts = (text for corpus in corpora.values() for text in corpus.texts)
        bpe.train_from_iterator(texts, trainer)
        bpe.save(str(path))
    return PreTrainedTokenizerFast(
        tokenizer_file=str(path),
        eos_token=END_OF_TEXT,
        bos_token=END_OF_TEXT,
        model_max_length=2048,
    )


def token_stream(
    work: Path, tokenizer: PreTrainedTokenizerFast, corpus: Corpus
) -> torch.Tensor:
    """Token ids of the whole corpus, int32; those in `work` if there are any."""
    path = work / f"tokens-{re.sub(r'[:/]', '-', corpus.name)}.safetensors"
    if path.exists():
        return load_file(path)["ids"]
    ids = torch.from_numpy(tokenise(corpus.joined(), tokenizer))
    save_file({"ids": ids}, path)
    return ids


def check_work(
    work: Path,
    spec: TrainSpec,
    corpora: dict[str, Corpus],
    mixture: dict[str, float],
    decay_mixture: dict[str, float],
) -> None:
    """Check that an unfinished run in `work` has the same settings.

    The number of steps may differ, and the number of threads, which changes only the
    last bits.

    Raises:
        CacheError: `work` holds a run with other settings.
    """
    settings = asdict(spec) | {"n_steps": None, "n_threads": None}
    prints = {name: corpus.fingerprint for name, corpus in corpora.items()}
    shares = [mixture, decay_mixture]
    now = digest({"spec": settings, "corpora": prints, "mixtures": shares})
    work.mkdir(parents=True, exist_ok=True)
    path = work / "run.json"
    if not path.exists():
        path.write_text(canonical_json({"digest": now, "spec": asdict(spec)}))
    elif json.loads(path.read_text())["digest"] != now:
        raise CacheError(
            f"{work} holds an unfinished run with other settings or corpora: "
            "give another work folder, or delete this one to start again"
        )


def save_state(
    work: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int
) -> None:
    """Write parameters, optimizer state and step to `work`, atomically."""
    done = {"step": torch.tensor(step)}
    save_training(_state(work), dict(model.named_parameters()), optimizer, done)


def restore(
    work: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> int:
    """Load the state of `save_state`; the step to resume from, 0 if there is none."""
    if not _state(work).exists():
        return 0
    trained = dict(model.named_parameters())
    return int(restore_training(_state(work), trained, optimizer)["step"])


def _state(work: Path) -> Path:
    return work / "state.safetensors"


def begin_from(work: Path, earlier: Path, model: torch.nn.Module) -> None:
    """Load weights and tokenizer of the model in `earlier`, which has the same shapes.

    If it has one expert a layer, all experts become copies of it, with noise.

    Raises:
        CacheError: it has other shapes.
    """
    source = read_weights(earlier, dtype=torch.float32)
    weights = upcycled(source.state_dict(), model.state_dict())
    expected = {name: p.shape for name, p in model.state_dict().items()}
    if {name: w.shape for name, w in weights.items()} != expected:
        raise CacheError(
            f"the model in {earlier} has other shapes than the one to train: "
            "give a training specification with the same sizes"
        )
    model.load_state_dict(weights)
    tokenizer = work / "tokenizer.json"
    if not tokenizer.exists():
        shutil.copyfile(earlier / "tokenizer.json", tokenizer)


def upcycled(
    weights: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """`weights` with a layer's one expert copied for every expert of `wanted`.

    Each copy has noise of 2 % of the weights' standard deviation. Routers, which chose
    among one, are those of `wanted`; other weights are as they were.
    Source: Komatsuzaki et al. 2023 (sparse upcycling).
    """
    tensors = dict(weights)
    for name, other in wanted.items():
        weight = weights.get(name)
        if weight is None or weight.shape == other.shape or weight.shape[0] != 1:
            continue
        if weight.dim() == 2:  # a router
            tensors[name] = other
            continue
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        noise = torch.randn(other.shape, generator=generator)
        tensors[name] = weight + UPCYCLED_NOISE * weight.std() * noise
    return tensors


def write_model(
    out: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    spec: TrainSpec,
    corpora: dict[str, Corpus],
    mixture: dict[str, float],
    decay_mixture: dict[str, float],
    earlier: Path | None = None,
) -> None:
    """Write weights (bf16 safetensors), tokenizer and training.json to `out`."""
    out.mkdir(parents=True, exist_ok=True)
    model.bfloat16()
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    training: dict[str, Any] = {
        "spec": asdict(spec),
        "n_tokens": spec.n_tokens,
        "mixture": mixture,
        "decay_mixture": decay_mixture,
        "corpora": [corpus.provenance for corpus in corpora.values()],
        "torch": torch.__version__,
        "went_on_from": earlier and json.loads((earlier / "training.json").read_text()),
    }
    card = out / "training.json"
    card.write_text(json.dumps(training, indent=2) + "\n")
    share_mode(out, like=card)
