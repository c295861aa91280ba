"""Muon: orthogonalized updates for the matrices inside the blocks (Jordan et al. 2024).

The momentum of a matrix is dominated by a few directions. Muon replaces it by the nearest orthogonal matrix, so that
rare directions are learned as fast. Embeddings, head and vectors are trained with AdamW.
"""

from collections import defaultdict

import torch
from torch import Tensor, nn

# Coefficients of a x + b x^3 + c x^5. Applied five times, this polynomial takes singular values from 0.01 to 1 to
# values between 0.7 and 1.2, which is near enough to 1 (Jordan et al. 2024).
A = 3.4445
B = -4.7750
C = 2.0315
FIRST_MOMENTUM = 0.8
MOMENTUM_STEPS = 300  # in which it rises from the first to that of the configuration


def momentum_at(step: int, last: float) -> float:
    """Return the momentum of a step. It begins lower, because the first gradients are soon out of date."""
    return FIRST_MOMENTUM + (last - FIRST_MOMENTUM) * min(1.0, step / MOMENTUM_STEPS)


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

    @torch.no_grad()
    def step(self) -> None:
        """Update all parameters."""
        groups = self.param_groups
        self.param_groups = self.adamw_groups
        super().step()
        self.param_groups = groups
        for group in groups[len(self.adamw_groups) :]:
            matrices = group["params"]
            gradients = [matrix.grad for matrix in matrices]
            if group["weight_decay"] > 0:
                torch._foreach_mul_(matrices, 1 - torch.tensor(group["lr"] * group["weight_decay"]))
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
    change = orthogonalize(ahead).to(momentum.dtype)
    torch._foreach_add_(matrices, list(change * rate))
