"""Decoding by a CUDA graph: one token a call, whose kernels the host does not launch one by one."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from model.cache import LayerCache

# Outside of a graph, cuDNN's kernel would make a new plan for every number of keys. In a graph one query has a mask:
# there cuDNN's is the fastest, and in a precision that it does not have, the formula.
ONE_BY_ONE = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
RECORDED = [SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH]
LIMIT = 0.05  # of the size of logits; 12 layers round by 0.015 of it in bfloat16, where another kernel is used

Read = Callable[[Tensor], Tensor]  # the next tokens, (B, T) -> logits of the token after them, (B, V)


def reader(model: nn.Module, caches: list[LayerCache]) -> Read:
    """Return a function that reads tokens into the caches of a `GPT`. A call may overwrite the logits of the last."""

    @sdpa_kernel(ONE_BY_ONE)
    def read(idx: Tensor) -> Tensor:
        return model.logits(model.hidden(idx, caches)[:, -1])

    def prefill(idx: Tensor) -> Tensor:
        """Read several tokens; a prompt that all rows have is read once."""
        rows = idx[:1] if len(idx) > 1 and (idx == idx[:1]).all() else idx
        return read(rows).expand(len(idx), -1)

    replay = None

    def decode_one_token(token: Tensor) -> Tensor:
        nonlocal replay
        if replay is None:
            logits, replay = record_step(model, caches, token, read)
            return logits
        return replay(token)

    return lambda idx: decode_one_token(idx) if idx.size(1) == 1 else prefill(idx)


def can_record(model: nn.Module, token: Tensor) -> bool:
    """Return whether a graph may be recorded: on CUDA, and if no hook listens, as those of an inspection do."""
    return token.is_cuda and not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())


@dataclass
class StepCache:
    """A `LayerCache` for a step of static shapes, of one token, whose position is a tensor, (1,)."""

    cache: LayerCache
    position: Tensor

    def positions(self, T: int) -> Tensor:
        """Return the position of the token."""
        return self.position

    def store(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store (B, n_kv_head, 1, D) at the position; return all that there is room for, which the mask forbids."""
        for stored, new in ((self.cache.keys, k), (self.cache.values, v)):
            stored.index_copy_(2, self.position, new.to(stored.dtype))
        return self.cache.keys, self.cache.values


def record_step(model: nn.Module, caches: list[LayerCache], token: Tensor, read: Read) -> tuple[Tensor, Read]:
    """Read a token, (B, 1), into the caches. Return its logits, and what reads single tokens from then on.

    That is a graph, or `read` where the two do not agree on this token. A graph repeats what Python has decided once:
    it does not fit a model that asks the host, or one that counts the keys of its caches.
    """
    if not can_record(model, token):
        return read(token), read
    token = token.clone()
    position = torch.full((1,), caches[0].length, device=token.device)
    steps = [StepCache(cache, position) for cache in caches]
    try:
        replay = record(lambda: model.logits(model.hidden(token, steps)[:, -1]))
    except Exception:  # whatever a changed model may do that a graph cannot
        return read(token), read
    replayed = replay()
    logits = read(token)
    agrees = (replayed - logits).norm() < LIMIT * logits.norm()

    def read_one(next_token: Tensor) -> Tensor:
        token.copy_(next_token)
        position.fill_(caches[0].length)
        for cache in caches:
            cache.length += 1
        return replay()

    return logits, read_one if agrees else read


def record(work: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """Record the kernels of `work` as a CUDA graph. Return a function that launches it and returns its output."""
    # A weight that autocast keeps cast would be empty outside of the graph, or no longer there inside of it.
    autocast = torch.autocast("cuda", enabled=torch.is_autocast_enabled("cuda"), cache_enabled=False)
    with sdpa_kernel(RECORDED, set_priority=True), autocast:
        with warnings.catch_warnings(action="ignore"):  # PyTorch calls this a prototype
            torch.cuda.set_sync_debug_mode("error")  # a wait would break the recording, and with it what comes after
        try:
            work()  # what kernels do only once cannot be recorded
        finally:
            torch.cuda.set_sync_debug_mode("default")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = work()

    def replay() -> Tensor:
        graph.replay()
        return output

    return replay
