"""The optimizer of a run: parameter groups, schedule, state as named tensors, and the guard against inf and nan."""

import math
from collections import defaultdict
from pathlib import Path

import torch
from torch import Tensor
from torch.optim import Optimizer

from model import GPT
from model.huggingface import Tensors
from model.load import read_tensors
from training.config import TrainConfig
from training.muon import Muon, momentum_at
from training.sharded import gather_tensor, shard_like


class NonFiniteLoss(ArithmeticError):
    """The loss or its gradient became inf or nan; the message is for the user."""

    exit_code = 3


def make_optimizer(
    model: GPT, config: TrainConfig, dtype: torch.dtype = torch.float32, compiled: bool = False
) -> Optimizer:
    """Return the optimizer of all parameters that are not frozen.

    Weight decay applies to matrices, with Muon only to those inside the blocks; never to others (biases, norms).
    A group's "lr_share" is its part of the learning rate. dtype is the precision of training. Muon's iteration has the
    same, except that it is float32 for float16, whose range is too small. compiled: whether Muon's update is.
    """
    parts = defaultdict(list)
    for name, parameter in model.named_parameters():  # a tied head has the name of the embedding
        if parameter.requires_grad:
            parts[name.partition(".")[0] if parameter.dim() == 2 else "others"].append(parameter)
    others = parts.pop("others", [])
    options = {"lr": config.learning_rate, "betas": (0.9, config.beta2)}
    if config.optimizer == "adamw":
        groups = [{"params": sum(parts.values(), [])}, {"params": others, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, weight_decay=config.weight_decay, fused=True, **options)
    inside = parts.pop("blocks", [])
    groups = [
        {"params": others, "lr_share": config.vector_rate},
        {"params": parts.pop("lm_head", []), "lr_share": config.head_rate},
        {"params": sum(parts.values(), []), "lr_share": config.embedding_rate},
    ]
    precision = torch.float32 if dtype == torch.float16 else dtype
    return Muon(inside, config.weight_decay, groups, precision, compiled, **options)


def learning_rate_at(step: int, config: TrainConfig) -> float:
    """Return the learning rate of a step: linear warmup, then cosine decay, or constant with a linear decay at last."""
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    final = config.final_lr_fraction
    if config.schedule == "cosine":
        done = (step - config.warmup_steps) / max(1, config.max_steps - config.warmup_steps)
        share = 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
    else:
        decay_steps = min(config.decay_fraction * config.max_steps, config.max_steps - config.warmup_steps)
        left = (config.max_steps - step) / max(1.0, decay_steps)
        share = min(1.0, max(0.0, left))
    return config.learning_rate * (final + (1 - final) * share)


def set_schedule(optimizer: Optimizer, step: int, config: TrainConfig) -> None:
    """Set each group's learning rate for this step, and the momentum of Muon's."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate_at(step, config) * group.get("lr_share", 1.0)
        if "momentum" in group:
            group["momentum"] = momentum_at(step, config.momentum)


def clip_gradients(model: GPT, most: float) -> Tensor:
    """Scale the gradients down to a norm of at most `most`, and return the norm that they had. 0: as they are."""
    return gather_tensor(torch.nn.utils.clip_grad_norm_(model.parameters(), most or math.inf))


def optimizer_tensors(model: GPT, optimizer: Optimizer) -> Tensors:
    """Return the state of the optimizer as named tensors: "parameter.quantity" -> tensor."""
    return {
        f"{name}.{key}": value
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state[parameter].items()
    }


def load_optimizer_tensors(model: GPT, optimizer: Optimizer, directory: Path) -> None:
    """Give the optimizer the state that a checkpoint holds."""
    parameters = dict(model.named_parameters())
    for name, tensor in read_tensors(directory, "optimizer"):
        name, _, key = name.rpartition(".")
        parameter = parameters[name]
        value = shard_like(tensor, parameter)
        optimizer.state[parameter].setdefault(key, value).copy_(value)  # into Muon's, which are views of a stack


class FiniteGuard:
    """Guard that ends a run after a loss or gradient that is not finite, before a checkpoint holds what came of it.

    `watch` leaves its note on the device, so that no step waits for the host. `check` reads it, and is called where the
    host waits anyway: before each log line, evaluation and checkpoint.
    """

    def __init__(self, device: torch.device):
        self.first_bad_step = torch.full((), math.inf, device=device)

    def watch(self, step: int, number: Tensor) -> None:
        """Note whether a number of this step is finite."""
        self.first_bad_step.clamp_(max=torch.where(number.isfinite(), math.inf, float(step)))

    def check(self) -> None:
        """Raise NonFiniteLoss if a number was not finite."""
        step = self.first_bad_step.item()
        if math.isfinite(step):
            raise NonFiniteLoss(
                f"the loss or its gradient is not finite in step {int(step) + 1}, and no checkpoint contains its "
                "update; begin again in another --train.out_dir, with a lower --train.learning_rate or a longer warmup"
            )
