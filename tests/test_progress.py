"""What a run says of its speed and of the time it will take, and to whom."""

import math
import os
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import train
from tests.conftest import make_gpt, metrics, tiny_run
from training.config import TrainConfig
from training.device import Operations, peak_tokens_per_second
from training.progress import Outliving, Progress, duration, rehearse, time_line


def test_speed_counts_training_time_only(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("training.progress.time.perf_counter", lambda: now[0])
    monkeypatch.setattr("training.device.peak_flops", lambda device: 1e9)
    model, state, cpu = make_gpt(), {"step": 0, "train_seconds": 5.0}, torch.device("cpu")
    peak = peak_tokens_per_second(model, cpu)
    with Progress(state, 10, tokens_per_step=7, peak_tokens_per_second=peak, device=cpu) as progress:
        for _ in range(4):
            now[0] += 2.0
            progress.step()
        with progress.paused("evaluating"):
            now[0] += 50.0
        speed = progress.speed(loss=1.0)
    assert state == {"step": 4, "train_seconds": 13.0}
    num_parameters = sum(p.numel() for p in model.parameters()) - 11 * 15
    flops = 6 * num_parameters + 12 * 2 * 15 * 11
    assert speed == {"tokens": 28, "tokens_per_second": 3.5, "mfu": pytest.approx(3.5 * flops / 1e9)}


# What has to wait for a device; copies to the host, which a CPU does not make, are not seen here.
WAITING = {"_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select", "_unique2", "unique_dim"}


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_no_step_reads_a_number_between_logs(
    run, corpus_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, optimizer: str, dtype: str
) -> None:
    set_schedule, step, operations, watching = train.set_schedule, Progress.step, [], ExitStack()

    def begin(*arguments: object) -> None:  # a step begins with its schedule
        operations.append(watching.enter_context(Operations()))
        set_schedule(*arguments)

    def end(self: Progress) -> None:
        step(self)
        watching.close()

    monkeypatch.setattr(train, "set_schedule", begin)
    monkeypatch.setattr(Progress, "step", end)
    options = {"train__optimizer": optimizer, "train__dtype": dtype, "model__family": "nanochat"}
    options |= {"model__n_embd": 18, "train__max_steps": 7, "train__log_every": 3}
    with watching:
        assert run(train, *tiny_run(corpus_file, tmp_path / "run", **options)).exit_code == 0
    seen = [{name.removeprefix("aten::").split(".")[0] for name in mode.names} for mode in operations]
    assert len(seen) == 7 and all(names >= {"embedding", "_fused_adamw_"} for names in seen)  # forward, and the update
    assert [names & WAITING for names in seen] == [set()] * 7


@pytest.mark.parametrize("changes", [{}, {"train__optimizer": "muon"}, {"train__dtype": "float16"}], ids=str)
def test_a_rehearsal_leaves_no_trace(run, corpus_file: Path, tmp_path: Path, monkeypatch, changes: dict) -> None:
    for out, rehearsal in (("rehearsed", train.rehearse), ("not", lambda *arguments: (0.0, 0.0))):
        monkeypatch.setattr(train, "rehearse", rehearsal)
        assert run(train, *tiny_run(corpus_file, tmp_path / out, **changes, train__max_steps=4)).exit_code == 0
        assert run(train, "--resume", tmp_path / out, "--train.max_steps", 6).exit_code == 0
    checkpoints = [tmp_path / out / "checkpoints" / "step-00000006" for out in ("rehearsed", "not")]
    for file in ("model.safetensors", "optimizer.safetensors"):
        rehearsed, not_rehearsed = (load_file(checkpoint / file) for checkpoint in checkpoints)
        assert rehearsed.keys() == not_rehearsed.keys()
        assert all(torch.equal(rehearsed[name], not_rehearsed[name]) for name in rehearsed)
    assert metrics(tmp_path / "rehearsed", "train_loss") == metrics(tmp_path / "not", "train_loss")


def test_a_rehearsal_times_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    model, now, asked = make_gpt(), [100.0], []
    monkeypatch.setattr("training.progress.time.perf_counter", lambda: now[0])
    step = torch.optim.AdamW.step

    def slow_step(optimizer: torch.optim.Optimizer) -> None:
        now[0] += 0.5
        step(optimizer)

    def backward(micro_batch: int) -> None:
        now[0] += 2.0
        asked.append(micro_batch)
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, math.nan)

    monkeypatch.setattr(torch.optim.AdamW, "step", slow_step)
    before = [parameter.clone() for parameter in model.parameters()]
    assert rehearse(model, TrainConfig(), backward, lambda model: (3, 5, 7)) == (6.0, 0.5)
    assert asked == [3, 3, 5, 7]
    assert all(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(
    "step, evaluated, more, said",
    [
        (0, None, {}, "about 3 min for 29 more steps, and 28 s to evaluate 6 times"),  # at 0, 7, 14, 21, 28, 29
        (14, 14, {}, "about 2 min for 15 more steps, and 14 s to evaluate 3 times"),
        (14, 7, {"activation_checkpointing": True}, "about 2 min for 15 more steps, and 14 s to evaluate 4 times"),
        (16, 14, {}, "about 84 s for 13 more steps, and 14 s to evaluate 3 times"),
    ],
)
def test_the_time_that_a_run_will_take(step: int, evaluated: int | None, more: dict, said: str) -> None:
    config = TrainConfig(max_steps=29, eval_every=7, grad_accum_steps=3, **more)
    assert time_line(config, step, evaluated, gradients=6.0, update=0.5, eval_batches=7.0) == said


@pytest.mark.parametrize(
    "seconds, words", [(0.4, "0 s"), (89, "89 s"), (95, "2 min"), (5399, "90 min"), (5400, "1.5 h"), (3e5, "3.5 days")]
)
def test_durations_in_words(seconds: float, words: str) -> None:
    assert duration(seconds) == words


def test_nobody_has_to_read_what_a_training_says(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w") as pipe:
        stream = Outliving(pipe)
        for _ in range(3):
            stream.write("step\n")
            stream.flush()
        assert not stream.isatty()
