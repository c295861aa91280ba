"""What the stages of bench.py share: where they measure, in which sizes, and how a time is taken."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks import nanogpt
from model import GPTConfig
from model.precision import precision


@dataclass(frozen=True)
class Shape:
    """What is trained: a size that all families can have, and the batches to try, the first of them nanoGPT's."""

    name: str
    n_layer: int
    n_head: int
    n_embd: int
    context_length: int
    batches: tuple[int, ...]
    vocab_size: int = 65
    dropout: float = 0.0

    def of(self, family: str) -> GPTConfig:
        size = {name: getattr(self, name) for name in ("n_layer", "n_head", "n_embd", "context_length", "vocab_size")}
        return GPTConfig(family, **size, dropout=self.dropout, bias=False)

    def of_nanogpt(self) -> nanogpt.Config:
        """It rounds up the vocabulary of GPT-2, because matrix kernels are slow at odd sizes."""
        vocab_size = 50304 if self.vocab_size == 50257 else self.vocab_size
        size = (self.n_layer, self.n_head, self.n_embd, self.context_length)
        return nanogpt.Config(*size, vocab_size, self.dropout)


TINY = Shape("tiny", 2, 2, 16, 16, (3, 5))
ON_CPU = Shape("0.8 M", 4, 4, 128, 64, (12, 32, 96))
ON_CUDA = (
    Shape("10.6 M", 6, 6, 384, 256, (64, 256), dropout=0.2),
    Shape("124 M", 12, 12, 768, 1024, (12, 64), vocab_size=50257),
)


@dataclass(frozen=True)
class Bench:
    """Where to measure, in which precision to train, and with what text."""

    device: torch.device
    dtype: torch.dtype
    tiny: bool = False
    text: Path | None = None

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"

    @property
    def shapes(self) -> tuple[Shape, ...]:
        return (TINY,) if self.tiny else ON_CUDA if self.cuda else (ON_CPU,)

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """What to measure operations in: bfloat16 only where there are units for it, else it takes minutes."""
        units = self.tiny or precision(self.device) == torch.bfloat16
        return (torch.float32, *[torch.bfloat16] * units)

    def wait(self) -> None:
        """Until the device has done its work, so that a clock read here counts it."""
        torch.get_device_module(self.device).synchronize()

    def clock(self, work: Callable[[], object], calls: int) -> float:
        """Seconds of all of so many calls."""
        self.wait()
        began = time.perf_counter()
        for _ in range(calls):
            work()
        self.wait()
        return time.perf_counter() - began

    def measure(self, works: dict[str, Callable[[], object]], seconds: float = 2.0) -> dict[str, dict[str, float]]:
        """{name: milliseconds of a call: median, 10th and 90th percentile}, for so many seconds each.

        They take turns, so that a machine that slows down does so for all. A turn is of several calls if they are
        short. The first calls, which compile and allocate, do not count.
        """
        least, seconds = (0.0, 0.0) if self.tiny else (0.01, seconds)
        for work in works.values():
            self.clock(work, 2)
        fewest = 5 if self.cuda else 1  # the host prepares a step while the GPU is at the one before
        calls = {name: max(fewest, round(least / self.clock(work, 1))) for name, work in works.items()}
        turn = sum(self.clock(work, calls[name]) for name, work in works.items())
        times = {name: [] for name in works}
        for _ in range(min(max(5, round(seconds * len(works) / turn)), 100)):
            for name, work in works.items():
                times[name].append(self.clock(work, calls[name]) / calls[name])
        return {name: milliseconds(seconds) for name, seconds in times.items()}


def milliseconds(seconds: list[float]) -> dict[str, float]:
    low, *_, high = statistics.quantiles(seconds, n=10, method="inclusive")
    return {"ms": 1e3 * statistics.median(seconds), "ms_p10": 1e3 * low, "ms_p90": 1e3 * high}


def short(dtype: torch.dtype) -> str:
    return {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
