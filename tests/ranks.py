"""A run on several ranks: forked processes that meet as those of torchrun do."""

import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch.distributed.tensor  # noqa: F401  slow, and imported once here instead of in each rank
import torch.nn.parallel  # noqa: F401
from torch.distributed import TCPStore
from torch.distributed.fsdp import fully_shard  # noqa: F401
from tqdm import tqdm

import train
from configs.script import run_script

tqdm.monitor_interval = 0  # a thread of its own would not survive a fork


class Rank(NamedTuple):
    exit_code: int
    out: str
    err: str


class Ranks:
    """Processes that have begun: rank r of `world` does work(r)."""

    def __init__(self, world: int, directory: Path, work: Callable[[int], object], **environment: str):
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # as that of torchrun
        self.directory, self.pids = directory, []
        directory.mkdir(exist_ok=True)
        meet = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self.store.port), "WORLD_SIZE": str(world)}
        meet |= {"TORCHELASTIC_USE_AGENT_STORE": "True"} | environment
        for rank in range(world):
            pid = os.fork()
            if pid == 0:
                self.be(meet | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, rank, work)
            self.pids.append(pid)

    def be(self, environment: dict[str, str], rank: int, work: Callable[[int], object]) -> None:
        """The life of a rank."""
        code = 1
        try:
            os.environ.update(environment)
            for number in (1, 2):
                path = self.directory / f"{rank}.{number}"
                os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
            sys.stdout, sys.stderr = (open(number, "w", buffering=1, closefd=False) for number in (1, 2))
            sys.__stdout__, sys.__stderr__ = sys.stdout, sys.stderr
            tqdm.set_lock(threading.RLock())
            signal.alarm(100)  # what hangs fails
            work(rank)
            code = 0
        except SystemExit as stop:
            code = stop.code or 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)

    def wait(self) -> list[Rank]:
        """How each of them ended; killed: 128 and the signal."""
        ends = []
        for rank, pid in enumerate(self.pids):
            status = os.waitpid(pid, 0)[1]
            code = os.waitstatus_to_exitcode(status)
            said = [(self.directory / f"{rank}.{number}").read_text(errors="replace") for number in (1, 2)]
            ends.append(Rank(code if code >= 0 else 128 - code, *said))
        return ends


def train_on(world: int, directory: Path, argv: list[str], **environment: str) -> Ranks:
    """train.py with these arguments on so many ranks."""

    def work(rank: int) -> None:
        sys.argv = ["train.py", *argv]
        run_script(train.main)

    return Ranks(world, directory, work, **environment)
