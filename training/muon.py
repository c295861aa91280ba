"""Muon: orthogonalized updates for the matrices inside the blocks (Jordan et al. 2024).

The momentum of a matrix is dominated by a few directions. Muon replaces it by the nearest orthogonal matrix, so that
rare directions are learned as fast. Embeddings, head and vectors are trained with AdamW.
"""

from collections import defaultdict

import torch
from torch import Tensor, nn

from training.sharded import from_own_shard, gather_tensor, is_sharded, own_shard, shard_like

# Coefficients of a x + b x^3 + c x^5. Applied five times, this polynomial takes singular values from 0.01 to 1 to
# values between 0.7 and 1.2, which is near enough to 1 (Jordan et al. 2024).
A = 3.4445
B = -4.7750
C = 2.0315
FIRST_MOMENTUM = 0.8
LAST_MOMENTUM = 0.9  # for batches as small as a CPU's (benchmarks/results/first_run_cpu_2026-11-26.md)
MOMENTUM_STEPS = 300  # in which it rises from the first to the last


def momentum_at(step: int) -> float:
    """Return the momentum of a step. It begins lower, because the first gradients are soon out of date."""
    return FIRST_MOMENTUM + (LAST_MOMENTUM - FIRST_MOMENTUM) * min(1.0, step / MOMENTUM_STEPS)


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

    Like fused AdamW, it skips the update while `found_inf` is not zero, and decides so on the device.

    Args:
        matrices: the parameters for Muon.
        weight_decay: that of `matrices`; the others have none.
        groups: the parameter groups for AdamW.
        precision: of the Newton-Schulz iteration, float32 or bfloat16.
        compiled: whether to compile the update of a stack, unless it is sharded: ten seconds once, and then 1.5 ms a
            step less for GPT-2 small (benchmarks/results/gpu_nvidia-h100-80gb-hbm3_2026-11-26.md).
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
        self.precision = precision
        self.compiled = (
            torch.compile(update, dynamic=False) if compiled and not any(map(is_sharded, matrices)) else None
        )
        self.adamw_groups = list(self.param_groups)
        by_shape = defaultdict(list)
        for matrix in matrices:
            by_shape[matrix.shape].append(matrix)
        for alike in by_shape.values():
            stack = torch.stack([torch.zeros_like(own_shard(matrix)) for matrix in alike])
            group = {"params": alike, "weight_decay": weight_decay, "momentum": FIRST_MOMENTUM, "stack": stack}
            self.add_param_group(group)
            for matrix, momentum in zip(alike, stack, strict=True):
                self.state[matrix]["momentum"] = from_own_shard(momentum, matrix)  # a view of the stack

    @torch.no_grad()
    def step(self) -> None:
        """Update all parameters."""
        groups = self.param_groups
        self.param_groups = self.adamw_groups
        super().step()
        self.param_groups = groups
        for group in groups[len(self.adamw_groups) :]:
            matrices = group["params"]
            momentum = group["stack"]
            parameters = [own_shard(matrix) for matrix in matrices]
            gradients = [own_shard(matrix.grad) for matrix in matrices]
            enabled = (getattr(self, "found_inf", momentum.new_zeros(())) == 0).float()
            if group["weight_decay"] > 0:
                torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"] * enabled)
            rows, columns = matrices[0].shape
            # The factor makes up for what more rows than columns would lose (Jordan et al. 2024).
            numbers = (group["momentum"], -group["lr"] * max(1, rows / columns) ** 0.5)
            if self.compiled:  # for another number it would be compiled anew
                numbers = [torch.tensor(number) for number in numbers]
            (self.compiled or update)(matrices, parameters, gradients, momentum, enabled, *numbers, self.precision)


def update(
    matrices: list[nn.Parameter],
    parameters: list[Tensor],
    gradients: list[Tensor],
    momentum: Tensor,
    enabled: Tensor,
    beta: float | Tensor,
    rate: float | Tensor,
    precision: torch.dtype,
) -> None:
    """Update matrices of equal shape, of which this rank has `parameters`, and their momentum, if `enabled` is 1."""
    gradient = torch.stack(gradients).where(enabled > 0, momentum)
    momentum.lerp_(gradient, 1 - beta)  # if the update is skipped, the two are equal
    ahead = gradient.lerp(momentum, beta).to(precision)  # (Nesterov 1983)
    if is_sharded(matrices[0]):  # each rank gathers one matrix at a time, and keeps its own rows of the update
        change = torch.empty_like(momentum)
        for part, matrix, own in zip(ahead, matrices, change, strict=True):
            whole = gather_tensor(from_own_shard(part, matrix))
            own.copy_(own_shard(shard_like(orthogonalize(whole[None])[0], matrix)))
    else:
        change = orthogonalize(ahead).to(momentum.dtype)
    torch._foreach_add_(parameters, list(change * (rate * enabled)))
