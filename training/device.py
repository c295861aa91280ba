"""The machine: which device and precision to use, and what fraction of its speed a run reaches."""

import contextlib
import math
import os
import re
from collections.abc import Callable, Iterator

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from model import GPT
from model.precision import precision
from training.config import TrainConfig, TrainError
from training.progress import duration

# Dense peak of the matrix units in TFLOP/s, bfloat16 where there is one, else float16; from the makers' data sheets.
# The first name found in the device's own name counts, so longer names stand before shorter ones.
PEAK_TFLOPS = {
    "B200": 2250,
    "H200": 989,
    "H100 PCIe": 756,
    "H100 NVL": 835,
    "H100": 989,
    "A100": 312,
    "A10G": 70,
    "A40": 149.7,
    "L40S": 362,
    "L4": 121,
    "RTX 5090": 209.5,
    "RTX 4090": 165.2,
    "RTX 3090": 71,
    "V100": 125,
    "T4": 65,
}

# The one width at which training in bfloat16 was measured on a CPU with units for it, and was faster, in
# benchmarks/results/fast_cpu_2026-11-21.md; what is narrower has smaller products, and as many conversions.
WIDE_ENOUGH = 128
# What torch.compile says if there is no C++ compiler, no C compiler for Triton or one that fails (for want of Python.h,
# say), no Triton, or a GPU it does not know.
NO_COMPILER = re.compile(
    "InvalidCxxCompiler|Failed to find C compiler|CalledProcessError|TritonMissing|GPUTooOldForTriton"
)


def device_type(name: str) -> str:
    """cuda, mps or cpu; auto is the first of them that is there."""
    if name != "auto":
        return name.split(":")[0]
    return "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"


def find_device(name: str) -> torch.device:
    """The device of this name; auto is CUDA, else MPS, else CPU. Raises TrainError if it is not there."""
    try:
        there = torch.empty(1, device=device_type(name) if name == "auto" else name)
        there.cpu()  # which the device "meta" cannot do
        return there.device
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0].split(". ")[0][:80]
        if reason.startswith("Expected one of"):
            reason = "it is none of auto, cpu, cuda, cuda:1 and mps"
        raise TrainError(f"device {name!r} cannot be used here: {reason}") from error


def choose_device(config: TrainConfig, n_embd: int, local_rank: int = 0) -> tuple[torch.device, torch.dtype]:
    """The device and precision of a run, explained in one printed line; of several GPUs that of this process.

    n_embd is the width of the model: a narrow one stays in float32 on a CPU. Raises TrainError if the device is not
    there.
    """
    is_any_gpu = config.device in ("auto", "cuda") and torch.cuda.is_available()
    device = find_device(f"cuda:{local_rank}" if is_any_gpu else config.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if config.dtype != "auto":
        dtype, why = getattr(torch, config.dtype), "as asked"
    elif device.type == "cpu" and n_embd >= WIDE_ENOUGH and precision(device) == torch.bfloat16:
        dtype, why = torch.bfloat16, "this CPU has units for it"
    elif device.type != "cuda":
        dtype, why = torch.float32, "nothing is known to be faster for this model here"
    elif torch.cuda.is_bf16_supported(including_emulation=False):
        dtype, why = torch.bfloat16, "this GPU has it"
    else:
        dtype, why = torch.float16, "with loss scaling, as this GPU has no bfloat16"
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")  # TF32, where float32 products remain
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read by cuBLAS if it has to be deterministic
    # Where it may only warn, PyTorch's attention on CUDA does so, and adds in any order.
    torch.use_deterministic_algorithms(config.deterministic, warn_only=device.type != "cuda")
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else f"threads: {torch.get_num_threads()}"
    print(f"device: {device} ({where}), {str(dtype).removeprefix('torch.')}: {why}")
    return device, dtype


def set_seed(device: torch.device, seed: int) -> None:
    """Seed what is drawn on the host and on this device.

    As torch.manual_seed, which takes milliseconds: it writes down a stack for every kind of device that is not there.
    """
    torch.default_generator.manual_seed(seed)
    if device.type != "cpu":
        torch.get_device_module(device).manual_seed(seed)


def weights_dtype(name: str, device: torch.device) -> torch.dtype:
    """Return the dtype of the weights for generating text: auto is bfloat16 where the machine has units for it."""
    if name != "auto":
        return getattr(torch, name)
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float32
    return precision(device)


class Operations(TorchDispatchMode):
    """Notes the names of the operations that PyTorch makes while it is on."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Callable, types: tuple, args: tuple = (), kwargs: dict | None = None) -> object:
        self.names.add(func.name())
        return func(*args, **(kwargs or {}))


def attention_kernel(model: GPT, dtype: torch.dtype) -> str:
    """The fused kernel that PyTorch chooses for the attention, by its name, or "not fused".

    Others may be chosen with dropout and for gradients: the model is asked as it will be trained.
    """
    device = model.lm_head.weight.device
    with Operations() as seen, autocast(device, dtype):
        model(torch.zeros(1, model.config.context_length, dtype=torch.long, device=device))
    fused = sorted(name for name in seen.names if "scaled_dot_product" in name and "math" not in name)
    return ", ".join(name.removeprefix("aten::_scaled_dot_product_") for name in fused) or "not fused"


def environment(device: torch.device, dtype: torch.dtype, compiled: bool) -> dict[str, str]:
    """What besides the configuration and the attention kernel decides the last bits of a run's numbers."""
    cuda = device.type == "cuda"
    return {
        "torch": torch.__version__,
        "cudnn": str(torch.backends.cudnn.version()) if cuda else "any",
        "device": torch.cuda.get_device_name(device) if cuda else device.type,
        "dtype": str(dtype).removeprefix("torch."),
        "kernels": "compiled" if compiled else "eager",
        "deterministic": str(torch.are_deterministic_algorithms_enabled()).lower(),
        "threads": "any" if cuda else str(torch.get_num_threads()),
        "instructions": "any" if cuda else torch.backends.cpu.get_cpu_capability(),
    }


def autocast(device: torch.device, dtype: torch.dtype) -> contextlib.AbstractContextManager:
    """Matrix products in `dtype`, what is delicate in float32; nothing at all if `dtype` is float32.

    The model has its residual stream in bfloat16 where that is `dtype`.
    """
    return torch.autocast(device.type, dtype) if dtype != torch.float32 else contextlib.nullcontext()


@contextlib.contextmanager
def advice_if_not_compiled(otherwise: str) -> Iterator[None]:
    """Let a TrainError say what to do where torch.compile lacks what it needs. Its other errors stay what they are."""
    try:
        yield
    except RuntimeError as error:
        if not NO_COMPILER.search(f"{type(error).__name__}: {error}"):  # its classes take seconds to import
            raise
        reason = str(error).splitlines()[0]
        raise TrainError(f"torch.compile fails here ({reason}): mend that, or go on {otherwise}") from error


def after_compiling(compiled: bool) -> str:
    """What to add to a line that is printed when all has been compiled."""
    if not compiled:
        return ""
    from torch._dynamo.utils import calculate_time_spent  # which takes seconds, unless there is something compiled

    return f", after {duration(calculate_time_spent().get('total_wall_time', 0.0))} of compiling"


def flops_per_token(model: GPT) -> float:
    """Training FLOPs a token, 6 N + 12 L H D T (Chowdhery et al. 2022, appendix B), N without lookup tables."""
    c = model.config
    return 6 * num_multiplied(model) + 12 * c.n_layer * c.n_head * c.head_dim * c.context_length


def num_multiplied(model: GPT) -> int:
    """The number of parameters that every token is multiplied by: all but lookup tables."""
    tables = [model.position_embedding, None if model.config.tied else model.token_embedding]
    return sum(p.numel() for p in model.parameters()) - sum(t.weight.numel() for t in tables if t is not None)


def peak_tokens_per_second(model: GPT, device: torch.device) -> float:
    """How many tokens a device could train on if its matrix units never waited, nan where unknown."""
    return peak_flops(device) / flops_per_token(model)


def peak_flops(device: torch.device) -> float:
    """FLOP/s the matrix units could do, nan where unknown."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return next((tflops * 1e12 for known, tflops in PEAK_TFLOPS.items() if known in name), math.nan)
