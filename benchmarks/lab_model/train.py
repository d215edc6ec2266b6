"""Train the lab model: a small, balanced, converged MoE that works offline.

A stock Qwen2-MoE (routed and shared experts) or Qwen3-MoE (routed experts alone) with
its own byte-level BPE tokenizer. Training is a pure function of `TrainSpec`, the
corpora and the number of threads: every batch is drawn by a generator seeded with
(seed, step), so a resumed run continues exactly where it stopped. The learning rate
schedule is warmup-stable-decay: until the decay begins, the run does not depend on the
number of steps.

Letters: E experts, f_e share of routed (token, slot) pairs, P_e mean routing
probability of an expert.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AutoConfig, PreTrainedModel

from benchmarks.lab_model import run_folder
from benchmarks.lab_model.recipes import DECAY_MIXTURE, MIXTURE, RECIPES, TrainSpec
from heapr_lab.models.folders import build
from heapr_lab.storage import cache
from heapr_lab.text.corpora import load_corpus

_SAVE_SECONDS = 120.0


def train_lab_model(
    out: Path,
    *,
    spec: TrainSpec | None = None,
    work: Path,
    mixture: Mapping[str, float] | None = None,
    decay_mixture: Mapping[str, float] | None = None,
    start_from: Path | None = None,
    device: str = "cpu",
    on_step: Callable[[int, int, float], None] | None = None,
) -> Path:
    """Train the lab model, or resume its training, and write it to `out`.

    Args:
        out: folder for weights, tokenizer and card.
        spec: the specification of the training; by default the bundled model's.
        work: folder for the state of an unfinished run, from which it resumes.
        mixture: share of the training sequences of each corpus; by default `MIXTURE`.
        decay_mixture: the same while the learning rate decays; by default
            `DECAY_MIXTURE`, or `mixture` where that is given.
        start_from: folder of an earlier lab model with which to begin, rather than with
            random weights and a new tokenizer.
        device: the device to train on; batches are the same on all, rounding is not.
        on_step: called after each step with (step, n_steps, loss in nats).

    Returns:
        `out`.

    Raises:
        CorpusError: one of the training corpora is not available.
        CacheError: `work` holds the state of another specification, or the model in
            `start_from` has other shapes.
        SpecError: another run writes to `out` or `work`.
    """
    spec = spec or TrainSpec()
    shares = dict(MIXTURE if mixture is None else mixture)
    late = dict(decay_mixture or mixture or DECAY_MIXTURE)
    torch.set_num_threads(spec.n_threads)
    with cache.writing(out), cache.writing(work):
        corpora = {name: load_corpus(name) for name in shares}
        run_folder.check_work(work, spec, corpora, shares, late)
        model: Any = build_lab_model(spec)
        if start_from is not None:
            run_folder.begin_from(work, start_from, model)
        tokenizer = run_folder.fitted_tokenizer(work, spec, corpora)
        streams = {
            name: run_folder.token_stream(work, tokenizer, c)
            for name, c in corpora.items()
        }
        model.to(device)
        optimizer = _optimizer(model, spec)
        start = run_folder.restore(work, model, optimizer)
        saved_at = time.monotonic()
        for step in range(start, spec.n_steps):
            now = late if step >= decay_start(spec) else shares
            ids = _batch(streams, now, spec, step).to(device)
            loss = _train_step(model, optimizer, ids, spec, step)
            if on_step is not None:
                on_step(step + 1, spec.n_steps, loss)
            if time.monotonic() - saved_at > _SAVE_SECONDS or step + 1 == spec.n_steps:
                run_folder.save_state(work, model, optimizer, step + 1)
                saved_at = time.monotonic()
        run_folder.write_model(
            out, model, tokenizer, spec, corpora, shares, late, start_from
        )
    return out


def train_bundled(
    out: Path,
    *,
    work: Path,
    runs: Sequence[TrainSpec] = RECIPES["bundled"],
    device: str = "cpu",
    on_step: Callable[[int, int, float], None] | None = None,
) -> Path:
    """Train the lab model in several runs, each from the model of the one before.

    Arguments and errors are those of `train_lab_model`; each run has its own folder in
    `work`, from which it resumes.
    """
    earlier: Path | None = None
    for number, spec in enumerate(runs, start=1):
        folder = out if number == len(runs) else work / f"model-{number}"
        train_lab_model(
            folder,
            spec=spec,
            work=work / f"run-{number}",
            start_from=earlier,
            device=device,
            on_step=on_step,
        )
        earlier = folder
    return out


def build_lab_model(spec: TrainSpec) -> PreTrainedModel:
    """The untrained model of `spec`, in float32, from its seed."""
    torch.manual_seed(spec.seed)
    config = AutoConfig.for_model(
        spec.family,
        vocab_size=spec.d_vocab,
        hidden_size=spec.d_model,
        num_hidden_layers=spec.n_layers,
        num_attention_heads=spec.n_heads,
        num_key_value_heads=spec.n_heads,
        num_experts_per_tok=spec.top_k,
        tie_word_embeddings=True,
        max_position_embeddings=2048,
        initializer_range=spec.initializer_range,
        router_aux_loss_coef=0.0,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
        **_FAMILIES[spec.family](spec),
    )
    model: PreTrainedModel = build(config)
    model.set_experts_implementation("grouped_mm")
    if spec.precision == "bfloat16":
        model.set_attn_implementation("eager")  # flash is slower in bfloat16 on a CPU
    return model


def _qwen(spec: TrainSpec) -> dict[str, Any]:
    return {
        "num_experts": spec.n_experts,
        "moe_intermediate_size": spec.d_inter,
        "intermediate_size": spec.d_shared,
        "norm_topk_prob": True,
    }


def _qwen2_moe(spec: TrainSpec) -> dict[str, Any]:
    return {**_qwen(spec), "shared_expert_intermediate_size": spec.d_shared}


def _qwen3_moe(spec: TrainSpec) -> dict[str, Any]:
    return {**_qwen(spec), "head_dim": spec.d_model // spec.n_heads}


def _deepseek_v2(spec: TrainSpec) -> dict[str, Any]:
    """The first layer is dense, and has as many atoms as a token uses in the others."""
    head = spec.d_model // spec.n_heads
    n_shared = spec.d_shared // spec.d_inter
    return {
        "n_routed_experts": spec.n_experts,
        "n_shared_experts": n_shared,
        "moe_intermediate_size": spec.d_inter,
        "intermediate_size": spec.d_inter * (spec.top_k + n_shared),
        "first_k_dense_replace": 1,
        "topk_method": "greedy",
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
        "q_lora_rank": None,
        "kv_lora_rank": 2 * head,
        "qk_nope_head_dim": head,
        "qk_rope_head_dim": head // 2,
        "v_head_dim": head,
        "pad_token_id": None,
    }


def _gpt_oss(spec: TrainSpec) -> dict[str, Any]:
    return {
        "num_local_experts": spec.n_experts,
        "intermediate_size": spec.d_inter,
        "head_dim": spec.d_model // spec.n_heads,
        "sliding_window": spec.seq_len // 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "pad_token_id": None,
    }


_FAMILIES: dict[str, Callable[[TrainSpec], dict[str, Any]]] = {
    "qwen2_moe": _qwen2_moe,
    "qwen3_moe": _qwen3_moe,
    "deepseek_v2": _deepseek_v2,
    "gpt_oss": _gpt_oss,
}
"""The settings of each family's configuration that others name otherwise or lack."""


def balance_losses(
    router_logits: Sequence[torch.Tensor], *, top_k: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Load-balancing and z loss of the routers, each a mean over layers.

    Per layer E·Σ_e f_e·P_e, which is 1 when the load is even, and the mean square of
    the log-partition. transformers' own auxiliary loss pools all layers, so that the
    imbalance of one layer can cancel another's: this loss balances each layer.

    Shapes: each of `router_logits` (n_tokens, n_experts).
    Source: Fedus et al. 2022 (Switch Transformers), eq. 4; Zoph et al. 2022, eq. 5.
    """
    balance, z = [], []
    for logits in router_logits:
        n_experts = logits.shape[-1]
        chosen = logits.topk(top_k, dim=-1).indices
        share = torch.bincount(chosen.flatten(), minlength=n_experts) / chosen.numel()
        balance.append(n_experts * (share * logits.softmax(-1).mean(0)).sum())
        z.append(logits.logsumexp(-1).square().mean())
    return torch.stack(balance).mean(), torch.stack(z).mean()


def decay_start(spec: TrainSpec) -> int:
    """The first step with the decaying learning rate and its mixture."""
    return spec.n_steps - int(spec.n_steps * spec.decay_fraction)


def learning_rate_at(step: int, spec: TrainSpec) -> float:
    """Warmup, then constant, then linear decay to 0 over the last part."""
    decay_steps = spec.n_steps - decay_start(spec)
    warm = min(1.0, (step + 1) / spec.warmup_steps)
    cool = min(1.0, (spec.n_steps - step) / max(1, decay_steps))
    return spec.learning_rate * warm * cool


def _train_step(
    model: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    ids: torch.Tensor,
    spec: TrainSpec,
    step: int,
) -> float:
    for group in optimizer.param_groups:
        group["lr"] = learning_rate_at(step, spec)
    model.train()
    half = spec.precision == "bfloat16"
    with torch.autocast(ids.device.type, torch.bfloat16, enabled=half):
        output = model(ids, output_router_logits=True)
    logits = output.logits[:, :-1].flatten(0, 1)
    nll = F.cross_entropy(logits.float(), ids[:, 1:].flatten())
    routers = [logits.float() for logits in output.router_logits]
    balance, z = balance_losses(routers, top_k=spec.top_k)
    late = step >= decay_start(spec)
    weight = spec.decay_balance_weight if late else spec.balance_weight
    (nll + weight * balance + spec.router_z_weight * z).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return nll.item()


def _optimizer(model: torch.nn.Module, spec: TrainSpec) -> torch.optim.AdamW:
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": spec.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        groups, lr=spec.learning_rate, betas=(0.9, 0.95), eps=1e-10, fused=True
    )


def _batch(
    streams: dict[str, torch.Tensor],
    mixture: Mapping[str, float],
    spec: TrainSpec,
    step: int,
) -> torch.Tensor:
    """Token ids (batch_size, seq_len) of one step, at random corpora and offsets."""
    generator = torch.Generator().manual_seed(spec.seed * 1_000_003 + step)
    weights = torch.tensor([mixture[name] for name in streams])
    chosen = torch.multinomial(
        weights, spec.batch_size, replacement=True, generator=generator
    )
    names = list(streams)
    rows = []
    for index in chosen.tolist():
        stream = streams[names[index]]
        last = len(stream) - spec.seq_len
        offset = int(torch.randint(last, (1,), generator=generator))
        rows.append(stream[offset : offset + spec.seq_len])
    return torch.stack(rows).long()
