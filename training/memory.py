"""Memory: what a step will need, known before the first one, and a loss that needs less of it."""

import contextlib
import ctypes
import os
import weakref
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from configs import is_out_of_memory
from data.batches import IGNORE
from model import GPT, GPTConfig
from training.config import TrainConfig, TrainError
from training.optimizer import make_optimizer

LOGITS = 1 << 25  # logits at a time, 128 MiB in float32: enough to keep a device busy
MOST_CHUNKS = 16  # of a batch: each is compiled by itself
OVERHEAD = {"cpu": 1.15}  # malloc keeps some of what is freed: 3 to 31 % of what the tensors had were measured
KEPT = 2  # times what is needed at a glance, if malloc keeps all: less was measured
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of mallopt(3)


def chunked_loss(model: GPT, inputs: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy in nats, summed over the (B, T) targets, of which never all have their V logits in memory.

    A chunk of logits is computed, summed up, forgotten, and computed again when its gradient is wanted.
    """
    hidden, targets = model.hidden(inputs).flatten(0, 1), targets.flatten()  # (B, T, C) -> (B * T, C)
    size = max(1, LOGITS // model.config.vocab_size, -(-len(targets) // MOST_CHUNKS))

    def loss(hidden: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(model.logits(hidden).float(), targets, ignore_index=IGNORE, reduction="sum")

    chunks = zip(hidden.split(size), targets.split(size), strict=True)
    return torch.stack([checkpoint(loss, *chunk, use_reentrant=False) for chunk in chunks]).sum()


class Allocated(TorchDispatchMode):
    """Counts the bytes of the tensors that are made while it is on, and the most that were there at once."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.peak, self.known = 0, 0, set()

    def __torch_dispatch__(self, func: Callable, types: tuple, args: tuple = (), kwargs: dict | None = None) -> object:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and id(tensor.untyped_storage()) not in self.known:
                storage = tensor.untyped_storage()
                self.known.add(id(storage))
                self.bytes += storage.nbytes()
                self.peak = max(self.peak, self.bytes)
                weakref.finalize(storage, self.forget, id(storage), storage.nbytes())
        return result

    def forget(self, key: int, size: int) -> None:
        """A storage is gone."""
        self.known.remove(key)
        self.bytes -= size


def memory_line(
    model: GPT,
    config: TrainConfig,
    loss_fn: Callable[[GPT, Tensor, Tensor], Tensor],
    device: torch.device,
    compiled: bool,
    resumed: bool = False,
) -> str:
    """What a step of training needs, of how much, in words."""
    there = memory_there(device)
    if is_small(model, config, device):  # nothing to worry about, and nothing to wait for
        return f"less than {in_gib(KEPT * most_of_step(model, config))} of {in_gib(there)} GiB"
    try:
        needed = memory_of_step(model.config, config, loss_fn, device)
    except Exception as error:  # a layer of somebody's own may need to know what is in its tensors
        return f"not known before the first step ({type(error).__name__}: {str(error).splitlines()[0]:.80})"
    return describe_memory(needed, there, config, compiled, resumed)


def is_small(model: GPT, config: TrainConfig, device: torch.device) -> bool:
    """Whether a step needs so little of the device's memory that it need not be saved."""
    return most_of_step(model, config) < memory_there(device) / 10


def keep_freed_memory(model: GPT, config: TrainConfig, device: torch.device) -> None:
    """Have malloc keep what is freed for the next step, if that is little and malloc is glibc's.

    Else it gives large tensors back to the system, which clears their pages anew for each step: of the quickstart's,
    half of the time where that is slow.
    """
    if device.type == "cpu" and is_small(model, config, device):
        with contextlib.suppress(AttributeError):  # another malloc has no such options
            mallopt = ctypes.CDLL(None).mallopt
            mallopt(M_MMAP_THRESHOLD, 2**30)
            mallopt(M_TRIM_THRESHOLD, 2**31 - 1)


def most_of_step(model: GPT, config: TrainConfig) -> int:
    """More bytes than a step needs, at a glance: what would be kept if everything was, in float32."""
    c, num_parameters = model.config, sum(parameter.numel() for parameter in model.parameters())
    of_token = c.n_layer * (20 * c.n_embd + 12 * c.n_head * c.head_dim + 8 * c.n_inner) + 6 * c.vocab_size
    return 4 * (8 * num_parameters + config.batch_size * c.context_length * of_token)


def memory_of_step(
    model_config: GPTConfig,
    config: TrainConfig,
    loss_fn: Callable[[GPT, Tensor, Tensor], Tensor],
    device: torch.device,
) -> int:
    """The most bytes that weights, gradients, optimizer and activations have at once in a step of training.

    The step is made with tensors that have shapes and no content: the model's own operations say what they allocate,
    in whatever family. What kernels need inside, and what compilation saves, is not in it; what is usual for the
    device's allocator to keep is.
    """
    shape = (config.batch_size, model_config.context_length)
    with FakeTensorMode(allow_non_fake_inputs=True), Allocated() as allocated, torch.device(device):
        model = GPT(model_config)
        model.activation_checkpointing = config.activation_checkpointing
        optimizer = make_optimizer(model, config)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()  # makes its state
        optimizer.zero_grad()
        for _ in range(min(2, config.grad_accum_steps)):  # from the second on there are gradients from the beginning
            inputs, targets = (torch.zeros(shape, dtype=torch.long) for _ in range(2))
            loss_fn(model, inputs, targets).backward()
        optimizer.step()
    return round(allocated.peak * OVERHEAD.get(device.type, 1))


def memory_there(device: torch.device) -> int:
    """Bytes that a process could have on the device; for a CPU, those of the machine."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
    if device.type == "mps":
        return torch.mps.recommended_max_memory()
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def describe_memory(needed: int, there: int, config: TrainConfig, compiled: bool, resumed: bool = False) -> str:
    """One line: what a step needs, of how much, and what to change if that is not enough."""
    line = f"{'up to' if compiled else 'about'} {in_gib(needed)} of {in_gib(there)} GiB"
    if needed <= there:
        return line
    return f"{line}, which may not be enough: try {what_needs_less(config, resumed)}"


def what_needs_less(config: TrainConfig, resumed: bool) -> str:
    """What to try: options that keep the steps as they are; where there are none left, a smaller model."""
    if resumed:
        return "a device with more memory: a resumed run keeps its batches"
    c = config
    advice = [] if c.activation_checkpointing else ["--train.activation_checkpointing true"]
    if parts := next((n for n in range(2, c.batch_size + 1) if c.batch_size % n == 0), 0):
        smaller, more = c.batch_size // parts, c.grad_accum_steps * parts
        advice.append(f"--train.batch_size {smaller} --train.grad_accum_steps {more}")
    return " and ".join(advice or ["a smaller --model.context_length or model"])


@contextlib.contextmanager
def advice_if_out_of_memory(config: TrainConfig, resumed: bool) -> Iterator[None]:
    """Raise TrainError instead of running out of memory, with options that need less."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        less = what_needs_less(config, resumed)
        raise TrainError(f"out of memory with {config.batch_size} sequences at once: try {less}") from error


def in_gib(number: int) -> str:
    return f"{number / 2**30:.{1 if number >= 2**30 else 2}f}"
