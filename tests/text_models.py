"""Tiny models that read text, and what their experts do with it, by loops."""

from typing import Any

import pandas as pd
import torch
from families import tiny_model
from keeps import logits_of
from oracles.token_by_token import atom_activations, matrices
from tiny_folder import D_VOCAB, SIZES
from torch import nn

from heapr_lab.models.experts import find_experts
from heapr_lab.tasks.harness import continuation_task
from heapr_lab.text.corpora import Corpus

FAMILIES = ["qwen2_moe", "deepseek_v3", "gpt_oss", "nemotron_h"]
"""With and without gates, biases, shared experts, scaled routing, dense layers."""
CLOSE: dict[str, Any] = {"rtol": 1e-9, "atol": 1e-12}
SINGLE: dict[str, Any] = {"rtol": 1e-6, "atol": 1e-7}
"""The tolerance where a family computes a part in float32, whatever its type."""
TEXT = "the weather, then naïve Ω€ 漢字 🙂 paths"
Call = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def tolerance(family: str) -> dict[str, Any]:
    """How close numbers of a family have to be."""
    return SINGLE if family == "nemotron_h" else CLOSE


def model_of(family: str, **changes: Any) -> Any:
    """A tiny float64 model that knows the tokenizer's ids."""
    return tiny_model(family, vocab_size=D_VOCAB, **changes)


def byte_model(family: str = "qwen2_moe", **changes: Any) -> Any:
    """A tiny float32 model over the bytes, for long texts."""
    return tiny_model(family, dtype=torch.float32, **SIZES, **changes)


def corpus_of(n_texts: int, *, n_words: int = 70) -> Corpus:
    """Texts of numbered words: word j of text i is `<word><i>x<j>`, words in turn."""
    words = ["alpha", "beta", "gamma", "delta", "epsilon"] * n_words
    texts = [
        " ".join(f"{words[j]}{i}x{j}" for j in range(n_words)) for i in range(n_texts)
    ]
    return Corpus("numbered", "test", tuple(texts), "made here")


def task(n_items: int = 12) -> Any:
    """Four-way continuations."""
    return continuation_task(corpus_of(16), n_items=n_items)


def requests_of(n_items: int) -> list[Any]:
    """What the harness asks of such a task: four requests for each item."""
    asked = task(n_items)
    asked.build_all_requests(limit=None, rank=0, world_size=1)
    return list(asked.instances)


def experts_calls(model: nn.Module, ids: torch.Tensor) -> dict[int, Call]:
    """What each experts module was handed: x (T, D), experts (T, K), p (T, K)."""
    calls, hooks = {}, []
    for layer in find_experts(model):

        def keep(
            _module: Any, args: Any, kwargs: Any, number: int = layer.layer
        ) -> Any:
            names = ("hidden_states", "top_k_index", "top_k_weights")
            inputs = dict(zip(names, args, strict=False)) | kwargs
            calls[number] = tuple(inputs[name] for name in names)

        hooks.append(layer.module.register_forward_pre_hook(keep, with_kwargs=True))
    logits_of(model, ids)
    for hook in hooks:
        hook.remove()
    return calls


def atoms_by_hand(model: nn.Module, ids: torch.Tensor) -> pd.DataFrame:
    """Every atom's h for every token, one token and slot after the other."""
    modules = {layer.layer: layer.module for layer in find_experts(model)}
    rows = []
    for number, (x, index, weights) in experts_calls(model, ids).items():
        for token in range(len(x)):
            for slot in range(index.shape[1]):
                expert, p = int(index[token, slot]), float(weights[token, slot])
                w = matrices(modules[number], expert)
                with torch.no_grad():
                    h = atom_activations(modules[number], x[token], w)
                    norms = [float(column.norm()) for column in w["W_down"].T]
                pairs = enumerate(zip(h.tolist(), norms, strict=True))
                rows += [(number, token, expert, p, i, *pair) for i, pair in pairs]
    names = ["layer", "place", "expert", "p", "atom", "h", "w_down_norm"]
    return pd.DataFrame(rows, columns=names)
