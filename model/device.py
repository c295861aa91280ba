"""The device of a model, the precisions in which it is fast, and its memory."""

import contextlib
import ctypes

import torch

from errors import errors_as_user_error

M_TRIM_THRESHOLD = -1  # of mallopt(3)
M_MMAP_THRESHOLD = -3
MADV_HUGEPAGE = 14  # of madvise(2)


def find_device(name: str) -> torch.device:
    """Return the device of this name; auto is CUDA, else MPS, else CPU. Raises UserError if it cannot be used."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    older = "an NVIDIA GPU from before 2018 needs PyTorch 2.14 or older, built for CUDA 12.6"  # (PyTorch issue 190385)
    with errors_as_user_error(f"device {name!r} cannot be used here (try auto, cpu, cuda or mps; {older})"):
        there = torch.ones(1, device=name)  # launches a kernel, which a GPU may lack
        there.cpu()  # waits for it, and fails on the device "meta"
        return there.device


def has_bfloat16(device: torch.device) -> bool:
    """Return whether the device computes bfloat16 natively, so that matrix products in it are fast."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return device.type == "cpu" and (torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def is_fast(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether matrix products in this precision are known to be fast on the device."""
    if dtype == torch.float16:
        return device.type != "cpu"
    return dtype != torch.bfloat16 or has_bfloat16(device)


def weights_dtype(name: str, device: torch.device) -> torch.dtype:
    """Return the precision of the weights for generating text; auto is bfloat16 where that is native, else float32."""
    if name != "auto":
        return getattr(torch, name)
    return torch.bfloat16 if has_bfloat16(device) else torch.float32


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a precision, as float32."""
    return str(dtype).removeprefix("torch.")


def autocast(device: torch.device, dtype: torch.dtype) -> contextlib.AbstractContextManager:
    """Return a context for mixed precision: matrix products in `dtype`, sensitive operations in float32."""
    return torch.autocast(device.type, dtype) if dtype != torch.float32 else contextlib.nullcontext()


def keep_freed_memory(device: torch.device) -> None:
    """Have glibc's malloc keep freed memory for the next step, on a CPU, and in huge pages if Linux gives them.

    It keeps tensors of up to 256 MiB, and a GiB at the end of a heap. By default malloc gives large tensors back to the
    system, which clears their pages anew in each step: that took up to half of the quickstart's time. Huge pages save a
    twentieth of training (benchmarks/results/huge_pages_cpu_2026-11-27.md), and a tenth of decoding, where each token
    reads all weights (benchmarks/results/decode_cpu_2026-11-29.md).
    """
    if device.type == "cpu":
        with contextlib.suppress(AttributeError, TypeError):  # another malloc has no such options, and Windows no libc
            libc = ctypes.CDLL(None)
            libc.mallopt(M_MMAP_THRESHOLD, 1 << 28)
            libc.mallopt(M_TRIM_THRESHOLD, 1 << 30)
            # The heap grows by memory that nothing has touched yet, which is then free, and stays advised.
            libc.malloc.restype = libc.sbrk.restype = ctypes.c_void_p
            start = libc.sbrk(0)
            blocks = [libc.malloc(1 << 27) for _ in range(6)]
            libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(libc.sbrk(0) - start), MADV_HUGEPAGE)
            for block in blocks:
                libc.free(ctypes.c_void_p(block))
