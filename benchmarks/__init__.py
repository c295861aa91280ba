"""Measurements: bench.py is run by make bench, the other scripts answer one question each."""

import json
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from errors import UserError

ROOT = Path(__file__).parent.parent


def has_nvidia_gpu() -> bool:
    """Return whether this machine has an NVIDIA GPU, without asking PyTorch, from which tests hide it."""
    devices = Path("/dev")
    return any(devices.glob("nvidia[0-9]*")) or (devices / "dxg").exists()  # the latter in WSL 2


def run(*arguments: object) -> tuple[str, float]:
    """Run Python, and return the printed text and the seconds. Raises UserError with the end of stderr if it fails."""
    began = time.perf_counter()
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8")
    if done.returncode:
        raise UserError(f"{' '.join(command[1:])}: exit code {done.returncode}: {done.stderr.strip()[-400:]}")
    return done.stdout, time.perf_counter() - began


def train(*way: object, out: Path | None = None) -> list[dict]:
    """Train in a new process, and return the lines of metrics.jsonl; the last has the seconds of the whole process.

    way: train.py and its arguments, perhaps with torchrun before them. out: the run directory; None: it is deleted.
    """
    with TemporaryDirectory() as temporary:
        out = out or Path(temporary)
        _, seconds = run(*way, "--train.out_dir", out)
        lines = (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        return [*map(json.loads, lines), {"process seconds": seconds}]


def evaluations(lines: list[dict]) -> list[dict]:
    """Return the lines of metrics.jsonl that have a validation loss."""
    return [line for line in lines if "val_loss" in line]
