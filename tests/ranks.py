"""A run on several ranks: forked processes that meet as those of torchrun do."""

import os
import signal
import sys
from pathlib import Path

import torch.distributed.tensor  # noqa: F401  slow, and imported once here instead of in each rank
import torch.nn.parallel  # noqa: F401
from torch.distributed import TCPStore
from torch.distributed.fsdp import fully_shard  # noqa: F401

import train
from cli.script import run_script
from tests.conftest import Result
from tests.crash import fork


class Job:
    """train.py with these arguments on so many ranks, whose output is kept in `directory`."""

    def __init__(self, world: int, directory: Path, argv: list[str]):
        directory.mkdir(exist_ok=True)
        receive, send = os.pipe()

        def serve() -> None:
            store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # as that of torchrun
            os.write(send, str(store.port).encode())
            signal.pause()

        # In a process of its own: ranks forked beside its thread would wait for the locks that this thread held.
        self.store = fork(serve, os.devnull, os.devnull)
        os.close(send)
        port = os.read(receive, 9).decode()
        os.close(receive)
        self.files = [(directory / f"{rank}.out", directory / f"{rank}.err") for rank in range(world)]

        def begin(rank: int) -> None:
            meet = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": True}
            place = {"WORLD_SIZE": world, "RANK": rank, "LOCAL_RANK": rank, "TORCHELASTIC_RESTART_COUNT": 0}
            place["TORCHELASTIC_RUN_ID"] = "tests"
            os.environ.update({name: str(value) for name, value in (meet | place).items()})
            sys.argv = ["train.py", *argv]
            run_script(train.main)

        self.pids = [fork(lambda rank=rank: begin(rank), *files) for rank, files in enumerate(self.files)]

    def wait(self) -> list[Result]:
        """Wait for the end of all ranks. An exit code is 128 and the signal if one killed the rank."""
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in self.pids]
        os.kill(self.store, signal.SIGKILL)
        os.waitpid(self.store, 0)
        said = [[path.read_text(errors="replace") for path in files] for files in self.files]
        return [Result(code if code >= 0 else 128 - code, *texts) for code, texts in zip(codes, said, strict=True)]
