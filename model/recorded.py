"""Decoding by a CUDA graph: one token a call, without launching each kernel from the host."""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from model.cache import LayerCache

# An attention kernel that takes a mask needs 50 us for each 1,024 keys that there is room for, on an H100
# (benchmarks/results/gpu_nvidia-h100-80gb-hbm3_2026-11-26.md). Beyond this a fast host may be faster without a graph.
MOST_KEYS = 2048


def can_record(model: nn.Module, cache: LayerCache) -> bool:
    """Return whether a step can be recorded, and pays: on CUDA, if it gathers no shards and calls no hooks."""
    hooked = any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    sharded = hasattr(model.lm_head.weight, "full_tensor")
    return cache.keys.is_cuda and cache.keys.size(2) <= MOST_KEYS and not sharded and not hooked


@dataclass
class StepCache:
    """A `LayerCache` for a step with static shapes, of one token, whose position is a tensor, (1,).

    mask is (1, T_key): what is added to the scores. It forbids the keys that are not there yet.
    """

    cache: LayerCache
    position: Tensor
    mask: Tensor

    def positions(self, T: int) -> Tensor:
        """Return the position of the token."""
        return self.position

    def store(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store (B, n_kv_head, 1, D) at the position; return all that there is room for."""
        for stored, new in ((self.cache.keys, k), (self.cache.values, v)):
            stored.index_copy_(2, self.position, new.to(stored.dtype))
        return self.cache.keys, self.cache.values


def recorded_step(model: nn.Module, caches: list[LayerCache]) -> Callable[[Tensor], Tensor]:
    """Return a function that reads one token more into the caches: (B, 1) -> logits of the next, (B, V).

    Call this while the caches are empty, and the function in the same dtype of autocast. It overwrites the logits that
    it returned before.
    """
    keys = caches[0].keys
    token = keys.new_zeros(len(keys), 1, dtype=torch.int64)
    position = torch.zeros_like(token[0])

    def step() -> Tensor:
        @functools.cache
        def row(mask: Tensor) -> Tensor:  # once for all layers that share a mask
            return torch.where(mask[position, : keys.size(2)], 0.0, float("-inf")).to(keys.dtype)

        pairs = zip(caches, model.blocks, strict=True)
        steps = [StepCache(cache, position, row(block.attention.causal_mask)) for cache, block in pairs]
        return model.logits(model.hidden(token, steps)[:, -1])

    launch = record(step)

    def read(next_token: Tensor) -> Tensor:
        token.copy_(next_token)
        position.fill_(caches[0].length)
        for cache in caches:
            cache.length += 1
        return launch()

    return read


def record(work: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """Record the kernels of `work` as a CUDA graph. Return a function that launches it and returns its output."""
    # A weight that autocast keeps cast would be empty outside of the graph, or no longer there inside of it.
    with torch.autocast("cuda", enabled=torch.is_autocast_enabled("cuda"), cache_enabled=False):
        work()  # what kernels do only once cannot be recorded
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = work()

    def replay() -> Tensor:
        graph.replay()
        return output

    return replay
