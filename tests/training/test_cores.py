"""training/cores.py: idle threads while others need the cores, and only then."""

import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

import train
from training import cores

POOLS = """
import time
from pathlib import Path
import torch
from training.cores import IdleThreads

def count():
    return len(list(Path("/proc/self/task").iterdir()))

def until(enough):
    for _ in range(3000):
        if enough():
            return
        time.sleep(0.01)
    raise SystemExit(f"{count()} threads, {before} before")

torch.ones(10**6).sum()
before = count()
idle = IdleThreads()
until(lambda: count() >= before + 3)  # a thread of Python and two workers, at least
idle.ended.set()
until(lambda: count() <= before)
"""


def test_idle_threads_are_kept_while_threads_wait_for_cores() -> None:
    watch = cores.Watch()
    watch.last_waited = 7.0
    watch.last_time = 0.0
    share = cores.CROWDED * torch.get_num_threads()  # of a second
    waited = 7.0
    # The last: a thread has ended, and its time is gone.
    for now, (change, kept) in enumerate(
        [(0.5, False), (1.1, True), (3.0, True), (0.9, False), (-9.0, False)], start=1
    ):
        before = watch.idle
        waited += change * share
        watch.look(waited, float(now))
        assert (watch.idle is not None) == kept
        if before and not kept:
            assert before.ended.is_set()


@pytest.mark.skipif(not cores.TASKS.exists(), reason="only Linux counts threads in /proc")
def test_idle_threads_are_openmps_and_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    subprocess.run([sys.executable, "-c", POOLS], check=True, cwd=Path(cores.__file__).parent.parent)


def test_waiting_is_summed_over_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, content in {"1": "5 2000000000 7", "2": "0 500000000 1"}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "schedstat").write_text(content)
    (tmp_path / "3").mkdir()
    (tmp_path / "3" / "schedstat").symlink_to(tmp_path / "of a thread that has ended")
    monkeypatch.setattr(cores, "TASKS", tmp_path)
    assert cores.seconds_waited() == 2.5


@pytest.mark.parametrize(
    ("setting", "num_threads", "watched"),
    [
        (None, 2, Path("/proc/self/schedstat").exists()),
        ("OMP_WAIT_POLICY", 2, False),
        ("GOMP_SPINCOUNT", 2, False),
        ("OMP_NUM_THREADS", 2, False),
        (None, 1, False),
    ],
)
def test_a_training_shares_the_cores_unless_the_user_decides(
    setting: str | None, num_threads: int, watched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in cores.SETTINGS:
        monkeypatch.delenv(name, raising=False)
    if setting:
        monkeypatch.setenv(setting, "2")
    monkeypatch.setattr(torch, "get_num_threads", lambda: num_threads)
    before = set(threading.enumerate())
    during = []

    def training(*arguments: object) -> None:
        during.extend(set(threading.enumerate()) - before)
        raise KeyError

    monkeypatch.setattr(train, "train", training)
    monkeypatch.setattr(sys, "argv", ["train.py"])
    with pytest.raises(KeyError):
        train.main()
    assert len(during) == watched
    assert not any(thread.is_alive() for thread in during)
