"""The key-value cache: keys and values of earlier tokens, so that no token is read twice."""

import torch
from torch import Tensor, nn


class LayerCache:
    """Keys and values of one layer, in storage for `capacity` positions that is allocated once and filled in order."""

    def __init__(self, B: int, n_kv_head: int, capacity: int, head_dim: int, dtype: torch.dtype, device: torch.device):
        # Zeros, since a recorded step reads all of it under a mask, and 0 x nan is nan.
        self.keys = torch.zeros(B, n_kv_head, capacity, head_dim, dtype=dtype, device=device)
        self.values = torch.zeros_like(self.keys)
        self.length = 0

    def positions(self, T: int) -> slice:
        """Return the positions of the next T tokens."""
        return slice(self.length, self.length + T)

    def store(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store (B, n_kv_head, T, D) after the earlier positions; return views of all positions."""
        end = self.length + k.size(2)
        self.keys[:, :, self.length : end] = k
        self.values[:, :, self.length : end] = v
        self.length = end
        return self.keys[:, :, :end], self.values[:, :, :end]


def read_in_parts(model: nn.Module, idx: Tensor) -> Tensor:
    """Return the logits of a text that a `GPT` reads in four parts, with a cache: (B, T) -> (B, T, V)."""
    T = idx.size(1)
    caches = model.new_cache(len(idx), T)
    parts = idx.tensor_split((T // 2, T // 2 + 1, T // 2 + 3), dim=1)  # long, single, short, long
    return model.logits(torch.cat([model.hidden(part, caches) for part in parts if part.size(1)], dim=1))
