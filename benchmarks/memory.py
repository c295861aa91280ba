"""Measure the memory that training needs on a GPU; where there is none, count it on a pretended one.

    python benchmarks/memory.py                                  the configurations of docs/train.md
    python benchmarks/memory.py --configs configs/my.toml        others

Measured are the tensors of the certificate with the proof of the loss, and of one step of train.py, in bfloat16:
compiled, if there is a GPU, and uncompiled. A GPU needs more: a context, workspaces of libraries, and gaps between
tensors. A GiB of a card is left for these.
"""

import gc
import sys
from collections.abc import Callable
from contextlib import nullcontext, redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass, replace
from functools import partial
from io import StringIO
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks import ROOT
from benchmarks.pretended_gpu import pretended_gpu  # before torch

# isort: split
import numpy as np
import torch

from cli.options import parse
from cli.script import run_script
from data.batches import Batches
from errors import UserError
from model import GPT, GPTConfig
from train import next_token_loss
from training.certificate import certify, prove_loss
from training.config import Config, TrainConfig
from training.device import compile_loss
from training.optimizer import clip_gradients, make_optimizer

GIB = 2**30
CARDS = (8, 16, 24, 80)  # GB, of which a GiB has more
DTYPE = torch.bfloat16
EAGER = partial(next_token_loss, dtype=DTYPE)
VOCABULARIES = {"chars": 65, "bytes": 257, "gpt2": 50257, "model": 50257}  # Tiny Shakespeare has 65 characters


def make(config: GPTConfig, train: TrainConfig) -> tuple[GPT, torch.optim.Optimizer]:
    """Return a model on the GPU, without ever having its weights on the host, and its optimizer."""
    with torch.device("cuda"):
        model = GPT(config).train()
    return model, make_optimizer(model, train, DTYPE)


def measure_certificate(config: GPTConfig, train: TrainConfig, loss_fn: Callable) -> int:
    """Return the most bytes on the GPU during the proofs of a run, with all that is there beside them."""
    model, _optimizer = make(config, train)  # Muon's momentum is there from the start
    torch.cuda.reset_peak_memory_stats()
    with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
        certify(model, loss_fn, DTYPE, train.batch_size, special=())
        tokens = np.arange(config.context_length + 1) % config.vocab_size
        prove_loss(model, loss_fn, EAGER, DTYPE, Batches(tokens, train.batch_size, config.context_length, seed=0))
    return torch.cuda.max_memory_allocated()


def measure_step(config: GPTConfig, train: TrainConfig, loss_fn: Callable) -> int:
    """Return the most bytes on the GPU during a step, with all that is there beside it."""
    model, optimizer = make(config, train)
    batch = torch.zeros(train.batch_size, config.context_length, dtype=torch.int64, device="cuda")
    for _ in range(2):  # the first one makes the state of AdamW
        torch.cuda.reset_peak_memory_stats()
        for _ in range(min(2, train.grad_accum_steps)):
            loss_fn(model, batch, batch).backward()
        clip_gradients(model, train.grad_clip)
        optimizer.step()
        optimizer.zero_grad()
    return torch.cuda.max_memory_allocated()


def gpt_config(config: Config) -> GPTConfig:
    """Return the model of a run, with the vocabulary of its tokenizer."""
    tokenizer = config.data.tokenizer
    size = VOCABULARIES.get(tokenizer) or tokenizer.removeprefix("bpe:")
    if not str(size).isdigit():
        raise UserError(f"the vocabulary of {tokenizer!r} is not known here: give bpe:N, or {', '.join(VOCABULARIES)}")
    return GPTConfig(**asdict(config.model), vocab_size=int(size))


def measure(work: Callable[..., int], *arguments: object) -> str:
    """Return the GiB that work needs, in words."""
    try:
        found = f"{work(*arguments) / GIB:.1f}"
    except torch.OutOfMemoryError:
        found = "more than there is"
    gc.collect()
    torch.cuda.empty_cache()
    return found


def cells_of(config: GPTConfig, train: TrainConfig) -> list[str]:
    """Return the cells of a row of the table, each compiled / uncompiled if there is a GPU, else uncompiled."""
    ways = [EAGER]
    gpu = pretended_gpu()
    if torch.cuda.is_available():
        gpu = nullcontext()
        torch.compiler.reset()  # it compiles a function for a few models only
        ways.insert(0, partial(compile_loss(next_token_loss, train, torch.device("cuda")), dtype=DTYPE))
    with gpu:
        cells = [
            " / ".join(measure(work, config, train, loss_fn) for loss_fn in ways)
            for work in (measure_certificate, measure_step)
        ]
        return cells + [f"{most:,}" for most in largest_batches(config, train)]


def largest_batches(config: GPTConfig, train: TrainConfig) -> list[int]:
    """Return the most sequences of a micro-batch whose uncompiled step fits each of CARDS. It grows evenly."""
    two, three = (measure_step(config, replace(train, batch_size=size), EAGER) for size in (2, 3))
    return [max(0, 2 + int((size * 1e9 - GIB - two) // (three - two))) for size in CARDS]


@dataclass(frozen=True)
class Options:
    __doc__ = __doc__

    configs: tuple[Path, ...] = tuple(
        ROOT / "configs" / f"{name}.toml" for name in ("shakespeare_char", "tinystories", "finetune", "fineweb_edu")
    )
    """The configurations. finetune is taken for GPT-2 small."""


def main() -> None:
    options = parse(Options, sys.argv[1:])
    runs = [(path.stem, parse(Config, [], path)) for path in options.configs]
    models = [gpt_config(config) for _, config in runs]
    where = f"on an {torch.cuda.get_device_name()}" if torch.cuda.is_available() else "counted on a pretended GPU"
    print(f"GiB {where}, and sequences in an uncompiled micro-batch\n")
    titles = ["configuration", "certificate", "a step", *(f"{size} GB hold" for size in CARDS)]
    print(f"| {' | '.join(titles)} |\n|---|{'---:|' * (len(titles) - 1)}")
    for (name, config), model in zip(runs, models, strict=True):
        cells = [f"{name}, {config.train.batch_size} x {model.context_length:,}"]
        print(f"| {' | '.join(cells + cells_of(model, config.train))} |", flush=True)


if __name__ == "__main__":
    run_script(main)
