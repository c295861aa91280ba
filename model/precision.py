"""Two questions about precision: is bfloat16 fast on a device, and is autocast on?"""

import torch
from torch import Tensor


def precision(device: torch.device) -> torch.dtype:
    """Return the dtype for large products that bfloat16 is exact enough for: bfloat16 if it is fast, else float32."""
    fast = device.type == "cuda" or torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return torch.bfloat16 if fast else torch.float32


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """Return the dtype of matrix products under autocast on the device of x, or None if autocast is off."""
    device = x.device.type
    if device == "meta" or not torch.is_autocast_enabled(device):  # PyTorch raises for meta: it has no autocast
        return None
    return torch.get_autocast_dtype(device)
