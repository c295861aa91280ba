"""Do on the first day with an NVIDIA GPU what could not be done without one, and write a report. `make gpu` runs it.

The report, benchmarks/results/gpu_<device>_<date>.md, has what three commands print: the tests that need a GPU, the
benchmarks, and the memory that training needs. They take at most 25 minutes.
"""

import re
import subprocess
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks import ROOT
from cli.script import fail, run_script
from errors import UserError

RESULTS = ROOT / "benchmarks" / "results"
COMMANDS = {  # command -> most minutes
    "-m pytest -m cuda -n 6 -p no:benchmark": 8,  # which, if installed, warns of -n, and warnings are errors here
    "benchmarks/bench.py --device cuda --out benchmarks/results": 10,
    "benchmarks/memory.py --configs configs/shakespeare_char.toml configs/fineweb_edu.toml": 7,
}


def run(command: str, minutes: float) -> tuple[str, bool]:
    """Run Python with these arguments, and print what it prints. Return that, and whether it succeeded in time."""
    began = time.monotonic()
    lines = []
    arguments = ["timeout", str(60 * minutes), sys.executable, *command.split()]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(arguments, cwd=ROOT, **pipes) as process:
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line)
    code = process.returncode
    how = f"stopped after {minutes:g} minutes" if code == 124 else f"exit code {code}"
    lines.append(f"{how}, {time.monotonic() - began:.0f} s\n")
    return "".join(lines), code == 0


def main() -> None:
    if not torch.cuda.is_available():
        raise UserError(f"PyTorch {torch.__version__} sees no NVIDIA GPU: look at nvidia-smi; a +cpu build sees none")
    name = torch.cuda.get_device_name()
    date = time.strftime("%Y-%m-%d")
    report = RESULTS / f"gpu_{re.sub('[^a-z0-9]+', '-', name.lower()).strip('-')}_{date}.md"
    text = f"# {name}, torch {torch.__version__}, CUDA {torch.version.cuda}, {date}\n"
    failed = []
    for command, minutes in COMMANDS.items():
        printed, succeeded = run(command, minutes)
        text += f"\n`python {command}`\n\n```text\n{printed}```\n"
        report.write_text(text, encoding="utf-8")
        if not succeeded:
            failed.append(command)
    print(f"report: {report.relative_to(ROOT)}")
    if failed:
        fail(f"failed, as the report says: {', '.join(failed)}", 1)


if __name__ == "__main__":
    run_script(main)
