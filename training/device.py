"""The machine of a run: device, precision, compiler, and random numbers."""

import os
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

from errors import UserError, errors_as_user_error
from model import GPT
from model.checkpoint import code_hash
from model.device import dtype_name, find_device, has_bfloat16
from training.certificate import LossFn
from training.config import TrainConfig

# Narrower models train in float32 on a CPU: their products are small, and there are as many conversions. This is the
# narrowest width at which bfloat16 was measured, and was faster (benchmarks/results/step_cpu_2026-11-23.md).
WIDE_ENOUGH = 64
# Runs of fewer micro-batches are not compiled by default. On an H200 that took 15 s more for six layers, and saved 5 ms
# in each micro-batch as a CUDA graph, else 3 ms (benchmarks/results/gpu_nvidia-h200_2026-11-26.md).
ENOUGH_TO_COMPILE = 3000


def choose_device(config: TrainConfig, n_embd: int, local_rank: int | None = None) -> tuple[torch.device, torch.dtype]:
    """Choose device and precision of a run, and print them.

    n_embd is the width of the model; local_rank the number of the GPU where each process has its own. Raises UserError
    if the device cannot be used.
    """
    own = local_rank is not None and config.device.startswith(("auto", "cuda")) and torch.cuda.is_available()
    device = find_device(f"cuda:{local_rank}" if own else config.device)
    cuda = device.type == "cuda"
    if config.dtype != "auto":
        dtype = getattr(torch, config.dtype)
    elif has_bfloat16(device) and (cuda or n_embd >= WIDE_ENOUGH):
        dtype = torch.bfloat16
    else:
        dtype = torch.float16 if cuda else torch.float32
    if cuda:
        torch.cuda.set_device(device)
        torch.set_float32_matmul_precision("high")  # TF32, where float32 products remain
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read by cuBLAS if it has to be deterministic
    # On CUDA a warning would not do: PyTorch's attention then adds in any order.
    if config.deterministic:
        torch.use_deterministic_algorithms(True, warn_only=not cuda)
    where = torch.cuda.get_device_name(device) if cuda else f"threads: {torch.get_num_threads()}"
    print(f"device: {device} ({where}), {dtype_name(dtype)}")
    return device, dtype


def choose_kernels(config: TrainConfig, device: torch.device) -> str:
    """Return how the loss runs: "eager", "graph" or "compiled", as `train.compile` says.

    auto compiles by the length of the whole run; prints a note if it would, but cannot. Raises UserError if the run was
    asked to compile, and cannot.
    """
    if config.compile == "graph":
        return "graph" if fits_a_graph(config, device) else "eager"
    pays = device.type == "cuda" and config.max_steps * config.grad_accum_steps >= ENOUGH_TO_COMPILE
    if config.compile == "false" or config.compile == "auto" and not pays:
        return "eager"
    try:
        with errors_as_user_error("the loss is not compiled (install g++, or take --train.compile false)"):
            trial = compile_loss(lambda x: x + x, config, device)
            for _ in range(3):  # a CUDA graph is recorded in the second call and replayed in the third
                trial(torch.ones(2, device=device))
    except UserError as error:
        if config.compile == "true":
            raise
        print(f"note: {error}")
        return "eager"
    return "compiled"


def compile_loss(loss_fn: Callable[..., Tensor], config: TrainConfig, device: torch.device) -> Callable[..., Tensor]:
    """Return the compiled loss, on CUDA as CUDA graphs if each step is one micro-batch.

    The host launches a graph at once. Launching the kernels of a small model one by one takes longer than computing
    them (benchmarks/results/gpu_nvidia-h200_2026-11-26.md). Gradients that are kept for the next micro-batch, or that
    fsdp moves, would need new graphs.
    """
    if not fits_a_graph(config, device):
        return torch.compile(loss_fn, dynamic=False)
    compiled = torch.compile(loss_fn, dynamic=False, options={"triton.cudagraphs": True})

    def loss(*inputs: object, **options: object) -> Tensor:
        return compiled(*inputs, **options).clone()  # the graph writes its next result into the same memory

    return loss


def record_loss(loss_fn: LossFn, model: GPT, batch_size: int, T: int) -> LossFn:
    """Return the loss as a CUDA graph in each step, and so is its gradient.

    No compiler is needed. The certificate has to be asked before, since it replaces weights for a while, and a graph
    reads the memory of those that it was recorded with. Raises UserError if the model cannot be recorded: it asks the
    host for a number, for example.
    """
    shape = (batch_size, T)
    inputs, targets = torch.zeros(2, *shape, dtype=torch.int64, device=model.device)
    # The gradients come from the stream of the recording, for which autograd waits, on the GPU.
    torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(False)
    with errors_as_user_error("the loss cannot be recorded: train with --train.compile false"):
        graph = torch.cuda.make_graphed_callables(Recordable(loss_fn, model), (inputs, targets))

    def loss(model: GPT, inputs: Tensor, targets: Tensor) -> Tensor:
        # The graph writes gradients into the same memory too, and must not while there are some.
        if model.training and inputs.shape == shape and all(weight.grad is None for weight in model.parameters()):
            return graph(inputs, targets).clone()  # the graph writes its next result into the same memory
        return loss_fn(model, inputs, targets)

    return loss


def fits_a_graph(config: TrainConfig, device: torch.device) -> bool:
    """Return whether a step can be a CUDA graph: it is one micro-batch, and nobody moves its gradients."""
    return device.type == "cuda" and config.grad_accum_steps == 1 and config.parallel == "ddp"


class Recordable(nn.Module):
    """A loss as a module, whose parameters are those of the model."""

    def __init__(self, loss_fn: LossFn, model: GPT):
        super().__init__()
        self.loss_fn = loss_fn
        self.model = model

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return self.loss_fn(self.model, inputs, targets)


def set_seed(device: torch.device, seed: int) -> None:
    """Seed the random numbers of the host and of this device.

    torch.manual_seed does the same, but takes milliseconds: it looks at every kind of device.
    """
    torch.default_generator.manual_seed(seed)
    if device.type != "cpu":
        torch.get_device_module(device).manual_seed(seed)


def environment(device: torch.device, dtype: torch.dtype, kernels: str) -> dict[str, str]:
    """Return the facts about the machine and the code that decide the last bits of a run's numbers, by name."""
    return {
        "torch": torch.__version__,
        "numpy": np.__version__,  # it draws the batches
        "code of model/": code_hash(),
        "cudnn": str(torch.backends.cudnn.version()),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "dtype": dtype_name(dtype),
        "kernels": kernels,
        "deterministic": str(torch.are_deterministic_algorithms_enabled()).lower(),
        "threads": str(torch.get_num_threads()),
        "instructions": torch.backends.cpu.get_cpu_capability(),
    }
