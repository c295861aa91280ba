"""Decode in bfloat16 on a CPU at the speed of its memory, with packed weights.

    with packed(model):
        model.generate(idx, 100)

Each new token reads all weights once. PyTorch also reorders them for the CPU's instructions, each time: a prompt is
read faster as well (benchmarks/results/decode_cpu_2026-11-29.md).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from model.device import has_bfloat16
from model.families import Head


@contextmanager
def packed(model: nn.Module) -> Iterator[None]:
    """Have the linear layers keep a packed copy of their weights, until the context ends.

    It takes the memory of the weights a second time. Results agree up to rounding: on the CPUs that were tried they are
    the same bits. Only weights in bfloat16 on a CPU are copied, and only those of nn.Linear itself and of our head. In
    the context the model must not be changed or copied.
    """
    layers = [module for module in model.modules() if can_be_packed(module)]
    try:
        for layer in layers:
            weight = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach(), 1)  # as torch.compile does
            layer.forward = partial(multiply, layer, weight)
        yield
    finally:
        for layer in layers:
            vars(layer).pop("forward", None)


def can_be_packed(layer: nn.Module) -> bool:
    """Return whether this is a linear layer that `packed` copies, and has not copied yet."""
    if type(layer) not in (nn.Linear, Head) or type(layer.weight) is not nn.Parameter or "forward" in vars(layer):
        return False
    device = layer.weight.device
    return layer.weight.dtype == torch.bfloat16 and device.type == "cpu" and has_bfloat16(device)


def multiply(layer: nn.Linear, weight: Tensor, x: Tensor) -> Tensor:
    """Apply a layer: (..., in_features) -> (..., out_features), by its packed weight if it computes no gradient."""
    if x.dtype != torch.bfloat16 or x.size(-1) != layer.in_features or torch.is_grad_enabled():
        return nn.Linear.forward(layer, x)
    return torch.ops.mkldnn._linear_pointwise.default(x, weight, layer.bias, "none", [], "")  # by name 1 % slower
