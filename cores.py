"""Let threads that wait for each other sleep soon where other programs work. A script imports this before torch.

Between the parallel parts of a step, the threads of GNU's OpenMP spin for milliseconds before they sleep. Beside a
program that wants the same core, their spinning takes it from the thread that computes, and a step takes up to 40 times
as long. Where nobody else works, sleeping soon costs a tenth of the speed. OpenMP reads the setting when torch loads
it. Results do not change.
"""

import os
from contextlib import suppress
from pathlib import Path

SETTINGS = {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"}  # with one of them, the user has decided
LOAD = Path("/proc/loadavg")  # of Linux, as GNU's OpenMP is

if not SETTINGS & os.environ.keys():
    with suppress(OSError):  # another system, or a container that hides it
        last_minute, _, _, running, _ = LOAD.read_text().split()
        if float(last_minute) > 0.5 and int(running.split("/")[0]) > 1:  # at this instant; one is this process
            os.environ["GOMP_SPINCOUNT"] = "1000"  # turns, a few microseconds
