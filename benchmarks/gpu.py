"""Measure an NVIDIA GPU in at most 12 minutes, and write a report. `make gpu` runs it.

    python benchmarks/gpu.py --text input.txt    with options of bench.py, to which they go

When a stage ends, the report, benchmarks/results/gpu_<device>_<date>.md, gets its heading and what it printed. The
headings are the table at the end. A second start leaves out what has passed: delete the report to begin anew.
"""

import re
import subprocess
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks import ROOT
from cli.script import run_script
from errors import UserError

RESULTS = ROOT / "benchmarks" / "results"
BENCH = "benchmarks/bench.py --out benchmarks/results --stages"
# What is worth most comes first. Name: arguments of Python; most minutes; and for a stage of bench.py the figure of its
# measurements that the table has. For others it has what they print last.
STAGES = {
    # If pytest-benchmark is installed, it warns of -n, and warnings are errors here.
    "tests": ("-m pytest -m cuda -n 6 -p no:benchmark tests/training/test_cuda.py", 2.5, None),
    "sampling": (f"{BENCH} decode", 2.5, "tokens/s"),
    "loss": (f"{BENCH} loss", 2.5, "s to goal"),
    "step": (f"{BENCH} step", 2.5, "same batch"),
    "memory": ("benchmarks/memory.py --configs configs/fineweb_edu.toml", 2, None),
}


def run(arguments: list[str], minutes: float) -> tuple[str, str]:
    """Run Python with these arguments, and print what it prints. Return that, and how it ended."""
    lines = []
    command = ["timeout", "--kill-after=5", str(60 * minutes), sys.executable, *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, cwd=ROOT, **pipes) as process:
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line)
    endings = {0: "passed", 124: f"stopped after {minutes:g} minutes"}
    return "".join(lines), endings.get(process.returncode, f"exit code {process.returncode}")


def main() -> None:
    if not torch.cuda.is_available():
        raise UserError(f"PyTorch {torch.__version__} sees no NVIDIA GPU: look at nvidia-smi; a +cpu build sees none")
    device = torch.cuda.get_device_name()
    date = time.strftime("%Y-%m-%d")
    report = RESULTS / f"gpu_{re.sub('[^a-z0-9]+', '-', device.lower()).strip('-')}_{date}.md"
    title = f"# {device}, torch {torch.__version__}, CUDA {torch.version.cuda}, {date}\n"
    text = report.read_text(encoding="utf-8") if report.exists() else title
    for name, (command, minutes, figure) in STAGES.items():
        if re.search(f"^## {name} +passed", text, re.MULTILINE):
            continue
        began = time.monotonic()
        printed, ending = run(command.split() + (sys.argv[1:] if figure else []), minutes)
        key = printed.strip().rpartition("\n")[2]
        if figure:  # bench.py prints: stage, two spaces or more between what was measured and figures
            key = "; ".join(map(" ".join, re.findall(rf"^\w+ +(.+?)  .*({figure} \S+)", printed, re.MULTILINE)))
        text += f"\n## {name:9} {ending:26} {time.monotonic() - began:4.0f} s  {key}\n"
        text += f"\n`python {command}`\n\n```text\n{printed}```\n"
        report.write_text(text, encoding="utf-8")
    table = dict(re.findall(r"^## (\w+) +(.*)$", text, re.MULTILINE))
    print(f"\nreport: {report}\n", *(f"{name:9} {row}" for name, row in table.items()), sep="\n")
    if not all(row.startswith("passed") for row in table.values()):
        sys.exit(1)


if __name__ == "__main__":
    run_script(main)
