"""A GPU that is pretended: PyTorch runs the real code on tensors that say cuda:0 and hold no data.

    with pretended_gpu() as gpu:
        model.to("cuda")(idx)             # shapes, precisions, devices, operators and bytes are those of a GPU
    gpu.peak, gpu.operators, gpu.waits

Tensors of the CPU stay real. What a GPU would compute is not known, so where the program asks for a number, it gets
one with which it goes on: True, 1, 0.0, and an empty list of places.

Import this file before torch. A build of PyTorch without CUDA knows no such device, and gets one from
pretended_gpu.cpp, which needs g++. Its headers differ by version, so that it is compiled once for each. A build with
CUDA needs an NVIDIA driver and a GPU, on which it makes one number.
"""

import ctypes
import hashlib
import importlib.metadata
import importlib.util
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest import mock

from benchmarks import has_nvidia_gpu

SOURCE = Path(__file__).with_suffix(".cpp")


def load_guard() -> None:
    """Give a build of PyTorch without CUDA a device of that name. Exits with 2 and a sentence if that cannot be.

    Raises RuntimeError if torch is imported already.
    """
    package = Path(importlib.util.find_spec("torch").origin).parent
    if (package / "lib" / "libc10_cuda.so").exists():
        if has_nvidia_gpu():
            return
        print(
            "to pretend a GPU, PyTorch with CUDA needs an NVIDIA GPU: install the build without CUDA", file=sys.stderr
        )
        sys.exit(2)
    if "torch" in sys.modules:
        raise RuntimeError("benchmarks/pretended_gpu.py has to be imported before torch")
    key = importlib.metadata.version("torch").encode() + SOURCE.read_bytes()
    library = SOURCE.parent / "__pycache__" / f"pretended_gpu_{hashlib.sha256(key).hexdigest()[:16]}.so"
    library.parent.mkdir(exist_ok=True)
    if not library.exists():
        with tempfile.TemporaryDirectory(dir=library.parent) as directory:
            built = Path(directory) / library.name
            flags = ["-shared", "-fPIC", "-std=c++20", f"-I{package / 'include'}"]
            try:
                subprocess.run(["g++", *flags, str(SOURCE), "-o", str(built)], check=True)
            except (OSError, subprocess.CalledProcessError) as error:
                print(f"to pretend a GPU, PyTorch without CUDA needs g++, which failed: {error}", file=sys.stderr)
                sys.exit(2)
            built.rename(library)
    for path in (package / "lib" / "libc10.so", package / "lib" / "libtorch_cpu.so", library):
        ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)


load_guard()

# ruff: noqa: E402
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

aten = torch.ops.aten
COPIES = (aten._to_copy.default, aten.copy_.default)
HALF = (torch.bfloat16, torch.float16)


class HostGenerator(torch.Generator):
    """A generator of the host in the place of the GPU's."""

    def __new__(cls, device: object = None) -> "HostGenerator":
        return super().__new__(cls)


def takes_kernel(q: Tensor, k: Tensor, mask: Tensor | None) -> bool:
    """Return whether PyTorch 2.13 has a fused kernel for such a call on CUDA; if not, it computes the formula.

    FlashAttention takes half precision, heads of at most 256 and no mask. The memory-efficient kernel takes all
    precisions and masks, but no grouped heads, and widths of heads that are multiples of 16 bytes.
    (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp)
    """
    D = q.size(-1)
    flash = q.dtype in HALF and mask is None and D <= 256
    efficient = q.size(1) == k.size(1) and D * q.dtype.itemsize % 16 == 0 and q.dtype != torch.float64
    return flash or efficient


@torch.library.custom_op("tril::attention", mutates_args=())
def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Stand for a fused kernel: its output, and a number for each row."""
    raise NotImplementedError("it runs on fake tensors only")


@attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    rows = q.new_empty(q.shape[:3], dtype=torch.float32)
    return torch.empty_like(q), rows


@torch.library.custom_op("tril::attention_backward", mutates_args=())
def attention_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, output: Tensor, rows: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Stand for the gradient of a fused kernel: those of q, k and v, and the float32 sum that it needs for q."""
    raise NotImplementedError("it runs on fake tensors only")


@attention_backward.register_fake
def _(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, output: Tensor, rows: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    shape = (*q.shape[:2], *k.shape[2:])  # grouped heads have a gradient each before these are added
    return torch.empty_like(q), k.new_empty(shape), v.new_empty(shape), q.new_empty(q.shape, dtype=torch.float32)


def save_for_backward(ctx: object, inputs: tuple, output: tuple) -> None:
    ctx.save_for_backward(*inputs[:3], *output)


def backward(ctx: object, gradient: Tensor, _: Tensor) -> tuple:
    q, k, *_ = ctx.saved_tensors
    dq, dk, dv, _ = attention_backward(gradient, *ctx.saved_tensors)
    if k.size(1) != q.size(1):
        dk, dv = (each.unflatten(1, (k.size(1), -1)).sum(2) for each in (dk, dv))
    return dq, dk, dv, None


attention.register_autograd(backward, setup_context=save_for_backward)
fused = F.scaled_dot_product_attention


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute what PyTorch would on CUDA: a fused kernel, or the formula where there is none for such a call."""
    if query.device.type != "cuda":
        return fused(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    if torch.is_autocast_enabled("cuda"):
        query, key, value = (x.to(torch.get_autocast_dtype("cuda")) for x in (query, key, value))
    if takes_kernel(query, key, attn_mask):
        return attention(query, key, value, attn_mask)[0]
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(~attn_mask, float("-inf"))
    options = {"scale": scale, "enable_gqa": enable_gqa}
    with torch.autocast("cuda", enabled=False):
        return aten._scaled_dot_product_attention_math(
            query, key, value, attn_mask, dropout_p, is_causal, None, **options
        )[0]


class PretendedGPU(TorchDispatchMode):
    """A GPU that is pretended, and notes what a program asks of it.

    operators: (name, dtypes of what it reads and makes, without scalars) of each operator on the GPU, in their order.
    waits: descriptions of the operators that would make the host wait for the GPU.
    mixed: descriptions of the operators that read tensors of the host beside those of the GPU.
    allocated, peak: bytes of the tensors on the GPU, now and at most.
    """

    def __init__(self) -> None:
        super().__init__()
        self.fake = FakeTensorMode()
        self.storages: set[int] = set()
        self.allocated = self.peak = 0
        self.clear()

    def clear(self) -> None:
        """Forget the operators so far, and count the peak anew."""
        self.operators: list[tuple[str, tuple[torch.dtype, ...]]] = []
        self.waits: list[str] = []
        self.mixed: list[str] = []
        self.peak = self.allocated

    def __torch_dispatch__(self, func: object, types: object, args: tuple = (), kwargs: dict | None = None) -> object:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        to = None if kwargs.get("device") is None else torch.device(kwargs["device"]).type
        if func is aten._pin_memory.default:
            pinned = args[0].clone()
            pinned.is_in_pinned_memory = True
            return pinned
        if to != "cuda" and not any(isinstance(tensor, FakeTensor) for tensor in tensors) or func.namespace == "prim":
            return func(*args, **kwargs)
        with self:
            outputs = func.decompose(*args, **kwargs)  # into operators that come here one by one
        if outputs is not NotImplemented:
            return outputs
        outputs, is_question = self.answer(func, args, kwargs)
        devices = [tensor.device.type for tensor in tensors]
        if "cuda" in (to, *devices):
            text = describe(func, tensors)
            made = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)]
            dtypes = tuple(tensor.dtype for tensor in tensors + made if tensor.dim() > 0)
            self.operators.append((str(func), dtypes))
            source = tensors[-1] if tensors else None
            if is_question or (func in COPIES and self.waits_for_copy(source, outputs, kwargs.get("non_blocking"))):
                self.waits.append(text)
            if func not in COPIES and len({*devices}) > 1:
                self.mixed.append(text)
        for leaf in tree_leaves(outputs):
            if isinstance(leaf, FakeTensor) and leaf.device.type == "cuda":
                self.count(leaf.untyped_storage())
        return outputs

    def waits_for_copy(self, source: Tensor, copy: Tensor, non_blocking: bool | None) -> bool:
        """Return whether the host waits for a copy: for each between host and GPU but one from pinned memory."""
        if source.device.type == copy.device.type:
            return False
        return not (non_blocking and hasattr(source, "is_in_pinned_memory"))

    def answer(self, func: object, args: tuple, kwargs: dict) -> tuple[object, bool]:
        """Return what an operator returns, and whether it is a question that the host waits for."""
        if func is aten._local_scalar_dense.default:
            kind = args[0].dtype
            return (0.0 if kind.is_floating_point else True if kind == torch.bool else 1), True
        if func is aten.equal.default:
            return True, True
        if func is aten.index.Tensor and args[1][0] is not None and args[1][0].dtype == torch.bool:
            return args[0].flatten(0, args[1][0].dim() - 1), True  # as if all were chosen
        if func is aten.nonzero.default:
            with self.fake:
                return args[0].new_empty((0, args[0].dim()), dtype=torch.int64), True
        args, kwargs = tree_map_only(Tensor, self.make_fake, (args, kwargs))
        kwargs.pop("generator", None)  # fake tensors draw nothing
        with self.fake:
            outputs = func(*args, **kwargs)
        places = args[1] if func in (aten.index_put.default, aten.index_put_.default) else ()
        by_mask = any(place is not None and place.dtype == torch.bool for place in places)
        return outputs, by_mask or func is aten.multinomial.default

    def make_fake(self, tensor: Tensor) -> FakeTensor:
        """Return a tensor of the host without its numbers; a fake one as it is."""
        return tensor if isinstance(tensor, FakeTensor) else self.fake.from_tensor(tensor)

    def count(self, storage: torch.UntypedStorage) -> None:
        """Count the bytes of a storage until it is freed."""
        key = storage._cdata
        if key not in self.storages:
            self.storages.add(key)
            self.allocated += storage.nbytes()
            self.peak = max(self.peak, self.allocated)
            weakref.finalize(storage, self.free, key, storage.nbytes())

    def free(self, key: int, num_bytes: int) -> None:
        """Take off the bytes of a storage that is freed."""
        self.storages.remove(key)
        self.allocated -= num_bytes


def describe(func: object, tensors: list[Tensor]) -> str:
    """Return an operator with the tensors that it reads, in words."""
    return f"{func}({', '.join(f'{tensor.dtype} {tuple(tensor.shape)} on {tensor.device.type}' for tensor in tensors)})"


@contextmanager
def named_cuda() -> Iterator[None]:
    """Have PyTorch say inside of the `with` block that there is a GPU. Only fake tensors can be on it."""
    silent = ("_lazy_init", "set_device", "manual_seed", "set_rng_state", "empty_cache")
    values = {f"torch.cuda.{name}": lambda *_: None for name in silent} | {
        "torch.cuda.is_available": lambda: True,
        "torch.cuda.is_bf16_supported": lambda including_emulation=True: True,
        "torch.cuda.device_count": lambda: 1,
        "torch.cuda.current_device": lambda: 0,
        "torch.cuda.get_device_name": lambda device=None: "a pretended GPU",
        "torch.cuda.get_device_capability": lambda device=None: (9, 0),
        "torch.cuda.get_rng_state": lambda device=None: torch.zeros(16, dtype=torch.uint8),
        "torch.nn.functional.scaled_dot_product_attention": scaled_dot_product_attention,
        "torch.Generator": HostGenerator,
        "model.recorded.record": lambda work: work,
        "torch._subclasses.fake_tensor.FakeTensor.data_ptr": lambda tensor: tensor.untyped_storage()._cdata,
        # In the certificate all numbers differ, and no token is seen.
        "tril.causality.Prober.vanishes": lambda *_: True,
        "tril.causality.Prober.gradient": lambda self, exact: self.influence(exact, self.text(1), [0]),
        "torch.cuda.make_graphed_callables": lambda module, example: module,
    }
    with ExitStack() as patches:
        for name, value in values.items():
            patches.enter_context(mock.patch(name, value))
        torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(..., device="cuda") is a tensor of the host, copied
        patches.callback(torch._C._set_only_lift_cpu_tensors, False)
        yield


@contextmanager
def pretended_gpu() -> Iterator[PretendedGPU]:
    """Pretend inside of the `with` block that there is a GPU, and yield it."""
    gpu = PretendedGPU()
    peak = mock.patch("torch.cuda.max_memory_allocated", lambda device=None: gpu.peak)
    reset = mock.patch("torch.cuda.reset_peak_memory_stats", lambda device=None: gpu.clear())
    with named_cuda(), peak, reset, gpu:
        yield gpu
