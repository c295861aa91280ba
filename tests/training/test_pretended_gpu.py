"""What can be seen of a GPU without one: tests/pretended.py in a process that knows a device named CUDA."""

import os
import shutil
import sys

import pytest
import torch

from benchmarks import has_nvidia_gpu
from tests.conftest import run_python

CAN_PRETEND = has_nvidia_gpu() if torch.backends.cuda.is_built() else shutil.which("g++") is not None
pytestmark = [
    pytest.mark.skipif(not CAN_PRETEND, reason="to pretend a GPU needs g++, or where PyTorch has CUDA, an NVIDIA GPU"),
    pytest.mark.skipif(sys.platform != "linux", reason="pretends a GPU on Linux only"),
]


IN_PARTS = ["planted", "steps and gpt2", "steps and not gpt2", "certificate or decoding"]


@pytest.mark.long
@pytest.mark.parametrize("tests, marks", [("not certificate", "not long"), *((part, "") for part in IN_PARTS)])
def test_the_dry_run(tests: str, marks: str) -> None:
    """Run the tests of tests/pretended.py with these words in their names, in a process of their own."""
    start = "import benchmarks.pretended_gpu, pytest, sys; sys.exit(pytest.main(sys.argv[1:]))"
    options = ["-x", "-p", "no:cacheprovider", "-k", tests, "-m", marks]
    environment = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    done = run_python("-c", start, "tests/pretended.py", *options, env=environment)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
