"""Heal a pruned model: train what is left of it on text, beside the dense model.

The loss of a token is its own, -log q, and KL(p ‖ q) of the whole prediction, with p
that of the dense model. Kept experts, routers and norms are trained by AdamW, on each
window once. On held-out windows the weights are judged before, and after every quarter
of the text; those that lose least are taken. Two rises in a row end the training.

Source: this project; as other papers fine-tune what they pruned.

Shapes: B windows, L tokens in each; D d_model.
"""

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
import torch
import torch.nn.functional as F
from torch import nn

from heapr_lab.errors import CacheError, HeaprLabError, SpecError
from heapr_lab.evaluation.perplexity import evaluate_perplexity
from heapr_lab.models.backend import backend_of
from heapr_lab.models.experts import find_experts, sliced_experts
from heapr_lab.models.identity import model_identity, refuse_disturbed
from heapr_lab.models.likelihood import final_states, input_device, iter_log_probs
from heapr_lab.models.modes import differentiating
from heapr_lab.progress import Progress, no_report
from heapr_lab.storage.files import load_state, save_state
from heapr_lab.storage.hashing import digest
from heapr_lab.text.calibration import CalibrationSet

BATCH_TOKENS = 1024
LEARNING_RATE = 2e-4
_NORM_RATE = 5.0
"""The rate of norms, as a multiple of that of all others."""
_WARM_UP = 0.1
_PARTS = 4
"""Parts of the text, after each of which the held-out windows are judged."""
_HELD_OUT = 16
"""Windows, at most: every fourth if there are few."""
_SAVE_SECONDS = 300.0
_SHARED = re.compile(r"shared_experts?\.")
_MOMENTS = ("exp_avg", "exp_avg_sq")


def heal(
    pruned: Any,
    dense: Any,
    text: CalibrationSet,
    *,
    learning_rate: float = LEARNING_RATE,
    state: Path | None = None,
    progress: Progress | None = None,
) -> Any:
    """Train a pruned model, in place, to predict text, and to predict as the dense one.

    The cost is a forward and backward pass of the pruned model and a forward pass of
    the dense one on the text, and up to five on the held-out windows. Both models are
    in memory, and so are a gradient, two moments and the best value of every trained
    weight.

    Args:
        pruned: the pruned model, made from `dense` by `prune`, `compensate` or
            `compress`, in float32 or float64.
        dense: the dense model, which is not changed.
        text: at least four windows. Up to 16, and at most every fourth, are held out.
        learning_rate: the highest rate of experts and routers.
        state: a file in which an unfinished training is saved every five minutes, and
            from which it resumes; removed at the end.
        progress: called after each step with (steps done, steps in all).

    Returns:
        `pruned`. Its `heapr_healing` is a table with a row for each time that the
        held-out windows were judged: `tokens` trained on so far, the mean `loss` of
        these [nats], and the `held_out` loss, -log q [nats per token]; the row of the
        least is what was taken.

    Raises:
        SpecError: `pruned` was not made from `dense`, its weights have 16 bits, a model
            is streamed, there are fewer than four windows, or a mask, autocast or hook
            changes what `dense` computes.
        HeaprLabError: the loss is not finite.
        CacheError: `state` is that of another training, or damaged.

    Example:
        >>> smaller = compress(model, calibration, ratio=0.4)  # doctest: +SKIP
        >>> heal(smaller, model, text)  # doctest: +SKIP
    """
    _check(pruned, dense, text, learning_rate)
    trained = _trained(pruned)
    groups = [
        {"params": [w], "base": learning_rate * (_NORM_RATE if "norm" in name else 1)}
        for name, w in trained.items()
    ]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.0)
    n_held_out = min(_HELD_OUT, text.n_sequences // 4)
    run = _Run(
        pruned=pruned,
        dense=dense,
        trained=trained,
        optimizer=optimizer,
        held_out=text.ids[:n_held_out],
        batches=text.ids[n_held_out:].split(max(1, BATCH_TOKENS // text.seq_len)),
        state=state,
        key="" if state is None else _key(pruned, text, learning_rate),
    )
    run.train(progress or no_report)
    n_tokens = int(run.rows[-1]["tokens"])
    weights = getattr(pruned, "heapr_weights", "sliced")
    healed = f"{weights}; then healed on {n_tokens:,} tokens of {text.label}"
    pruned.__dict__["heapr_weights"] = healed
    pruned.__dict__["heapr_healing"] = pd.DataFrame(run.rows).astype({"tokens": int})
    return pruned


def _check(pruned: Any, dense: Any, text: CalibrationSet, learning_rate: float) -> None:
    """Check that there is something to train, and text.

    Raises:
        SpecError: there is not.
    """
    refuse_disturbed(dense, remedy="begin again with the dense model")
    for model in (dense, pruned):
        check_trainable(model)
    sliced = sliced_experts(pruned)
    expected = {layer.name: layer.n_experts for layer in find_experts(dense)}
    if {name: len(layer.heapr_widths) for name, layer in sliced.items()} != expected:
        raise SpecError(
            f"this {type(pruned).__name__} has {len(sliced)} layers of sliced experts, "
            f"expected those of the dense {type(dense).__name__}, {len(expected)}: "
            "give a model that heapr_lab.prune, compensate or compress made from it"
        )
    if text.n_sequences < 4:
        raise SpecError(
            f"there are {text.n_sequences} windows, expected at least 4: one of them "
            "is held out"
        )
    if not learning_rate > 0:
        raise SpecError(f"learning_rate must be positive, got {learning_rate}")


def check_trainable(model: Any) -> None:
    """Check that all weights are in memory, and in a type that shows small steps.

    Raises:
        SpecError: they are not.
    """
    backend_of(model).require_loaded(
        remedy="load the dense model with stream=False (--no-stream) to heal"
    )
    narrow = next((w for w in model.parameters() if w.element_size() < 4), None)
    if narrow is not None:
        raise SpecError(
            f"the weights are {narrow.dtype}, in which small steps are lost: to heal, "
            "load the dense model with dtype='float32' (--dtype float32)"
        )


def _trained(pruned: Any) -> dict[str, nn.Parameter]:
    """Kept experts, what routes to them, and all norms, by name."""
    experts = sliced_experts(pruned)
    blocks = tuple(f"{name.rpartition('.')[0]}." for name in experts)
    return {
        name: weight
        for name, weight in pruned.named_parameters()
        if weight.numel()
        and ("norm" in name or (name.startswith(blocks) and not _SHARED.search(name)))
    }


def _key(pruned: Any, text: CalibrationSet, learning_rate: float) -> str:
    return digest([model_identity(pruned), text.fingerprint, learning_rate])


@dataclass(kw_only=True, eq=False)
class _Run:
    """A training, and how far it is."""

    pruned: Any
    dense: Any
    trained: Mapping[str, nn.Parameter]
    optimizer: torch.optim.Optimizer
    held_out: torch.Tensor
    batches: tuple[torch.Tensor, ...]
    state: Path | None
    key: str
    losses: list[float] = field(default_factory=list)
    """The loss of each step."""
    rows: list[dict[str, float]] = field(default_factory=list)
    best: dict[str, torch.Tensor] = field(default_factory=dict)

    def train(self, report: Progress) -> None:
        """Go on until two rises, or the end of the text, and take the best weights."""
        n_steps = len(self.batches)
        judged = {round(n_steps * (part + 1) / _PARTS) for part in range(_PARTS)}
        with differentiating(self.pruned, [*self.trained.values()]):
            self._resume()
            saved_at = time.monotonic()
            for step in range(len(self.losses), n_steps):
                self._step(step)
                report(step + 1, n_steps)
                if step + 1 in judged and self._judge():
                    break
                if time.monotonic() - saved_at > _SAVE_SECONDS:
                    self._save()
                    saved_at = time.monotonic()
        with torch.no_grad():
            for name, weight in self.trained.items():
                weight.copy_(self.best[name])
        if self.state is not None:
            self.state.unlink(missing_ok=True)

    def _step(self, step: int) -> None:
        """One step of the optimiser.

        Raises:
            HeaprLabError: the loss is not finite.
        """
        n_steps = len(self.batches)
        share = share_of_rate(step, n_steps, max(1.0, _WARM_UP * n_steps))
        for group in self.optimizer.param_groups:
            group["lr"] = group["base"] * share
        loss = add_gradients(self.pruned, self.dense, self.batches[step])
        if not loss < float("inf"):
            raise HeaprLabError(
                f"the loss of step {step + 1} is {loss}: heal with a smaller "
                "learning_rate"
            )
        nn.utils.clip_grad_norm_(self.trained.values(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.losses.append(loss)

    def _judge(self) -> bool:
        """Judge the held-out windows, and keep the weights if none were better.

        Returns:
            Whether they lost more than before for the second time in a row.
        """
        now = evaluate_perplexity(self.pruned, self.held_out).nll
        before = min((row["held_out"] for row in self.rows), default=float("inf"))
        if now < before:
            self.best = {k: w.detach().clone() for k, w in self.trained.items()}
        n_tokens = sum(batch.numel() for batch in self.batches[: len(self.losses)])
        loss = pd.Series(self.losses, dtype=float).mean()
        self.rows.append({"tokens": n_tokens, "loss": loss, "held_out": now})
        last = [row["held_out"] for row in self.rows[-3:]]
        return len(last) == 3 and last[0] < last[1] < last[2]

    def _save(self) -> None:
        if self.state is None:
            return
        rows = [list(row.values()) for row in self.rows]
        others = {f"best.{name}": weight for name, weight in self.best.items()}
        others["losses"] = torch.tensor(self.losses, dtype=torch.float64)
        others["rows"] = torch.tensor(rows, dtype=torch.float64)
        save_training(self.state, self.trained, self.optimizer, others, key=self.key)

    def _resume(self) -> None:
        """Judge the model as it is, or go on from a file."""
        if self.state is None or not self.state.exists():
            self._judge()
            return
        others = restore_training(
            self.state, self.trained, self.optimizer, key=self.key
        )
        self.losses = others.pop("losses").tolist()
        names = ("tokens", "loss", "held_out")
        rows = others.pop("rows").tolist()
        self.rows = [dict(zip(names, row, strict=True)) for row in rows]
        self.best = {name.removeprefix("best."): w for name, w in others.items()}


def add_gradients(pruned: Any, dense: Any, ids: torch.Tensor) -> float:
    """Add the gradients of the mean loss of a batch (B, L); returns it [nats].

    The logits of a few tokens are in memory at a time.
    """
    ids = ids.to(input_device(pruned))
    with torch.no_grad():
        goal = final_states(dense, ids)[:, :-1]
    states = final_states(pruned, ids)[:, :-1]
    leaf = states.detach().requires_grad_()
    targets = ids[:, 1:].flatten()
    pairs = zip(iter_log_probs(pruned, leaf), iter_log_probs(dense, goal), strict=True)
    total, done = 0.0, 0
    for log_q, log_p in pairs:
        target = targets[done : done + len(log_q)].to(log_q.device)
        done += len(target)
        p = log_p.detach().to(log_q.device)
        loss = F.nll_loss(log_q, target, reduction="sum")
        loss = loss + F.kl_div(log_q, p, reduction="sum", log_target=True)
        (loss / len(targets)).backward()
        total += loss.item()
    states.backward(leaf.grad)
    return total / len(targets)


# --- what trainings have in common ------------------------------------------------


def share_of_rate(step: int, n_steps: int, warm: float) -> float:
    """The share of a rate: it rises over `warm` steps, and falls to 0 at the end."""
    return min(1.0, (step + 1) / warm) * (1 - step / n_steps)


def save_training(
    path: Path,
    trained: Mapping[str, nn.Parameter],
    optimizer: torch.optim.Optimizer,
    others: Mapping[str, torch.Tensor],
    *,
    key: str = "",
) -> None:
    """Write the state after a step.

    Args:
        path: the file.
        trained: the parameters that are trained, by name.
        optimizer: an Adam that has taken a step.
        others: what else to go on with.
        key: hash of all that determines the training.
    """
    tensors = {f"other.{name}": tensor for name, tensor in others.items()}
    for name, weight in trained.items():
        tensors[f"weight.{name}"] = weight.detach()
        for part, value in optimizer.state[weight].items():
            tensors[f"{part}.{name}"] = value
    arrays = {name: tensor.cpu().numpy() for name, tensor in tensors.items()}
    save_state(path, arrays, {"key": key})


def restore_training(
    path: Path,
    trained: Mapping[str, nn.Parameter],
    optimizer: torch.optim.Optimizer,
    *,
    key: str = "",
) -> dict[str, torch.Tensor]:
    """Give parameters and optimiser the state in a file; returns the others.

    Raises:
        CacheError: the file is of another training, or is damaged.
    """
    arrays, meta = load_state(path)
    if meta.get("key") != key:
        raise CacheError(
            f"{path} is the state of another training (another model or other text); "
            "delete it, or give another file"
        )
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    for name, weight in trained.items():
        weight.data.copy_(tensors[f"weight.{name}"])
        moments = {part: tensors[f"{part}.{name}"] for part in _MOMENTS}
        optimizer.state[weight] = {
            "step": tensors[f"step.{name}"],  # a counter, which Adam has on the CPU
            **{part: moment.to(weight.device) for part, moment in moments.items()},
        }
    begin = "other."
    return {
        name.removeprefix(begin): tensor
        for name, tensor in tensors.items()
        if name.startswith(begin)
    }
