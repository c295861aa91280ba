"""Let threads that wait for each other sleep soon, unless the user has decided. A script imports this before torch.

Between the parallel parts of a step, the threads of GNU's OpenMP spin for milliseconds before they sleep. Beside a
program that wants the same core, their spinning takes it from the thread that computes, and a step takes up to 40 times
as long. OpenMP reads the setting when torch loads it. Results do not change.
"""

import os

SETTINGS = {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"}  # with one of them, the user has decided

if not SETTINGS & os.environ.keys():
    os.environ["GOMP_SPINCOUNT"] = "1000"  # turns, a few microseconds
