"""Model FLOPs utilization (MFU): the FLOPs that training needs, as a share of those that its devices can do.

They are counted as PaLM's are (Chowdhery et al. 2022, appendix B): what the model needs, not what computing it took. So
activations that are computed twice count once, and all T x T scores count, although a causal kernel leaves out half.
"""

import time

import torch

from model import GPT


def flops_per_token(model: GPT) -> int:
    """Return the FLOPs of training on a token: 6 N + 12 L H D T. N: the parameters of the blocks and the head.

    Each parameter takes 2 forward and 4 backward, and so does each product of two numbers in the scores and in the sums
    of values.
    """
    c = model.config
    N = sum(parameter.numel() for parameter in [*model.blocks.parameters(), model.lm_head.weight])
    return 6 * N + 12 * c.n_layer * c.n_head * c.head_dim * c.context_length


def product_flops(device: torch.device, dtype: torch.dtype, n: int = 8192) -> float:
    """Return the FLOP/s of products of (n, n) matrices. On an H100 they should take some 50 ms, by arithmetic."""
    a = torch.randn(n, n, device=device, dtype=dtype)
    for calls in (3, 30):  # the first calls load and choose a kernel, and leave the device idle
        began = time.perf_counter()
        for _ in range(calls):
            a @ a
        torch.get_device_module(device).synchronize()
    return calls * 2 * n**3 / (time.perf_counter() - began)
