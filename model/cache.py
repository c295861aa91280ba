"""The key-value cache: what attention needs of the tokens it has already read, so that they are read only once."""

import torch
from torch import Tensor


class LayerCache:
    """Keys and values of one layer in storage for `capacity` positions, allocated once and filled from the left."""

    def __init__(self, B: int, n_kv_head: int, capacity: int, head_dim: int, dtype: torch.dtype, device: torch.device):
        self.keys = torch.empty(B, n_kv_head, capacity, head_dim, dtype=dtype, device=device)
        self.values = torch.empty_like(self.keys)
        self.length = 0

    def positions(self, T: int) -> slice:
        """Where the next T tokens belong."""
        return slice(self.length, self.length + T)

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store (B, n_kv_head, T, D) behind what is there; return views of everything stored so far."""
        end = self.length + k.size(2)
        self.keys[:, :, self.length : end] = k
        self.values[:, :, self.length : end] = v
        self.length = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def fill(self, rows: list[int], cache: "LayerCache") -> None:
        """Hold what a cache of as many sequences has stored, and nothing else; rows are all of them."""
        self.length = 0
        self.append(cache.keys[:, :, : cache.length], cache.values[:, :, : cache.length])


class StaticCache:
    """Keys and values of one layer for sequences of which each is at a position of its own, one token at a time.

    No shape and no address changes from token to token, so that a step can be compiled, or recorded as a CUDA graph.

    Args:
        like: an empty cache, whose storage is taken.
        position: (B, 1, 1) int64, where the next token of each sequence belongs. The layers share one, and its owner
            counts it up.
    """

    def __init__(self, like: LayerCache, position: Tensor):
        # What is not stored yet has no weight, but zero times what was in memory might be nan.
        self.keys, self.values, self.position = like.keys.zero_(), like.values.zero_(), position

    def fill(self, rows: list[int], cache: LayerCache) -> None:
        """Let these sequences hold what a cache of len(rows) sequences has stored, and nothing else."""
        self.keys[rows, :, : cache.length] = cache.keys[:, :, : cache.length]
        self.values[rows, :, : cache.length] = cache.values[:, :, : cache.length]
        self.position[rows] = cache.length

    def positions(self, T: int) -> Tensor:
        """Where the next token of each sequence belongs; T is 1."""
        return self.position

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store (B, n_kv_head, 1, D); return the whole storage, of which a row of the mask says what is there."""
        rows, places = torch.arange(k.size(0), device=k.device), self.position.flatten()
        self.keys[rows, :, places] = k.squeeze(2).to(self.keys.dtype)  # scatter_, once compiled, would copy all of it
        self.values[rows, :, places] = v.squeeze(2).to(self.values.dtype)
        return self.keys, self.values
