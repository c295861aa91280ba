"""What a person sees and does while a run is going: the progress line, its clock, and Ctrl-C."""

import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import TextIO

import torch
from torch import Tensor
from tqdm import tqdm

from model import GPT
from training.config import TrainConfig
from training.optimizer import make_optimizer


class Progress:
    """Counts the steps and the training seconds in a run's `state`; measuring and saving do not count as training."""

    def __init__(
        self,
        state: dict,
        max_steps: int,
        tokens_per_step: int,
        peak_tokens_per_second: float,
        device: torch.device,
    ):
        self.state, self.tokens_per_step, self.device = state, tokens_per_step, device
        self.peak_tokens_per_second = peak_tokens_per_second  # of all devices together; nan if unknown
        self.logged, self.lap_began = dict(state), time.perf_counter()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)  # what was before the first step does not count
        self.is_watched = sys.stderr.isatty()
        interval = 0.1 if self.is_watched else 10  # seconds between two drawings; a log file needs few
        self.line = tqdm(total=max_steps, initial=state["step"], unit="step", dynamic_ncols=True, mininterval=interval)

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *exception: object) -> None:
        self.line.close()

    @contextmanager
    def paused(self, doing: str) -> Iterator[None]:
        """Stop the clock for a while, and tell who watches what is done meanwhile."""
        self.lap()
        self.line.set_description_str(doing, refresh=self.is_watched)
        yield
        self.line.set_description_str("", refresh=False)
        now = time.perf_counter()
        took = now - self.lap_began
        self.line.start_t += took  # the line's clock stops too
        self.line.last_print_t += took
        self.lap_began = now

    def lap(self) -> None:
        """Add the time since the last lap to the training seconds."""
        now = time.perf_counter()
        self.state["train_seconds"] += now - self.lap_began
        self.lap_began = now

    def step(self) -> None:
        """One step is done."""
        self.state["step"] += 1
        self.line.update()

    def speed(self, loss: float) -> dict[str, float]:
        """Tokens so far and per second since last asked, model FLOPs utilisation and memory where they are known."""
        self.lap()
        tokens = (self.state["step"] - self.logged["step"]) * self.tokens_per_step
        speed = {"tokens_per_second": tokens / (self.state["train_seconds"] - self.logged["train_seconds"])}
        text = f"loss {loss:.3f}, {speed['tokens_per_second']:,.0f} tokens/s"
        if math.isfinite(self.peak_tokens_per_second):
            speed["mfu"] = speed["tokens_per_second"] / self.peak_tokens_per_second
            text += f", {speed['mfu']:.0%} of peak"
        if self.device.type == "cuda":
            speed["memory_gib"] = torch.cuda.max_memory_allocated(self.device) / 2**30
        self.line.set_postfix_str(text, refresh=False)
        self.logged = dict(self.state)
        return {"tokens": self.state["step"] * self.tokens_per_step, **speed}

    def write(self, text: str) -> None:
        """A line that stays, above the progress line."""
        self.line.write(text)


def rehearse(
    model: GPT, config: TrainConfig, backward: Callable[[int], object], micro_batches: Callable[[GPT], Iterable[int]]
) -> tuple[float, float]:
    """How many seconds the gradients of a step take, and its update; no trace is left of either.

    backward: computes the gradients of a micro-batch. One of them and an update are made before the clock runs.
    """
    device, optimizer = model.lm_head.weight.device, make_optimizer(model, config)  # for this alone

    def wait() -> None:
        if device.type != "cpu":
            torch.accelerator.synchronize(device)

    def seconds(work: Callable[[], object]) -> float:
        wait()
        began = time.perf_counter()
        work()
        wait()
        return time.perf_counter() - began

    backward(next(iter(micro_batches(model))))
    watched = tqdm(micro_batches(model), "time:   rehearsing", config.grad_accum_steps, leave=False, delay=1)
    gradients = seconds(lambda: [backward(micro_batch) for micro_batch in watched])
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for parameter in group["params"]:
            if parameter.grad is not None:
                parameter.grad.zero_()  # it may not even be finite
    optimizer.step()
    update = seconds(optimizer.step)
    model.zero_grad()
    return gradients, update


def time_line(
    config: TrainConfig, step: int, evaluated: int | None, gradients: float, update: float, eval_batches: float
) -> str:
    """How long a run will take from `step` on, in words, with what was rehearsed.

    evaluated: the last step whose validation loss is known. eval_batches: how many batches such a loss takes.
    """
    c = config
    training = (c.max_steps - step) * (gradients + update)
    forward = gradients / c.grad_accum_steps / (4 if c.activation_checkpointing else 3)  # backward takes twice as long
    left = {*range(-(-step // c.eval_every) * c.eval_every, c.max_steps, c.eval_every), c.max_steps} - {evaluated}
    return (
        f"about {duration(training)} for {c.max_steps - step:,} more steps, "
        f"and {duration(len(left) * eval_batches * forward)} to evaluate {len(left)} times"
    )


def duration(seconds: float) -> str:
    """A time in words, in its largest fitting unit: 95 s is 2 min."""
    for unit, size, most in (("s", 1, 90), ("min", 60, 90), ("h", 3600, 48)):
        if seconds < most * size:
            return f"{seconds / size:.{int(unit == 'h')}f} {unit}"
    return f"{seconds / 86400:.1f} days"


class WorstLoss:
    """The step with the highest loss since last asked, found on the device: no step waits for the host."""

    def __init__(self, device: torch.device):
        self.step, self.loss = torch.zeros((), device=device), torch.full((), -math.inf, device=device)

    def watch(self, step: int, loss: Tensor) -> None:
        """Look at the loss of a step."""
        self.step.copy_(torch.where(loss > self.loss, step, self.step))
        self.loss.copy_(torch.maximum(loss, self.loss))

    def take(self) -> tuple[int, float]:
        """The step and its loss; the next one is sought from here on."""
        found = int(self.step.item()), self.loss.item()
        self.loss.fill_(-math.inf)
        return found


class Outliving:
    """An output stream whose reader may go away: a closed pipe or terminal does not end a training."""

    def __init__(self, stream: TextIO):
        self.stream = stream

    def __getattr__(self, name: str) -> object:
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        try:
            return self.stream.write(text)
        except OSError:
            self.silence()
            return len(text)

    def flush(self) -> None:
        try:
            self.stream.flush()
        except OSError:
            self.silence()

    def silence(self) -> None:
        """Let what is written from now on go nowhere."""
        os.dup2(os.open(os.devnull, os.O_WRONLY), self.stream.fileno())


class Interrupted(KeyboardInterrupt):
    """The run was asked to stop, and nothing is lost; the message is for the user."""

    exit_code = 75


class Interrupt:
    """True after a SIGINT, SIGTERM or SIGHUP, to be obeyed after the step; another one later stops at once.

    Until this session has made a step there is nothing to save, and the first signal raises Interrupted wherever it
    finds the program: preparing data, loading, compiling. Of several processes one `says` so.
    """

    def __init__(self, state: dict, says: bool = True):
        self.state, self.first_step, self.received, self.name = state, state["step"], 0.0, ""
        self.says = says
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:  # nohup has asked for that
                signal.signal(number, self.receive)

    def receive(self, number: int, frame: FrameType | None) -> None:
        """The signal handler. What stops a group of processes may send the same signal twice, moments apart."""
        again = self.received and time.monotonic() - self.received > 1
        if again:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        elif not self.received:
            self.received, self.name = time.monotonic(), signal.Signals(number).name
            self.stop_if_nothing_is_made()
            with suppress(OSError):  # no lock and no buffer, which the program may just be using
                os.write(2, f"\n{self.name}: saving after this step; once more to stop at once\n".encode() * self.says)

    def stop_if_nothing_is_made(self) -> None:
        """Raise Interrupted if this session has not made a step."""
        if self.state["step"] == self.first_step:
            raise Interrupted(f"{self.name} before a step was made: nothing to save, the same command starts again")

    def __bool__(self) -> bool:
        if self.received:
            self.stop_if_nothing_is_made()  # again: an exception in a destructor or a callback of torch gets lost
        return bool(self.received)
