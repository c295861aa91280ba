"""Batches as a function of their number: no loader, no workers, no state to save or lose."""

import hashlib
import math
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from errors import UserError

IGNORE = -100  # a target that F.cross_entropy skips
Batch = tuple[Tensor, Tensor]  # inputs and targets


def seed_for(*place: int | str) -> int:
    """Return a 63-bit seed for one purpose at one place of a run, such as (seed, "dropout", step, micro_batch)."""
    return int.from_bytes(hashlib.blake2b(repr(place).encode(), digest_size=8).digest()) >> 1


def permute(index: np.ndarray, size: int, seed: int) -> np.ndarray:
    """Evaluate a random permutation of range(size) at the given indices, without storing it.

    A Feistel network permutes all numbers of an even number of bits (Luby and Rackoff 1988). A result outside of the
    range is permuted again until it is inside ("cycle walking", Black and Rogaway 2002).
    """
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    keys = [seed_for(seed, round) for round in range(6)]
    index = index.astype(np.uint64)  # and so is every array below
    outside = np.ones(len(index), dtype=bool)
    while outside.any():
        left = index[outside] >> half
        right = index[outside] & mask
        for key in keys:
            mixed = (right ^ key) * 0x9E3779B97F4A7C15
            mixed = (mixed ^ (mixed >> 32)) * 0xD6E8FEB86659FD93
            left, right = right, left ^ ((mixed >> 40) & mask)
        index[outside] = left << half | right
        outside = index >= size
    return index.astype(np.int64)


class Batches:
    """Batches of training sequences. A token is an input at most once in an epoch.

    Each epoch cuts the text at another offset, and draws the sequences in another order.

    Args:
        tokens: (n,) ids, memory-mapped. They are read as a ring: the last sequence may end at the beginning.
        batch_size, context_length: B and T of a batch.
        seed: decides the offsets and the orders.

    Raises UserError if there are fewer than context_length + 1 tokens.
    """

    def __init__(self, tokens: np.ndarray, batch_size: int, context_length: int, seed: int):
        if len(tokens) < context_length + 1:
            raise UserError(
                f"the training split has {len(tokens):,} tokens and needs context_length + 1 = {context_length + 1:,}: "
                "use more text or a smaller --model.context_length"
            )
        self.tokens = tokens
        self.batch_size = batch_size
        self.context_length = context_length
        self.seed = seed
        self.sequences_per_epoch = len(tokens) // context_length

    def starts(self, batch: int) -> np.ndarray:
        """Return where the sequences of the batch with this number begin, (B,)."""
        drawn = batch * self.batch_size + np.arange(self.batch_size)
        epochs, numbers = np.divmod(drawn, self.sequences_per_epoch)
        starts = np.empty_like(drawn)
        for epoch in np.unique(epochs).tolist():  # one, or more where an epoch ends inside the batch
            here = epochs == epoch
            order = permute(numbers[here], self.sequences_per_epoch, seed_for(self.seed, "order", epoch))
            offset = seed_for(self.seed, "offset", epoch) % self.context_length
            starts[here] = order * self.context_length + offset
        return starts

    def __call__(self, batch: int, device: torch.device) -> Batch:
        """Return inputs and targets of the batch with this number, both (B, T) int64. Targets are one token ahead."""
        places = self.starts(batch)[:, None] + np.arange(self.context_length + 1)
        return to_device(self.tokens[places % len(self.tokens)], device)


def validation_batches(
    tokens: np.ndarray, batch_size: int, context_length: int, device: torch.device, rank: int = 0, world: int = 1
) -> Iterator[Batch]:
    """Yield all of `tokens` once, in order: inputs and targets, both (B, T) int64. Targets are padded with IGNORE.

    Each of `world` ranks gets every world-th batch. All get the same number of batches: the last may be padding only.
    """
    num_sequences = math.ceil((len(tokens) - 1) / context_length)
    for first in range(0, num_sequences, batch_size * world):
        numbers = first + rank * batch_size + np.arange(batch_size)
        places = numbers[:, None] * context_length + np.arange(context_length + 1)
        inputs, targets = to_device(tokens[np.minimum(places, len(tokens) - 1)], device)
        beyond = places[:, 1:] >= len(tokens)
        if beyond.any():  # only then, because the mask has to be copied to the device
            targets = targets.masked_fill(torch.from_numpy(beyond).to(device), IGNORE)
        yield inputs, targets


def to_device(sequences: np.ndarray, device: torch.device) -> Batch:
    """Return (B, T + 1) ids as inputs and targets on the device, both (B, T) int64.

    The ids are copied in 2 or 4 bytes each, and become int64 on the device.
    """
    ids = torch.from_numpy(sequences)
    if device.type == "cuda":
        ids = ids.pin_memory()
    ids = ids.to(device, non_blocking=True).long()
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()  # else a compiled loss is compiled again for these strides
