"""cores.py: threads spin for a short time, unless the user has decided."""

import cores
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize(
    "settings, spins",
    [({}, "1000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, "None")],
)
def test_threads_spin_for_a_short_time_unless_the_user_decides(settings: dict[str, str], spins: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name not in cores.SETTINGS}
    command = [sys.executable, "-c", "import os, cores; print(os.environ.get('GOMP_SPINCOUNT'))"]
    root = Path(cores.__file__).parent
    done = subprocess.run(command, env=environment | settings, cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == spins
