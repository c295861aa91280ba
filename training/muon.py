"""Muon: orthogonalized updates for the matrices inside the blocks (Jordan et al. 2024).

The momentum of a matrix is dominated by a few directions. Muon replaces it by the nearest orthogonal matrix, so that
rare directions are learned as fast. Embeddings, head and vectors are trained with AdamW.
"""

from collections import defaultdict
from collections.abc import Callable

import torch
from torch import Tensor, nn

from training.sharded import full, is_sharded, local, shard_like

# Coefficients of a x + b x^3 + c x^5. Applied five times, this polynomial takes singular values from 0.01 to 1 to
# values between 0.7 and 1.2, which is near enough to 1 (Jordan et al. 2024).
A, B, C = 3.4445, -4.7750, 2.0315
FIRST_MOMENTUM, LAST_MOMENTUM, MOMENTUM_STEPS = 0.8, 0.95, 300


def momentum_at(step: int) -> float:
    """Return the momentum of a step. It begins lower, because the first gradients are soon out of date."""
    return FIRST_MOMENTUM + (LAST_MOMENTUM - FIRST_MOMENTUM) * min(1.0, step / MOMENTUM_STEPS)


def orthogonalize(matrices: Tensor, steps: int = 5) -> Tensor:
    """Return nearly the nearest orthogonal matrices, (n, rows, columns), by a Newton-Schulz iteration.

    The iteration has the precision of its input.
    """
    x = matrices.mT if matrices.size(-2) > matrices.size(-1) else matrices  # the products are of the shorter side
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        square = x @ x.mT
        polynomial = torch.baddbmm(square, square, square, beta=B, alpha=C)  # B square + C square square
        x = torch.baddbmm(x, polynomial, x, beta=A)
    return x.mT if matrices.size(-2) > matrices.size(-1) else x


class Muon(torch.optim.AdamW):
    """Muon for some matrices, in stacks of equal shape, and fused AdamW for all other parameters.

    Like fused AdamW, it skips the update while `found_inf` is not zero, and decides so on the device.

    Args:
        matrices: the parameters for Muon.
        groups: the parameter groups for AdamW.
        precision: of the Newton-Schulz iteration, float32 or bfloat16.
    """

    def __init__(
        self,
        matrices: list[nn.Parameter],
        groups: list[dict],
        lr: float,
        weight_decay: float,
        precision: torch.dtype,
        **options: object,
    ):
        super().__init__(groups, lr=lr, fused=True, **options)
        self.precision = precision
        by_shape = defaultdict(list)
        for matrix in matrices:
            by_shape[matrix.shape].append(matrix)
        self.adamw_groups = list(self.param_groups)
        self.momenta = []
        for alike in by_shape.values():
            self.add_param_group({"params": alike, "weight_decay": weight_decay, "momentum": FIRST_MOMENTUM})
            self.momenta.append(torch.stack([torch.zeros_like(local(matrix)) for matrix in alike]))
            for parameter, momentum in zip(alike, self.momenta[-1], strict=True):
                self.state[parameter]["momentum"] = as_shard(momentum, parameter)  # a view of the stack

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        """Update all parameters."""
        all_groups, self.param_groups = self.param_groups, self.adamw_groups
        try:
            super().step(closure)
        finally:
            self.param_groups = all_groups
        found_inf = getattr(self, "found_inf", None)
        for group, momentum in zip(self.param_groups[len(self.adamw_groups) :], self.momenta, strict=True):
            matrices = group["params"]
            rate = group["lr"]
            parameters = [local(matrix) for matrix in matrices]
            enabled = torch.ones((), device=momentum.device) if found_inf is None else (found_inf == 0).float()
            gradient = torch.stack([local(matrix.grad) for matrix in matrices])
            gradient = gradient.where(enabled > 0, momentum)
            momentum.lerp_(gradient, 1 - group["momentum"])  # if the update is skipped, the two are equal
            ahead = gradient.lerp(momentum, group["momentum"]).to(self.precision)  # (Nesterov 1983)
            if is_sharded(matrices[0]):  # each rank gathers one matrix at a time, and keeps its own rows of the update
                whole = (full(as_shard(part, matrix))[None] for part, matrix in zip(ahead, matrices, strict=True))
                update = [shard_like(orthogonalize(x)[0], matrix) for x, matrix in zip(whole, matrices, strict=True)]
                update = torch.stack([local(part) for part in update])
            else:
                update = orthogonalize(ahead).to(momentum.dtype)
            rows, columns = matrices[0].shape
            # The factor makes up for what more rows than columns would lose (Jordan et al. 2024).
            update = list(update * (-rate * max(1, rows / columns) ** 0.5 * enabled))
            torch._foreach_mul_(parameters, 1 - rate * group["weight_decay"] * enabled)
            torch._foreach_add_(parameters, update)


def as_shard(tensor: Tensor, parameter: Tensor) -> Tensor:
    """Wrap this process's shard of a tensor as a DTensor like the parameter, if that is sharded."""
    if not is_sharded(parameter):
        return tensor
    from torch.distributed.tensor import DTensor

    shape = {"run_check": False, "shape": parameter.shape, "stride": parameter.stride()}
    return DTensor.from_local(tensor, parameter.device_mesh, parameter.placements, **shape)
