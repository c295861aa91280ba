"""Memory: a loss that needs less of it, an allocator that keeps it, and advice where it is not enough."""

import contextlib
import ctypes
import os
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from configs.script import is_out_of_memory
from data.batches import IGNORE
from model import GPT
from training.config import TrainConfig, TrainError

LOGITS = 1 << 25  # logits at a time, 128 MiB in float32: enough to keep a device busy
MOST_CHUNKS = 16  # in a batch: torch.compile handles each of them separately
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of mallopt(3)


def chunked_loss(model: GPT, inputs: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy in nats, summed over the (B, T) targets, computed in chunks so that few logits are in memory.

    The logits of a chunk are forgotten once its loss is known, and computed again for the backward pass.
    """
    hidden, targets = model.hidden(inputs).flatten(0, 1), targets.flatten()  # (B, T, C) -> (B * T, C)
    size = max(1, LOGITS // model.config.vocab_size, -(-len(targets) // MOST_CHUNKS))

    def loss(hidden: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(model.logits(hidden).float(), targets, ignore_index=IGNORE, reduction="sum")

    chunks = zip(hidden.split(size), targets.split(size), strict=True)
    return torch.stack([checkpoint(loss, *chunk, use_reentrant=False) for chunk in chunks]).sum()


def keep_freed_memory(model: GPT, config: TrainConfig, device: torch.device) -> None:
    """Have glibc's malloc keep freed memory for the next step, on a CPU, if that is at most a tenth of the machine's.

    By default malloc gives large tensors back to the system, which clears their pages anew in each step: that took up
    to half of the quickstart's time.
    """
    c, num_parameters = model.config, sum(parameter.numel() for parameter in model.parameters())
    per_token = c.n_layer * (20 * c.n_embd + 12 * c.n_head * c.head_dim + 8 * c.n_inner) + 6 * c.vocab_size
    upper_bound = 4 * (8 * num_parameters + config.batch_size * c.context_length * per_token)  # bytes, in float32
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if device.type == "cpu" and upper_bound < machine / 10:
        with contextlib.suppress(AttributeError):  # another malloc has no such options
            mallopt = ctypes.CDLL(None).mallopt
            mallopt(M_MMAP_THRESHOLD, 2**30)
            mallopt(M_TRIM_THRESHOLD, 2**31 - 1)


@contextlib.contextmanager
def advice_if_out_of_memory(config: TrainConfig, resumed: bool) -> Iterator[None]:
    """Turn running out of memory into a TrainError with options that need less, and keep the steps as they are."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        B, options = config.batch_size, []
        if not config.activation_checkpointing:
            options.append("--train.activation_checkpointing true")
        if pieces := next((n for n in range(2, B + 1) if B % n == 0), 0):
            accum = config.grad_accum_steps * pieces
            options.append(f"--train.batch_size {B // pieces} --train.grad_accum_steps {accum}")
        advice = " and ".join(options or ["a smaller --model.context_length or model"])
        if resumed:
            advice = "a device with more memory: a resumed run keeps its batches"
        raise TrainError(f"out of memory with {B} sequences at once: try {advice}") from error
