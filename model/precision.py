"""bfloat16, where a machine gains by it."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def precision(device: torch.device) -> torch.dtype:
    """What large products are made in, if bfloat16 is enough for them: bfloat16 where it is fast, else float32."""
    fast = device.type == "cuda" or torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return torch.bfloat16 if fast else torch.float32


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """What autocast makes products in where x is; None if it is off."""
    device = x.device.type
    if device == "meta" or not torch.is_autocast_enabled(device):  # of shapes alone PyTorch refuses to answer
        return None
    return torch.get_autocast_dtype(device)


class BFloat16Linear(nn.Module):
    """A linear layer with its weight in bfloat16, between layers in float32, for a CPU without units for bfloat16.

    To continue a text is to read all weights for each token, which takes half as long if they are half as large. With
    more rows it is the products that take the time, and these are fast in float32 only. What goes in and comes out is
    rounded for any number of rows, so that a text alone has the numbers it has in a batch, but for a last bit at times.
    """

    FEW = 4  # rows that are multiplied in bfloat16 (benchmarks/results/decode_cpu_2026-11-22.md)

    weight: Tensor
    bias: Tensor | None

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.register_buffer("weight", linear.weight.detach().bfloat16())
        self.register_buffer("bias", None if linear.bias is None else linear.bias.detach().bfloat16())

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) -> (..., out), float32."""
        x, weight, bias = x.bfloat16(), self.weight, self.bias
        if x.numel() > self.FEW * x.size(-1):
            x, weight, bias = x.float(), weight.float(), bias if bias is None else bias.float()
        return F.linear(x, weight, bias).bfloat16().float()


def keep_matrices_in_bfloat16(model: nn.Module) -> None:
    """Exchange the linear layers for such, and compute all else in float32.

    To continue texts only: the model can no longer be trained, moved or saved.
    """
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.Linear):
                setattr(module, name, BFloat16Linear(child))
    for parameter in model.parameters():  # embeddings and norms
        parameter.data = parameter.data.float()
