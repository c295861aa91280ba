"""What only a GPU can show: that its kernels compute the same layer and leak nothing. How fast it is: bench.py.

Ways to run:
    python benchmarks/gpu.py                      on a GPU, a few minutes
    python benchmarks/gpu.py --out results.jsonl  one JSON object a measurement
    python benchmarks/gpu.py --tiny               everything small, on any machine
"""

import sys
import time
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path

import torch
import tyro

sys.path.insert(0, str(Path(__file__).parent.parent))
from benchmarks.record import Record, describe_machine
from inspection import capture
from model import GPT, GPTConfig
from model.attention import Attend, attention_weights, make_causal_mask
from train import next_token_loss
from training.certificate import certify
from training.config import TrainError
from training.device import find_device


@dataclass(frozen=True)
class Options:
    __doc__ = __doc__

    tiny: tyro.conf.FlagCreatePairsOff[bool] = False
    """Small sizes, to see that the script works."""
    out: Path | None = None
    """A file to append the measurements to."""


def kernel_error(device: torch.device, dtype: torch.dtype, T: int, n_kv_head: int) -> dict:
    """Largest difference between the fused kernel in `dtype` and the formula in float64, relative to the output."""
    B, H, D = 2, 6, 64
    q, k, v = (torch.randn(B, heads, T, D, device=device, dtype=dtype) for heads in (H, n_kv_head, n_kv_head))
    mask = make_causal_mask(T, device)
    weights = attention_weights(q.double(), k.double(), mask)
    expected = weights @ v.double().repeat_interleave(H // n_kv_head, dim=1)
    error = (Attend()(q, k, v, mask).double() - expected).abs().max() / expected.abs().max()
    last = Attend()(q[:, :, -3:], k, v, mask[-3:])  # as cached decoding calls it
    cached = (last.double() - expected[:, :, -3:]).abs().max() / expected.abs().max()
    return {"relative_error": error.item(), "cached_relative_error": cached.item()}


def certificate(config: GPTConfig, device: torch.device, dtype: torch.dtype, compiled: bool, batch_size: int) -> dict:
    """Whether the certificate passes what is causal and refuses a leak, and its seconds with and without warm-up."""
    model = GPT(config).to(device)

    def ask() -> bool:
        torch.compiler.reset()
        loss_fn = partial(torch.compile(next_token_loss, dynamic=False) if compiled else next_token_loss, dtype=dtype)
        for _ in range(2):
            began = time.perf_counter()
            try:
                certify(model, loss_fn, dtype, batch_size)
                passed = True
            except TrainError as error:
                print(error)
                passed = False
            synchronize(device)
            seconds.append(time.perf_counter() - began)
        return passed

    seconds = []
    passed, kernel = ask(), Attend.forward
    Attend.forward = lambda self, q, k, v, mask, dropout=0.0: torch.nn.functional.scaled_dot_product_attention(
        q, k, v, dropout_p=dropout, enable_gqa=q.size(1) != k.size(1)
    )
    leak_refused = not ask()
    Attend.forward = kernel
    return {"passed": passed, "leak_refused": leak_refused, "first_seconds": seconds[0], "seconds": seconds[1]}


def shown_weights(config: GPTConfig, device: torch.device, dtype: torch.dtype) -> dict:
    """The largest error of a row of weights that inspection shows, against the kernel."""
    model = GPT(config).to(device, dtype).eval()
    with capture(model) as att, torch.no_grad():
        model(torch.randint(config.vocab_size, (2, config.context_length), device=device))
    return {"largest_row_error": max(att.verify().values())}


def synchronize(device: torch.device) -> None:
    """Wait for the device, so that a clock read here counts its work."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def main(options: Options) -> None:
    device = find_device("auto")
    machine = describe_machine(device.type)
    record = Record(options.out, machine)

    def report(what: str, result: dict) -> None:
        print(f"{what:58s} " + "  ".join(f"{key} {value:.4g}" for key, value in result.items()))
        record({"what": what, **result})

    print(machine)
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    dtypes = [torch.float32, torch.bfloat16, torch.float16]
    for dtype in dtypes:
        for n_kv_head in (6, 2):
            T = 65 if options.tiny else 1024
            report(
                f"kernel against formula, {dtype}, {n_kv_head} of 6 kv heads", kernel_error(device, dtype, T, n_kv_head)
            )
    shape = {"n_layer": 2, "n_head": 2, "n_embd": 64, "context_length": 64} if options.tiny else {"n_layer": 4}
    for dropout, compiled in product((0.0, 0.1), (False, True)):
        for dtype in dtypes[:1] if options.tiny else dtypes:
            config = GPTConfig(**shape, dropout=dropout, vocab_size=4096)
            what = f"certificate, {dtype}, dropout {dropout}, compiled {compiled}"
            report(what, certificate(config, device, dtype, compiled, batch_size=8))
    for dtype in dtypes:
        report(f"shown weights, {dtype}", shown_weights(GPTConfig(**shape), device, dtype))


if __name__ == "__main__":
    main(tyro.cli(Options))
