"""The optimizer of a run: AdamW or Muon, schedule, state as named tensors, and the guard against inf and nan.

Muon makes orthogonalized updates for the matrices (Jordan et al. 2024). The momentum of a matrix is dominated by a few
directions. Muon replaces it by the nearest orthogonal matrix, so that rare directions are learned as fast. Embeddings,
head and vectors are trained with AdamW.
"""

import math
from collections import defaultdict
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from model import GPT
from model.huggingface import Tensors
from model.load import read_tensors
from training.config import TrainConfig
from training.distributed import gather_tensor, is_sharded

# Coefficients of a x + b x^3 + c x^5. Applied five times, this polynomial takes singular values from 0.01 to 1 to
# values between 0.7 and 1.2, which is near enough to 1 (Jordan et al. 2024).
A = 3.4445
B = -4.7750
C = 2.0315
FIRST_MOMENTUM = 0.8
MOMENTUM_STEPS = 300  # in which it rises from the first to that of the configuration


class NonFiniteLoss(ArithmeticError):
    """The loss or its gradient became inf or nan; the message is for the user."""

    exit_code = 3


def make_optimizer(
    model: GPT, config: TrainConfig, dtype: torch.dtype = torch.float32, compiled: bool = False
) -> Optimizer:
    """Return the optimizer of all parameters that are not frozen.

    Muon trains each matrix, wherever it is, but the weights of an nn.Embedding and of the head. Weight decay applies to
    matrices, with Muon to its own alone; never to what has another number of dimensions (biases, norms). A group's
    "lr_share" is its part of the learning rate. dtype is the precision of training. Muon's iteration has the same,
    except that it is float32 for float16, whose range is too small. compiled: whether Muon's update is, but of shards.
    """
    kinds = {model.lm_head.weight: "head"}
    kinds |= {part.weight: "embedding" for part in model.modules() if isinstance(part, nn.Embedding)}  # or a tied head
    parts = defaultdict(list)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parts[kinds.get(parameter, "matrix") if parameter.dim() == 2 else "other"].append(parameter)
    others = parts.pop("other", [])
    options = {"lr": config.learning_rate, "betas": (0.9, config.beta2)}
    if config.optimizer == "adamw":
        groups = [{"params": sum(parts.values(), [])}, {"params": others, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, weight_decay=config.weight_decay, fused=True, **options)
    groups = [
        {"params": others, "lr_share": config.vector_rate},
        {"params": parts["head"], "lr_share": config.head_rate},
        {"params": parts["embedding"], "lr_share": config.embedding_rate},
    ]
    precision = torch.float32 if dtype == torch.float16 else dtype
    compiled = compiled and config.parallel == "ddp"
    return Muon(parts["matrix"], config.weight_decay, groups, precision, compiled, **options)


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
        if "momentum" in group:  # begins lower, because the first gradients are soon out of date
            risen = min(1.0, step / MOMENTUM_STEPS)
            group["momentum"] = FIRST_MOMENTUM + (config.momentum - FIRST_MOMENTUM) * risen


def clip_gradients(model: GPT, most: float) -> Tensor:
    """Scale the gradients down to a norm of at most `most`, and return the norm that they had. 0: as they are."""
    return gather_tensor(torch.nn.utils.clip_grad_norm_(model.parameters(), most or math.inf))


def orthogonalize(matrices: Tensor) -> Tensor:
    """Return nearly the nearest orthogonal matrices, (n, rows, columns), by a Newton-Schulz iteration.

    The iteration has the precision of its input.
    """
    tall = matrices.size(-2) > matrices.size(-1)
    x = matrices.mT if tall else matrices  # the products are of the shorter side
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        square = x @ x.mT
        polynomial = torch.baddbmm(square, square, square, beta=B, alpha=C)  # B square + C square square
        x = torch.baddbmm(x, polynomial, x, beta=A)
    return x.mT if tall else x


class Muon(torch.optim.AdamW):
    """Muon for some matrices, in stacks of equal shape, and fused AdamW for all other parameters.

    Args:
        matrices: the parameters for Muon.
        weight_decay: that of `matrices`; the others have none.
        groups: the parameter groups for AdamW.
        precision: of the Newton-Schulz iteration, float32 or bfloat16.
        compiled: whether to compile the update of a stack: ten seconds once, and then 1.5 ms a step less for GPT-2
            small (benchmarks/results/gpu_nvidia-h100-80gb-hbm3_2026-11-26.md).
        options: the other options of AdamW.
    """

    def __init__(
        self,
        matrices: list[nn.Parameter],
        weight_decay: float,
        groups: list[dict],
        precision: torch.dtype,
        compiled: bool = False,
        **options: object,
    ):
        super().__init__(groups, weight_decay=0.0, fused=True, **options)
        self._step_supports_amp_scaling = False  # float16's scaler skips a step itself, which fused AdamW does for it
        self.precision = precision
        self.compiled = torch.compile(update, dynamic=False) if compiled else None
        self.adamw_groups = list(self.param_groups)
        by_shape = defaultdict(list)
        for matrix in matrices:
            by_shape[matrix.shape].append(matrix)
        for alike in by_shape.values():
            stack = torch.stack([torch.zeros_like(matrix) for matrix in alike])
            group = {"params": alike, "weight_decay": weight_decay, "momentum": FIRST_MOMENTUM, "stack": stack}
            self.add_param_group(group)
            for matrix, momentum in zip(alike, stack, strict=True):
                self.state[matrix]["momentum"] = momentum  # a view of the stack

    # As decorated, this and `step` import torch's compiler, which takes a second.
    add_param_group = Optimizer.add_param_group.__wrapped__

    @torch.no_grad()
    def step(self) -> None:
        """Update all parameters."""
        groups = self.param_groups
        self.param_groups = self.adamw_groups
        torch.optim.AdamW.step.__wrapped__(self)
        self.param_groups = groups
        for group in groups[len(self.adamw_groups) :]:
            matrices = group["params"]
            gradients = [matrix.grad for matrix in matrices]
            if group["weight_decay"] > 0:
                kept = 1 - torch.tensor(group["lr"] * group["weight_decay"])  # in float32
                torch._foreach_mul_(matrices, kept.item())
            rows, columns = matrices[0].shape
            # The factor makes up for what more rows than columns would lose (Jordan et al. 2024).
            numbers = (group["momentum"], -group["lr"] * max(1, rows / columns) ** 0.5)
            if self.compiled:  # for another number it would be compiled anew
                numbers = [torch.tensor(number) for number in numbers]
            (self.compiled or update)(matrices, gradients, group["stack"], *numbers, self.precision)


def update(
    matrices: list[nn.Parameter],
    gradients: list[Tensor],
    momentum: Tensor,
    beta: float | Tensor,
    rate: float | Tensor,
    precision: torch.dtype,
) -> None:
    """Update matrices of equal shape and their momentum, (n, rows, columns)."""
    gradient = torch.stack(gradients)
    momentum.lerp_(gradient, 1 - beta)
    ahead = gradient.lerp(momentum, beta).to(precision)  # (Nesterov 1983)
    if is_sharded(ahead):  # by rows; each rank orthogonalizes its share of whole matrices
        from torch.distributed.tensor import DTensor, Shard

        whole = orthogonalize(ahead.redistribute(placements=[Shard(0)]).to_local())
        change = DTensor.from_local(whole, ahead.device_mesh, [Shard(0)], shape=ahead.shape, stride=ahead.stride())
        change = change.redistribute(placements=ahead.placements)
    else:
        change = orthogonalize(ahead)
    torch._foreach_add_(matrices, list(change.to(momentum.dtype) * rate))


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
        value = tensor.to(parameter.device, parameter.dtype)
        if is_sharded(parameter) and value.dim() > 0:
            from torch.distributed.tensor import distribute_tensor

            value = distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)
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
