"""`make gpu`: one command writes one report, also of what fails."""

from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks import gpu


def test_the_report_has_what_each_command_prints(run: Callable, tmp_path: Path, monkeypatch) -> None:
    result = run(gpu)  # other tests see no GPU
    assert result.exit_code == 2 and "device 'cuda' cannot be used here" in result.err
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H900 80GB")
    monkeypatch.setattr(gpu, "find_device", lambda name: None)
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
