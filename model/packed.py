"""Packed weights: continue a text in bfloat16 on a CPU as fast as its memory gives the weights.

    with packed(model):
        model.generate(idx, 100)

A token reads all weights once. PyTorch first brings them into the order of the CPU's instructions, anew for each token.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.device import has_bfloat16
from model.gpt import Head

MOST_ROWS = 16  # of a product with packed weights: with more rows, as in a prompt, sums may round differently


@contextmanager
def packed(model: nn.Module) -> Iterator[None]:
    """Have the linear layers keep a packed copy of their weights, until the context ends. The results are the same.

    Only weights in bfloat16 on a CPU are copied, and only those of nn.Linear itself and of our head. The weights must
    not be changed in the context.
    """
    layers = [
        module
        for module in model.modules()
        if type(module) in (nn.Linear, Head)
        and module.weight.dtype == torch.bfloat16
        and module.weight.device.type == "cpu"
        and has_bfloat16(module.weight.device)
    ]
    for layer in layers:
        weight = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach(), 1)  # torch.compile calls it too
        layer.forward = partial(apply, layer, weight)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def apply(layer: nn.Linear, weight: Tensor, x: Tensor) -> Tensor:
    """Apply a linear layer: (..., in_features) -> (..., out_features). weight is the packed one, for few rows."""
    if torch.is_grad_enabled() or x.numel() > MOST_ROWS * layer.in_features:
        return F.linear(x, layer.weight, layer.bias)
    return torch.ops.mkldnn._linear_pointwise(x, weight, layer.bias, "none", [], "")
