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
# Layers that read the same tensor, in the order of their calls. One product of queries, keys and values was faster.
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
            together = [[getattr(module, name, None) for name in names] for names in TOGETHER]
            for group in (*together, [module]):
                if not all(map(can_be_packed, group)):
                    continue
                if len({(layer.in_features, layer.bias is None) for layer in group}) == 1:
                    product = Product(group)
                    for number, layer in enumerate(group):
                        layer.forward = partial(product.apply, number)
                        layers.append(layer)
        yield
    finally:
        for layer in layers:
            del layer.forward


def can_be_packed(layer: object) -> bool:
    """Return whether this is a linear layer that `packed` copies, and has not copied yet."""
    if type(layer) not in (nn.Linear, Head) or type(layer.weight) is not nn.Parameter or "forward" in vars(layer):
        return False
    device = layer.weight.device
    return layer.weight.dtype == torch.bfloat16 and device.type == "cpu" and has_bfloat16(device)


class Product:
    """The product of linear layers that read the same tensor, with their packed weights, computed in the first call."""

    def __init__(self, layers: list[nn.Linear]):
        self.layers = layers
        self.sizes = [layer.out_features for layer in layers]
        weight = torch.cat([layer.weight.detach() for layer in layers])
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight, 1)  # as torch.compile does
        self.bias = None if layers[0].bias is None else torch.cat([layer.bias.detach() for layer in layers])
        self.read = None  # what the first layer was given
        self.outputs: list[Tensor] = []  # for the layers after it

    def apply(self, number: int, x: Tensor) -> Tensor:
        """Apply a layer: (..., in_features) -> (..., out_features), by its packed weight if there are few rows."""
        layer = self.layers[number]
        few = x.numel() <= MOST_ROWS * layer.in_features
        if not few or x.dtype != torch.bfloat16 or x.size(-1) != layer.in_features or torch.is_grad_enabled():
            return F.linear(x, layer.weight, layer.bias)
        if number == 0 or x is not self.read:
            product = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
            self.read, self.outputs = x, list(product.split(self.sizes, dim=-1))
        output = self.outputs[number]
        if number == len(self.layers) - 1:
            self.read, self.outputs = None, []
        return output
