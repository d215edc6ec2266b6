"""The statistics of Algorithm 1, token by token, with the matrix G built.

Runs a model with an experts function that treats every (token, slot) pair on its own
and keeps the expert's output as a leaf of its own gradient, exactly as the paper
defines g = dl/dE_i(x). Nothing here shares code with the package.
"""

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS


@dataclass
class RoutedToken:
    """One token in one expert."""

    x: torch.Tensor
    h: torch.Tensor
    p: torch.Tensor
    E: torch.Tensor
    e: torch.Tensor
    """Outputs of the atomic experts, (I, D); they and the bias sum to E."""


Tokens = dict[int, list[RoutedToken]]
"""The tokens of each expert of one experts module, of one forward and backward."""
_records: dict[int, Tokens] = {}


def matrices(module: Any, expert: int) -> dict[str, torch.Tensor | None]:
    """W_gate, W_up (I, D), W_down (D, I) and biases of one expert."""
    if module.has_gate:
        w, b = module.gate_up_proj[expert], None
        if module.has_bias:
            b = module.gate_up_proj_bias[expert]
        w = w.T if module.is_transposed else w
        half = w.shape[0] // 2
        first = slice(0, half) if module.is_concatenated else slice(0, None, 2)
        second = slice(half, None) if module.is_concatenated else slice(1, None, 2)
        gate, up = w[first], w[second]
        gate_b, up_b = (None, None) if b is None else (b[first], b[second])
    else:
        gate = gate_b = None
        up = module.up_proj[expert]
        up = up.T if module.is_transposed else up
        up_b = module.up_proj_bias[expert] if module.has_bias else None
    down = module.down_proj[expert]
    return {
        "W_gate": gate,
        "W_up": up,
        "W_down": down.T if module.is_transposed else down,
        "b_gate": gate_b,
        "b_up": up_b,
        "b_down": module.down_proj_bias[expert] if module.has_bias else None,
    }


def atom_activations(module: Any, x: torch.Tensor, w: dict[str, Any]) -> torch.Tensor:
    """Activations (I,) of one token x (D,), atom by atom through the own gating."""
    up = F.linear(x, w["W_up"], w["b_up"])
    if w["W_gate"] is None:
        return module.act_fn(up)
    gate = F.linear(x, w["W_gate"], w["b_gate"])
    atoms = []
    for k in range(len(up)):
        # A two-row "expert" of one atom: both layouts read it as (gate, up).
        atoms.append(module._apply_gate(torch.stack([gate[k], up[k]])[None])[0, 0])
    return torch.stack(atoms)


def _experts_forward(
    module: Any,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    record = _records.setdefault(id(module), defaultdict(list))
    rows = []
    for t in range(hidden_states.shape[0]):
        total = torch.zeros_like(hidden_states[t])
        for slot in range(top_k_index.shape[1]):
            expert = int(top_k_index[t, slot])
            p = top_k_weights[t, slot]
            w = matrices(module, expert)
            h = atom_activations(module, hidden_states[t], w)
            h.retain_grad()
            e = (w["W_down"] * h).T
            E = e.sum(0)
            if w["b_down"] is not None:
                E = E + w["b_down"]
            E.retain_grad()
            x = hidden_states[t].detach()
            record[expert].append(RoutedToken(x, h, p.detach(), E, e.detach()))
            out = (
                module.post_expert_norm(E[None])[0]
                if module.has_post_expert_norm
                else E
            )
            total = total + p * out
        rows.append(total)
    return torch.stack(rows)


ALL_EXPERTS_FUNCTIONS.register("token_by_token", _experts_forward)


def run(model: Any, ids: torch.Tensor) -> dict[int, Tokens]:
    """The tokens of each experts module, by `id(module)`."""
    _records.clear()
    model.requires_grad_(False)
    previous = model.config._experts_implementation
    model.set_experts_implementation("token_by_token")
    try:
        with model.get_input_embeddings().register_forward_hook(
            lambda _m, _a, output: output.requires_grad_(True)
        ):
            logits = model(ids, use_cache=False).logits[:, :-1]
        loss = F.cross_entropy(
            logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum"
        )
        loss.backward()
    finally:
        model.set_experts_implementation(previous)
    return dict(_records)


def statistics(record: Tokens, expert: int) -> dict[str, torch.Tensor]:
    """Every column of one expert, and the paper's score from its matrix G."""
    tokens = record[expert]
    h = torch.stack([token.h.detach() for token in tokens])
    g_h = torch.stack([token.h.grad for token in tokens])
    p = torch.stack([token.p for token in tokens]).double()[:, None]
    G = sum(torch.outer(t.E.grad, t.E.grad) for t in tokens) / len(tokens)
    return {
        "heapr": sum(0.5 * (t.e @ G * t.e).sum(1) for t in tokens) / len(tokens),
        "fisher_sum": sum(0.5 * (t.e @ t.E.grad) ** 2 for t in tokens),
        "sum_h2": h.square().sum(0),
        "sum_g2": g_h.square().sum(0),
        "sum_hg": (h * g_h).sum(0),
        "sum_hg2": (h * g_h).square().sum(0),
        "max_abs_h": h.abs().amax(0),
        "sum_ph2": (p * h).square().sum(0),
        "max_abs_ph": (p * h).abs().amax(0),
        "tokens": torch.tensor(float(len(tokens))),
    }
