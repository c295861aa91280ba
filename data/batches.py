"""Batches as a function of their number: no loader, no workers, no state to save or lose."""

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from errors import UserError

IGNORE = -100  # a target that F.cross_entropy skips
Batch = tuple[Tensor, Tensor]  # inputs and targets


def seed_for(*place: int | str) -> int:
    """Return a 63-bit seed for one purpose at one place of a run, such as (seed, "dropout", step, micro_batch)."""
    return int.from_bytes(hashlib.blake2b(repr(place).encode(), digest_size=8).digest()) >> 1


@dataclass
class Batches:
    """Batches of training sequences. A token is an input at most once in an epoch.

    Each epoch cuts the text at another offset, and draws the sequences in another order. The order of an epoch is kept,
    which takes 8 bytes a sequence.

    Raises UserError if there are fewer than context_length + 1 tokens.
    """

    tokens: np.ndarray
    """(n,) ids, memory-mapped. They are read as a ring: the last sequence may end at the beginning."""
    batch_size: int
    """B of a batch."""
    context_length: int
    """T of a batch."""
    seed: int
    """Decides the offsets and the orders."""

    def __post_init__(self) -> None:
        needed = self.context_length + 1
        if len(self.tokens) < needed:
            raise UserError(
                f"the training split has {len(self.tokens):,} tokens and needs context_length + 1 = {needed:,}: "
                "use more text or a smaller --model.context_length"
            )
        self.sequences_per_epoch = len(self.tokens) // self.context_length
        self.order = lru_cache(maxsize=1)(self.draw_epoch)

    def draw_epoch(self, epoch: int) -> np.ndarray:
        """Return where the sequences of an epoch begin, in the order in which they are drawn, (n,)."""
        random = np.random.default_rng([self.seed, epoch])
        offset = random.integers(self.context_length)
        return random.permutation(self.sequences_per_epoch) * self.context_length + offset

    def __call__(self, batch: int, device: torch.device) -> Batch:
        """Return inputs and targets of the batch with this number, both (B, T) int64. Targets are one token ahead."""
        n = self.sequences_per_epoch
        first = batch * self.batch_size
        starts = [self.order(number // n)[number % n] for number in range(first, first + self.batch_size)]
        places = np.array(starts)[:, None] + np.arange(self.context_length + 1)
        return to_device(self.tokens[places % len(self.tokens)], device)


def validation_batches(
    tokens: np.ndarray, batch_size: int, context_length: int, device: torch.device, rank: int, world: int
) -> Iterator[Batch]:
    """Yield all of `tokens` once, in order: inputs and targets, both (B, T) int64. Targets are padded with IGNORE.

    Each of `world` ranks gets every world-th batch. All get the same number of batches: the last may be padding only.
    """
    num_sequences = math.ceil((len(tokens) - 1) / context_length)
    for first in range(0, num_sequences, batch_size * world):
        numbers = first + rank * batch_size + np.arange(batch_size)
        places = numbers[:, None] * context_length + np.arange(context_length + 1)
        inputs, targets = to_device(tokens[np.minimum(places, len(tokens) - 1)], device)
        beyond = torch.from_numpy(places[:, 1:] >= len(tokens))
        yield inputs, targets.masked_fill(beyond.to(device), IGNORE)


def to_device(sequences: np.ndarray, device: torch.device) -> Batch:
    """Return (B, T + 1) ids as inputs and targets on the device, both (B, T) int64.

    The ids are copied in 2 or 4 bytes each, and become int64 on the device.
    """
    ids = torch.from_numpy(sequences)
    if device.type == "cuda":
        ids = ids.pin_memory()
    ids = ids.to(device, non_blocking=True).long()
    return ids[:, :-1].clone(), ids[:, 1:].clone()  # of memory and strides of their own, for which a loss is compiled
