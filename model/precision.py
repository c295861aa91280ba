"""The precision of matrix products: ask which one autocast has chosen, or ask for the exact one."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """Return the dtype of matrix products under autocast on the device of x, or None if autocast is off."""
    device = x.device.type
    if device == "meta" or not torch.is_autocast_enabled(device):  # PyTorch raises for meta: it has no autocast
        return None
    return torch.get_autocast_dtype(device)


@contextmanager
def exact_products(device: torch.device) -> Iterator[None]:
    """Multiply matrices in the precision of their factors: without a GPU's TF32, and without autocast."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        torch.set_float32_matmul_precision(before)
