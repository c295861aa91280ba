"""Measurements: bench.py is run by make bench, the other scripts answer one question each."""

from pathlib import Path


def has_nvidia_gpu() -> bool:
    """Return whether this machine has an NVIDIA GPU, without asking PyTorch, from which tests hide it."""
    devices = Path("/dev")
    return any(devices.glob("nvidia[0-9]*")) or (devices / "dxg").exists()  # the latter in WSL 2
