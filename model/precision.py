"""The precision of matrix products under autocast."""

import torch
from torch import Tensor


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """Return the dtype of matrix products under autocast on the device of x, or None if autocast is off."""
    device = x.device.type
    if device == "meta" or not torch.is_autocast_enabled(device):  # PyTorch raises for meta: it has no autocast
        return None
    return torch.get_autocast_dtype(device)
