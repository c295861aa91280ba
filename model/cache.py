"""The key-value cache: keys and values of earlier tokens, so that no token is read twice."""

import torch
from torch import Tensor


class LayerCache:
    """Keys and values of one layer, in storage that is allocated once and filled in order.

    zeros: for the keys, (B, n_kv_head, capacity, D). A recorded step reads all of it, masked, and 0 x nan is nan.
    """

    def __init__(self, zeros: Tensor):
        self.keys = zeros
        self.values = torch.zeros_like(zeros)
        self.length = 0

    def positions(self, T: int) -> slice:
        """Return the positions of the next T tokens."""
        return slice(self.length, self.length + T)

    def store(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store (B or 1 for all, n_kv_head, T, D) after the earlier positions; return views of all positions."""
        end = self.length + k.size(2)
        self.keys[:, :, self.length : end] = k
        self.values[:, :, self.length : end] = v
        self.length = end
        return self.keys[: len(k), :, :end], self.values[: len(k), :, :end]
