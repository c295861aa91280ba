"""Batches: a pure function of their number, nothing twice in an epoch, targets one ahead, validation complete."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from data.batches import IGNORE, Batches, validation_batches

CPU = torch.device("cpu")


@settings(deadline=None, max_examples=20)
@given(num_tokens=st.integers(8, 500), batch_size=st.integers(1, 9), seed=st.integers(0, 99))
def test_an_epoch_reads_no_token_twice(num_tokens: int, batch_size: int, seed: int) -> None:
    T = 7
    batches = Batches(np.arange(num_tokens), batch_size, T, seed)
    num_sequences = batches.sequences_per_epoch
    rows = torch.cat([batches(n, CPU)[0] for n in range(-(-3 * num_sequences // batch_size))])
    for epoch in range(3):
        seen = rows[epoch * num_sequences : (epoch + 1) * num_sequences].flatten()
        assert len(seen.unique()) == len(seen) == num_sequences * T
        assert num_tokens - len(seen) < T


def test_targets_are_the_next_tokens() -> None:
    inputs, targets = Batches(np.arange(100, dtype=np.uint16), 3, 7, seed=5)(4, CPU)
    assert inputs.shape == (3, 7) and torch.equal((inputs + 1) % 100, targets)


@pytest.mark.parametrize("batch_size, length", [(1, 7), (1, 1), (3, 7)])
def test_what_is_done_to_inputs_leaves_the_targets(batch_size: int, length: int) -> None:
    inputs, targets = Batches(np.arange(40, dtype=np.uint16), batch_size, length, 0)(0, CPU)
    expected = targets.clone()
    inputs.fill_(-1)
    assert torch.equal(targets, expected) and inputs.is_contiguous() and targets.is_contiguous()


def test_a_batch_depends_on_its_number_and_the_seed_only() -> None:
    tokens = np.arange(1000)
    whole, split = Batches(tokens, 6, 7, 0), Batches(tokens, 2, 7, 0)
    assert torch.equal(whole(5, CPU)[0], torch.cat([split(n, CPU)[0] for n in (15, 16, 17)]))
    some, same, other = (Batches(tokens, 3, 7, seed) for seed in (5, 5, 6))
    for n in (40, 2, 77, 2):  # any order, any number of times
        some(n, CPU)
    assert torch.equal(some(9, CPU)[0], same(9, CPU)[0])
    assert not torch.equal(some(9, CPU)[0], other(9, CPU)[0])


def test_epochs_differ_in_order_and_offset() -> None:
    batches = Batches(np.arange(707), 101, 7, 0)
    starts = [batches(epoch, CPU)[0][:, 0] for epoch in range(20)]
    assert not torch.equal(starts[0], starts[1])
    offsets = [(start % 7).unique().tolist() for start in starts]
    assert all(len(offset) == 1 for offset in offsets)  # sequences of an epoch tile the text
    assert len({offset for (offset,) in offsets}) > 3


@settings(deadline=None, max_examples=20)
@given(num_tokens=st.integers(2, 200), batch_size=st.integers(1, 5))
def test_validation_predicts_every_token_once(num_tokens: int, batch_size: int) -> None:
    T = 7
    batches = list(validation_batches(np.arange(num_tokens, dtype=np.uint16), batch_size, T, CPU, 0, 1))
    targets = torch.cat([y for _, y in batches]).flatten()
    assert len(batches) == -(-(num_tokens - 1) // (T * batch_size))  # none without a target
    assert {x.shape for x, _ in batches} == {(batch_size, T)}  # one shape: nothing to compile twice
    assert targets[targets != IGNORE].tolist() == list(range(1, num_tokens))
    for x, y in batches:
        assert ((x + 1 == y) | (y == IGNORE)).all()
        assert x.min() >= 0
