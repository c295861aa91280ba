"""Decode in bfloat16 on a CPU at the speed of its memory, with packed weights.

    with packed(model):
        model.generate(idx, 100)

Each new token reads all weights once. PyTorch also reorders them for the CPU's instructions, each time.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.device import has_bfloat16
from model.gpt import Head

MOST_ROWS = 16  # of an input that is multiplied by packed weights; a prompt has more
# Layers that read the same tensor. One product of queries, keys and values was faster.
TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


@contextmanager
def packed(model: nn.Module) -> Iterator[None]:
    """Have the linear layers keep a packed copy of their weights, until the context ends.

    It takes the memory of the weights a second time. Results agree up to rounding: on the CPUs that were tried they are
    the same bits. Only weights in bfloat16 on a CPU are copied, and only those of nn.Linear itself and of our head. In
    the context the model must not be changed, copied, or called by two threads at once.
    """
    layers = []
    try:
        for module in model.modules():
            groups = [[getattr(module, name, None) for name in names] for names in TOGETHER]
            for group in (*groups, [module]):
                if can_be_packed(group):
                    product = Product(group)
                    for layer in group:
                        layer.forward = partial(product.apply, layer)
                    layers += group
        yield
    finally:
        for layer in layers:
            del layer.forward


def can_be_packed(group: list) -> bool:
    """Return whether these are linear layers that `packed` copies, and has not copied yet, and can be one product."""
    for layer in group:
        if type(layer) not in (nn.Linear, Head) or type(layer.weight) is not nn.Parameter or "forward" in vars(layer):
            return False
        if layer.weight.dtype != torch.bfloat16 or layer.weight.device.type != "cpu":
            return False
    return has_bfloat16(torch.device("cpu")) and len({(each.in_features, each.bias is None) for each in group}) == 1


class Product:
    """The product of layers that read the same tensor: whichever is called first computes it, and each takes its part.

    A part is taken once. A layer that finds none, or another tensor, computes the product anew, so that the order of
    calls changes nothing.
    """

    def __init__(self, layers: list[nn.Linear]):
        self.layers = layers
        weight = torch.cat([layer.weight.detach() for layer in layers])
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight, 1)  # as torch.compile does
        self.bias = None if layers[0].bias is None else torch.cat([layer.bias.detach() for layer in layers])
        self.sizes = [layer.out_features for layer in layers]
        self.read: Tensor | None = None
        self.parts: dict[nn.Linear, Tensor] = {}

    def apply(self, layer: nn.Linear, x: Tensor) -> Tensor:
        """Apply a layer: (..., in_features) -> (..., out_features), by its packed weight if there are few rows."""
        few = x.numel() <= MOST_ROWS * layer.in_features
        if not few or x.dtype != torch.bfloat16 or x.size(-1) != layer.in_features or torch.is_grad_enabled():
            return F.linear(x, layer.weight, layer.bias)
        if x is not self.read or layer not in self.parts:
            product = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
            if len(self.layers) == 1:
                return product
            self.read = x
            self.parts = dict(zip(self.layers, product.split(self.sizes, dim=-1), strict=True))
        return self.parts.pop(layer)
