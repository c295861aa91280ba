"""training/cores.py: a second pool of threads while others need the cores, and only then."""

import os
import subprocess
import sys
import threading
import time

import pytest
import torch

from training import cores

CPU = torch.device("cpu")


def threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "idle pool"}


def test_a_pool_is_kept_while_threads_wait_for_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    readings = iter([7.0, 7.01, 7.5, 8.0, 8.05, 8.1, 7.9])  # the last: a thread has ended, and its time is gone
    monkeypatch.setattr(cores, "seconds_waited", lambda: next(readings))
    clock = iter(range(100))
    monkeypatch.setattr(cores.time, "perf_counter", lambda: next(clock))
    watch = cores.Watch()
    for kept in (False, True, True, False, False, False):
        before = watch.pool
        watch.look()
        assert (watch.pool is not None) == kept
        if before and not kept:
            assert before.ended.is_set()


def test_a_pool_is_a_thread_that_ends() -> None:
    before = threads()
    pool = cores.Pool()
    (thread,) = threads() - before
    pool.ended.set()
    thread.join(timeout=60)
    assert not thread.is_alive()


@pytest.mark.skipif(not cores.TASKS.exists(), reason="only Linux counts how long threads wait")
def test_waiting_is_counted() -> None:
    """More busy processes than there are cores: this one has to wait for one."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(os.cpu_count() or 1)]
    try:
        before = cores.seconds_waited()
        began = time.monotonic()
        while cores.seconds_waited() == before and time.monotonic() - began < 60:
            sum(range(10**6))
        assert cores.seconds_waited() > before
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


@pytest.mark.parametrize(
    ("setting", "device", "num_threads", "watched"),
    [
        (None, "cpu", 2, cores.TASKS.exists()),
        ("OMP_WAIT_POLICY", "cpu", 2, False),
        ("GOMP_SPINCOUNT", "cpu", 2, False),
        ("OMP_NUM_THREADS", "cpu", 2, False),
        (None, "cpu", 1, False),
        (None, "cuda", 2, False),
    ],
)
def test_cores_are_watched_unless_the_user_decides(
    setting: str | None, device: str, num_threads: int, watched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = []
    for name in cores.SETTINGS:
        monkeypatch.delenv(name, raising=False)
    if setting:
        monkeypatch.setenv(setting, "2")
    monkeypatch.setattr(torch, "get_num_threads", lambda: num_threads)
    monkeypatch.setattr(cores.Watch, "go_on", lambda watch: started.append(watch))
    before = set(threading.enumerate())
    cores.share_cores(torch.device(device))
    for thread in set(threading.enumerate()) - before:
        thread.join(timeout=60)
    assert len(started) == watched
