"""Decoding by a CUDA graph: one token a call, whose kernels the host does not launch one by one."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from model.attention import CausalSelfAttention
from model.cache import LayerCache
from model.families import autocast_dtype

# Outside of a graph, cuDNN's kernel would make a new plan for every number of keys. In a graph one query has a mask:
# there cuDNN's is the fastest, and in a precision that it does not have, the formula.
ONE_BY_ONE = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
RECORDED = [SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH]
ROOM = 256  # caches have a multiple of it, so that texts of other lengths can use the same graph
LIMIT = 0.05  # of the size of logits; 12 layers round by 0.015 of it in bfloat16, where another kernel is used

KEPT = WeakKeyDictionary()  # model -> {key of its last graph: (its caches, its stacks, what reads a token by it)}
Read = Callable[[Tensor], Tensor]  # the next tokens, (B, T) -> logits of the token after them, (B, V)
Stacks = dict[Tensor, tuple[Tensor, slice]]  # a weight or bias -> a copy of it and its neighbours, and its rows there


@contextmanager
def reader(model: nn.Module, idx: Tensor, capacity: int) -> Iterator[tuple[list[LayerCache], Read]]:
    """Yield the empty caches of a text that begins with idx, and a function by which a `GPT` reads tokens into them.

    A call may overwrite the logits of the last. A graph and its caches are kept for the model's next text, but not in
    training, which needs the memory. Weights may be written between texts, not within one.
    """
    key = None
    if can_record(model, idx):
        capacity = min(capacity + -capacity % ROOM, model.config.context_length)
        # What a graph has decided once. It reads what is written into a weight, and not a tensor in its place.
        key = (
            len(idx),
            capacity,
            autocast_dtype(idx),
            torch.get_float32_matmul_precision(),
            *((tensor.data_ptr(), tensor.stride()) for tensor in (*model.parameters(), *model.buffers())),
            *(id(value) for part in model.modules() for value in vars(part).values()),
        )
    # Taken out, so that no other text uses it meanwhile.
    caches, stacks, step = key and KEPT.pop(model, {}).get(key) or (model.new_cache(len(idx), capacity), {}, None)
    for part, (stack, rows) in stacks.items():
        stack[rows] = part

    def read(idx: Tensor) -> Tensor:
        return model.logits(model.hidden(idx, caches)[:, -1])

    if model.device.type == "cuda":  # on a CPU the choice of a kernel takes 2 % of a token
        read = sdpa_kernel(ONE_BY_ONE)(read)

    def read_next(idx: Tensor) -> Tensor:
        """Read one token by a graph, or several, which are read once if all rows have them."""
        nonlocal step
        if idx.size(1) > 1:
            rows = idx[:1] if len(idx) > 1 and (idx == idx[:1]).all() else idx
            return read(rows).expand(len(idx), -1)
        if step is None:
            step = record_step(model, caches, stacks, idx, read) if key else read
        return step(idx)

    try:
        yield caches, read_next
    finally:
        if step not in (None, read) and not model.training:
            for cache in caches:
                cache.length = 0
                cache.keys.zero_()  # no mask would hide a nan of this text from the next
                cache.values.zero_()
            KEPT[model] = {key: (caches, stacks, step)}


def can_record(model: nn.Module, token: Tensor) -> bool:
    """Return whether a graph may be recorded: on CUDA, and if no hook listens, as those of an inspection do."""
    return token.is_cuda and not any(
        part._forward_hooks or part._forward_pre_hooks or "forward" in vars(part) for part in model.modules()
    )


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


def make_stacks(model: nn.Module) -> Stacks:
    """Return copies of the weights of queries, keys and values of each layer as one tensor, and of the biases."""
    stacks = {}
    for layer in model.modules():
        if isinstance(layer, CausalSelfAttention):
            for parts in zip(*(each.parameters() for each in (layer.q_proj, layer.k_proj, layer.v_proj)), strict=False):
                if len({part.shape[1:] for part in parts}) > 1:  # one layer has an adapter, whose parameters are others
                    continue
                stack, end = torch.cat(parts), 0
                for part in parts:
                    stacks[part] = stack, slice(end, end := end + len(part))
    return stacks


class FewKernels(TorchFunctionMode):
    """Computes once what a step repeats: fewer kernels, and the same numbers up to rounding.

    Layers of one input whose weights are stacked are one product. Rows that all layers read, of the mask and of the
    rotary tables, are read once, and the mask is made the numbers that a kernel adds to the scores. Nothing else is
    remembered: a model may write into a tensor, such as the residual stream, between two calls with it.
    """

    def __init__(self, stacks: Stacks, position: Tensor):
        super().__init__()
        self.stacks = stacks
        self.rows = {position}  # and what was read by it
        self.results = {}

    def once(self, function: Callable, *args: object, **kwargs: object) -> Tensor:
        """Return what the function returned in the first call with these."""
        key = (function, *(leaf if isinstance(leaf, Tensor) else str(leaf) for leaf in tree_leaves((args, kwargs))))
        if key not in self.results:
            self.results[key] = function(*args, **kwargs)
        return self.results[key]

    def __torch_function__(self, func: Callable, types: object, args: tuple = (), kwargs: dict | None = None) -> object:
        if func is F.linear and len(args) == 3 and args[1] in self.stacks:
            x, weight, bias = args
            stack, columns = self.stacks[weight]
            biases, places = (None, columns) if bias is None else self.stacks.get(bias, (None, None))
            if places == columns:  # not so if a weight is tied to another with a bias of its own, or has an adapter
                return self.once(F.linear, x, stack, biases)[..., columns]
        if func is F.scaled_dot_product_attention and {*args[3:4]} & self.rows and args[3].dtype == torch.bool:
            numbers = self.once(torch.where, args[3], 0.0, -torch.inf)
            args = (*args[:3], self.once(Tensor.to, numbers, args[0].dtype), *args[4:])
        kwargs = kwargs or {}
        if func in (Tensor.__getitem__, Tensor.to) and {*filter(torch.is_tensor, tree_leaves(args))} & self.rows:
            rows = self.once(func, *args, **kwargs)
            self.rows.add(rows)
            return rows
        return func(*args, **kwargs)


def record_step(model: nn.Module, caches: list[LayerCache], stacks: Stacks, token: Tensor, read: Read) -> Read:
    """Return what reads single tokens, such as this one, (B, 1), into the caches, which stay as they are. Fill stacks.

    That is a graph, or `read` where the two do not agree on this token. A graph repeats what Python has decided once:
    it does not fit a model that asks the host, or one that counts the keys of its caches.
    """
    token = token.clone()
    position = token.new_full((1,), caches[0].length)
    steps = [StepCache(cache, position) for cache in caches]

    def work() -> Tensor:
        with FewKernels(stacks, position):
            return model.logits(model.hidden(token, steps)[:, -1])

    try:
        stacks |= make_stacks(model)
        replay = record(work)
    except Exception:  # whatever a changed model may do that a graph cannot
        return read
    replayed = replay()
    logits = read(token)
    for cache in caches:
        cache.length -= 1

    def read_one(next_token: Tensor) -> Tensor:
        token.copy_(next_token)
        position.fill_(caches[0].length)
        for cache in caches:
            cache.length += 1
        return replay()

    return read_one if (replayed - logits).norm() < LIMIT * logits.norm() else read


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
