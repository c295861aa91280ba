"""Sharing the cores of a CPU with other programs.

Between the parallel parts of a step, the threads of OpenMP spin for milliseconds before they sleep, because waking a
thread takes longer than the next part. Beside a program that wants the same core, their spinning takes it from the
thread that computes, and a step takes up to 40 times as long. GNU's OpenMP almost stops spinning while it has more
threads than there are CPUs (libgomp, `do_spin`). So `Watch` keeps idle threads while other programs need a core.
Results do not change. An OpenMP of another maker ignores the idle threads.
"""

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

TASKS = Path("/proc/self/task")  # the threads of this process, on Linux
SETTINGS = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "OMP_NUM_THREADS")  # with one of them, the user has decided
INTERVAL = 0.5  # seconds
# Share of the time that a thread waits for a core, on two cores: 0.2 or more beside a busy program, 0.005 alone.
CROWDED = 0.05


@contextmanager
def shared_cores() -> Iterator[None]:
    """Stop OpenMP's threads from spinning while other programs need the cores, if the user has not decided."""
    decided = any(name in os.environ for name in SETTINGS)
    if decided or torch.get_num_threads() == 1 or not Path("/proc/self/schedstat").exists():
        yield
        return
    watch = Watch()
    thread = threading.Thread(target=watch.run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        watch.ended.set()
        thread.join()


class Watch:
    """A watch of how long this process waits for cores, which keeps idle threads meanwhile."""

    def __init__(self):
        self.ended = threading.Event()
        self.idle: IdleThreads | None = None
        self.last_waited = seconds_waited()
        self.last_time = time.perf_counter()

    def run(self) -> None:
        """Look twice a second until the watch has ended."""
        while not self.ended.wait(INTERVAL):
            self.look(seconds_waited(), time.perf_counter())
        self.keep(False)

    def look(self, waited: float, now: float) -> None:
        """Keep idle threads or end them, by what was waited since the last look. Both are in seconds."""
        share = (waited - self.last_waited) / (now - self.last_time) / torch.get_num_threads()
        self.last_waited = waited
        self.last_time = now
        self.keep(share > CROWDED)

    def keep(self, crowded: bool) -> None:
        """Keep idle threads, or none."""
        if crowded and self.idle is None:
            self.idle = IdleThreads()
        elif not crowded and self.idle is not None:
            self.idle.ended.set()
            self.idle = None


def seconds_waited() -> float:
    """Return how long the threads of this process were ready to run and had no core, summed over all threads."""
    nanoseconds = 0
    for path in TASKS.glob("*/schedstat"):
        try:
            nanoseconds += int(path.read_text().split()[1])  # Linux, Documentation/scheduler/sched-stats.rst
        except OSError:  # the thread has ended
            continue
    return nanoseconds / 1e9


class IdleThreads:
    """Threads that do nothing until `ended` is set: with those that compute, OpenMP has more than there are CPUs."""

    def __init__(self):
        self.ended = threading.Event()
        # Each thread of Python gets a pool of its own. PyTorch counts cores, libgomp CPUs, of which a core may be two.
        workers = max(1, torch.get_num_threads() - 1)
        for _ in range(max(1, len(os.sched_getaffinity(0)) // workers)):
            threading.Thread(target=self.hold, daemon=True).start()

    def hold(self) -> None:
        """Make a pool, by an operation that is long enough to be shared, and wait."""
        torch.ones(10**6).sum()
        self.ended.wait()
