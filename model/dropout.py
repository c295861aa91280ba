"""Dropout (Srivastava et al. 2014), whose random numbers a CPU draws faster than PyTorch's."""

import torch
from torch import Tensor, nn


class Dropout(nn.Dropout):
    """PyTorch's dropout. On a CPU it draws 16 bits for each element, so that p is rounded to 1 / 65,536.

    PyTorch's took a seventh of a step of configs/shakespeare_char_best.toml
    (benchmarks/results/passes_cpu_2026-11-27.md).
    """

    def forward(self, x: Tensor) -> Tensor:
        """Drop elements with probability p and divide the others by 1 - p, in training."""
        if x.device.type != "cpu" or not self.training or self.p == 0:
            return super().forward(x)
        words = torch.randint(-(2**63), 2**63 - 1, (x.numel() // 4 + 1,))
        bits = words.view(torch.int16)[: x.numel()].view(x.shape)
        kept = bits >= round(self.p * 2**16) - 2**15
        return x * kept.to(x.dtype).div_(1 - self.p)
