"""A short recovery run: the experts of a pruned model learn from the dense model.

Distillation with transformers' Trainer: the loss is KL(dense || pruned) over all
predicted tokens of the calibration windows, which needs no labels, and only the routed
experts' weights are trained.
"""

import tempfile
from typing import Any

import torch
from torch import nn
from transformers import PrinterCallback, Trainer, TrainingArguments

from heapr_lab.errors import SpecError
from heapr_lab.models.backend import backend_of
from heapr_lab.models.experts import trainable_experts
from heapr_lab.models.modes import differentiating
from heapr_lab.progress import Progress, no_report
from heapr_lab.refinement.distillation import Teacher, check_positive
from heapr_lab.refinement.students import note_change
from heapr_lab.text.calibration import CalibrationSet


def recover(
    pruned: nn.Module,
    dense: nn.Module,
    calibration: CalibrationSet,
    *,
    n_steps: int = 200,
    batch_size: int = 8,
    learning_rate: float = 1e-4,
    seed: int = 0,
    progress: Progress | None = None,
) -> nn.Module:
    """Train the experts of `pruned`, in place, to predict what `dense` predicts.

    Adam without weight decay, gradients clipped to norm 1; the learning rate increases
    over the first tenth of the steps and decreases to 0 over the rest. Weights keep
    their dtype, in which small steps can be lost: load both models in float32, on one
    device. Nothing is written. As Trainer does, models on GPUs are trained on the first
    one, and the random numbers of the process are seeded.

    Args:
        pruned: the pruned model, made from `dense` by `prune`.
        dense: the dense model, which is not changed.
        calibration: the windows to train on, and no others.
        n_steps: optimiser steps.
        batch_size: windows of each step.
        learning_rate: the highest learning rate.
        seed: seed of the order of the windows.
        progress: called after each step.

    Returns:
        `pruned`.

    Raises:
        SpecError: `pruned` has no sliced experts or is streamed, or a number is not
            positive.
    """
    check_positive(n_steps=n_steps, batch_size=batch_size, learning_rate=learning_rate)
    weights = expert_weights(pruned)
    teacher = Teacher(dense, calibration.ids, batch_size)
    config: Any = pruned.config
    use_cache = config.use_cache
    with tempfile.TemporaryDirectory() as folder, differentiating(pruned, weights):
        arguments: Any = TrainingArguments(
            output_dir=folder,
            max_steps=n_steps,
            per_device_train_batch_size=batch_size,
            learning_rate=learning_rate,
            lr_scheduler_type="linear",
            warmup_steps=n_steps // 10,
            seed=seed,
            use_cpu=weights[0].device.type == "cpu",
            remove_unused_columns=False,
            logging_strategy="no",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        arguments._n_gpu = min(1, arguments.n_gpu)  # else the model is copied to all
        try:
            _Distiller(pruned, arguments, teacher, progress or no_report).train()
        finally:
            config.use_cache = use_cache  # Trainer switches it off
    note_change(
        pruned,
        f"the experts distilled from the dense model in {n_steps} steps of "
        f"{batch_size} windows",
    )
    return pruned


def expert_weights(pruned: nn.Module) -> list[nn.Parameter]:
    """The weights of the routed experts, layer by layer.

    Raises:
        SpecError: the model has no sliced experts, is streamed or quantised.
    """
    backend_of(pruned).require_loaded(
        remedy="make it from a dense model that is loaded with stream=False to train "
        "it",
    )
    found = [
        parameter
        for module in trainable_experts(pruned).values()
        for parameter in module.parameters(recurse=False)
    ]
    if not found:
        raise SpecError(
            f"this {type(pruned).__name__} has no sliced experts to train: expected a "
            "model that heapr_lab.prune returned"
        )
    return found


class _Distiller(Trainer):
    """Trains on indices of windows, whose tokens the teacher has."""

    def __init__(
        self, pruned: Any, arguments: Any, teacher: Teacher, progress: Progress
    ) -> None:
        windows: Any = [{"window": number} for number in range(len(teacher.ids))]
        super().__init__(pruned, arguments, train_dataset=windows)
        self.teacher = teacher
        self.progress = progress
        self.remove_callback(PrinterCallback)

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], *_args: Any, **_kwargs: Any
    ) -> torch.Tensor:
        model.eval()  # Trainer switches to training mode, where some routers are noisy
        return self.teacher.mean_kl(model, inputs["window"].cpu())

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss: torch.Tensor = super().training_step(*args, **kwargs)
        self.progress(self.state.global_step + 1, self.state.max_steps)
        return loss
