"""Stopping a run: a signal at any place loses no step, and a resumed run is the same."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import train
from model import GPT
from tests.conftest import metrics, same_bits, tiny_run, weights
from training.progress import Interrupt


@pytest.mark.parametrize(
    "number, when, said",
    [
        (signal.SIGINT, lambda training: sum(training) == 13, "saved step 7"),  # in step 6, of two micro-batches a step
        (signal.SIGTERM, lambda training: training[-2:] == [True, False], "saved step 4"),  # in an evaluation
        (signal.SIGTERM, lambda training: len(training) == 1, "there was nothing to save yet"),  # in the first one
        (signal.SIGUSR1, lambda training: sum(training) == 5, "saved step 3"),  # as Slurm sends it
    ],
)
def test_a_signal_saves_and_the_resumed_run_is_the_same(
    run, straight: Path, uncertified, corpus_file, tmp_path, monkeypatch, number: int, when: Callable, said: str
) -> None:
    out, loss, seen = tmp_path / "interrupted", train.next_token_loss, []
    signal.signal(number, signal.SIG_DFL)  # whatever started the tests may have asked to ignore it

    def interrupting(model: GPT, *arguments: object, **options: object) -> torch.Tensor:
        seen.append(model.training)
        if when(seen):
            os.kill(os.getpid(), number)
        return loss(model, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(train, "next_token_loss", interrupting)
        result = run(train, *tiny_run(corpus_file, out))
    assert result.exit_code == 75
    assert result.err.splitlines()[-1].startswith(f"train.py: {said}; continue with: ")
    assert run(train, "--resume", out).exit_code == 0
    assert same_bits(weights(straight), weights(out))
    for key in ("train_loss", "val_loss"):
        assert metrics(straight, key) == metrics(out, key)


def test_a_signal_that_comes_twice_loses_nothing_and_nohup_is_obeyed() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    interrupt = Interrupt()
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN and not interrupt.received
    for _ in range(2):
        signal.raise_signal(signal.SIGTERM)
    assert interrupt.received
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN  # which lasts while Python ends
