"""The progress line of a run, its clock, and the signals that stop it."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType

import torch

from cli.script import progress_bar

# SIGBREAK is Windows' own. Slurm can be asked for the last two.
SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP", "SIGBREAK", "SIGUSR1", "SIGUSR2")


@dataclass
class Progress:
    """Progress line. It counts the steps, tokens and training seconds; measuring and saving are not training."""

    step: int
    """Steps made, those of earlier sessions included."""
    tokens: int
    """Tokens trained on, those of earlier sessions included."""
    train_seconds: float
    """Seconds of training, those of earlier sessions included."""
    max_steps: int
    """Steps of the run."""
    device: torch.device
    """The device whose memory is reported."""

    def __enter__(self) -> "Progress":
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)  # of the certificate
        # The remaining time follows from all steps and evaluations so far, not from the last ones.
        self.line = progress_bar(total=self.max_steps, initial=self.step, unit="step", dynamic_ncols=True, smoothing=0)
        self.logged_tokens = self.tokens
        self.logged_seconds = self.train_seconds
        self.lap_began = time.perf_counter()
        return self

    def __exit__(self, *exception: object) -> None:
        self.line.close()

    @contextmanager
    def paused(self, doing: str) -> Iterator[None]:
        """Stop the clock for a while, and show the reason."""
        self.lap()
        self.line.set_description_str(doing)
        yield
        self.line.set_description_str("", refresh=False)
        self.lap_began = time.perf_counter()

    def lap(self) -> None:
        """Add the time since the last lap to the training seconds."""
        now = time.perf_counter()
        self.train_seconds += now - self.lap_began
        self.lap_began = now

    def made_step(self, tokens: int) -> None:
        """Count a step, and the tokens of all its micro-batches, those of other ranks included."""
        self.step += 1
        self.tokens += tokens
        self.line.update()

    def speed(self, loss: float) -> dict[str, float]:
        """Return tokens so far and per second since the last call, and the most memory of a CUDA GPU so far."""
        self.lap()
        speed = (self.tokens - self.logged_tokens) / (self.train_seconds - self.logged_seconds)
        self.logged_tokens = self.tokens
        self.logged_seconds = self.train_seconds
        record = {"tokens": self.tokens, "tokens_per_second": speed}
        self.line.set_postfix_str(f"loss {loss:.3f}, {speed:,.0f} tokens/s", refresh=False)
        if self.device.type == "cuda":
            record["memory_gib"] = torch.cuda.max_memory_allocated(self.device) / 2**30
        return record


class Interrupted(Exception):
    """The run was asked to stop, and nothing is lost; the message is for the user."""

    exit_code = 75


class Interrupt:
    """Whether one of SIGNALS was `received`: the run is to stop after the step. SIGQUIT stops at once.

    Windows has no SIGQUIT: there a Ctrl-Break that comes after a signal stops at once.
    """

    def __init__(self) -> None:
        self.received = False
        for number in signal.Signals:  # those of this system: Windows has few
            if number.name in SIGNALS and signal.getsignal(number) != signal.SIG_IGN:  # nohup has asked for that
                signal.signal(number, self.receive)

    def receive(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal. A group of processes may be sent one twice, also when Python's handlers are gone."""
        signal.signal(number, signal.SIG_IGN)
        if not self.received:
            name = signal.Signals(number).name
            key = "Ctrl-\\"
            if at_once := signal.Signals.__members__.get("SIGBREAK"):
                signal.signal(at_once, signal.SIG_DFL)
                key = "Ctrl-Break"
            with suppress(OSError):  # no lock and no buffer: the program may just be using them
                os.write(2, f"\n{name}: saving after this step; {key} stops at once\n".encode())
        self.received = True
