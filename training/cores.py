"""Sharing the cores of a CPU with other programs.

Between the parallel parts of a step, the threads of OpenMP spin for milliseconds before they sleep, because waking a
thread takes longer than the next part. Beside a program that wants the same core, they spin away the time in which they
should compute, and a step takes up to 40 times as long. GNU's OpenMP almost stops spinning while it has more threads
than there are cores (libgomp, `do_spin`). So a second pool of threads, which does nothing, is kept while others need a
core. How threads wait changes no numbers.
"""

import os
import threading
import time
from pathlib import Path

import torch

TASKS = Path("/proc/self/task")  # the threads of this process, on Linux
SETTINGS = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "OMP_NUM_THREADS")  # with one of them, the user has decided
EVERY = 0.5  # seconds
CROWDED = 0.1  # of the time, summed over all threads; beside a busy program it is 0.4 or more, alone 0.01


def share_cores(device: torch.device) -> None:
    """Watch in the background, until the process ends, whether others need the cores, if the device is the CPU."""
    decided = any(name in os.environ for name in SETTINGS)
    if device.type == "cpu" and not decided and TASKS.exists() and torch.get_num_threads() > 1:
        threading.Thread(target=Watch().go_on, daemon=True, name="watch of the cores").start()


class Watch:
    """A watch of how long this process waits for cores, which keeps a second pool of threads meanwhile."""

    def __init__(self):
        self.pool: Pool | None = None
        self.waited = seconds_waited()
        self.looked = time.perf_counter()

    def go_on(self) -> None:
        """Look again and again."""
        while True:
            time.sleep(EVERY)
            self.look()

    def look(self) -> None:
        """Begin or end the pool, if the time since the last look asks for it."""
        waited = seconds_waited()
        now = time.perf_counter()
        is_crowded = waited - self.waited > CROWDED * (now - self.looked)
        self.waited = waited
        self.looked = now
        if is_crowded and self.pool is None:
            self.pool = Pool()
        elif not is_crowded and self.pool is not None:
            self.pool.ended.set()
            self.pool = None


def seconds_waited() -> float:
    """Return how long the threads of this process were ready to run and had no core, summed over all threads."""
    nanoseconds = 0
    for path in TASKS.glob("*/schedstat"):
        try:
            nanoseconds += int(path.read_text().split()[1])  # Linux, Documentation/scheduler/sched-stats.rst
        except OSError:  # the thread has ended
            continue
    return nanoseconds / 1e9


class Pool:
    """A pool of OpenMP threads that does nothing: that of a thread of Python, until `ended` is set."""

    def __init__(self):
        self.ended = threading.Event()
        threading.Thread(target=self.hold, daemon=True, name="idle pool").start()

    def hold(self) -> None:
        """Run an operation that is long enough to be shared among threads, and wait."""
        torch.ones(10**6).sum()
        self.ended.wait()
