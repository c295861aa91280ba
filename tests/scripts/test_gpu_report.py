"""`make gpu`: one command writes one report, also of what fails."""

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from benchmarks import gpu
from tests.conftest import CAN_PRETEND


def test_the_report_has_what_each_command_prints(run: Callable, tmp_path: Path, monkeypatch) -> None:
    result = run(gpu)  # other tests see no GPU
    assert result.exit_code == 2 and "sees no NVIDIA GPU" in result.err
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H900 80GB")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu, "ROOT", tmp_path)
    monkeypatch.setattr(gpu, "RESULTS", tmp_path)
    commands = {"-c print(6*7)": 1, "-c import(time)": 1, "-c input();": 1, "-c while(1):0": 0.02}
    monkeypatch.setattr(gpu, "COMMANDS", commands)
    result = run(gpu)
    (report,) = tmp_path.glob("gpu_nvidia-h900-80gb_*.md")
    text = report.read_text()
    assert "`python -c print(6*7)`\n\n```text\n42\nexit code 0" in text and "SyntaxError" in text
    assert "stopped after 0.02 minutes" in text and result.out.startswith("42\n")
    assert result.exit_code == 1 and "failed, as the report says: -c import(time), " in result.err


def test_the_benchmarks_come_as_far_as_asking_for_a_gpu() -> None:
    (command,) = (command for command in gpu.COMMANDS if "bench.py" in command)
    ran = subprocess.run([sys.executable, *command.split()], cwd=gpu.ROOT, capture_output=True, text=True)
    assert ran.returncode == 2 and "device 'cuda' cannot be used here" in ran.stderr, ran.stderr


def test_where_no_gpu_can_be_pretended_a_sentence_says_why(tmp_path: Path) -> None:
    shutil.copytree(gpu.ROOT / "benchmarks", tmp_path / "benchmarks", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(gpu.ROOT / "errors.py", tmp_path)
    command = [sys.executable, "-c", "import benchmarks.pretended_gpu"]
    has_cuda = torch.backends.cuda.is_built()
    if has_cuda and CAN_PRETEND:
        pytest.skip("this PyTorch has CUDA and a GPU, and needs no compiler")
    ran = subprocess.run(command, cwd=tmp_path, env={"PATH": str(tmp_path)}, capture_output=True, text=True)
    missing = "with CUDA needs an NVIDIA GPU" if has_cuda else "without CUDA needs g++"
    assert ran.returncode == 2 and ran.stderr.startswith(f"to pretend a GPU, PyTorch {missing}")
