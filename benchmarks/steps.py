"""Stages of bench.py: a training step beside nanoGPT's, where its time goes, and its parts outside of the model."""

import math
import re
import sys
import time
from collections.abc import Iterator
from functools import partial
from itertools import count, pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks import nanogpt
from benchmarks.nanogpt import PARTS
from benchmarks.operations import peak_flops
from benchmarks.timing import Bench, Shape, short
from data.batches import Batches, seed_for
from model import GPT
from train import next_token_loss
from training.config import TrainConfig
from training.device import flops_per_token, set_seed
from training.optimizer import FiniteGuard, make_optimizer, set_schedule

OURS = {  # way: family and how it is trained
    "ours, gpt2": ("gpt2", TrainConfig(beta2=0.99, learning_rate=1e-3)),
    "ours, muon": ("nanochat", TrainConfig(optimizer="muon", learning_rate=0.02, weight_decay=0.0, grad_clip=0.0)),
}
KINDS = {  # of kernels, by their names on CPU and CUDA: the first that fits. Triton's may also name what they feed.
    "attention": "^(?!triton).*(attention|flash|fmha|sdpa)",
    "matmul": "^(?!triton_(?!tem)).*(mm(_|$)|gemm|nvjet|matmul|cutlass)",
    "elementwise": "triton|elementwise|multi_tensor|fused_adam|foreach|norm|softmax|gelu|relu|tanh|dropout"
    r"|aten::(add|sub|mul|div|pow|copy|fill|zero|where|addcmul|addcdiv|lerp|sqrt|cat|sum)_?$",
}


def training(bench: Bench, model: GPT, config: TrainConfig, batches: Batches) -> Iterator[str]:
    """The steps of train.py without end, in PARTS: the name of each is yielded as soon as it is done.

    Without what looks on: the progress line, the worst loss.
    """
    loss_fn = torch.compile(next_token_loss, dynamic=False) if bench.cuda else next_token_loss
    optimizer = make_optimizer(model, config)
    guard = FiniteGuard(optimizer, bench.device, str)
    for step in count():
        set_schedule(optimizer, step, config)
        set_seed(bench.device, seed_for(0, "dropout", step))
        inputs, targets = batches(step, bench.device)
        yield "data"
        loss = loss_fn(model, inputs, targets, bench.dtype) / targets.numel()
        yield "forward"
        loss.backward()
        yield "backward"
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip or math.inf)
        guard.watch(step, loss.detach() + norm)
        yield "clipping"
        optimizer.step()
        optimizer.zero_grad()
        yield "optimizer"


def one_step(parts: Iterator[str]) -> None:
    while next(parts) != PARTS[-1]:
        pass


def first_steps(bench: Bench, parts: Iterator[str]) -> dict[str, float]:
    """Seconds of the first step, which compiles, and on CUDA the GiB that the second needs for a while."""
    result = {"first step s": bench.clock(partial(one_step, parts), 1)}
    if bench.cuda:
        torch.cuda.reset_peak_memory_stats()
        always = torch.cuda.memory_allocated()
        one_step(parts)
        result["GiB"] = (torch.cuda.max_memory_allocated() - always) / 2**30
    return result


def random_tokens(shape: Shape, directory: str) -> Path:
    path = Path(directory) / "tokens.bin"
    np.random.default_rng(0).integers(shape.vocab_size, size=2**22, dtype=np.uint16).tofile(path)
    return path


def all_trainings(bench: Bench, shape: Shape, batch_size: int, path: Path) -> dict[str, Iterator[str]]:
    """{way: its steps, in PARTS}, nanoGPT's first. What was compiled for others is forgotten."""
    if bench.cuda:
        torch.compiler.reset()
    theirs = nanogpt.NanoGPT(shape.of_nanogpt()).to(bench.device)
    adamw = nanogpt.make_optimizer(theirs)
    ways = {"nanoGPT": nanogpt.training(theirs, adamw, path, batch_size, max_steps=sys.maxsize, compiled=bench.cuda)}
    batches = Batches(np.memmap(path, dtype=np.uint16, mode="r"), batch_size, shape.context_length, seed=0)
    for way, (family, config) in OURS.items():
        ways[way] = training(bench, GPT(shape.of(family)).to(bench.device), config, batches)
    return ways


def flops_of_step(shape: Shape, way: str, batch_size: int) -> float:
    family, _ = OURS.get(way, OURS["ours, gpt2"])  # nanoGPT's model is a gpt2
    with torch.device("meta"):
        return batch_size * shape.context_length * flops_per_token(GPT(shape.of(family)))


def measure_step(bench: Bench) -> Iterator[dict]:
    """A whole step, from its batch on, at nanoGPT's batch size and at others; then the ratios of tokens a second."""
    for shape in bench.shapes:
        speeds = {}
        for batch_size in shape.batches:
            with TemporaryDirectory() as directory:
                ways = all_trainings(bench, shape, batch_size, random_tokens(shape, directory))
                extra = {way: first_steps(bench, parts) for way, parts in ways.items()}
                results = bench.measure({way: partial(one_step, parts) for way, parts in ways.items()})
            del ways
            for way, result in results.items():
                speed = batch_size * shape.context_length / result["ms"] * 1e3
                speeds.setdefault(way, []).append(speed)
                share = flops_of_step(shape, way, batch_size) / result["ms"] * 1e3 / peak_flops(bench, bench.dtype)
                what = {"what": f"{way}, {shape.name} x {batch_size}", "batch": batch_size, "dtype": short(bench.dtype)}
                yield what | result | {"tokens/s": speed, "of peak": share} | extra[way]
        for way in OURS:
            theirs, ours = speeds["nanoGPT"], speeds[way]
            ratios = {"same batch": ours[0] / theirs[0], "best batches": max(ours) / max(theirs)}
            yield {"what": f"{way} / nanoGPT, {shape.name}"} | ratios


def measure_split(bench: Bench) -> Iterator[dict]:
    """Where the milliseconds of a step go, by part and by kind of kernel: either sums to the step."""
    shape, steps = bench.shapes[-1], 5 if bench.tiny else 31
    batch_size = shape.batches[-1] if bench.cuda else shape.batches[0]
    splits = {"part": {}, "kernel": {}}
    with TemporaryDirectory() as directory:
        ways = all_trainings(bench, shape, batch_size, random_tokens(shape, directory))
        for way, parts in ways.items():
            for _ in range(3):
                one_step(parts)
            times = [parts_of_step(bench, parts) for _ in range(steps)]
            splits["part"][way] = sorted(times, key=lambda times: sum(times.values()))[steps // 2]  # the median step
            splits["kernel"][way] = kinds_of_step(bench, parts)
    for by, of_way in splits.items():
        for name in of_way["nanoGPT"]:
            took = {way.removeprefix("ours, "): split[name] for way, split in of_way.items()}
            yield {"what": f"{by}: {name}, ms", "shape": shape.name, "batch": batch_size} | took


def parts_of_step(bench: Bench, parts: Iterator[str]) -> dict[str, float]:
    """Milliseconds of each part of a step. A GPU is not stopped for it: it notes itself when it was so far."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(len(PARTS) + 1)] if bench.cuda else []

    def now() -> float | torch.cuda.Event:
        if not bench.cuda:
            bench.wait()
            return time.perf_counter()
        event = events.pop()
        event.record()
        return event

    bench.wait()
    marks = [now()] + [now() for _ in zip(PARTS, parts, strict=False)]
    bench.wait()
    took = (a.elapsed_time(b) if bench.cuda else 1e3 * (b - a) for a, b in pairwise(marks))
    return dict(zip(PARTS, took, strict=True))


def kind_of(kernel: str) -> str | None:
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, kernel, re.IGNORECASE)), None)


def kinds_of_step(bench: Bench, parts: Iterator[str]) -> dict[str, float]:
    """Milliseconds of a step by kind of kernel, under the profiler; the rest is other kernels, Python and waiting."""
    steps = 1 if bench.tiny else 5
    kinds_of_device = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * bench.cuda]
    with profile(activities=kinds_of_device, acc_events=True) as profiled:  # else torch 2.11 warns
        seconds = bench.clock(partial(one_step, parts), steps)
    kinds = dict.fromkeys(KINDS, 0.0)
    for event in profiled.key_averages():
        kind = kind_of(event.key)
        if kind and event.device_type == (DeviceType.CUDA if bench.cuda else DeviceType.CPU):
            took = event.self_device_time_total if bench.cuda else event.self_cpu_time_total
            kinds[kind] += took / 1e3 / steps
    return kinds | {"rest": 1e3 * seconds / steps - sum(kinds.values())}


def measure_loader(bench: Bench) -> Iterator[dict]:
    """A batch of data/batches.py, beside nanoGPT's and as a share of our step, which waits for it."""
    for shape in bench.shapes:
        batch_size, T = shape.batches[0], shape.context_length
        with TemporaryDirectory() as directory:
            path = random_tokens(shape, directory)
            batches = Batches(np.memmap(path, dtype=np.uint16, mode="r"), batch_size, T, seed=0)
            number, ours = count(), all_trainings(bench, shape, batch_size, path)["ours, gpt2"]
            works = {
                "ours": lambda batches=batches, number=number: batches(next(number), bench.device),
                "nanoGPT": partial(nanogpt.batch, path, batch_size, T, bench.device),
                "step": partial(one_step, ours),
            }
            results = bench.measure(works)
        for way in ("ours", "nanoGPT"):
            share = {"of our step": results[way]["ms"] / results["step"]["ms"]}
            yield {"what": f"{way}, {shape.name} x {batch_size}"} | results[way] | share


def measure_optimizer(bench: Bench) -> Iterator[dict]:
    """One update of all parameters: Muon as we have it and as PyTorch has, AdamW as we have it and as nanoGPT has."""
    for shape in bench.shapes:
        model = GPT(shape.of("nanochat")).to(bench.device)
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        inside = [parameter for parameter in model.blocks.parameters() if parameter.dim() == 2]
        others = {id(parameter) for parameter in inside}
        others = [parameter for parameter in model.parameters() if id(parameter) not in others]
        torch_muon = (torch.optim.Muon(inside), torch.optim.AdamW(others, fused=True))
        works = {
            "Muon, ours": make_optimizer(model, TrainConfig(optimizer="muon", learning_rate=1e-6)).step,
            "Muon, torch": lambda muon=torch_muon: [optimizer.step() for optimizer in muon],
            "AdamW, ours": make_optimizer(model, TrainConfig(learning_rate=1e-6)).step,
            "AdamW, nanoGPT": nanogpt.make_optimizer(model, 1e-6).step,
        }
        for way, result in bench.measure(works).items():
            yield {"what": f"{way}, {shape.name}"} | result
