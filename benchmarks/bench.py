"""Measure this machine: steps, text, decoding, operators of a step, time to a loss.

Ways to run:
    make bench                                           all stages, into benchmarks/results/
    make bench TEXT=input.txt STAGES="prepare loss"      these stages, on this text
    python benchmarks/bench.py --out results.jsonl       one JSON object per measurement
    python benchmarks/bench.py --tiny                    tiny sizes, to see that it works

The ways of a stage take turns in one process, so that a machine that slows down slows all of them. Printed are medians;
of operators, means. "of peak" is MFU, the share of the fastest matrix product found in the same run. nanoGPT is
benchmarks/nanogpt.py.
"""

import contextlib
import gc
import json
import math
import platform
import re
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from itertools import count, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal
from unittest.mock import patch

import numpy as np
import torch
import tyro
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks import ROOT, nanogpt
from benchmarks.loss import measure_loss, standard_library
from cli.options import parse
from cli.script import run_script
from data.batches import Batches, seed_for
from data.prepare import DataConfig, prepare
from errors import UserError
from model import GPT, GPTConfig
from model.device import dtype_name, find_device, has_bfloat16, keep_freed_memory
from model.packed import packed
from train import next_token_loss
from training.config import TrainConfig
from training.device import compile_loss, set_seed
from training.optimizer import FiniteGuard, clip_gradients, make_optimizer, set_schedule
from training.options import read_config

# name: shape, and batch sizes
Sizes = dict[str, tuple[nanogpt.Config, tuple[int, ...]]]
TINY: Sizes = {"tiny": (nanogpt.Config(2, 2, 16, 16, 67), (3, 5))}
ON_CPU: Sizes = {"0.8 M": (nanogpt.Config(4, 4, 128, 64, 65), (12, 32, 96))}
ON_CUDA: Sizes = {
    "124 M": (nanogpt.Config(12, 12, 768, 1024, 50257), (32,)),
    "10.6 M": (nanogpt.FOR_GPU, (64,)),
}
FAMILIES = {"nanoGPT": "gpt2", "gpt2": "gpt2", "muon": "nanochat"}
OURS = {
    "gpt2": TrainConfig(beta2=0.99, learning_rate=1e-3),
    "muon": TrainConfig(optimizer="muon", learning_rate=0.02, weight_decay=0.0, grad_clip=0.0),
}


@dataclass(frozen=True)
class Bench:
    """The device, precision, sizes and text of the measurements."""

    device: torch.device
    tiny: bool = False
    text: Path | None = None

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"

    @property
    def dtype(self) -> torch.dtype:
        """The precision in which nanoGPT trains on this device."""
        return torch.bfloat16 if self.cuda else torch.float32

    @property
    def sizes(self) -> Sizes:
        return TINY if self.tiny else ON_CUDA if self.cuda else ON_CPU

    def clock(self, work: Callable[[], object], calls: int) -> float:
        """Return the seconds that this many calls take. The device is idle at each reading of the clock."""
        device = torch.get_device_module(self.device)
        device.synchronize()
        began = time.perf_counter()
        for _ in range(calls):
            work()
        device.synchronize()
        return time.perf_counter() - began

    def measure(self, works: dict[str, Callable[[], object]], seconds: float = 2.0) -> dict[str, float]:
        """Time the works in turns, about this many seconds each. Return name -> median of the milliseconds of a call.

        A turn has several calls where these are short. The first two calls compile and allocate, and do not count.
        """
        shortest = 0.3 if self.cuda else 0.01  # seconds of a turn; a GPU's host prepares one step during another
        if self.tiny:
            shortest = seconds = 0.0
        for work in works.values():
            self.clock(work, 2)
        calls = {name: max(1, round(shortest / self.clock(work, 1))) for name, work in works.items()}
        turn = sum(self.clock(work, calls[name]) for name, work in works.items())
        times = {name: [] for name in works}
        for _ in range(min(max(3, round(seconds * len(works) / turn)), 100)):
            for name, work in works.items():
                times[name].append(1e3 * self.clock(work, calls[name]) / calls[name])
        return {name: statistics.median(milliseconds) for name, milliseconds in times.items()}


def make_gpt(family: str, shape: nanogpt.Config) -> GPT:
    return GPT(GPTConfig(family, **asdict(shape), bias=False))


def make_nanogpt(shape: nanogpt.Config) -> nanogpt.NanoGPT:
    """Make nanoGPT, which rounds GPT-2's vocabulary up, because matrix kernels are slow at odd sizes."""
    return nanogpt.NanoGPT(replace(shape, vocab_size=50304) if shape.vocab_size == 50257 else shape)


def flops_per_token(model: GPT) -> int:
    """Return the FLOPs of training on a token: 6 N + 12 L H D T. N: the parameters of the blocks and the head.

    Counted as for PaLM (Chowdhery et al. 2022, appendix B): what the model needs, not what computing it took. So
    activations that are computed twice count once, and all T x T scores count, although a causal kernel leaves out
    half. Each parameter takes 2 forward and 4 backward, and so does each product of two numbers in the scores and in
    the sums of values.
    """
    c = model.config
    N = sum(parameter.numel() for parameter in [*model.blocks.parameters(), model.lm_head.weight])
    return 6 * N + 12 * c.n_layer * c.n_head * c.head_dim * c.context_length


def product_flops(device: torch.device, dtype: torch.dtype, n: int) -> float:
    """Return the FLOP/s of products of (n, n) matrices."""
    a = torch.randn(n, n, device=device, dtype=dtype)
    for calls in (3, 30):  # the first calls load and choose a kernel, and leave the device idle
        began = time.perf_counter()
        for _ in range(calls):
            a @ a
        torch.get_device_module(device).synchronize()
    return calls * 2 * n**3 / (time.perf_counter() - began)


@cache
def peak_flops(bench: Bench) -> float:
    """Return the FLOP/s of the fastest of a few products of square matrices."""
    sizes = (32, 64) if bench.tiny else (4096, 8192, 16384) if bench.cuda else (512, 1024, 2048)
    return max(product_flops(bench.device, bench.dtype, n) for n in sizes)


def measure_step(bench: Bench) -> Iterator[dict]:
    """Time whole training steps, reading the batch included, of nanoGPT and of ours, at several batch sizes."""
    for name, (shape, batch_sizes) in bench.sizes.items():
        speeds = {way: [] for way in FAMILIES}
        for batch_size in batch_sizes:
            with TemporaryDirectory() as directory:
                path = Path(directory) / "tokens.bin"
                np.random.default_rng(0).integers(shape.vocab_size, size=2**22, dtype=np.uint16).tofile(path)
                trainings = all_trainings(bench, shape, batch_size, path)
                results = bench.measure({way: partial(next, training) for way, training in trainings.items()})
            del trainings
            for way, ms in results.items():
                speed = 1e3 * batch_size * shape.context_length / ms
                speeds[way].append(speed)
                with torch.device("meta"):
                    share = speed * flops_per_token(make_gpt(FAMILIES[way], shape)) / peak_flops(bench)
                yield {"what": f"{way}, {name} x {batch_size}", "ms": ms, "tokens/s": speed, "of peak": share}
        for way in OURS:
            ours = speeds[way]
            theirs = speeds["nanoGPT"]
            ratios = {"same batch": ours[0] / theirs[0], "best batches": max(ours) / max(theirs)}
            yield {"what": f"{way} / nanoGPT, {name}"} | ratios


def all_trainings(bench: Bench, shape: nanogpt.Config, batch_size: int, path: Path) -> dict[str, Iterator[None]]:
    """Start every way to train on a file of uint16 ids. Return way -> an endless iterator of its steps."""
    torch.compiler.reset()
    theirs = make_nanogpt(shape).to(bench.device)
    optimizer = nanogpt.make_optimizer(theirs)
    ways = {"nanoGPT": nanogpt.steps(theirs, optimizer, path, batch_size, learning_rate=1e-3, max_steps=10**9)}
    batches = Batches(np.memmap(path, dtype=np.uint16, mode="r"), batch_size, shape.context_length, seed=0)
    for way, config in OURS.items():
        ways[way] = steps(bench, make_gpt(FAMILIES[way], shape).to(bench.device), config, batches)
    return ways


def steps(
    bench: Bench, model: GPT, config: TrainConfig, batches: Callable, dtype: torch.dtype | None = None
) -> Iterator[None]:
    """Train as train.py does, one step per iteration, without its logging.

    batches: (step, device) -> inputs and targets. dtype: None for that of nanoGPT.
    """
    dtype = dtype or bench.dtype
    loss_fn = compile_loss(next_token_loss, config, bench.device) if bench.cuda else next_token_loss
    optimizer = make_optimizer(model, config, dtype)
    guard = FiniteGuard(bench.device)
    for step in count():
        set_schedule(optimizer, step, config)
        set_seed(bench.device, seed_for(0, "dropout", step))
        inputs, targets = batches(step, bench.device)
        loss = loss_fn(model, inputs, targets, dtype) / targets.numel()
        loss.backward()
        norm = clip_gradients(model, config.grad_clip)
        guard.watch(step, loss.detach() + norm)
        optimizer.step()
        optimizer.zero_grad()
        yield


class Operators(TorchDispatchMode):
    """Calls, milliseconds, and megabytes of inputs and outputs of each operator that does not return a view."""

    def __init__(self):
        super().__init__()
        self.found = defaultdict(lambda: np.zeros(3))  # (part of the step, operator) -> calls, ms, MB

    def __torch_dispatch__(self, function: Callable, types: object, args: tuple = (), kwargs: dict | None = None):
        began = time.perf_counter()
        result = function(*args, **(kwargs or {}))
        ms = 1e3 * (time.perf_counter() - began)
        part = "forward" if torch.is_grad_enabled() else "optimizer"
        part = "backward" if torch._C._current_graph_task_id() >= 0 else part  # which autograd's engine sets
        if not function.is_view:
            megabytes = sum(x.nbytes for x in tree_leaves((args, kwargs, result)) if isinstance(x, Tensor)) / 1e6
            self.found[part, str(function.overloadpacket)] += 1, ms, megabytes
        return result


def measure_operators(bench: Bench) -> Iterator[dict]:
    """Time each operator of a step of our configurations for a CPU, and yield those that take a fiftieth or more."""
    if bench.device.type != "cpu":
        return  # another device is not waited for
    keep_freed_memory(bench.device)
    dtype = torch.bfloat16 if has_bfloat16(bench.device) else torch.float32
    for name, V in (("quickstart", 512), ("shakespeare_char_fast", 65), ("shakespeare_char_best", 65)):
        config = read_config([str(ROOT / "configs" / f"{name}.toml")])
        model = GPT(GPTConfig(**asdict(config.model), vocab_size=V))
        batch = torch.randint(V, (2, config.train.batch_size, config.model.context_length))
        training = steps(bench, model, config.train, lambda *_, batch=batch: batch, dtype)
        num_steps = 1 if bench.tiny else 20
        list(islice(training, num_steps))
        with Operators() as operators:
            list(islice(training, num_steps))
        total = sum(operators.found.values())
        rows = [(("all",), total), *sorted(operators.found.items(), key=lambda row: -row[1][1])]
        for names, numbers in rows:
            if numbers[1] > total[1] / 50:
                calls, ms, megabytes = (numbers / num_steps).tolist()
                yield {"what": " ".join((name, *names)), "calls": calls, "ms": ms, "MB": megabytes}


def measure_prepare(bench: Bench) -> Iterator[dict]:
    """Time preparation of a text file, and its tokenizer alone, in threads, with the text in memory."""
    characters = 50_000 if bench.tiny else 30_000_000
    tokenizer = "bpe:300" if bench.tiny else "bpe:4096"
    text = bench.text.read_text(encoding="utf-8") if bench.text else standard_library()
    text = (text * math.ceil(characters / len(text)))[:characters]
    pieces = [text[i : i + 10**6] for i in range(0, characters, 10**6)]
    with TemporaryDirectory() as directory:
        path = Path(directory) / "text.txt"
        learned = Path(directory) / "learned"
        names = count()
        path.write_text(text, encoding="utf-8")
        encoding = prepare(DataConfig(str(path), tokenizer), learned).tokenizer

        def prepared() -> None:
            prepare(DataConfig(str(path), "model"), Path(directory) / str(next(names)), model=learned)

        def tokenized() -> None:
            with ThreadPoolExecutor(torch.get_num_threads()) as pool:
                list(pool.map(encoding.encode, pieces))

        for way, ms in bench.measure({"data.prepare": prepared, "its tokenizer alone": tokenized}).items():
            yield {"what": f"{way}, {tokenizer}", "ms": ms, "MB/s": path.stat().st_size / ms / 1e3}


@torch.no_grad()
def measure_decode(bench: Bench) -> Iterator[dict]:
    """Time greedy decoding after a prompt, with random weights: ours, and `transformers`.

    On a GPU in its fastest precision only, and also ours without a CUDA graph and theirs compiled, with a static cache.
    "weights GB/s" are the bytes of the weights that a token reads, over the time of the prompt and all tokens. On a CPU
    the memory is their limit: the first line says how fast it is read.
    """
    import transformers

    keep_freed_memory(bench.device)  # as sample.py does
    if bench.device.type == "cpu":
        numbers = torch.zeros(2**14 if bench.tiny else 2**27)
        (ms,) = bench.measure({"sum": numbers.sum}).values()
        yield {"what": f"sum of {numbers.nbytes / 2**20:g} MiB", "ms": ms, "GB/s": numbers.nbytes / ms / 1e6}
        del numbers
    shape, _ = TINY["tiny"] if bench.tiny else ON_CUDA["124 M"]
    prompt = 5 if bench.tiny else 500
    new = 4 if bench.tiny else 200 if bench.cuda else 100
    sizes = {"n_layer": shape.n_layer, "n_head": shape.n_head, "n_embd": shape.n_embd, "vocab_size": shape.vocab_size}
    special = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    gpt2 = transformers.GPT2Config(**sizes, n_positions=shape.context_length, **special)
    dtypes = [torch.float32, *[torch.bfloat16] * has_bfloat16(bench.device)]
    idx = torch.randint(shape.vocab_size, (1, prompt), device=bench.device)
    options = {"attention_mask": torch.ones_like(idx), "max_new_tokens": new, "do_sample": False}
    works = {}
    read = {}  # bytes of weights
    with contextlib.ExitStack() as stack:
        for dtype in dtypes[-1:] if bench.cuda else dtypes:
            ours = make_gpt("gpt2", shape).eval().to(bench.device, dtype)
            stack.enter_context(packed(ours))  # as sample.py does
            other = transformers.AutoModelForCausalLM.from_config(gpt2, attn_implementation="sdpa").eval()
            other = other.to(bench.device, dtype)
            ways = {"ours": partial(ours.generate, idx, new, temperature=0)}
            ways["transformers"] = partial(other.generate, idx, **options)
            if bench.cuda or bench.tiny:
                ways["ours, eager"] = patch("model.recorded.can_record", lambda *_: False)(ways["ours"])
                ways["transformers, static"] = partial(ways["transformers"], cache_implementation="static")
            for way, work in ways.items():
                works[f"{way}, {dtype_name(dtype)}"] = work
                read[f"{way}, {dtype_name(dtype)}"] = bytes_read(ours if "ours" in way else other)
        results = bench.measure(works)
    for way, ms in results.items():
        speed = 1e3 * new / ms
        rate = read[way] * speed / 1e9
        yield {"what": way, "new": new, "ms": ms, "tokens/s": speed, "weights GB/s": rate}


def bytes_read(model: nn.Module) -> int:
    """Return the bytes of the weights that a token reads: of all linear layers, and of the tied head."""
    return sum(weight.nbytes for name, weight in model.named_parameters() if not re.search("position|wpe", name))


STAGES = {
    "step": measure_step,
    "prepare": measure_prepare,
    "decode": measure_decode,
    "operators": measure_operators,  # keeps freed memory, also for what this process would measure after it
    "loss": lambda bench: measure_loss(bench.device, bench.text, bench.tiny),
}


@dataclass(frozen=True)
class Options:
    __doc__ = __doc__

    stages: tuple[Literal[*STAGES], ...] = tuple(STAGES)
    """The stages to run."""
    text: Path | None = None
    """Text for prepare and loss. None: the Python standard library."""
    device: str = "auto"
    """auto (CUDA, else MPS, else CPU), cpu, cuda or mps."""
    tiny: tyro.conf.FlagCreatePairsOff[bool] = False
    """Tiny sizes, to see that it works."""
    out: Path | None = None
    """File to append the measurements to. For a directory, the file is named after device and date."""

    def __post_init__(self) -> None:
        if self.text and not self.text.is_file():
            raise UserError(f"there is no text {str(self.text)!r}")


def describe_machine(device: str) -> dict[str, str | int]:
    """Return the properties of the machine that change a measurement. device: cpu, cuda or mps."""
    cpuinfo = Path("/proc/cpuinfo")
    names = re.findall(r"^model name\s*: (.*)$", cpuinfo.read_text() if cpuinfo.exists() else "", re.MULTILINE)
    return {
        "cpu": names[0] if names else platform.processor() or platform.machine(),
        "device": torch.cuda.get_device_name() if device == "cuda" else device,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"),
    }


def append(out: Path | None, result: dict) -> None:
    """Append a measurement to a file as a line of JSON. None: do nothing."""
    if out:
        with open(out, "a", encoding="utf-8") as file:
            file.write(json.dumps(result) + "\n")


def main(options: Options) -> None:
    bench = Bench(find_device(options.device), options.tiny, options.text)
    torch.set_float32_matmul_precision("high" if bench.cuda else "highest")  # as train.py does
    machine = describe_machine(bench.device.type)
    print("\n".join(f"{key:9} {value}" for key, value in machine.items()))
    out = options.out
    if out and out.is_dir():
        out /= f"{re.sub('[^a-z0-9]+', '-', machine['device'].lower())}_{machine['date']}.jsonl"
    torch.manual_seed(0)
    for stage in options.stages:
        try:
            for result in STAGES[stage](bench):
                what = result.pop("what")
                numbers = [f"{name} {value:,.2f}" for name, value in result.items() if isinstance(value, float)]
                print(f"{stage:9} {what:36} {'  '.join(numbers)}", flush=True)
                append(out, {"stage": stage, "what": what} | result | machine)
        except torch.OutOfMemoryError:
            print(f"{stage:9} needs more memory than there is")
        gc.collect()
        torch.cuda.empty_cache()  # the next stage may start other processes


if __name__ == "__main__":
    run_script(lambda: main(parse(Options, sys.argv[1:])))
