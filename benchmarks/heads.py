"""Measure the scores of all attention heads: seconds, and memory beyond the model, beside eager attention.

    python benchmarks/heads.py                      GPT-2 small's shape; ten minutes on two CPU cores, 14 GB of memory
    python benchmarks/heads.py --out results.jsonl  one JSON object per measurement
    python benchmarks/heads.py --tiny               tiny sizes, to see that it works

Ours runs our model under capture, scores every head and verifies the weights against the kernel. Theirs does the same
with the model of `transformers`, as for a decoder of any other type. Eager is that model with output_attentions, which
returns all T x T weights; nothing is computed from them. Each measurement is a process of its own, on the CPU. Memory
is read from /proc: on Linux only.
"""

import re
import statistics
import sys
import timeit
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import torch
import tyro
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.bench import append, describe_machine
from cli.options import parse
from cli.script import run_script
from inspection import capture
from inspection.decoder import read
from model import GPT, GPTConfig


@dataclass(frozen=True)
class Options:
    __doc__ = __doc__

    tiny: tyro.conf.FlagCreatePairsOff[bool] = False
    """Tiny sizes, to see that it works."""
    out: Path | None = None
    """File to append the measurements to."""


def resident(name: str) -> float:
    """Return the bytes of memory that this process uses: VmRSS now, or VmHWM at most so far."""
    return 1024 * int(re.search(rf"{name}:\s+(\d+)", Path("/proc/self/status").read_text())[1])


def extra_memory(work: Callable[[], object]) -> float:
    """Return the bytes that the work needs at most, beyond those in use before."""
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    before = resident("VmRSS")
    work()
    return resident("VmHWM") - before


def ours(shape: dict, T: int) -> Callable[[Tensor], None]:
    """Return a function that measures and verifies all heads on tokens (1, T)."""
    return partial(look, GPT(GPTConfig(**shape, context_length=T)).eval())


def look(model: nn.Module, idx: Tensor) -> None:
    """Capture the heads of a model, score them all, and verify them."""
    with capture(model) as att:
        read(model, idx, slice(1))
    att.scores()
    att.verify()


def by_transformers(shape: dict, T: int, way: str) -> nn.Module:
    """Return the model of `transformers`, which attends in this way."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(**shape, n_positions=T, bos_token_id=0, eos_token_id=0)
    return GPT2LMHeadModel._from_config(config, attn_implementation=way).eval()


def theirs(shape: dict, T: int) -> Callable[[Tensor], None]:
    """Return a function that measures and verifies all heads of the model of `transformers` on tokens (1, T)."""
    return partial(look, by_transformers(shape, T, "sdpa"))


def eager(shape: dict, T: int) -> Callable[[Tensor], None]:
    """Return a function that computes all weights on tokens (1, T) with `transformers`."""
    return partial(by_transformers(shape, T, "eager").transformer, output_attentions=True, use_cache=False)


@torch.no_grad()
def measure(way: Callable, shape: dict, T: int, repeats: int) -> dict[str, float]:
    """Measure the median of the seconds, and the extra bytes of a first call with all T tokens."""
    look = way(shape, T)
    idx = torch.randint(shape["vocab_size"], (1, T))
    look(idx[:, :16])  # loads libraries
    extra = extra_memory(lambda: look(idx))
    seconds = timeit.repeat(lambda: look(idx), number=1, repeat=repeats)
    return {"seconds": statistics.median(seconds), "extra bytes": extra}


def main(options: Options) -> None:
    shape = {"n_layer": 12, "n_head": 12, "n_embd": 768, "vocab_size": 50257}
    if options.tiny:
        shape = {"n_layer": 2, "n_head": 3, "n_embd": 48, "vocab_size": 211}
    machine = describe_machine("cpu")
    for T in (32,) if options.tiny else (512, 1024, 2048, 4096):
        for way in (ours, theirs, eager):
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
                result = pool.submit(measure, way, shape, T, 5 if T <= 1024 else 2).result()
            megabytes = result["extra bytes"] / 1e6
            print(f"T = {T:4}  {way.__name__:6} {result['seconds']:8.2f} s {megabytes:8,.0f} MB extra", flush=True)
            append(options.out, {"way": way.__name__, "tokens": T} | shape | result | machine)


if __name__ == "__main__":
    run_script(lambda: main(parse(Options, sys.argv[1:])))
