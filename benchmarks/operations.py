"""Stages of bench.py: what the machine can do at most, and what attention makes of it."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache, partial
from itertools import product

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.timing import Bench, short
from model.attention import Attend, attention_weights, make_causal_mask

PRECISIONS = (torch.float32, torch.bfloat16, torch.float16)
KERNELS = {"flash": SDPBackend.FLASH_ATTENTION, "efficient": SDPBackend.EFFICIENT_ATTENTION}
KERNELS |= {"cudnn": SDPBackend.CUDNN_ATTENTION}


@cache
def matmul(bench: Bench, dtype: torch.dtype, m: int, k: int, n: int) -> dict:
    """(m, k) @ (k, n)."""
    a, b = (torch.randn(size, device=bench.device, dtype=dtype) for size in ((m, k), (k, n)))
    took = bench.measure({"": lambda: a @ b}, seconds=0.5)[""]
    return took | {"TFLOP/s": 2 * m * k * n / took["ms"] / 1e9}


def cubes(bench: Bench, dtype: torch.dtype) -> dict[str, dict]:
    sizes = (32, 64) if bench.tiny else (4096, 8192, 16384) if bench.cuda else (512, 1024, 2048)
    return {f"{size}^3": matmul(bench, dtype, size, size, size) for size in sizes}


def peak_flops(bench: Bench, dtype: torch.dtype) -> float:
    """FLOP/s of the fastest cube; measured once."""
    return 1e12 * max(result["TFLOP/s"] for result in cubes(bench, dtype).values())


def measure_peak(bench: Bench) -> Iterator[dict]:
    """Matrix products, as cubes and as the models have them; a copy; the launch of a kernel."""
    for dtype in bench.dtypes:
        results = cubes(bench, dtype)
        for shape in bench.shapes:
            C, V, rows = shape.n_embd, shape.vocab_size, shape.batches[0] * shape.context_length
            for k, n in ((C, C), (C, 4 * C), (4 * C, C), (C, V)):
                results[f"{rows}x{k}x{n}"] = matmul(bench, dtype, rows, k, n)
        for name, result in results.items():
            yield {"what": f"{short(dtype)} matmul {name}"} | result
    size = 2**16 if bench.tiny else 2**30 if bench.cuda else 2**28
    source, target = torch.zeros(2, size, dtype=torch.uint8, device=bench.device)
    one = torch.zeros(1, device=bench.device)
    took = bench.measure({"copy": lambda: target.copy_(source), "launch": lambda: one.add_(1)})
    yield {"what": f"copy of {size >> 10:,} KiB"} | took["copy"] | {"GB/s": 2 * size / took["copy"]["ms"] / 1e6}
    yield {"what": "adding one number"} | took["launch"] | {"us": 1e3 * took["launch"]["ms"]}


def measure_rows(bench: Bench) -> Iterator[dict]:
    """Milliseconds of few rows by the matrices of blocks, more than a CPU's caches hold: what decoding waits for."""
    C, blocks = (16, 1) if bench.tiny else (768, 4)
    shapes = ([(C, C)] * 4 + [(4 * C, C), (C, 4 * C)]) * blocks
    weights = {dtype: [torch.randn(shape, device=bench.device).to(dtype) for shape in shapes] for dtype in PRECISIONS}
    for rows in (1, 5) if bench.tiny else (1, 2, 4, 8, 16, 64, 512):
        x = {size: torch.randn(rows, size, device=bench.device) for size in (C, 4 * C)}
        works = {short(dtype): partial(multiply, x, some, dtype) for dtype, some in weights.items()}
        works["widened"] = partial(multiply, x, weights[torch.bfloat16], torch.float32)
        took = {way: result["ms"] for way, result in bench.measure(works, seconds=0.5).items()}
        yield {"what": f"ms of {rows} x {len(shapes)} matrices"} | took


@torch.no_grad()
def multiply(x: dict[int, Tensor], weights: list[Tensor], dtype: torch.dtype) -> None:
    """Rows by matrices of the precision `dtype`, or widened to it."""
    for weight in weights:
        torch.nn.functional.linear(x[weight.size(1)].to(dtype), weight.to(dtype))


def measure_attention(bench: Bench) -> Iterator[dict]:
    """Milliseconds of our seam, of each kernel by name, and of the formula written out."""
    lengths = (8, 16) if bench.tiny else (256, 1024, 4096) if bench.cuda else (64, 256, 1024)
    widths = (8,) if bench.tiny else (64, 128) if bench.cuda else (32, 64)
    H, tokens = bench.shapes[-1].n_head, 32 if bench.tiny else 2**14 if bench.cuda else 2**11
    for dtype, D, T in product(bench.dtypes, widths, lengths):
        B, mask = max(1, tokens // T), make_causal_mask(T, bench.device)
        q, k, v = (torch.randn(B, H, T, D, device=bench.device, dtype=dtype, requires_grad=True) for _ in range(3))
        ways = all_kernels(bench, q, k, v, mask)
        chosen = SDPBackend(torch._fused_sdp_choice(q, k, v, is_causal=True)).name
        passes = (("forward", forward, 1.0), ("and backward", partial(forward_and_backward, (q, k, v)), 3.5))
        for name, call, share in passes:
            results = bench.measure({way: partial(call, work) for way, work in ways.items()}, seconds=0.5)
            took = {f"{way} ms": result["ms"] for way, result in results.items()}
            speed = share * 2 * B * H * T * T * D / took["seam ms"] / 1e9  # half of the square is the future
            what = {"what": f"{short(dtype)} {T}x{D} {name}", "batch": B, "heads": H}
            yield what | took | {"TFLOP/s": speed, "chosen": chosen}


def all_kernels(bench: Bench, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> dict[str, Callable[[], Tensor]]:
    """{way: work}; of the kernels with a name, those that there are for these tensors."""

    def only(backend: SDPBackend) -> Tensor:
        with sdpa_kernel(backend):
            return Attend()(q, k, v, mask)

    ways = {"seam": partial(Attend(), q, k, v, mask), "formula": lambda: attention_weights(q, k, mask) @ v}
    for name, backend in KERNELS.items() if bench.cuda else ():
        with warnings.catch_warnings(action="ignore"), suppress(RuntimeError):  # which say why it cannot
            forward_and_backward((q, k, v), partial(only, backend))
            ways[name] = partial(only, backend)
    return ways


@torch.no_grad()
def forward(work: Callable[[], Tensor]) -> None:
    work()


def forward_and_backward(inputs: tuple[Tensor, ...], work: Callable[[], Tensor]) -> None:
    y = work()
    torch.autograd.grad(y, inputs, y.detach())
