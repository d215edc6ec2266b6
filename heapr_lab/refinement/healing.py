"""Heal a pruned model: train what is left of it on text, beside the dense model.

The loss of a token is its own, -log q, and KL(p ‖ q) of the whole prediction, with p
that of the dense model. Kept experts, routers and norms are trained by AdamW, on each
window once. On held-out windows the weights are judged before, and after every quarter
of the text; those that lose least are taken. Two rises in a row end the training.

Source: this project; as other papers fine-tune what they pruned.

Shapes: B windows, L tokens in each; D d_model.
"""

import functools
import itertools
import re
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
import torch
import torch.nn.functional as F
from torch import nn

from heapr_lab.errors import CacheError, HeaprLabError, SpecError
from heapr_lab.evaluation.perplexity import evaluate_perplexity
from heapr_lab.models.backend import (
    Gradient,
    Tensors,
    Training,
    TrainingPlan,
    backend_of,
)
from heapr_lab.models.experts import find_experts, sliced_experts
from heapr_lab.models.identity import model_identity, refuse_disturbed
from heapr_lab.models.likelihood import (
    final_states,
    input_device,
    iter_log_probs,
    states_of_all,
)
from heapr_lab.models.modes import differentiating, evaluating
from heapr_lab.progress import Progress, no_report
from heapr_lab.storage.files import load_state, save_state
from heapr_lab.storage.hashing import digest
from heapr_lab.streaming.plan import free_memory, gigabytes
from heapr_lab.streaming.training import LARGEST_NORM, folder_of
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
_SHARE = 0.5
"""Of the room for states of the dense model; the training takes the rest."""
_ROUTERS = r"(gate|router|shared_expert_gate|expert_bias)\b"
"""Names, in the block that experts are in, of what routes to them."""
_MOMENTS = ("exp_avg", "exp_avg_sq")
_BEST = "best."


def heal(
    pruned: Any,
    dense: Any,
    text: CalibrationSet,
    *,
    learning_rate: float = LEARNING_RATE,
    state: Path | None = None,
    batch_tokens: int | None = None,
    progress: Progress | None = None,
) -> Any:
    """Train a pruned model, in place, to predict text, and to predict as the dense one.

    The cost is a forward and backward pass of the pruned model and a forward pass of
    the dense one on the text, and up to five on the held-out windows. A gradient, two
    moments and the best value of every trained weight are kept: in memory, as are both
    models; those of streamed models in files, as far as half of `host_memory` is not
    enough. A step of a streamed model then reads its layers twice, and reads and writes
    weights, moments and gradients once, whatever the tokens of a batch; its layers and
    those of the dense model are otherwise read once for a judgement, and the latter
    once for as many steps as there is room for.

    Args:
        pruned: the pruned model, made from `dense` by `prune`, `compensate` or
            `compress`, in float32 or float64.
        dense: the dense model, which is not changed.
        text: at least four windows. Up to 16, and at most every fourth, are held out.
        learning_rate: the highest rate of experts and routers.
        state: a file in which a training is saved every five minutes, and from which
            it resumes; one that ended is not run again. Of a streamed model every step
            is saved, in a folder beside it (`.training`), from which it reads its
            weights. `forget` removes both, once the weights are written.
        batch_tokens: tokens of a step, by default 1024, in memory and streamed, so that
            the result is the same. More tokens are fewer steps, which take less time of
            a streamed model, and change the weights less often.
        progress: called after each step with (steps done, steps in all).

    Returns:
        `pruned`. Its `heapr_healing` is a table with a row for each time that the
        held-out windows were judged: `tokens` trained on so far, the mean `loss` of
        these [nats], and the `held_out` loss, -log q [nats per token]; the row of the
        least is what was taken.

    Raises:
        SpecError: `pruned` was not made from `dense`, its weights have 16 bits, there
            are fewer than four windows, a mask, autocast or hook changes what `dense`
            computes, or there is no room in memory or on the disk.
        HeaprLabError: the loss is not finite.
        CacheError: `state` is that of another training, or damaged.

    Example:
        >>> smaller = compress(model, calibration, ratio=0.4)  # doctest: +SKIP
        >>> heal(smaller, model, text)  # doctest: +SKIP
    """
    _check(pruned, dense, text, learning_rate)
    n_tokens = batch_tokens or BATCH_TOKENS
    key = "" if state is None else _key(pruned, text, learning_rate, n_tokens)
    optimizers = functools.partial(_adam, learning_rate)
    plan = TrainingPlan(_trained(pruned), optimizers, state, key)
    n_held_out = min(_HELD_OUT, text.n_sequences // 4)
    run = _Run(
        pruned=pruned,
        dense=dense,
        training=backend_of(pruned).training(plan) or _InMemory(pruned, plan),
        held_out=text.ids[:n_held_out],
        batches=text.ids[n_held_out:].split(max(1, n_tokens // text.seq_len)),
        batch_size=max(1, BATCH_TOKENS // text.seq_len),
    )
    run.train(progress or no_report)
    n_tokens = int(run.rows[-1]["tokens"])
    weights = getattr(pruned, "heapr_weights", "sliced")
    healed = f"{weights}; then healed on {n_tokens:,} tokens of {text.label}"
    pruned.__dict__["heapr_weights"] = healed
    pruned.__dict__["heapr_trained"] = frozenset(plan.names)
    pruned.__dict__["heapr_healing"] = pd.DataFrame(run.rows).astype({"tokens": int})
    return pruned


def forget(state: Path) -> None:
    """Remove what `heal` left of a training: the file `state`, and the folder."""
    state.unlink(missing_ok=True)
    shutil.rmtree(folder_of(state), ignore_errors=True)


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
    """Check that all weights are in a type that shows small steps.

    Raises:
        SpecError: they are not.
    """
    narrow = next((w for w in model.parameters() if w.element_size() < 4), None)
    if narrow is not None:
        raise SpecError(
            f"the weights are {narrow.dtype}, in which small steps are lost: to heal, "
            "load the dense model with dtype='float32' (--dtype float32)"
        )


def _check_room(n_bytes: int, device: str) -> None:
    """Check that a gradient, two moments and the best value of each weight fit.

    Raises:
        SpecError: they do not.
    """
    needed, free = 4 * n_bytes, free_memory(device)
    if needed > free:
        raise SpecError(
            "a gradient, two moments and the best value of every trained weight need "
            f"{gigabytes(needed)}, and {gigabytes(free)} are free: load the dense "
            "model with stream=True (--stream)"
        )


def _trained(pruned: Any) -> list[str]:
    """Names of kept experts, what routes to them, and all norms after the embeddings.

    A streamed model has no gradients of the latter.
    """
    experts = [re.escape(name) for name in sliced_experts(pruned)]
    blocks = [name.rpartition(r"\.")[0] for name in experts]
    kept = re.compile(rf"({'|'.join(experts)})\.|({'|'.join(blocks)})\.{_ROUTERS}")
    embeddings = {id(w) for w in pruned.get_input_embeddings().parameters()}
    return [
        name
        for name, weight in pruned.named_parameters()
        if weight.numel()
        and id(weight) not in embeddings
        and ("norm" in name or kept.match(name))
    ]


def _adam(
    learning_rate: float, trained: Mapping[str, nn.Parameter], share: float
) -> torch.optim.Optimizer:
    """AdamW with a share of the highest rates, which are the `base` of its groups."""
    groups = []
    for name, weight in trained.items():
        base = learning_rate * (_NORM_RATE if "norm" in name else 1)
        groups += [{"params": [weight], "base": base, "lr": base * share}]
    return torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.0)


def _key(pruned: Any, text: CalibrationSet, learning_rate: float, n_tokens: int) -> str:
    parts = [model_identity(pruned), text.fingerprint, learning_rate]
    return digest(parts if n_tokens == BATCH_TOKENS else [*parts, n_tokens])


@dataclass(kw_only=True, eq=False)
class _Run:
    """A training, and how far it is."""

    pruned: Any
    dense: Any
    training: Training
    held_out: torch.Tensor
    batches: tuple[torch.Tensor, ...]
    """The windows of each step."""
    batch_size: int
    """Windows that are run together."""
    losses: list[float] = field(default_factory=list)
    """The loss of each step."""
    rows: list[dict[str, float]] = field(default_factory=list)
    goals: Iterator[torch.Tensor] | None = None
    """Final states of the dense model, batch by batch, once the first are needed."""

    def train(self, report: Progress) -> None:
        """Go on until two rises, or the end of the text, and take the best weights."""
        n_steps = len(self.batches)
        judged = {round(n_steps * part / _PARTS) for part in range(_PARTS + 1)}
        with differentiating(self.pruned, self.training.parameters):
            self._resume()
            while True:
                step = len(self.losses)
                due = len(self.rows) < sum(at <= step for at in judged)
                if (due and self._judge()) or step == n_steps:
                    break
                self._step(step, report)
                report(step + 1, n_steps)
            self.training.finish()

    def _step(self, step: int, report: Progress) -> None:
        """One step of the optimiser.

        Raises:
            HeaprLabError: the loss is not finite.
        """
        ids, goals, n_steps = self.batches[step], self._goals(step), len(self.batches)
        n_targets, loss = ids.numel() - len(ids), 0.0

        def gradient(windows: slice, states: torch.Tensor) -> torch.Tensor:
            nonlocal loss
            of_batch = ids[windows], states, goals[windows]
            more, by_states = loss_and_gradient(
                self.pruned, self.dense, *of_batch, n_targets
            )
            loss += more
            if not loss < float("inf"):
                raise HeaprLabError(
                    f"the loss of step {step + 1} is {loss}: heal with a smaller "
                    "learning_rate"
                )
            return by_states

        self.training.add_gradients(
            ids, self.batch_size, gradient, lambda *_: report(step, n_steps)
        )
        self.losses.append(loss)
        share = share_of_rate(step, n_steps, max(1.0, _WARM_UP * n_steps))
        rows = [list(row.values()) for row in self.rows]
        notes = {"losses": self.losses, "rows": rows}
        self.training.step(
            share, {k: torch.tensor(v, dtype=torch.float64) for k, v in notes.items()}
        )

    def _goals(self, step: int) -> torch.Tensor:
        """The final states of the dense model; those of steps to come are kept."""
        # No batch has windows of two steps: which these are depends on the room.
        steps = [ids.split(self.batch_size) for ids in self.batches[step:]]
        if self.goals is None:
            batches = [*itertools.chain(*steps)]
            self.goals = states_of_all(self.dense, batches, share=_SHARE)
        with evaluating(self.dense):
            return torch.cat([next(self.goals) for _ in steps[0]])

    def _judge(self) -> bool:
        """Judge the held-out windows, and keep the weights if none were better.

        Returns:
            Whether they lost more than before for the second time in a row.
        """
        now = evaluate_perplexity(self.pruned, self.held_out).nll
        before = min((row["held_out"] for row in self.rows), default=float("inf"))
        if now < before:
            self.training.keep()
        n_tokens = sum(batch.numel() for batch in self.batches[: len(self.losses)])
        loss = pd.Series(self.losses, dtype=float).mean()
        self.rows.append({"tokens": n_tokens, "loss": loss, "held_out": now})
        last = [row["held_out"] for row in self.rows[-3:]]
        return len(last) == 3 and last[0] < last[1] < last[2]

    def _resume(self) -> None:
        """Go on with what an earlier process did, if any did."""
        notes = self.training.resume()
        if notes:
            self.losses = notes["losses"].tolist()
            names = ("tokens", "loss", "held_out")
            rows = notes["rows"].tolist()
            self.rows = [dict(zip(names, row, strict=True)) for row in rows]


class _InMemory:
    """The training of weights that are in memory together.

    The protocol is `heapr_lab.models.backend.Training`.

    Raises:
        SpecError: there is no room for it.
    """

    def __init__(self, model: Any, plan: TrainingPlan) -> None:
        self._model, self._state, self._key = model, plan.state, plan.key
        self._trained = {name: model.get_parameter(name) for name in plan.names}
        self.parameters: Sequence[nn.Parameter] = [*self._trained.values()]
        _check_room(sum(w.nbytes for w in self.parameters), str(model.device))
        self._optimizer = plan.optimizers(self._trained, 1.0)
        self._best: dict[str, torch.Tensor] = {}
        self._notes: Tensors = {}
        self._saved_at = time.monotonic()

    def resume(self) -> dict[str, torch.Tensor]:
        if self._state is None or not self._state.exists():
            return {}
        others = restore_training(
            self._state, self._trained, self._optimizer, key=self._key
        )
        self._best = {k: others.pop(f"{_BEST}{k}") for k in self._trained}
        return others

    def add_gradients(
        self,
        ids: torch.Tensor,
        batch_size: int,
        gradient: Gradient,
        progress: Progress,  # noqa: ARG002
    ) -> None:
        model, run = self._model, functools.partial(final_states, self._model)
        backend_of(model).weight_gradients(
            model, ids, batch_size, run, gradient, None, no_report
        )

    def step(self, share: float, notes: Tensors) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = group["base"] * share
        nn.utils.clip_grad_norm_(self.parameters, LARGEST_NORM)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self._notes = notes
        if time.monotonic() - self._saved_at > _SAVE_SECONDS:
            self._save()

    def _save(self) -> None:
        if self._state is not None:
            others = {f"{_BEST}{name}": weight for name, weight in self._best.items()}
            others |= self._notes
            save_training(
                self._state, self._trained, self._optimizer, others, key=self._key
            )
            self._saved_at = time.monotonic()

    def keep(self) -> None:
        self._best = {k: w.detach().clone() for k, w in self._trained.items()}

    @torch.no_grad()
    def finish(self) -> None:
        if self._notes and self._state is not None and self._state.exists():
            self._save()  # so that no step is run again if the weights are not written
        for name, weight in self._trained.items():
            weight.copy_(self._best[name])


def loss_and_gradient(
    pruned: Any,
    dense: Any,
    ids: torch.Tensor | None,
    states: torch.Tensor,
    goal: torch.Tensor,
    n_targets: int,
) -> tuple[float, torch.Tensor]:
    """The share of a batch in the loss, and its gradient by the final states.

    The logits of a few tokens are in memory at a time.

    Shapes: ids (B, L); states, goal, gradient (B, L, D).

    Args:
        pruned: the model that is trained.
        dense: the model whose predictions it learns.
        ids: token ids; without them the loss is KL(p ‖ q) alone.
        states: final states of `pruned`.
        goal: those of `dense`.
        n_targets: tokens that are predicted in all batches of the step, over which the
            loss is the mean [nats].
    """
    leaf = states[:, :-1].detach().requires_grad_()
    goal = goal[:, :-1].to(input_device(dense))
    targets = None if ids is None else ids[:, 1:].flatten()
    pairs = zip(iter_log_probs(pruned, leaf), iter_log_probs(dense, goal), strict=True)
    total, done = 0.0, 0
    for log_q, log_p in pairs:
        p = log_p.detach().to(log_q.device)
        loss = F.kl_div(log_q, p, reduction="sum", log_target=True)
        if targets is not None:
            target = targets[done : done + len(log_q)].to(log_q.device)
            loss = F.nll_loss(log_q, target, reduction="sum") + loss
            done += len(target)
        (loss / n_targets).backward()
        total += loss.item()
    assert leaf.grad is not None
    return total / n_targets, F.pad(leaf.grad, (0, 0, 0, 1))


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
        if f"step.{name}" not in tensors:
            continue  # it has no gradient, like the norms of an encoder of images
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
