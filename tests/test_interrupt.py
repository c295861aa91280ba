"""Stopping a run: a signal at any place loses no step, and a resumed run is the same."""

import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch

import train
from model import GPT
from tests.conftest import metrics, same_bits, tiny_run, weights
from tests.crash import in_child
from training.progress import Interrupt


@pytest.mark.parametrize(
    "number, when, saved",
    [
        (signal.SIGINT, lambda training: sum(training) == 13, 7),  # in step 6, of two micro-batches a step
        (signal.SIGTERM, lambda training: training[-2:] == [True, False], 4),  # in an evaluation
    ],
)
def test_a_signal_saves_and_the_resumed_run_is_the_same(
    run, uncertified, straight: Path, corpus_file, tmp_path, monkeypatch, number: int, when: Callable, saved: int
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
    assert result.err.splitlines()[-1].startswith(f"train.py: saved step {saved}; continue with: ")
    assert run(train, "--resume", out).exit_code == 0
    assert same_bits(weights(straight), weights(out))
    for key in ("train_loss", "val_loss"):
        assert metrics(straight, key) == metrics(out, key)


@pytest.mark.parametrize("place, resumed", [("prepare", False), ("certify", True), ("next_token_loss", False)])
def test_a_signal_before_the_first_step_stops_at_once(
    run, straight: Path, corpus_file, tmp_path, monkeypatch, place: str, resumed: bool
) -> None:
    out = straight if resumed else tmp_path / "new"
    arguments = ["--resume", out, "--train.max_steps", "13"] if resumed else tiny_run(corpus_file, out)
    before = sorted((straight / "checkpoints").rglob("*"))

    def interrupted(*arguments: object, **options: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        raise AssertionError("went on")

    def work() -> None:
        monkeypatch.setattr(train, place, interrupted)
        sys.exit(run(train, *arguments).exit_code)

    said = tmp_path / "said"
    assert in_child(work, said=said) == 75  # in a process of its own, as a run holds its lock until its process ends
    message = said.read_text().splitlines()[-1]
    assert "SIGTERM before a step was made: nothing to save, the same command starts again" in message
    assert sorted((straight / "checkpoints").rglob("*")) == before
    assert run(train, *arguments).exit_code == 0


def test_a_signal_whose_exception_gets_lost_is_obeyed_before_the_first_step(
    run, straight: Path, corpus_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certify = train.certify

    def swallowing(*arguments: object) -> dict:
        with suppress(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
        return certify(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(train, "certify", swallowing)
        result = run(train, *tiny_run(corpus_file, tmp_path / "run"))
    assert result.exit_code == 75 and "SIGTERM before a step was made" in result.err.splitlines()[-1]
    assert not list((tmp_path / "run" / "checkpoints").iterdir())


def test_a_second_signal_stops_at_once_but_not_a_double_one(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    handlers = {number: signal.getsignal(number) for number in numbers}
    now, raised = [10.0], []
    monkeypatch.setattr("training.progress.time.monotonic", lambda: now[0])
    monkeypatch.setattr("training.progress.signal.raise_signal", raised.append)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        interrupt = Interrupt()
        interrupt.step_was_made = True
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        assert not interrupt
        interrupt.receive(signal.SIGTERM, None)
        now[0] += 0.01
        interrupt.receive(signal.SIGTERM, None)
        assert interrupt and not raised
        now[0] += 5
        interrupt.receive(signal.SIGTERM, None)
        assert raised == [signal.SIGTERM] and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
