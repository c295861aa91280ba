"""What can be seen of a GPU without one: tests/pretended.py in a process that knows a device named CUDA."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.conftest import often

ROOT = Path(__file__).parent.parent
GROUPS = ("planted", "steps and gpt2", "steps and llama", "steps and qwen3", "steps and nanochat", "memory")
GROUPS += ("certificate", "capture or decoding")

pytestmark = [
    pytest.mark.skipif(
        not torch.backends.cuda.is_built() and not shutil.which("g++"), reason="needs g++ to pretend a GPU"
    ),
    pytest.mark.skipif(sys.platform != "linux", reason="pretends a GPU on Linux only"),
]


@pytest.mark.parametrize("group, marks", [("not certificate", "not long"), *often(*((g, "long") for g in GROUPS))])
def test_dry_run(group: str, marks: str) -> None:
    start = "import benchmarks.pretended_gpu, pytest, sys; sys.exit(pytest.main(sys.argv[1:]))"
    options = ["-x", "-p", "no:cacheprovider", "-k", group, "-m", marks]
    done = subprocess.run(
        [sys.executable, "-c", start, "tests/pretended.py", *options], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
